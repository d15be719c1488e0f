"""The nouns of the route, as each step hands them to the next.

Workload → RunDir → Secrets → Tokens → Shards → ModelFolder → ModelVersion
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunewright.contract.rundir import RunDir


@dataclass(frozen=True)
class Secrets:
    """Values by variable name: in memory only, never shown, never stored."""

    values: Mapping[str, str] = field(repr=False)

    def __reduce__(self) -> Any:
        raise TypeError("secrets are not stored")


@dataclass(frozen=True)
class Tokens:
    """A sealed token store, or why there is none."""

    path: Path | None
    facts: Mapping[str, Any]
    reason: str | None = None


@dataclass(frozen=True)
class Shards:
    """What a command that ended well left in its run's folder."""

    run: RunDir


@dataclass(frozen=True)
class ModelFolder:
    """A sealed Hugging Face folder, or why there is none."""

    path: Path | None
    reason: str | None = None


@dataclass(frozen=True)
class ModelVersion:
    """A registered version, or why there is none."""

    name: str | None
    version: str | None
    reason: str | None = None
