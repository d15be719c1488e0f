"""The facts of a run, from what ran and never from what was asked.

`fold_events` reads what the recipes left step by step; `markdown` shows a receipt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

STATES = ("Completed", "Skipped", "Failed", "TimedOut", "Cancelled", "Crashed")
FINISHED = ("Completed", "Skipped")


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
    fast_paths, base_model, tokens_per_second_per_gpu, model_tflops_per_gpu, peak_memory_gib.
    """
    by_step: dict[int, Mapping[str, Any]] = {}
    evals: dict[int, float] = {}
    start: Mapping[str, Any] = {}
    end: dict[str, Any] = {}
    for attempt in attempts:
        for event in attempt:
            kind = event.get("event")
            if kind == "step":
                by_step[event["step"]] = event
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
        "tokens_per_second_per_gpu": end.get("tokens_per_second_per_gpu", _rate(by_step, start)),
        "model_tflops_per_gpu": end.get("model_tflops_per_gpu"),
        "peak_memory_gib": end.get("peak_memory_gib"),
        "fast_paths": start.get("fast_paths", {}),
    }


def _rate(by_step: Mapping[int, Mapping[str, Any]], start: Mapping[str, Any]) -> float | None:
    """Tokens per second and process over all steps, for attempts that did not reach their end."""
    seconds = sum(event.get("seconds", 0.0) for event in by_step.values())
    if not seconds:
        return None
    tokens = sum(event.get("tokens", 0) for event in by_step.values())
    return float(tokens / seconds / start.get("world_size", 1))


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
        ("Peak memory, GiB", receipt.get("peak_memory_gib")),
        ("Workload", f"`{receipt['workload']['sha256'][:12]}`"),
        ("Folder", f"`{receipt.get('folder')}`"),
    ]
    lines = [f"# {receipt['run']}", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {_plain(value)} |" for name, value in rows]
    lines += ["", "| attempt | resumed from | last step | ended |", "|---|---|---|---|"]
    lines += [_attempt(attempt) for attempt in receipt.get("attempts", [])]
    lines += ["", "| step | seconds |", "|---|---|"]
    lines += [f"| {name} | {value:.1f} |" for name, value in receipt["seconds"].items()]
    return "\n".join(lines) + "\n"


def _state(receipt: Mapping[str, Any]) -> str:
    reason = receipt.get("reason")
    return f"{receipt['state']}: {_one_line(reason)}" if reason else str(receipt["state"])


def _attempt(attempt: Mapping[str, Any]) -> str:
    failure = attempt.get("failure")
    ended = attempt.get("stopped_by") or "well"
    if failure:
        ended = f"{failure['class']}: {_one_line(failure['message'])}"
    return (
        f"| {attempt['attempt']} | step {attempt['resumed_from_step']} "
        f"| {attempt['last_step']} | {ended} |"
    )


def _change(first: float | None, last: float | None) -> str:
    return "" if first is None or last is None else f"{first:.4f} → {last:.4f}"


def _plain(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,.2f}" if isinstance(value, float) else str(value)


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200].replace("|", "\\|")
