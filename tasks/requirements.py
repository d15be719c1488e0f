"""Declared dependencies against what is installed here."""

from __future__ import annotations

import shlex
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement

from tunewright.contract.failures import UserError
from tunewright.contract.workload import Workload


def check(workload: Workload) -> list[str]:
    """Raise UserError with the pip line when a declared dependency is unmet.

    Returns notes on what cannot be checked (pip options, wheels, images).
    """
    if workload.environment is None:
        return []
    notes, unmet = [], []
    image = workload.environment.docker_image or workload.environment.unity_catalog_image
    if image:
        notes.append("environment names an image; on this machine its packages are not checked")
    for line in filter(_says_something, workload.environment.dependencies):
        requirement = _parse(line)
        if requirement is None:
            notes.append(f"dependency {line!r} is not a plain requirement and is not checked here")
        elif reason := _unmet(requirement):
            unmet.append((line, reason))
    if unmet:
        reasons = "; ".join(f"{line} ({reason})" for line, reason in unmet)
        line = " ".join(shlex.quote(line) for line, _ in unmet)
        raise UserError(f"environment.dependencies are not met: {reasons}; pip install {line}")
    return notes


def _says_something(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _parse(line: str) -> Requirement | None:
    try:
        return Requirement(line.partition(" #")[0].strip())
    except InvalidRequirement:
        return None


def _unmet(requirement: Requirement) -> str | None:
    if requirement.marker is not None and not requirement.marker.evaluate():
        return None
    try:
        found = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return "not installed"
    if requirement.specifier.contains(found, prereleases=True):
        return None
    return f"{found} is installed"
