"""Which variables of an outer environment a node's command may see, and what it may name."""

from __future__ import annotations

import re

import psutil

from tunewright.contract.failures import DEADLINE_VARIABLE, GRACE_VARIABLE

_OUTER = {
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "LOCAL_ADDR", "CODE_SOURCE_PATH",
    "HYPERPARAMETERS_PATH", DEADLINE_VARIABLE, GRACE_VARIABLE,
}  # fmt: skip
_UNDECLARED_SECRET = re.compile(r".*(_TOKEN|_API_KEY|_SECRET.*|_PASSWORD)\Z")


def may_pass(name: str) -> bool:
    """Whether a command inherits this variable: not an outer job's, no undeclared secret."""
    # The job's own names are set afresh: those of an outer job must not leak into this one.
    if name in _OUTER or name.startswith("TORCHELASTIC_"):
        return False
    if name.startswith("MLFLOW_"):
        return True
    return not name.startswith(("PREFECT_", "DATABRICKS_")) and not is_secret(name)


def is_secret(name: str) -> bool:
    """Whether a variable holds a secret, by the habits of naming one."""
    return _UNDECLARED_SECRET.match(name) is not None


def has_interface(asked: str) -> bool:
    """Whether this machine has what NCCL_SOCKET_IFNAME asks for.

    NCCL's own rule: a list of prefixes, `=` for exact names, `^` for exclusion.
    """
    names = list(psutil.net_if_addrs())
    if asked.startswith("^"):
        return True
    exact, wanted = asked.startswith("="), asked.lstrip("=").split(",")
    return any(n == w if exact else n.startswith(w) for n in names for w in wanted)
