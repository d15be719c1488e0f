"""The files of one call, in a private folder of this machine that goes when the call ends."""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class CallFolder:
    """Where the caller, the launcher and the ranks of one call leave things for each other."""

    root: Path

    @property
    def call(self) -> Path:
        """For the ranks: {"call": function and arguments, packed, "argv", "sources"}, pickled."""
        return self.root / "call.pkl"

    def log(self, rank: int) -> Path:
        """What a rank prints, stdout and stderr in the order they came."""
        return self.root / f"rank-{rank}.log"

    def result(self, rank: int) -> Path:
        """What the function returned on a rank, packed."""
        return self.root / f"rank-{rank}.result"

    def error(self, rank: int) -> Path:
        """The exception on a rank: a pickled `Raised`."""
        return self.root / f"rank-{rank}.error"

    @property
    def deaths(self) -> Path:
        """The ranks that did not end well: {"<rank>": {"exit_code", "at" (seconds)}}."""
        return self.root / "deaths.json"

    @property
    def launcher_log(self) -> Path:
        return self.root / "launcher.log"

    @property
    def exit(self) -> Path:
        """How the launcher ended, as its guardian writes it."""
        return self.root / "exit.json"


@dataclass(frozen=True)
class Raised:
    """An exception on a rank, in parts that can always be sent."""

    rank: int
    at: float
    """Seconds since the epoch, on the machine's one clock: the earliest is the cause."""
    summary: str
    traceback: str
    exception: bytes | None
    """Packed; None when it cannot be sent, or would mean something else to the caller."""


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that a reader sees whole or not at all, even if the writer is killed."""
    draft = path.with_name(path.name + ".tmp")
    draft.write_bytes(content)
    os.replace(draft, path)


def read_raised(path: Path) -> Raised | None:
    """What a rank left about its exception; None when it left nothing."""
    if not path.exists():
        return None
    found: Any = pickle.loads(path.read_bytes())
    assert isinstance(found, Raised)
    return found
