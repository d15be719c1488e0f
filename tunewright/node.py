"""The guardian of one node's command: environment, log, scrubbing, failure file, ending.

    python -m tunewright.node        with a specification as one line of JSON on stdin

It runs the command, writes its output with known secrets masked, and ends it with all its
descendants when the command ends, when it is told to, or when its parent is gone: stdin stays
open as long as the parent lives, however it dies. Specification:

    {"argv": [...], "env": {...}, "secrets": {NAME: value}, "cwd": path, "log": path,
     "exit": path of the file that tells how it ended, "node": 0, "grace_s": 10}

Later lines on stdin: `stop <reason>` ends the command (timeout, cancel, peer, interrupted).
The exit file: {"exit_code", "stopped_by", "failure": {"class", "node", "rank", "message"} | null,
"tail", "survivors", "started", "ended"}. Secrets arrive by this pipe and nowhere else.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO

from tunewright.contract import logtail, processes
from tunewright.contract.failures import FAILURE_DIR_VARIABLE, FailureClass
from tunewright.contract.rundir import read_json, write_json
from tunewright.contract.scrub import Scrubber

_WITNESS_LINES = 120
"""How far back the cause may stand: torchrun says 50 lines and more after it."""
_ERROR_CHARACTERS = 300
_NOT_STARTED = 127
_POLL_S = 0.05
_DRAIN_S = 5.0
_OUT_OF_MEMORY = re.compile(
    r"torch\.(cuda\.)?OutOfMemoryError|(CUDA|HIP) out of memory|CUDA error: out of memory"
)
_TORCHRUN_ROOT = re.compile(r"Root Cause.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", re.DOTALL)


def main() -> int:
    """Guard one command; returns its exit code (128 + n for signal n)."""
    # The terminal's Ctrl-C is for the flow, which then tells us to stop. A handler, since the
    # command would inherit that SIGINT is ignored.
    signal.signal(signal.SIGINT, lambda *_: None)
    specification, told = _read_line()
    # A parent that died before it said anything wants nothing.
    return Guardian(json.loads(specification), told).run() if specification else 1


def _read_line() -> tuple[bytes, bytes]:
    """The first line on stdin and what came with it; read raw, so that `select` sees the rest."""
    read = b""
    while b"\n" not in read:
        if not (chunk := os.read(sys.stdin.fileno(), 65536)):
            return b"", b""
        read += chunk
    line, _, rest = read.partition(b"\n")
    return line, rest


class Guardian:
    """One command and everything it starts."""

    def __init__(self, specification: dict[str, Any], told: bytes = b"") -> None:
        """`told` is what the parent said already, behind the specification."""
        self.spec = specification
        self.told = told
        self.scrubber = Scrubber(specification.get("secrets", {}))
        self.stopped_by: str | None = None
        self.status: int | None = None
        self.survivors: list[int] = []
        self.log = Path(specification["log"])
        self.failures = Path(tempfile.mkdtemp(prefix="tunewright-node-"))

    def run(self) -> int:
        processes.adopt_orphans()
        signal.signal(signal.SIGTERM, lambda *_: self._stop("preempted"))
        started, oom_kills = time.time(), _oom_kills()
        try:
            child = self._start()
        except OSError as error:
            return self._could_not_start(error, started)
        pump = threading.Thread(target=self._pump, args=(child.stdout,), daemon=True)
        pump.start()
        try:
            self._wait(child)
        finally:
            grace = self.spec.get("grace_s", processes.GRACE_S) if self.stopped_by else 0
            self.survivors = processes.end_descendants(grace, lambda: self._reap(child))
        pump.join(_DRAIN_S)
        try:
            self._write_exit(started, self._failure(_oom_kills() > oom_kills))
        finally:
            shutil.rmtree(self.failures, ignore_errors=True)
        return self._exit_code()

    def _could_not_start(self, error: OSError, started: float) -> int:
        self.status = _NOT_STARTED
        message = f"the command could not be started: {error}"
        shutil.rmtree(self.failures, ignore_errors=True)
        self._write_exit(started, self._failed("infrastructure", message))
        return self._exit_code()

    def _start(self) -> subprocess.Popen[bytes]:
        env = {**self.spec["env"], **self.spec.get("secrets", {})}
        env[FAILURE_DIR_VARIABLE] = str(self.failures)
        Path(self.spec["cwd"]).mkdir(parents=True, exist_ok=True)
        return subprocess.Popen(
            self.spec["argv"],
            env=env,
            cwd=self.spec["cwd"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _wait(self, child: subprocess.Popen[bytes]) -> None:
        """Until the command ends, or we are told to end it, or the parent is gone."""
        while self.stopped_by is None:
            self._reap(child)
            if self.status is not None:
                return
            ready, _, _ = select.select([sys.stdin.fileno()], [], [], 0 if self.told else _POLL_S)
            if ready or self.told:
                words = (self.told or os.read(sys.stdin.fileno(), 4096)).decode().split()
                self._stop(words[1] if len(words) > 1 else "parent died")

    def _stop(self, reason: str) -> None:
        self.stopped_by = self.stopped_by or reason

    def _reap(self, child: subprocess.Popen[bytes]) -> None:
        """Collect every dead child: the command's own status, and the orphans we adopted."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == child.pid:
                self.status = child.returncode = os.waitstatus_to_exitcode(status)

    def _pump(self, source: BinaryIO) -> None:
        """Output into the log, masked; a full disk loses the log, never the command."""
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with self.log.open("ab", buffering=0) as log:
                while chunk := os.read(source.fileno(), 65536):
                    log.write(self.scrubber.feed(chunk))
                log.write(self.scrubber.finish())
        except OSError as error:
            print(f"the log {self.log} cannot be written: {error}", file=sys.stderr)
            while os.read(source.fileno(), 65536):
                continue

    def _exit_code(self) -> int:
        code = self.status if self.status is not None else -signal.SIGKILL
        return 128 - code if code < 0 else code

    def _write_exit(self, started: float, failure: dict[str, Any] | None) -> None:
        facts = {
            "node": self.spec.get("node", 0),
            "exit_code": self._exit_code(),
            "stopped_by": self.stopped_by,
            "failure": failure,
            "tail": logtail.tail(logtail.last_lines(self.log)),
            "survivors": self.survivors,
            "started": started,
            "ended": time.time(),
        }
        write_json(Path(self.spec["exit"]), facts)

    def _failure(self, kernel_oom: bool) -> dict[str, Any] | None:
        """What went wrong, from the best witness: our own programs, the kernel, the output."""
        code = self._exit_code()
        if self.stopped_by in ("cancel", "interrupted", "peer"):
            return None
        # A command that ends well because it was told to has still not done its work.
        if code == 0 and self.stopped_by is None:
            return None
        told, lines = self._told_by_ranks(), logtail.last_lines(self.log)
        tail = "\n".join(lines[-_WITNESS_LINES:])
        root = _TORCHRUN_ROOT.search(tail)
        rank = told["rank"] if told else int(root[1]) if root else None
        killed = code == 137 or (root is not None and int(root[2]) in (-9, 137))
        failure_class, message = self._classify(code, killed, kernel_oom, told, tail)
        if failure_class == "unknown" and not told and (error := logtail.error(lines, rank)):
            message += f": {error[:_ERROR_CHARACTERS]}"
        return self._failed(failure_class, message, rank=rank)

    def _failed(
        self, failure_class: FailureClass, message: str, rank: int | None = None
    ) -> dict[str, Any]:
        return {
            "class": failure_class,
            "node": self.spec.get("node", 0),
            "rank": rank,
            "message": self.scrubber.text(message),
        }

    def _classify(
        self, code: int, killed: bool, kernel_oom: bool, told: dict[str, Any] | None, tail: str
    ) -> tuple[FailureClass, str]:
        if self.stopped_by == "timeout":
            saved = told is not None and told["class"] == "timeout"
            reached = "the deadline of this attempt was reached"
            return "timeout", told["message"] if told and saved else reached
        if self.stopped_by is not None:
            return "preemption", f"ended from outside: {self.stopped_by}"
        if told:
            return told["class"], told["message"]
        if killed and kernel_oom:
            return "oom", "the kernel killed a process: out of host memory"
        if _OUT_OF_MEMORY.search(tail):
            return "oom", "the GPU ran out of memory"
        if killed:
            return "infrastructure", "a process was killed by SIGKILL from outside"
        return "unknown", f"the command exited with {code}"

    def _told_by_ranks(self) -> dict[str, Any] | None:
        """The failure that one of our programs wrote: a known class first, then the earliest."""
        files = sorted(self.failures.glob("rank-*.json"), key=lambda p: p.stat().st_mtime)
        found = [facts for path in files if (facts := read_json(path))]
        told = [facts for facts in found if {"class", "rank", "message"} <= set(facts)]
        return min(told, key=lambda facts: facts["class"] == "unknown", default=None)


def _oom_kills() -> int:
    """How often the kernel killed for memory in our control group (version 2); 0 if unknown."""
    try:
        group = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2].lstrip("/")
        events = (Path("/sys/fs/cgroup") / group / "memory.events").read_text()
    except OSError:
        return 0
    return int(dict(line.split() for line in events.splitlines()).get("oom_kill", 0))


if __name__ == "__main__":
    raise SystemExit(main())
