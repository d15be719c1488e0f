"""What the states of a job run mean: going on, or ended, how, and whose word counts.

Pure values. The task is judged, not the run around it: that can read FAILED while the task timed
out. A state that is not known is waiting, since new ones may appear.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.targets.job import Ending, ending_of

_ENDED = {"TERMINATED", "SKIPPED", "INTERNAL_ERROR"}
_MISCONFIGURED = {
    "INVALID_RUN_CONFIGURATION", "UNAUTHORIZED_ERROR", "RESOURCE_NOT_FOUND", "FEATURE_DISABLED",
    "BUDGET_POLICY_LIMIT_EXCEEDED", "LIBRARY_INSTALLATION_ERROR",
}  # fmt: skip
"""Codes with which another attempt would end the same way."""
_PLATFORM = {
    "INTERNAL_ERROR", "DRIVER_ERROR", "STORAGE_ACCESS_ERROR", "CLOUD_FAILURE", "SKIPPED",
    "WORKSPACE_RUN_LIMIT_EXCEEDED", "MAX_CONCURRENT_RUNS_EXCEEDED",
}  # fmt: skip
_PLATFORM_TYPES = {"INTERNAL_ERROR", "CLOUD_FAILURE"}
_PLATFORM_RESULTS = {
    "SKIPPED", "INTERNAL_ERROR", "MAXIMUM_CONCURRENT_RUNS_REACHED", "EXCLUDED", "DISABLED",
    "UPSTREAM_FAILED", "UPSTREAM_CANCELED",
}  # fmt: skip
_FROM_OUTSIDE = {"preempted", "parent died"}
"""Why a guardian says it stopped when the platform ended it: the platform knows the reason."""


@dataclass(frozen=True)
class State:
    """One look at an attempt's task."""

    word: str
    """The life cycle's word: PENDING, RUNNING, TERMINATED, or one that we do not know."""
    result: str | None = None
    code: str | None = None
    kind: str | None = None
    message: str = ""
    task_run_id: int | None = None

    @property
    def ended(self) -> bool:
        return self.word in _ENDED

    @property
    def running(self) -> bool:
        return self.word == "RUNNING"

    @property
    def well(self) -> bool:
        return self.ended and self.result == "SUCCESS"

    @property
    def words(self) -> str:
        """Everything the platform says about the end, for a reader."""
        parts = [self.word, self.result, self.code, self.message]
        return ": ".join(dict.fromkeys(part for part in parts if part))


def state_of(run: Mapping[str, Any]) -> State:
    """The state of a run's one task; the run's own before there is a task."""
    tasks = run.get("tasks") or []
    # With several entries for one task the last attempt is the newest.
    place = max(tasks, key=lambda task: task.get("attempt_number") or 0) if tasks else run
    return _state(place, place.get("run_id") if tasks else None)


def parent_of(run: Mapping[str, Any]) -> State:
    """The state of the run around the task."""
    return _state(run, None)


def _state(place: Mapping[str, Any], task_run_id: int | None) -> State:
    old, new = place.get("state") or {}, place.get("status") or {}
    details = new.get("termination_details") or {}
    return State(
        word=str(old.get("life_cycle_state") or new.get("state") or "UNKNOWN"),
        result=old.get("result_state") or _result(old, details),
        code=details.get("code"),
        kind=details.get("type"),
        message=str(old.get("state_message") or details.get("message") or "").strip(),
        task_run_id=task_run_id,
    )


def _result(old: Mapping[str, Any], details: Mapping[str, Any]) -> str | None:
    """The result where only the life cycle or the termination code tells it."""
    if old.get("life_cycle_state") in ("SKIPPED", "INTERNAL_ERROR"):
        return str(old["life_cycle_state"])
    code = details.get("code")
    return {"USER_CANCELED": "CANCELED"}.get(code, code) if code else None


def judge(
    state: State, outcomes: Sequence[dict[str, Any]], reason: str | None, tail: str
) -> Ending:
    """How an attempt ended: by the nodes' own words, else by the platform's.

    `reason` is why we cancelled it: cancel, timeout, interrupted, or None. `tail` is the end of
    what is known of the first node's log.
    """
    own = [outcome for outcome in outcomes if outcome.get("stopped_by") not in _FROM_OUTSIDE]
    told = ending_of(own) if own else Ending(None, None, "", ())
    nodes = tuple(outcomes)
    if state.well and told.failure is None:
        return Ending(None, None, "", nodes)
    if reason == "cancel":
        return Ending(None, "cancel", tail, nodes)
    if told.failure is not None:
        return Ending(told.failure, told.stopped_by, told.tail or tail, nodes)
    if reason is None and _cancelled_by_someone(state):
        return Ending(None, "cancel", tail, nodes)
    kind, message = _by_platform(state, reason, outcomes)
    failure = {"class": kind, "node": 0, "rank": None, "message": message}
    return Ending(failure, "timeout" if kind == "timeout" else None, tail, nodes)


def _cancelled_by_someone(state: State) -> bool:
    """Whether a person ended the job on the platform, as far as the platform tells."""
    return state.result == "CANCELED" and state.kind not in _PLATFORM_TYPES


def _by_platform(
    state: State, reason: str | None, outcomes: Sequence[Mapping[str, Any]]
) -> tuple[str, str]:
    """Class and sentence from what the platform says."""
    said = f"the platform says {state.words}"
    if state.result == "TIMEDOUT" or reason == "timeout":
        return "timeout", f"the deadline of this attempt was reached ({said})"
    if reason is not None:
        return "preemption", f"it was cancelled together with the flow that followed it ({said})"
    if state.code in _MISCONFIGURED and state.result != "SUCCESS":
        return "user", said
    if any(outcome.get("stopped_by") in _FROM_OUTSIDE for outcome in outcomes):
        return "preemption", f"the nodes were ended from outside; {said}"
    if (
        state.code in _PLATFORM
        or state.kind in _PLATFORM_TYPES
        or state.result in _PLATFORM_RESULTS
        or state.result == "CANCELED"
    ):
        return "infrastructure", said
    return "unknown", said
