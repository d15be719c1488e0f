"""One attempt of a command on all its nodes, and how it ended. What every target speaks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunewright.contract.rundir import RunDir


@dataclass(frozen=True)
class Job:
    """An attempt as a value: tests compare it, --dry-run prints it. Secrets travel beside it."""

    run: RunDir
    attempt: int
    command: str
    nodes: int
    procs_per_node: int
    env_variables: Mapping[str, str] = field(default_factory=dict)
    code: Path | None = None
    has_parameters: bool = True
    mlflow: Mapping[str, str] = field(default_factory=dict)
    """MLFLOW_RUN_ID and MLFLOW_TRACKING_URI."""
    deadline_s: float | None = None


@dataclass(frozen=True)
class Ending:
    """How an attempt ended. `failure` is {"class", "node", "rank", "message"} or None."""

    failure: Mapping[str, Any] | None
    stopped_by: str | None
    tail: str
    nodes: tuple[Mapping[str, Any], ...]
    checkpoint_step: int | None = None
    """The newest sealed checkpoint, where the flow cannot see the folder itself."""

    @property
    def well(self) -> bool:
        return self.failure is None and self.stopped_by is None


def ending_of(outcomes: list[dict[str, Any]]) -> Ending:
    """The ending of a job from those of its nodes: the first real failure names the cause."""
    failed = [outcome for outcome in outcomes if outcome["failure"]]
    # A node that lost its peer says "unknown"; the one that names a class says why.
    failed.sort(key=lambda o: (o["failure"]["class"] == "unknown", o.get("ended", 0)))
    stops = [outcome["stopped_by"] for outcome in outcomes if outcome["stopped_by"]]
    stopped_by = next((reason for reason in stops if reason != "peer"), None)
    worst = failed[0] if failed else None
    return Ending(
        failure=worst["failure"] if worst else None,
        stopped_by=stopped_by,
        tail=worst["tail"] if worst else "",
        nodes=tuple(outcomes),
    )


def leave_open(error: BaseException, is_open: bool = True) -> None:
    """Mark an error that ends the following of an attempt: whether the attempt may go on.

    A later start then asks for its end, instead of beginning another beside it.
    """
    error.unsettled = is_open  # type: ignore[attr-defined]


def is_left_open(error: BaseException, unmarked: bool = False) -> bool:
    """What `leave_open` said; `unmarked` where it said nothing."""
    return bool(getattr(error, "unsettled", unmarked))
