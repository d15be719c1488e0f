"""A save under way: the thread that writes it, and the ranks as these threads see each other."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from tunewright.contract.failures import TunewrightError, UserError

T = TypeVar("T")
_USERS_ERRORS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EEXIST,
}


@dataclass(frozen=True)
class Saved:
    """A sealed checkpoint. Seconds from its begin to its seal, and those that training stood."""

    step: int
    path: Path
    seconds: float
    blocked: float


class Save:
    """A save being written by a thread. The thread never keeps the process alive."""

    def __init__(
        self, step: int, path: Path, started: float, work: Callable[[threading.Event], None]
    ) -> None:
        self.step = step
        self.path = path
        self.blocked = 0.0
        self.abandoned = threading.Event()
        self._started = started
        self._seconds: float | None = None
        self._error: BaseException | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, name=path.name, daemon=True)
        self._thread.start()

    def wait(self, within_s: float | None = None) -> bool:
        """Whether it has ended, waiting for that so long at most."""
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def elapsed(self) -> float:
        return time.perf_counter() - self._started

    def result(self) -> Saved:
        """Once it has ended; raises what went wrong."""
        if self._error is not None:
            raise self._error
        assert self._seconds is not None, "the save has not ended"
        return Saved(self.step, self.path, self._seconds, self.blocked)

    def _run(self) -> None:
        try:
            self._work(self.abandoned)
        except BaseException as error:  # it is raised where the training asks
            self._error = error
        self._seconds = self.elapsed()


@dataclass(frozen=True)
class Peers:
    """The ranks as the threads that write see them, over a gloo group that only they use."""

    group: dist.ProcessGroup
    main: bool
    size: int

    def on_main(self, work: Callable[[], None]) -> None:
        """Let rank 0 do something; an OSError or an error of ours there is raised on every rank."""
        box: list[Any] = [_failure(work) if self.main else None]
        dist.broadcast_object_list(box, src=0, group=self.group)
        if box[0] is not None:
            raise box[0]

    def gathered(self, value: T) -> list[T]:
        boxes: list[Any] = [None] * self.size
        dist.all_gather_object(boxes, value, group=self.group)
        return boxes


def explain(folder: Path, failures: list[BaseException], cause: BaseException) -> NoReturn:
    """Raise what a failed save means: a UserError where the user can make it work."""
    for failure in failures:
        if isinstance(failure, OSError) and failure.errno in _USERS_ERRORS:
            raise UserError(
                f"cannot write the checkpoint {folder}: {failure.strerror}; "
                "free some space there, or set output_dir to a folder that can be written"
            ) from cause
    raise RuntimeError(f"the checkpoint {folder} could not be written: {failures[0]}") from cause


def _failure(work: Callable[[], None]) -> Exception | None:
    try:
        work()
    except (OSError, TunewrightError) as error:
        return error
    return None
