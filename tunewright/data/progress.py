"""How far the work is: a bar in a terminal, else a line a second that programs can read too."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from tunewright.contract.progress import line_of

_EVERY_S = 1.0
_BAR = 24


class Progress:
    """Work in stages, each with its share of the whole; nothing is shown in the first second."""

    def __init__(
        self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._bar = self._stream.isatty()
        self._began = self._shown = clock()
        self._label, self._total = "", 0
        self._from, self._to = 0.0, 0.0
        self._open = False

    def stage(self, label: str, total: int | None, to: float) -> None:
        """Begin a stage of `total` rows (None: not known yet) that ends at `to`, of 0 to 1."""
        self._label, self._total = label, total or 0
        self._from, self._to = self._to, to
        self._began = self._clock()

    def at(self, done: int) -> None:
        """So many rows of this stage are done; cheap, since it shows at most once a second."""
        now = self._clock()
        if now - self._shown < _EVERY_S:
            return
        self._shown = now
        self._show(done, now - self._began)

    def close(self) -> None:
        """Leave the terminal's line to what comes next."""
        if self._open:
            self._stream.write("\r\033[K")
            self._stream.flush()
            self._open = False

    def _show(self, done: int, seconds: float) -> None:
        part = min(1.0, done / self._total) if self._total else 0.0
        whole = self._from + (self._to - self._from) * part
        text = f"{self._label} {self._counts(done, seconds)}"
        if self._bar:
            filled = round(whole * _BAR)
            text = f"\r\033[K{whole:4.0%} {'█' * filled}{'░' * (_BAR - filled)} {text}"
            self._open = True
        else:
            text = f"{line_of(100 * whole, text)}\n"
        self._stream.write(text)
        self._stream.flush()

    def _counts(self, done: int, seconds: float) -> str:
        speed = done / seconds if seconds > 0 else 0.0
        if not self._total:
            return f"{done:,} rows, {speed:,.0f} rows/s"
        left = f", {(self._total - done) / speed:,.0f} s left" if speed else ""
        return f"{done:,} of {self._total:,} rows, {speed:,.0f} rows/s{left}"
