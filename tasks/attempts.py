"""The attempts of a run as its folder tells them: begun, ended, how far, and why not further."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from tasks.targets.job import Ending
from tunewright.contract import receipt as receipts
from tunewright.contract.mirror import is_mirrored
from tunewright.contract.rundir import RunDir, read_json, sealed_checkpoints, write_json

_LOST = {
    "class": "infrastructure",
    "node": None,
    "rank": None,
    "message": "the flow was gone before the attempt ended",
}


def next_number(run: RunDir) -> int:
    return max(run.attempts(), default=0) + 1


def open_number(run: RunDir) -> int | None:
    """The last attempt when its end was never recorded: whoever followed it was killed."""
    last = max(run.attempts(), default=0)
    is_open = last and not (run.attempt_state(last) / "ended.json").exists()
    return last if is_open else None


def begin(run: RunDir, attempt: int) -> None:
    """Record an attempt as started; one that is gone on with began when it began."""
    if (run.attempt_state(attempt) / "started.json").exists():
        return
    facts = {"attempt": attempt, "started": time.time()}
    write_json(run.attempt_state(attempt) / "started.json", facts)


def conclude(run: RunDir, attempt: int, ending: Ending) -> None:
    """Record how an attempt ended."""
    facts = {
        "well": ending.well,
        "stopped_by": ending.stopped_by,
        "failure": ending.failure,
        "ended": time.time(),
        "checkpoint_step": newest_step(run)
        if ending.checkpoint_step is None
        else ending.checkpoint_step,
    }
    write_json(run.attempt_state(attempt) / "ended.json", facts)


def conclude_interrupted(run: RunDir, attempt: int, checkpoint_step: int | None = None) -> None:
    """Record that an attempt was left by a signal: in order, with its processes ended.

    `checkpoint_step` is that of its newest checkpoint where this machine does not see them.
    """
    ending = Ending(None, "interrupted", "", (), checkpoint_step=checkpoint_step)
    conclude(run, attempt, ending)


def ended_well(run: RunDir) -> bool:
    """Whether the last attempt did what the command was to do."""
    last = max(run.attempts(), default=0)
    return bool((read_json(run.attempt_state(last) / "ended.json") or {}).get("well"))


def newest_step(run: RunDir) -> int | None:
    """The step of the newest sealed checkpoint; None without one."""
    sealed = sealed_checkpoints(run.checkpoints)
    return sealed[-1][0] if sealed else None


def without_progress(run: RunDir) -> str | None:
    """Why another attempt makes no sense: two in a row that trained and got to the same step."""
    numbers = run.attempts()[-2:]
    if len(numbers) < 2:
        return None
    (_, last, mark), (_, before, mark_before) = (_reach(run, n) for n in numbers)
    if last and last == before and mark == mark_before:
        return f"two attempts in a row ended at step {last} without a newer checkpoint"
    return None


def of_run(run: RunDir, *, running: bool = False) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Every attempt as the receipt tells it, and what they did together.

    `running`: someone holds the run, so an attempt without an end is going on.
    """
    numbers = run.attempts()
    events = [receipts.events(run.events(number)) for number in numbers]
    going_on = numbers[-1:] if running else []
    told = [
        _told(run, n, found, {"failure": None if n in going_on else _LOST})
        for n, found in zip(numbers, events, strict=True)
    ]
    facts = receipts.fold_events(events)
    if not facts["steps"] and any(attempt["last_step"] is None for attempt in told):
        facts["steps"] = None
    return told, facts


def _told(
    run: RunDir, number: int, events: list[dict[str, Any]], lost: Mapping[str, Any]
) -> dict[str, Any]:
    started = read_json(run.attempt_state(number) / "started.json") or {}
    ended = read_json(run.attempt_state(number) / "ended.json") or lost
    first, last = _steps(events) if _is_told(run, number, ended) else (None, None)
    return {
        "attempt": number,
        "started": started.get("started"),
        "ended": ended.get("ended"),
        "resumed_from_step": first,
        "last_step": last,
        "stopped_by": ended.get("stopped_by"),
        "failure": ended["failure"],
    }


def _is_told(run: RunDir, number: int, ended: Mapping[str, Any]) -> bool:
    """Whether its steps are known: those of one cancelled on a platform may not have come here."""
    is_cut = ended.get("stopped_by") == "interrupted" and is_mirrored(run.root)
    return not is_cut or run.events(number).exists()


def _reach(run: RunDir, number: int) -> tuple[int, int, Any]:
    """Where an attempt began, the last step it completed (0: none), and the checkpoint then."""
    first, last = _steps(receipts.events(run.events(number)))
    ended = read_json(run.attempt_state(number) / "ended.json") or {}
    return first, last if last > first else 0, ended.get("checkpoint_step")


def _steps(events: list[Mapping[str, Any]] | list[dict[str, Any]]) -> tuple[int, int]:
    start = next((e["step"] for e in events if e.get("event") == "start"), 0)
    return start, max((e["step"] for e in events if e.get("event") == "step"), default=start)
