"""Where a job runs: one file per target, which knows neither Prefect nor torch."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from tunewright.contract.failures import UserError

_HOMES = {"local": "tasks.targets.local", "ray": "tasks.targets.ray_cluster"}
_LATER = {"databricks": "Databricks AI Runtime"}


def target_named(name: str) -> ModuleType:
    """The target's module; only the one in use is imported. Raises UserError for another name."""
    if name in _HOMES:
        return import_module(_HOMES[name])
    if name in _LATER:
        raise UserError(
            f"target {name} ({_LATER[name]}) is not part of this version; use --target local "
            "(in a deployment: -p target=local), with simulate where the GPUs are missing"
        )
    raise UserError(f"target {name!r} is unknown; known: {', '.join(sorted(_HOMES))}")
