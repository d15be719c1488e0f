"""An attempt as a Ray job: for clusters whose only door is http://host:8265, and without secrets.

The driver then runs on the cluster, as the entrypoint of a job; its events are lines of the job's
log, and orders reach it as a file on the volume. It also watches the heartbeat of the run's lock:
when flow and follower are both gone (their machine is), it ends by itself.
"""

from __future__ import annotations

import json
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tunewright.contract.rundir import read_json, write_json
from tunewright.ray_attempt import ClusterFailed, Reason, emit, pass_on, sentence

_POLL_S = 0.5
_AFTER_GRACE_S = 60.0
_AWAY_S = 120.0
"""How long the door may be shut before we say so: the job goes on without it."""


def cluster(address: str) -> dict[str, Any]:
    """What the cluster has: {"ray", "nodes": [{"host": None, "address", "CPU", "GPU"}]}."""
    import ray
    from ray.util.state import list_nodes

    try:
        found = list_nodes(address=address, detail=True, timeout=30)
    except Exception as error:
        raise ClusterFailed(f"Ray cluster {address}: {sentence(error)}") from None
    nodes = [
        {
            "host": None,
            "address": node.node_ip,
            "CPU": node.resources_total.get("CPU", 0),
            "GPU": node.resources_total.get("GPU", 0),
        }
        for node in found
        if node.state == "ALIVE"
    ]
    return {"ray": ray.__version__, "nodes": nodes}


def follow(specification: Mapping[str, Any], reason: Reason) -> int:
    """Submit the attempt as a job and pass on what it tells until it is over."""
    from ray.job_submission import JobSubmissionClient

    try:
        client = JobSubmissionClient(specification["address"])
        job = client.submit_job(
            entrypoint=_entrypoint(_write(specification)),
            runtime_env=specification["runtime_env"],
            submission_id=f"tunewright-{secrets.token_hex(8)}",
        )
    except Exception as error:
        raise ClusterFailed(f"the job was not accepted: {sentence(error)}") from None
    emit("connected")
    return _Following(client, job, specification, reason).to_the_end()


def orders_of_job(specification: Mapping[str, Any]) -> Callable[[], str | None]:
    """For the driver on the cluster: the reason that the follower wrote, or the flow's silence."""
    order, lock = Path(specification["order"]), Path(specification["lock"])
    silence_s = float(specification["silence_s"])
    heard: dict[str, Any] = {"beat": None, "at": time.monotonic()}

    def reason() -> str | None:
        told = read_json(order)
        if told is not None:
            return str(told["reason"])
        beat = (read_json(lock) or {}).get("heartbeat")
        if beat != heard["beat"]:
            heard.update(beat=beat, at=time.monotonic())
        # Two clocks need not agree: what counts is that the beat changes.
        return "parent-died" if time.monotonic() > heard["at"] + silence_s else None

    return reason


class _Following:
    """A submitted job, seen from where the flow runs."""

    def __init__(
        self, client: Any, job: str, specification: Mapping[str, Any], reason: Reason
    ) -> None:
        self.client, self.job, self.spec, self.reason = client, job, specification, reason
        self._shown = 0
        self._stopped_at: float | None = None
        self._heard = time.monotonic()
        self._error = False

    def to_the_end(self) -> int:
        while not self._is_over():
            self._pass_on()
            self._stop()
            time.sleep(_POLL_S)
        self._pass_on(ended=True)
        return 0

    def _is_over(self) -> bool:
        try:
            over = bool(self.client.get_job_status(self.job).is_terminal())
            self._heard = time.monotonic()
            return over
        except RuntimeError as error:
            if time.monotonic() > self._heard + _AWAY_S:
                raise ClusterFailed(f"job {self.job} is out of sight: {sentence(error)}") from None
            return False

    def _pass_on(self, ended: bool = False) -> None:
        """The job's new lines: events to the flow, the others (Ray's own) to our stderr."""
        try:
            text = self.client.get_job_logs(self.job)
        except RuntimeError as error:
            print(f"no log of the job now: {sentence(error)}", file=sys.stderr)
            return
        end = len(text) if ended else text.rfind("\n") + 1
        new, self._shown = text[self._shown : end], max(self._shown, end)
        for line in new.splitlines():
            if _is_event(line):
                pass_on(line)
            else:
                print(line, file=sys.stderr, flush=True)

    def _stop(self) -> None:
        """Hand on an order; the job that does not follow it is stopped by Ray."""
        now, reason = time.monotonic(), self.reason()
        if reason and self._stopped_at is None:
            self._stopped_at = now
            write_json(Path(self.spec["order"]), {"reason": reason})
        if self._stopped_at and now > self._stopped_at + self.spec["grace_s"] + _AFTER_GRACE_S:
            self.client.stop_job(self.job)
            self._stopped_at = now


def _write(specification: Mapping[str, Any]) -> Path:
    """The specification on the volume, where the job reads it; there are no secrets in it."""
    path = Path(specification["specification"])
    write_json(path, {name: part for name, part in specification.items() if name != "secrets"})
    return path


def _entrypoint(path: Path) -> str:
    """Our Python where the cluster has it at the same place, else the first in its PATH.

    A job's shell need not have the environment active that Ray itself runs in.
    """
    ours = shlex.quote(sys.executable)
    words = f"-m tunewright.ray_driver --job {shlex.quote(str(path))}"
    return f"p={ours}; [ -x $p ] || p=$(command -v python3); exec $p {words}"


def _is_event(line: str) -> bool:
    if not line.startswith('{"event":'):
        return False
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
