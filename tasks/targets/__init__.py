"""Where a job runs: one file or folder per target, which knows neither Prefect nor torch."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from tunewright.contract.failures import UserError

_HOMES = {
    "local": "tasks.targets.local",
    "ray": "tasks.targets.ray_cluster",
    "databricks": "tasks.targets.databricks.target",
}


def target_named(name: str) -> ModuleType:
    """The target's module; only the one in use is imported. Raises UserError for another name."""
    if name in _HOMES:
        return import_module(_HOMES[name])
    raise UserError(f"target {name!r} is unknown; known: {', '.join(sorted(_HOMES))}")


def is_platform(name: str) -> bool:
    """Whether jobs run on a platform that keeps them: it installs what they need, resolves their
    secrets, and goes on with a job while nobody follows it.
    """
    return name == "databricks"
