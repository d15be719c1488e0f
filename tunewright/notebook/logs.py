"""New lines of the ranks' logs, with the rank in front."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

_AT_ONCE = 1 << 20
_LONGEST = 64 << 10
_REDRAWN_S = 5.0


class RankLog:
    """The log of one rank, from its start.

    A line that is redrawn by carriage returns (a progress bar) shows its last state, and while
    it is unfinished its newest one every few seconds.
    """

    def __init__(self, path: Path, rank: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._prefix = f"[rank {rank}] "
        self._clock = clock
        self._at = 0
        self._rest = b""
        self._redrawn = clock()

    def lines(self, *, ended: bool = False) -> Iterator[str]:
        """What came since the last call, at most 1 MiB of it; with `ended` all, to its end."""
        while chunk := self._chunk():
            *whole, self._rest = (self._rest + chunk).split(b"\n")
            yield from (self._shown(line) for line in whole)
            if len(self._rest) > _LONGEST:
                yield self._shown(self._rest)
                self._rest = b""
            if not ended:
                break
        yield from self._unfinished(ended)

    def _chunk(self) -> bytes:
        # A rank that has not begun has no log.
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._at)
            chunk = file.read(_AT_ONCE)
            self._at += len(chunk)
            return chunk
        return b""

    def _unfinished(self, ended: bool) -> Iterator[str]:
        """The line that has no end yet: at the end of the log, or a bar now and then."""
        bar, _, newest = self._rest.rpartition(b"\r")
        due = bool(bar.strip(b"\r")) and self._clock() >= self._redrawn + _REDRAWN_S
        if ended and self._rest.strip(b"\r"):
            yield self._shown(self._rest)
            self._rest = b""
        elif due:
            yield self._shown(bar)
            self._rest, self._redrawn = newest, self._clock()

    def _shown(self, line: bytes) -> str:
        last = line.rstrip(b"\r").rpartition(b"\r")[2]
        return self._prefix + last.decode("utf-8", "replace")


def new_text(logs: Sequence[RankLog], *, ended: bool = False) -> Iterator[str]:
    """The new lines of each log as one text, rank by rank."""
    for log in logs:
        if text := "".join(f"{line}\n" for line in log.lines(ended=ended)):
            yield text
