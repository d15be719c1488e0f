"""Who holds a run: one flow and its guardians, named by host, boot id, pid and start time.

On the same host a lock is free as soon as all of them are gone; seen from another host it is held
until its heartbeat is 60 s old. It is never bypassed.
"""

from __future__ import annotations

import fcntl
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from tunewright.contract import processes
from tunewright.contract.rundir import read_json, write_json

HEARTBEAT_S = 15.0
STALE_S = 60.0
_KEYS = {"host", "boot_id", "flow", "guardians", "heartbeat"}


class Lock:
    """The lock of one run, held from `take` to `release`, with a heartbeat of its own."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._clock = clock
        self._guardians: list[dict[str, Any]] = []
        self._mutex = threading.Lock()
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._beat, daemon=True)

    def take(self) -> bool:
        """Take the lock when nobody holds it; whether we did."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(self.path):
            if holder(self.path, self._clock) is not None:
                return False
            self._write()
        self._heart.start()
        return True

    def guarded_by(self, pids: list[int]) -> None:
        """Name the guardians that hold the run with us, and outlive us for their grace."""
        self._guardians = [who for pid in pids if (who := _identity(pid)) is not None]
        if self._is_ours():
            self._write()

    def release(self) -> None:
        """Give the run free. The file stays, as the record of who held it last."""
        self._ended.set()
        self._guardians = []
        if self._is_ours():
            self._write(released=True)

    def _write(self, released: bool = False) -> None:
        facts = {
            "host": socket.gethostname(),
            "boot_id": processes.boot_id(),
            "flow": processes.identity(),
            "guardians": self._guardians,
            "heartbeat": self._clock(),
            "released": released,
        }
        with self._mutex:
            # A beat that was on its way must not undo the release.
            if released or not self._ended.is_set():
                write_json(self.path, facts)

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT_S) and self._is_ours():
            # The run's folder may be on a volume that is away for a moment; the next beat counts.
            try:
                self._write()
            except OSError:
                continue

    def _is_ours(self) -> bool:
        """Whether nobody took the lock while we slept: another host may after a minute."""
        try:
            facts = read_json(self.path)
        except OSError:
            return True
        mine = (socket.gethostname(), processes.identity()["pid"])
        return facts is None or (facts.get("host"), _pid(facts.get("flow"))) == mine


def holder(path: Path, clock: Callable[[], float] = time.time) -> str | None:
    """Who holds the lock at this path, in words; None when it is free."""
    facts = read_json(path)
    if facts is None or facts.get("released") or not set(facts) >= _KEYS:
        return None
    if facts["host"] != socket.gethostname():
        age = clock() - facts["heartbeat"]
        held = age < STALE_S
        return f"a flow on host {facts['host']}, last heard {age:.0f} s ago" if held else None
    if facts["boot_id"] != processes.boot_id():
        return None
    if processes.is_alive(facts["flow"]):
        return f"the flow with pid {facts['flow']['pid']}"
    alive = [who for who in facts["guardians"] if processes.is_alive(who)]
    return f"guardian pid {alive[0]['pid']} of a flow that is gone" if alive else None


def is_waiting_for_guardians(path: Path) -> bool:
    """Whether only guardians of a dead flow hold the lock; they end by themselves."""
    return (holder(path) or "").startswith("guardian")


def _identity(pid: int) -> dict[str, Any] | None:
    """None for a guardian that has ended already."""
    try:
        return processes.identity(pid)
    except psutil.Error:
        return None


def _pid(who: Any) -> Any:
    return who.get("pid") if isinstance(who, dict) else None


@contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Look and take in one step, against others on this host."""
    gate = os.open(path.with_name(".lock.gate"), os.O_CREAT | os.O_RDWR)
    try:
        # A volume without locks still has the heartbeat.
        with suppress(OSError):
            fcntl.flock(gate, fcntl.LOCK_EX)
        yield
    finally:
        os.close(gate)
