"""The end of a command's log, as evidence of why it failed.

torchrun says 50 lines and more after the error that ended a rank; those are left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

TAIL_LINES = 20
_BYTES = 65536
_TORCHRUN_SAYS = re.compile(r"[WE]\d{4} .*torch/distributed/elastic/")
_TORCHRUN_REPORTS = re.compile(r"E\d{4} .*torch/distributed/elastic/.*failed \(exitcode: ")
_RANK = re.compile(r"\[rank(\d+)\]: ?")
_TRACEBACK = "Traceback (most recent call last):"


def last_lines(path: Path) -> list[str]:
    """The lines in the last 64 KiB of a log; none where there is no log."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return text.rstrip().splitlines()


def tail(lines: Sequence[str]) -> str:
    """The end of what the command itself said."""
    return "\n".join(_own(lines)[-TAIL_LINES:])


def error(lines: Sequence[str], rank: int | None = None) -> str | None:
    """The error of the last Python traceback, "ValueError: …"; that of `rank` where lines say whose
    they are. None where there is none.
    """
    lines = _own(lines)
    of_rank = [line for line in lines if (m := _RANK.match(line)) and int(m[1]) == rank]
    lines = [_RANK.sub("", line, count=1) for line in of_rank or lines]
    starts = [number for number, line in enumerate(lines) if line == _TRACEBACK]
    after = lines[starts[-1] + 1 :] if starts else []
    return next((line for line in after if line.strip() and not line.startswith(" ")), None)


def _own(lines: Sequence[str]) -> list[str]:
    """Without what torchrun adds: its warnings, and its report at the end."""
    reports = [number for number, line in enumerate(lines) if _TORCHRUN_REPORTS.match(line)]
    kept = lines[: reports[-1]] if reports else lines
    return [line for line in kept if not _TORCHRUN_SAYS.match(line)]
