"""Processes by identity, and the ending of whole process trees.

Whoever starts a process ends it and all its descendants. A group kill is not enough: torchrun
puts each worker into a session of its own, and a daemon leaves its parent. So a guardian makes
itself the reaper of its orphans, and whatever its command started stays below it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil

GRACE_S = 10.0
"""Seconds between SIGTERM and SIGKILL."""

_UNKILLABLE_S = 30.0
_PR_SET_CHILD_SUBREAPER = 36


def identity(pid: int | None = None) -> dict[str, Any]:
    """What tells this process from a later one with the same pid: {"pid", "started"}."""
    process = psutil.Process(pid)
    return {"pid": process.pid, "started": process.create_time()}


def is_alive(who: Mapping[str, Any]) -> bool:
    """Whether the process with this identity runs; a zombie or a reused pid does not count."""
    try:
        process = psutil.Process(who["pid"])
        same = abs(process.create_time() - who["started"]) < 1
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def boot_id() -> str:
    """What tells one start of this machine from the next, so that old pids are not believed."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else f"boot-{psutil.boot_time():.0f}"


def adopt_orphans() -> None:
    """Make this process the parent of its descendants' orphans (Linux; elsewhere a no-op)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> list[psutil.Process]:
    """Every live process below this one."""
    found = psutil.Process().children(recursive=True)
    return [process for process in found if _runs(process)]


def end_descendants(
    grace_s: float, reap: Callable[[], None], clock: Callable[[], float] = time.monotonic
) -> list[int]:
    """End every process below this one: SIGTERM, `grace_s` seconds, then SIGKILL.

    `reap` collects exit statuses; it is called while waiting, so that dead children do not
    linger. What a dying process starts is ended too. Returns the pids that even SIGKILL did not
    end within 30 s (a process stuck in the kernel), normally none.
    """
    _signal(descendants(), signal.SIGTERM)
    _wait_for_none(grace_s, reap, clock)
    deadline = clock() + _UNKILLABLE_S
    while (remaining := descendants()) and clock() < deadline:
        _signal(remaining, signal.SIGKILL)
        _wait_for_none(0.1, reap, clock)
    reap()
    return [process.pid for process in remaining]


def below(pid: int) -> list[dict[str, Any]]:
    """The identities of the processes below one; none when it is gone."""
    try:
        found = psutil.Process(pid).children(recursive=True)
        return [{"pid": process.pid, "started": process.create_time()} for process in found]
    except psutil.Error:
        return []


def end_marked(variable: str, value: str, seen: Iterable[Mapping[str, Any]] = ()) -> int:
    """SIGKILL every process of ours whose environment has variable=value; their number.

    The last resort after a guardian was itself killed: its command's processes carry the mark,
    and what they started with an environment of its own is found below them. `seen` are the
    identities of more, which left their parents and have no mark.
    """
    needle = f"{variable}={value}".encode()
    ended: set[int] = set()
    while found := [p for p in _marked(needle, seen) if p.pid not in ended and _runs(p)]:
        _signal(found, signal.SIGKILL)
        ended |= {process.pid for process in found}
    return len(ended)


def _wait_for_none(limit_s: float, reap: Callable[[], None], clock: Callable[[], float]) -> None:
    deadline = clock() + limit_s
    while descendants() and clock() < deadline:
        time.sleep(0.02)
        reap()


def _marked(needle: bytes, seen: Iterable[Mapping[str, Any]]) -> list[psutil.Process]:
    found: dict[int, psutil.Process] = {}
    known = {who["pid"] for who in seen if is_alive(who)}
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        if process.pid in known or needle in _environment(process.pid):
            found |= {p.pid: p for p in [process, *_below(process)]}
    return list(found.values())


def _below(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _signal(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        # Gone already is what we want; a foreign process (setuid) is not ours to end.
        try:
            process.send_signal(number)
        except psutil.Error:
            continue
