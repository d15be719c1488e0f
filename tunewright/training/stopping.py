"""Ends before the last step: near the deadline of an attempt, and after SIGTERM."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from tunewright.contract.failures import DEADLINE_VARIABLE, GRACE_VARIABLE, OutOfTime
from tunewright.contract.processes import GRACE_S

_SAFETY = 1.5
"""How much longer than the last one a save may take."""
_RECENT = 8
"""Steps whose time says how long the next ones take."""
_OF_GRACE = 0.8
"""The part of the grace that a save may use; the rest is for ending."""
_POLL_S = 0.1


class Stopping:
    """Whether the time left is needed for saving."""

    def __init__(
        self, deadline: float | None, grace_s: float, clock: Callable[[], float] = time.time
    ) -> None:
        """`deadline` in Unix seconds, None where there is none; `grace_s`: time to end in."""
        self.deadline = deadline
        self.grace_s = grace_s
        self._clock = clock
        self._asked: float | None = None
        self._intervals: deque[float] = deque(maxlen=_RECENT)

    @classmethod
    def of_environment(cls) -> Self:
        """As the launcher says: TUNEWRIGHT_DEADLINE and TUNEWRIGHT_GRACE_S."""
        deadline = os.environ.get(DEADLINE_VARIABLE)
        grace_s = float(os.environ.get(GRACE_VARIABLE) or GRACE_S)
        return cls(float(deadline) if deadline else None, grace_s)

    def wanted(self, save_seconds: float, warmed_up: bool = True) -> bool:
        """Whether this rank wants a step to be the last; asked once, before each step.

        `warmed_up`: since it was last asked nothing was done that is not done again, such as
        compiling; else that time says nothing about the next steps.

        True when this step and one more, both as long as the longest of the last few with all that
        is done between steps, would leave too little time for a save of `save_seconds` and for
        ending.
        Clocks and speeds differ, so ranks must agree before they act on it.
        """
        now = self._clock()
        if self._asked is not None and warmed_up:
            self._intervals.append(now - self._asked)
        self._asked = now
        if self.deadline is None:
            return False
        longest = max(self._intervals, default=0.0)
        needed = 2 * longest + _SAFETY * save_seconds + self.grace_s
        return now + needed >= self.deadline

    def over(self, step: int, checkpoint: Path) -> OutOfTime:
        """The error that ends the attempt once its last step is saved."""
        left = (self.deadline or 0.0) - self._clock()
        return OutOfTime(
            f"stopped after step {step}, {left:.0f} s before the deadline, to save in time: "
            f"{checkpoint} is sealed, and starting again goes on from it"
        )


class _Ending(ABC):
    """Between entering and leaving, SIGTERM ends the process in order.

    A thread of its own does the ending: it lets the save being written end if that fits the grace,
    says what is there, and leaves with 128 + 15.
    """

    def __init__(
        self,
        settle: Callable[[float], str],
        grace_s: float,
        *,
        speaks: bool,
        part: float = _OF_GRACE,
    ) -> None:
        """`settle(seconds)` waits so long at most and says where a new start goes on.

        It gets that `part` of the grace. What it returns is printed if it `speaks` and that is not
        empty.
        """
        self._settle = settle
        self._within_s = part * grace_s
        self._speaks = speaks
        self._thread = threading.Thread(target=self._watch, name="termination", daemon=True)

    @abstractmethod
    def _watch(self) -> None:
        """In the thread: until we are left, or until the signal, which this ends with."""

    def _end(self) -> None:
        try:
            told = self._settle(self._within_s)
            if self._speaks and told:
                # Not `print`: the main thread may stand still with its buffer locked.
                os.write(1, f"told to end (SIGTERM): {told}\n".encode())
        finally:
            os._exit(128 + signal.SIGTERM)


class Termination(_Ending):
    """In the main thread, which stops where the signal reaches it: training does not go on.

    It may never stop inside a collective whose other ranks are gone, or in a wait of C++; the
    ending does not need it.
    """

    def __enter__(self) -> Self:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._thread.start()
        self._fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._handler = signal.signal(signal.SIGTERM, stand_still)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGTERM, self._handler)
        signal.set_wakeup_fd(self._fd)
        self._writer.close()
        # After a signal this never returns: the ending that has begun is brought to its end.
        self._thread.join()
        self._reader.close()

    def _watch(self) -> None:
        """The interpreter writes the number of every signal; an end of file: we are left."""
        while numbers := self._reader.recv(64):
            if signal.SIGTERM in numbers:
                self._end()


class BlockedTermination(_Ending):
    """In any thread of a process that was started with SIGTERM blocked in all of them.

    The signal then waits until this takes it, also one that came before. Training goes on while
    the save is written.
    """

    def __enter__(self) -> Self:
        self._left = threading.Event()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._left.set()
        # As above.
        self._thread.join()

    def _watch(self) -> None:
        while not self._left.is_set():
            if signal.sigtimedwait({signal.SIGTERM}, _POLL_S):
                self._end()


def stand_still(number: int, frame: FrameType | None) -> None:
    """Handles a signal by never going on."""
    threading.Event().wait()
