"""The flow's side of `tunewright.node`: start guardians, follow their logs, end them.

A guardian lives in a session of its own and holds a pipe to us. When we are gone, however, it
ends its command; when it is gone, we end what carries its mark.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunewright.contract import processes
from tunewright.contract.rundir import read_json

Say = Callable[[int, str], None]
"""Called with the node's number and one line of its output, secrets masked."""

_POLL_S = 0.05
_AFTER_KILL_S = 40.0
_LOOK_S = 1.0
_LINE = 4000
_CHUNK = 64 << 10
_AT_ONCE = 4 << 20
_REDRAWN_S = 5.0


@dataclass(frozen=True)
class Node:
    """What one guardian runs, and where it tells about it. `env` holds no secrets."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: Path
    log: Path
    exit: Path
    rank: int = 0


class Guardian:
    """A started guardian."""

    def __init__(
        self,
        node: Node,
        secrets: Mapping[str, str],
        grace_s: float,
        without: Iterable[str] = (),
    ) -> None:
        """Start it idle; `begin` lets it run its node.

        Variables named in `secrets` or `without` (secrets that this node does not need) are not in
        its environment.
        """
        self.node = node
        self.secrets = secrets
        hidden = {*secrets, *without}
        self.grace_s = grace_s
        self.process = subprocess.Popen(
            # -P: a file in the working directory must not stand in for a module of ours.
            [sys.executable, "-P", "-m", "tunewright.node"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env={k: v for k, v in os.environ.items() if k not in hidden},
        )
        self._stopping = False
        self._looked = 0.0
        self._below: list[dict[str, Any]] = []

    def begin(self) -> None:
        """Hand over what to run, and the secrets, by the pipe."""
        node = self.node
        specification = {
            "argv": list(node.argv),
            "env": dict(node.env),
            "secrets": dict(self.secrets),
            "cwd": str(node.cwd),
            "log": str(node.log),
            "exit": str(node.exit),
            "node": node.rank,
            "grace_s": self.grace_s,
        }
        self._tell(json.dumps(specification))

    @property
    def pid(self) -> int:
        return self.process.pid

    def ended(self) -> bool:
        return self.process.poll() is not None

    def stop(self, reason: str) -> None:
        """Ask the guardian to end its command: SIGTERM, grace, SIGKILL."""
        if not self._stopping and not self.ended():
            self._stopping = True
            self._tell(f"stop {reason}")

    def wait_ended(self) -> None:
        """Until the guardian is gone; after its grace and more, end it and what it ran."""
        try:
            self.process.wait(self.grace_s + _AFTER_KILL_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            self._end_lost()
        assert self.process.stdin is not None
        # What a guardian that is gone did not read does not matter.
        with suppress(BrokenPipeError):
            self.process.stdin.close()

    def outcome(self) -> dict[str, Any]:
        """How the command ended, as the guardian wrote it; or that the guardian was killed."""
        told = read_json(self.node.exit)
        if told is not None:
            return told
        self._end_lost()
        message = f"the guardian of node {self.node.rank} ended without a word (killed, or no disk)"
        return {
            "node": self.node.rank,
            "exit_code": 137,
            "stopped_by": None,
            "failure": {
                "class": "infrastructure",
                "node": self.node.rank,
                "rank": None,
                "message": message,
            },
            "tail": "",
            "survivors": [],
        }

    def look(self) -> None:
        """Remember what runs below the guardian, now and then, for when it is gone."""
        if time.monotonic() > self._looked + _LOOK_S:
            self._looked = time.monotonic()
            self._below = processes.below(self.pid)

    def _end_lost(self) -> None:
        """End what a guardian left: by its mark, and what we saw below it."""
        mark = self.node.env["TUNEWRIGHT_NODE_MARK"]
        processes.end_marked("TUNEWRIGHT_NODE_MARK", mark, self._below)

    def _tell(self, line: str) -> None:
        assert self.process.stdin is not None
        # A guardian that is gone says so by its exit, which the caller looks at anyway.
        with suppress(BrokenPipeError):
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()


def start_all(nodes: Sequence[Node], secrets: Mapping[str, str], grace_s: float) -> list[Guardian]:
    """A guardian for each node; when one cannot be started, none of them stays."""
    started: list[Guardian] = []
    try:
        for node in nodes:
            started.append(Guardian(node, secrets, grace_s))
    except BaseException:
        _stop(started, "interrupted")
        for guardian in started:
            guardian.wait_ended()
        raise
    return started


class Follower:
    """New whole lines of a growing log.

    A line that is redrawn by carriage returns shows its last state, and while it is unfinished
    its newest whole state every few seconds.
    """

    def __init__(
        self, log: Path, start: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """From byte `start`, by default from what is there now."""
        self._log = log
        self._at = start if start is not None else log.stat().st_size if log.exists() else 0
        self._rest = b""
        self._clock = clock
        self._redrawn = -_REDRAWN_S

    def lines(self, *, ended: bool = False) -> Iterator[str]:
        """What came since the last call, at most 4 MiB of it.

        With `ended`, all of it, and a last line without line end. A line is cut after 4,000
        characters; one that never ends is shown in pieces.
        """
        for chunk in self._chunks(None if ended else _AT_ONCE):
            *whole, self._rest = (self._rest + chunk).split(b"\n")
            yield from (_shown(line.rstrip(b"\r").rpartition(b"\r")[2]) for line in whole)
            yield from map(_shown, self._bar())
            if len(self._rest) > _CHUNK:
                yield _shown(self._rest)
                self._rest = b""
        if ended and self._rest.strip(b"\r"):
            yield _shown(self._rest.rstrip(b"\r").rpartition(b"\r")[2])
            self._rest = b""

    def _chunks(self, limit: int | None) -> Iterator[bytes]:
        """The log's new bytes, by pieces, so that much output takes little memory."""
        # A log that cannot be read, or a folder in its place, must not end what it tells of.
        with suppress(OSError), self._log.open("rb") as file:
            file.seek(self._at)
            end = math.inf if limit is None else self._at + limit
            while self._at < end and (chunk := file.read(_CHUNK)):
                self._at += len(chunk)
                yield chunk

    def _bar(self) -> list[bytes]:
        """The newest whole state of the unfinished line, now and then; older ones are dropped."""
        states, _, newest = self._rest.rpartition(b"\r")
        if not states.strip(b"\r"):
            return []
        self._rest = b"\r" + newest
        if self._clock() < self._redrawn + _REDRAWN_S:
            return []
        self._redrawn = self._clock()
        return [states.rstrip(b"\r").rpartition(b"\r")[2]]


def _shown(line: bytes) -> str:
    return line.decode("utf-8", "replace")[:_LINE]


def marked(env: Mapping[str, str], run: Path, rank: int | str) -> dict[str, str]:
    """The environment with the mark by which a lost guardian's processes are found."""
    return {**env, "TUNEWRIGHT_NODE_MARK": f"{run}#{rank}#{os.getpid()}#{time.time():.6f}"}


def watch(
    guardians: Sequence[Guardian],
    say: Say,
    reason_to_stop: Callable[[], str | None] = lambda: None,
    started: Callable[[list[int]], None] = lambda pids: None,
) -> list[dict[str, Any]]:
    """Follow guardians to their end and return their outcomes, by node.

    All are ended when one fails, when `reason_to_stop` gives a reason, and when this call is left
    by an exception (Ctrl-C, a signal): then they are gone before the exception goes on.
    """
    followers = [Follower(guardian.node.log) for guardian in guardians]
    decision = _Decision(guardians, reason_to_stop)

    def show(ended: bool = False) -> None:
        for guardian, follower in zip(guardians, followers, strict=True):
            for line in follower.lines(ended=ended):
                say(guardian.node.rank, line)

    try:
        # Named before they begin: whoever finds the run held knows by whom.
        started([guardian.pid for guardian in guardians])
        for guardian in guardians:
            guardian.begin()
        # A guardian that hangs is for `wait_ended`.
        while not all(guardian.ended() for guardian in guardians) and not decision.is_overdue():
            show()
            for guardian in guardians:
                guardian.look()
            if reason := decision.reason():
                _stop(guardians, reason)
            time.sleep(_POLL_S)
    except BaseException:
        _stop(guardians, "interrupted")
        raise
    finally:
        with undisturbed():
            for guardian in guardians:
                guardian.wait_ended()
            show(ended=True)
    return [guardian.outcome() for guardian in guardians]


@contextmanager
def undisturbed() -> Iterator[None]:
    """Let a second Ctrl-C or SIGTERM wait until what is being ended has ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


class _Decision:
    """Whether guardians are to be stopped, and why. Made once."""

    def __init__(
        self, guardians: Sequence[Guardian], reason_to_stop: Callable[[], str | None]
    ) -> None:
        self._guardians = guardians
        self._reason_to_stop = reason_to_stop
        self._grace_s = max(guardian.grace_s for guardian in guardians)
        self._failed_at: float | None = None
        self._stopped_at: float | None = None

    def reason(self) -> str | None:
        """A reason to stop now; None when there is none, or it was given before."""
        if self._stopped_at is not None:
            return None
        if self._failed_at is None and any(g.process.poll() for g in self._guardians):
            self._failed_at = time.monotonic()
        reason = self._reason_to_stop() or ("peer" if self._past(self._failed_at) else None)
        self._stopped_at = time.monotonic() if reason else None
        return reason

    def is_overdue(self) -> bool:
        return self._past(self._stopped_at)

    def _past(self, moment: float | None) -> bool:
        """Whether the grace is over: a peer may fail by itself, its log often names the cause."""
        return moment is not None and time.monotonic() > moment + self._grace_s


def _stop(guardians: Sequence[Guardian], reason: str) -> None:
    for guardian in guardians:
        guardian.stop(reason)
