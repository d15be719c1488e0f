"""Volumes of Unity Catalog as this machine sees them: mounted, or mirrored below TUNEWRIGHT_HOME.

/Volumes/<catalog>/<schema>/<volume>/… is a path on every node of the platform. Where that is not
mounted, `<TUNEWRIGHT_HOME>/Volumes/<catalog>/…` holds what this machine knows of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tunewright.contract.rundir import home

VOLUMES = "/Volumes/"


def here(path: str) -> Path:
    """Where a path on a volume is on this machine: itself when mounted, else in the mirror.

    Any other path stays as it is.
    """
    # /Volumes/<catalog>/<schema>/<volume> is the mount; macOS has a /Volumes of its own.
    if not path.startswith(VOLUMES) or Path(*Path(path).parts[:5]).is_dir():
        return Path(path)
    return home() / path.lstrip("/")


def on_volume(path: Path | str) -> str:
    """The same place as every node of the platform names it: the reverse of `here`."""
    mirror = home() / VOLUMES.strip("/")
    place = Path(path)
    return VOLUMES + str(place.relative_to(mirror)) if is_mirrored(place) else str(path)


def is_mirrored(path: Path | str) -> bool:
    """Whether a path of this machine stands for one on a volume that is not mounted here."""
    return Path(path).is_relative_to(home() / VOLUMES.strip("/"))


def values_on_volume(value: Any) -> Any:
    """A value with every path in it as the nodes of the platform name it."""
    if isinstance(value, str):
        return on_volume(value)
    if isinstance(value, dict):
        return {key: values_on_volume(part) for key, part in value.items()}
    if isinstance(value, list):
        return [values_on_volume(part) for part in value]
    return value
