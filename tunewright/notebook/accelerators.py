"""How the ranks that a function asks for fit on this machine."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from tunewright.contract.failures import UserError
from tunewright.contract.gpus import asked_driver, visible_gpus

SIMULATE = "TUNEWRIGHT_SIMULATE"


@dataclass(frozen=True)
class Placement:
    """What a call gets on this machine."""

    ranks: int
    gpus: tuple[str, ...]
    """One per rank, as CUDA_VISIBLE_DEVICES names them; empty on CPUs."""
    note: str | None = None

    def environment(self) -> dict[str, str]:
        """Exactly these GPUs, and a share of the cores for each rank unless the user says."""
        share = (os.cpu_count() or 1) // self.ranks
        env = {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)}
        env["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(max(1, share)))
        if not self.gpus:
            # Threads that spin while they wait cost a shared machine many times their work.
            env["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY", "PASSIVE")
        return env


def place(name: str, asked: int | None, kind: str | None, simulate: bool) -> Placement:
    """Fit the ranks that function `name` asks for to what is here.

    Without a number, one rank per GPU. Raises UserError when there are too few GPUs and the call
    does not simulate them.
    """
    gpus = visible_gpus()
    if asked is None and not gpus:
        raise UserError(
            f"{name} does not say how many ranks it needs, and this machine has no GPU; write "
            "@distributed(num_accelerators=2, simulate=True)"
        )
    ranks = len(gpus) if asked is None else asked
    wanted = _counted(ranks, "GPU") + (f" ({kind})" if kind else "")
    if len(gpus) >= ranks:
        return Placement(ranks, tuple(gpus[:ranks]), _other_kind(kind))
    if simulate:
        return Placement(ranks, (), f"simulating {wanted} by {_counted(ranks, 'process')} on CPUs")
    raise UserError(
        f"{name} asks for {wanted} and this machine has {len(gpus)}; ask for what is here, or let "
        f"processes on CPUs stand in for them: simulate=True in the decorator, or {SIMULATE}=1 in "
        "the environment"
    )


def _counted(count: int, what: str) -> str:
    plural = "es" if what.endswith("s") else "s"
    return f"{count} {what}{plural if count > 1 else ''}"


def _other_kind(kind: str | None) -> str | None:
    """A note when the GPUs here are of another model than the one asked for."""
    if kind is None:
        return None
    model = kind.rpartition("x")[2] if kind.startswith("GPU_") else kind
    here = sorted(set(asked_driver("name")))
    words = {word.upper() for name in here for word in re.split(r"\W+", name)}
    if not here or model.upper() in words:
        return None
    return f"{model} was asked for; the GPUs of this machine are {', '.join(here)}"
