"""The flow's side of `tunewright.ray_driver`: ask a cluster, follow an attempt on it, end it.

The driver lives in a session of its own and holds a pipe to us. When we are gone, however, it ends
its attempt; when it is gone, Ray ends its actors, and their guardians the commands.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from tasks.targets.guardian import Follower, Say, undisturbed
from tasks.targets.job import Ending, Job, ending_of
from tunewright.contract.failures import UserError
from tunewright.contract.rundir import read_json
from tunewright.contract.scrub import Scrubber

# -P: a file in the working directory must not stand in for a module of ours.
_PROGRAM = [sys.executable, "-P", "-m", "tunewright.ray_driver"]
_POLL_S = 0.05
_LOOK_S = 60.0
_CONNECT_S = 180.0
"""Until the cluster is connected to, the upload of the snapshot included."""
_AFTER_GRACE_S = 60.0
_GUARDIANS_S = 15.0


def look(address: str, without: Iterable[str]) -> list[dict[str, Any]]:
    """The live nodes of a cluster: [{"host" (None: not known), "address", "CPU", "GPU"}].

    Variables named in `without` (a workload's secrets) are not passed on. Raises UserError when
    the cluster does not answer.
    """
    question = json.dumps({"address": address, "look": True}) + "\n"
    try:
        answer = subprocess.run(
            _PROGRAM,
            input=question,
            capture_output=True,
            text=True,
            timeout=_LOOK_S,
            env=_environment(without),
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"the Ray cluster {address} did not answer in {_LOOK_S:.0f} s") from None
    for event in filter(None, map(_event, answer.stdout.splitlines())):
        if event["event"] == "cluster":
            return list(event["nodes"])
        if event["event"] == "error":
            raise UserError(event["message"])
    raise UserError(f"the Ray cluster {address} cannot be asked: {answer.stderr[-2000:]}")


class Driver:
    """The child that speaks to Ray for one attempt."""

    def __init__(
        self, specification: Mapping[str, Any], secrets: Mapping[str, str], log: Path
    ) -> None:
        """Start it; what Ray says goes to `log`, secrets go through the pipe alone."""
        self.grace_s = float(specification["grace_s"])
        self.scrubber = Scrubber(secrets)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                _PROGRAM,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,
                env=_environment(secrets),
            )
        self._events: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._stopped_at: float | None = None
        self._specification = json.dumps({**specification, "secrets": dict(secrets)})

    def begin(self) -> None:
        """Hand over what to run."""
        self._reader.start()
        self._tell(self._specification)

    def events(self) -> Iterator[dict[str, Any]]:
        """What came since the last call."""
        with suppress(Empty):
            while True:
                yield self._events.get_nowait()

    def ended(self) -> bool:
        return self.process.poll() is not None

    def stop(self, reason: str) -> None:
        """Ask the driver to end its nodes' commands: SIGTERM, grace, SIGKILL."""
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()
            self._tell(f"stop {reason}")

    def is_overdue(self) -> bool:
        limit = self.grace_s + _AFTER_GRACE_S
        return self._stopped_at is not None and time.monotonic() > self._stopped_at + limit

    def wait_ended(self, limit_s: float | None = None) -> None:
        """Until the driver is gone; one that hangs is killed, and Ray ends its actors then."""
        try:
            self.process.wait(self.grace_s + _AFTER_GRACE_S if limit_s is None else limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self._reader.is_alive():
            self._reader.join()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()

    def _tell(self, line: str) -> None:
        assert self.process.stdin is not None
        # A driver that is gone says so by its end, which the caller looks at anyway.
        with suppress(BrokenPipeError):
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if event := _event(line.decode("utf-8", "replace")):
                self._events.put(event)


class Watch:
    """One attempt as the flow sees it: the driver's events, the nodes' logs, why to stop it."""

    def __init__(self, driver: Driver, job: Job, say: Say, cancelled: Callable[[], bool]) -> None:
        self._driver, self._job, self._say, self._cancelled = driver, job, say, cancelled
        self._began = time.monotonic()
        self._deadline: float | None = None
        self._connected = self._placed = False
        self._reason: str | None = None
        self._error: dict[str, Any] | None = None
        self._outcomes: dict[int, dict[str, Any]] = {}
        logs = (job.run.node_log(job.attempt, rank) for rank in range(job.nodes))
        self._followers = [Follower(log) for log in logs]

    def to_the_end(self, started: Callable[[list[int]], None]) -> Ending:
        """Follow the attempt until nothing of it is left, also when left by an exception."""
        driver = self._driver
        try:
            # Named before it begins: whoever finds the run held knows by whom.
            started([driver.process.pid])
            driver.begin()
            while not driver.ended() and not driver.is_overdue() and not self._is_deaf():
                self._step()
                if not self._missing():
                    break
                time.sleep(_POLL_S)
        except BaseException:
            self._stop("interrupted")
            raise
        finally:
            with undisturbed():
                driver.wait_ended(0 if driver.is_overdue() or self._is_deaf() else None)
                self._step(ended=True)
                self._wait_for_guardians()
        return self._ending()

    def _step(self, ended: bool = False) -> None:
        for event in self._driver.events():
            self._hear(event)
        for rank, follower in enumerate(self._followers):
            for line in follower.lines(ended=ended):
                self._say(rank, line)
        if not ended and (reason := self._reason_to_stop()):
            self._stop(reason)

    def _hear(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        if kind == "connected":
            self._connected = True
        elif kind in ("waiting", "note"):
            self._say(0, self._driver.scrubber.text(event["message"]))
        elif kind == "placed":
            self._placed = True
            for rank, place in enumerate(event["nodes"]):
                self._say(rank, f"on the Ray node {place['address']} ({place['host']})")
        elif kind == "started" and self._job.deadline_s:
            self._deadline = time.monotonic() + self._job.deadline_s
        elif kind == "outcome":
            self._outcomes[event["outcome"]["node"]] = event["outcome"]
        elif kind == "error":
            self._error = dict(event)

    def _reason_to_stop(self) -> str | None:
        if self._deadline is not None and time.monotonic() > self._deadline:
            return "timeout"
        return "cancel" if self._cancelled() else None

    def _stop(self, reason: str) -> None:
        self._reason = self._reason or reason
        self._driver.stop(reason)

    def _is_deaf(self) -> bool:
        return not self._connected and time.monotonic() > self._began + _CONNECT_S

    def _wait_for_guardians(self) -> None:
        """The commands of a driver that is gone end with their guardians: that takes their grace.

        Meanwhile their run is ours; the next attempt must not meet them.
        """
        missing = self._missing() if self._placed else []
        exits = [self._job.run.node_exit(self._job.attempt, rank) for rank in missing]
        limit = time.monotonic() + self._driver.grace_s + _GUARDIANS_S
        while not all(map(read_json, exits)) and time.monotonic() < limit:
            time.sleep(_POLL_S)

    def _missing(self) -> Sequence[int]:
        return [rank for rank in range(self._job.nodes) if rank not in self._outcomes]

    def _ending(self) -> Ending:
        """From the nodes' outcomes; where they are missing, from the driver's words or silence."""
        found = [self._outcomes[rank] for rank in sorted(self._outcomes)]
        missing = bool(self._missing())
        if missing and self._reason != "cancel":
            found.append(self._without_outcome())
        ending = ending_of(found)
        stopped_by = ending.stopped_by or (self._reason if missing else None)
        return Ending(ending.failure, stopped_by, ending.tail, ending.nodes)

    def _without_outcome(self) -> dict[str, Any]:
        kind, message = "infrastructure", "the process that speaks to Ray ended without a word"
        if self._error:
            kind, message = self._error["class"], self._error["message"]
        elif self._reason == "timeout":
            kind, message = "timeout", "the deadline of this attempt was reached"
        elif self._is_deaf():
            message = f"the Ray cluster could not be connected to in {_CONNECT_S:.0f} s"
        message = self._driver.scrubber.text(message)
        failure = {"class": kind, "node": 0, "rank": None, "message": message}
        return {"node": 0, "exit_code": 1, "stopped_by": None, "failure": failure, "tail": ""}


def _environment(without: Iterable[str]) -> dict[str, str]:
    """Ours without secrets; Ray sends no statistics, and packs a snapshot as it is.

    What a snapshot leaves out is decided already, by git's own rules.
    """
    hidden = set(without)
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    ours = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_RUNTIME_ENV_IGNORE_GITIGNORE": "1",
        "RAY_OVERRIDE_RUNTIME_ENV_DEFAULT_EXCLUDES": "__pycache__",
    }
    return {**kept, **ours}


def _event(line: str) -> dict[str, Any] | None:
    """A line of the driver's as an event; Ray's own lines are none."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "event" in found else None
