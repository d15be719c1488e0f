"""Where /Volumes is on a machine that has none: below TUNEWRIGHT_HOME, and said."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tunewright.contract.mirror import VOLUMES, here
from tunewright.contract.rundir import home
from tunewright.contract.workload import Workload


def mapped(value: Any) -> Any:
    """A value with every string in it that starts with /Volumes/ mapped, when not mounted."""
    if isinstance(value, str):
        return str(here(value)) if value.startswith(VOLUMES) else value
    if isinstance(value, dict):
        return {key: mapped(part) for key, part in value.items()}
    if isinstance(value, list):
        return [mapped(part) for part in value]
    return value


def output_root(workload: Workload) -> Path:
    """The folder of a workload's runs: parameters.output_dir, else below TUNEWRIGHT_HOME."""
    given = workload.parameters.get("output_dir")
    if given:
        return Path(mapped(given)).expanduser().absolute()
    return home() / "Volumes" / "runs" / workload.experiment_name


def notes(workload: Workload) -> list[str]:
    """What the mapping changes, and what it leaves alone although it looks like a volume."""
    found = []
    if mapped(workload.parameters) != workload.parameters:
        found.append(f"/Volumes is not mounted here: parameters use {home() / 'Volumes'} instead")
    elsewhere = "\n".join([workload.command, *workload.env_variables.values()])
    named = re.findall(r"/Volumes/[\w./-]+", elsewhere)
    if left := sorted({path for path in named if mapped(path) != path}):
        found.append(f"{left[0]} is in command or env_variables, which are not rewritten")
    return found
