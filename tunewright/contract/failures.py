"""What can go wrong, and whether trying again could help.

    TunewrightError                     one clear message for the reader, never a traceback
    ├── UserError          user         a setting, file or argument the user can fix; exit code 2
    │   └── WorkloadError  user         every problem of a workload file at once
    ├── DataError          data         the rows or the token store cannot be trained on
    ├── OutOfMemory        oom          the same thing would not fit again
    ├── NonFinite          nonfinite    the loss or gradient stopped being a number
    └── OutOfTime          timeout      the deadline is near; saved, and may go on later

A program of ours runs its `main` under `reported()`: the error reaches the node's guardian as a
small JSON file, and the reader as one sentence.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

FailureClass = Literal[
    "user", "data", "oom", "nonfinite", "infrastructure", "preemption", "timeout", "unknown"
]
FINAL: frozenset[str] = frozenset({"user", "data", "oom", "nonfinite"})
"""Classes for which another attempt would end the same way."""

FAILURE_DIR_VARIABLE = "TUNEWRIGHT_FAILURE_DIR"
DEADLINE_VARIABLE = "TUNEWRIGHT_DEADLINE"
"""When the attempt is ended, in Unix seconds; not set where there is no time limit."""
GRACE_VARIABLE = "TUNEWRIGHT_GRACE_S"
"""Seconds between SIGTERM and SIGKILL."""


class TunewrightError(Exception):
    """An error with a message for the user. Pickles, since it takes one positional message."""

    failure_class: FailureClass = "unknown"
    exit_code = 1


class UserError(TunewrightError):
    """Something the user can fix; the message names the place, the reason and the way out."""

    failure_class = "user"
    exit_code = 2


class Problem(NamedTuple):
    """One thing wrong with a workload: its dotted path, and the reason with the way out."""

    path: str
    message: str


class WorkloadError(UserError):
    """A workload that cannot run. `problems` lists everything that is wrong with it."""

    def __init__(self, source: str, problems: list[Problem] | None = None) -> None:
        self.source = source
        self.problems = problems or []
        lines = [
            f"  {path}: {message}" if path else f"  {message}" for path, message in self.problems
        ]
        head = f"{source} is not a valid workload:" if self.problems else source
        super().__init__("\n".join([head, *lines]))

    def __reduce__(self) -> tuple[type, tuple[str, list[Problem]]]:
        return type(self), (self.source, self.problems)


class DataError(TunewrightError):
    failure_class = "data"


class OutOfMemory(TunewrightError):
    failure_class = "oom"


class NonFinite(TunewrightError):
    failure_class = "nonfinite"


class OutOfTime(TunewrightError):
    failure_class = "timeout"


@contextmanager
def reported() -> Iterator[None]:
    """Run a program's main: turn an error into one sentence, a failure file and an exit code.

    Exit codes: 2 for what the user can fix, 1 otherwise. An error that is not ours keeps its
    traceback on stderr, because only that says what to mend.
    """
    try:
        yield
    except TunewrightError as error:
        write_failure(error.failure_class, str(error))
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(error.exit_code) from None
    except Exception as error:
        traceback.print_exc()
        write_failure(_class_of(error), f"{type(error).__name__}: {error}")
        sys.stderr.flush()
        raise SystemExit(1) from None


def write_failure(failure_class: FailureClass, message: str) -> None:
    """Leave this process's failure for the guardian of the node; does nothing without one.

    The file is `rank-<RANK>.json` in the folder named by TUNEWRIGHT_FAILURE_DIR, a private
    folder on the node's own disk that the guardian reads, scrubs and deletes.
    """
    folder = os.environ.get(FAILURE_DIR_VARIABLE)
    if not folder:
        return
    rank = os.environ.get("RANK", "")
    rank = rank if rank.isdecimal() else "0"
    facts = {"class": failure_class, "rank": int(rank), "message": message}
    try:
        Path(folder, f"rank-{rank}.json").write_text(json.dumps(facts))
    except OSError as error:
        print(f"could not leave the failure for the guardian: {error}", file=sys.stderr)


def _class_of(error: Exception) -> FailureClass:
    """The class of an error that is not ours: out of memory by its type's name, else unknown."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return "oom" if names & {"OutOfMemoryError", "MemoryError"} else "unknown"
