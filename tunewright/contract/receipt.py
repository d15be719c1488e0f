"""The facts of a run, from what ran and never from what was asked.

`fold_events` reads what the recipes left step by step; `markdown` shows a receipt.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

STATES = ("Completed", "Skipped", "Failed", "TimedOut", "Cancelled", "Crashed")
FINISHED = ("Completed", "Skipped")
PHASES = {
    "start_up": "start-up (loading)",
    "warm_up": "warm-up (compile, tracing)",
    "data": "data",
    "forward_backward": "forward and backward",
    "optimizer": "optimizer",
    "checkpoint": "checkpoints (blocked)",
    "evaluation": "evaluation",
    "other": "other",
}
"""What the seconds of a command of ours go to, and how a reader is told."""

IN_STEP = ("data", "forward_backward", "optimizer")
"""Phases inside a step; the others lie between steps."""


def events(path: Path) -> list[dict[str, Any]]:
    """The events of one attempt, oldest first; a torn last line (a killed writer) is left out."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            found.append(event)
    return found


def fold_events(attempts: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """What the attempts together did. A step that a later attempt repeated counts once.

    Returns the receipt's keys steps, first_loss, last_loss, first_eval_loss, eval_loss, world_size,
    fast_paths, base_model, tokens_per_second_per_gpu, model_tflops_per_gpu,
    ceiling_tflops_per_gpu, ceiling_share (0 to 1), peak_memory_gib, checkpoints (count, seconds
    until they were sealed, seconds that training stood still) and seconds_by_phase (keys of
    PHASES). What events of an older version do not tell is None or empty.
    """
    by_step: dict[int, Mapping[str, Any]] = {}
    evals: dict[int, float] = {}
    start: Mapping[str, Any] = {}
    end: dict[str, Any] = {}
    for attempt in attempts:
        for event in attempt:
            kind = event.get("event")
            if kind == "step":
                by_step[event["step"]] = {**event, "world_size": start.get("world_size", 1)}
            elif kind == "eval" and event["loss"] is not None:
                evals[event["step"]] = event["loss"]
            elif kind == "start":
                start = event
            elif kind == "end":
                # An attempt that found nothing left to train measured nothing.
                end |= {key: value for key, value in event.items() if value is not None}
    # A step without a supervised token has no loss.
    losses = {step: e["loss"] for step, e in by_step.items() if e["loss"] is not None}
    base = start.get("base_model") or {}
    return {
        "world_size": start.get("world_size"),
        "base_model": {
            "name": base.get("name"),
            "revision": base.get("revision"),
            "parameters": start.get("parameters"),
        },
        "steps": max(by_step, default=0),
        "first_loss": losses[min(losses)] if losses else None,
        "last_loss": losses[max(losses)] if losses else None,
        "first_eval_loss": evals[min(evals)] if evals else None,
        "eval_loss": evals[max(evals)] if evals else None,
        "tokens_per_second_per_gpu": end.get("tokens_per_second_per_gpu", _rate(by_step)),
        "model_tflops_per_gpu": end.get("model_tflops_per_gpu"),
        "ceiling_tflops_per_gpu": start.get("ceiling_tflops_per_gpu"),
        "ceiling_share": end.get("ceiling_share"),
        "peak_memory_gib": end.get("peak_memory_gib"),
        "fast_paths": start.get("fast_paths", {}) | _compiled(end),
        "checkpoints": _checkpoints(attempts),
        "seconds_by_phase": _spent(attempts),
    }


def _compiled(end: Mapping[str, Any]) -> dict[str, int]:
    """How many graphs torch.compile made, where it made any."""
    graphs = end.get("compiled_graphs")
    return {"compiled_graphs": graphs} if graphs else {}


def _checkpoints(attempts: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """How many were sealed, and the seconds of all of them."""
    saved = [e for attempt in attempts for e in attempt if e.get("event") == "checkpoint"]
    return {
        "count": len(saved),
        "seconds": round(sum(e.get("seconds", 0.0) for e in saved), 3),
        # Before they were written beside the training, all of their time was blocked.
        "blocked_seconds": round(
            sum(e.get("blocked_seconds", e.get("seconds", 0.0)) for e in saved), 3
        ),
    }


def _spent(attempts: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, float]:
    """Seconds by phase of all attempts; of one that did not reach its end, what its steps tell."""
    found: dict[str, float] = {}
    for attempt in attempts:
        for name, seconds in _spent_by(attempt):
            found[name] = found.get(name, 0.0) + seconds
    return {name: round(found[name], 3) for name in PHASES if name in found}


def _spent_by(attempt: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    ends = [e["seconds_by_phase"] for e in attempt if e.get("seconds_by_phase") and _is(e, "end")]
    if ends:
        yield from ends[-1].items()
        return
    for event in attempt:
        if _is(event, "start") and "seconds" in event:
            yield "start_up", event["seconds"]
        elif _is(event, "step"):
            phases = event.get("seconds_by_phase", {})
            usual = event.get("counts", True)
            yield from ((n, s) for n, s in phases.items() if usual or n not in IN_STEP)
            if not usual:
                yield "warm_up", event["seconds"]


def _is(event: Mapping[str, Any], kind: str) -> bool:
    return event.get("event") == kind


def _rate(by_step: Mapping[int, Mapping[str, Any]]) -> float | None:
    """Tokens per second and process, for attempts that did not reach their end.

    Of the steps that count for the speed; of all when none does.
    """
    steps = [e for e in by_step.values() if e.get("counts", True)] or list(by_step.values())
    seconds = sum(event.get("seconds", 0.0) * event["world_size"] for event in steps)
    tokens = sum(event.get("tokens", 0) for event in steps)
    return float(tokens / seconds) if seconds else None


def time_rows(seconds_by_phase: Mapping[str, float]) -> list[tuple[str, float, float]]:
    """Where time went, for a reader: (what, seconds, share of 0 to 1), and the whole last."""
    total = sum(seconds_by_phase.values())
    if not total:
        return []
    rows = [(n, seconds_by_phase[k]) for k, n in PHASES.items() if seconds_by_phase.get(k)]
    return [(name, seconds, seconds / total) for name, seconds in [*rows, ("total", total)]]


def time_table(seconds_by_phase: Mapping[str, float]) -> Iterator[str]:
    """Where time went, as lines of text."""
    rows = time_rows(seconds_by_phase)
    if rows:
        yield f"{'where time went':28} {'seconds':>10} {'%':>6}"
    for name, seconds, share in rows:
        yield f"  {name:26} {seconds:10,.1f} {100 * share:6.1f}"


def markdown(receipt: Mapping[str, Any]) -> str:
    """The receipt as a page for the Prefect UI."""
    registered = receipt.get("registered")
    version = f"{registered['name']} version {registered['version']}" if registered else "none"
    data = receipt.get("data") or {}
    rows = [
        ("State", _state(receipt)),
        ("Registered", version),
        ("Steps", receipt.get("steps")),
        ("Loss", _change(receipt.get("first_loss"), receipt.get("last_loss"))),
        ("Evaluation loss", _change(receipt.get("first_eval_loss"), receipt.get("eval_loss"))),
        ("Tokens", data.get("tokens")),
        ("Supervised tokens", data.get("supervised_tokens")),
        ("Data", data.get("cache")),
        ("Nodes, processes", f"{receipt.get('nodes')}, {receipt.get('world_size')}"),
        ("Tokens/s per GPU or process", receipt.get("tokens_per_second_per_gpu")),
        ("Speed", speed(receipt)),
        ("Fast paths", _named(receipt.get("fast_paths") or {})),
        ("Peak memory, GiB", receipt.get("peak_memory_gib")),
        ("Checkpoints", saving(receipt)),
        ("Workload", f"`{receipt['workload']['sha256'][:12]}`"),
        ("Folder", f"`{receipt.get('folder')}`"),
    ]
    lines = [f"# {receipt['run']}", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {_plain(value)} |" for name, value in rows]
    lines += ["", "| attempt | resumed from | last step | ended |", "|---|---|---|---|"]
    lines += [_attempt(attempt) for attempt in receipt.get("attempts", [])]
    if spent := time_rows(receipt.get("seconds_by_phase") or {}):
        lines += ["", "| where time went | seconds | % |", "|---|---:|---:|"]
        lines += [f"| {what} | {took:,.1f} | {100 * part:.1f} |" for what, took, part in spent]
    lines += ["", "| step | seconds |", "|---|---|"]
    lines += [f"| {name} | {value:.1f} |" for name, value in receipt["seconds"].items()]
    return "\n".join(lines) + "\n"


def speed(receipt: Mapping[str, Any]) -> str:
    """How much of the hardware was used, in words; empty when it was not measured."""
    share, ceiling = receipt.get("ceiling_share"), receipt.get("ceiling_tflops_per_gpu")
    if share is None:
        return ""
    found = f"{100 * share:.1f} % of the measured ceiling"
    model = receipt.get("model_tflops_per_gpu")
    return f"{model:,.0f} TFLOP/s, {found} of {ceiling:,.0f}" if model and ceiling else found


def saving(receipt: Mapping[str, Any]) -> str:
    """The checkpoints in words; empty when there are none."""
    found = receipt.get("checkpoints") or {}
    if not found.get("count"):
        return ""
    return (
        f"{found['count']} in {found['seconds']:,.1f} s, "
        f"{found['blocked_seconds']:,.1f} s of it blocked"
    )


def _named(facts: Mapping[str, Any]) -> str:
    """`attention varlen, compile, no recomputation`: what is true by its name alone."""
    named = [(name.replace("_", " "), value) for name, value in facts.items()]
    return ", ".join(
        f"{'' if value else 'no '}{name}" if isinstance(value, bool) else f"{name} {value}"
        for name, value in named
    )


def _state(receipt: Mapping[str, Any]) -> str:
    reason = receipt.get("reason")
    return f"{receipt['state']}: {_one_line(reason)}" if reason else str(receipt["state"])


def _attempt(attempt: Mapping[str, Any]) -> str:
    failure = attempt.get("failure")
    ended = attempt.get("stopped_by") or "well"
    if failure:
        ended = f"{failure['class']}: {_one_line(failure['message'])}"
    first, last = (
        "unknown" if attempt[key] is None else attempt[key]
        for key in ("resumed_from_step", "last_step")
    )
    return f"| {attempt['attempt']} | step {first} | {last} | {ended} |"


def _change(first: float | None, last: float | None) -> str:
    return "" if first is None or last is None else f"{first:.4f} → {last:.4f}"


def _plain(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,.2f}" if isinstance(value, float) else str(value)


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200].replace("|", "\\|")
