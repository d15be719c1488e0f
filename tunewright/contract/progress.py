"""The lines by which a program says how far it is, to a reader and to the flow that runs it.

progress: 34.1 % tokenizing 512,000 of 2,000,000 rows, 24,310 rows/s, 61 s left
step 41/120   loss …
"""

from __future__ import annotations

import re

_PREFIX = "progress: "
_UNIT = " %"
_STEP = re.compile(r"step (\d+)/(\d+)\b", re.ASCII)


def line_of(percent: float, words: str) -> str:
    """A progress line: `percent` of 0 to 100."""
    return f"{_PREFIX}{percent:.1f}{_UNIT} {words}"


def percent_of(line: str) -> float | None:
    """The percentage, 0 to 100, of a progress line; None for any other line."""
    if not line.startswith(_PREFIX):
        return None
    try:
        found = float(line.removeprefix(_PREFIX).split(_UNIT, 1)[0])
    except ValueError:
        return None
    return found if 0 <= found <= 100 else None


def step_of(step: int, steps: int) -> str:
    """How the line of an optimizer step begins, in a column that keeps its width."""
    width = len(f"step {steps}/{steps}")
    return f"step {step}/{steps}".ljust(width)


def trained_percent(line: str) -> float | None:
    """How much of a training is done, 0 to 100, by the line of a step; None for any other line."""
    found = _STEP.match(line)
    step, steps = (int(found[1]), int(found[2])) if found else (0, 0)
    return 100 * step / steps if 0 < step <= steps else None
