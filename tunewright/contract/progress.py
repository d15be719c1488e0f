"""The line by which a program says how far it is, to a reader and to the flow that runs it.

progress: 34.1 % tokenizing 512,000 of 2,000,000 rows, 24,310 rows/s, 61 s left
"""

from __future__ import annotations

_PREFIX = "progress: "
_UNIT = " %"


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
