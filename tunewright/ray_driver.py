"""The process that speaks to a Ray cluster, so that whoever starts it never imports ray:

    python -m tunewright.ray_driver        with a specification as one line of JSON on stdin

{"address", "look": true} tells what the cluster has and ends. Otherwise it runs one attempt:

    {"address": "ray://host:10001", "runtime_env": {...}, "strategy": "STRICT_SPREAD",
     "bundle": {"CPU": 1, "GPU": 8}, "probe": path, "token": what the flow wrote there,
     "interface": NCCL_SOCKET_IFNAME or null, "grace_s": 10, "secrets": {NAME: value},
     "specification", "order", "lock", "silence_s" (for a job, see `tunewright.ray_job`),
     "nodes": [{"node": 0, "argv", "env", "cwd", "log", "exit", "code", "deadline_s"}, ...]}

Later lines on stdin: `stop <reason>`; the end of stdin means that the flow is gone. On stdout one
JSON object a line: {"event": "cluster" | "connected" | "waiting" | "note" | "placed" | "started" |
"outcome" | "error", ...}. With an address http://… the same program runs on the cluster as a Ray
job, and `--job SPECIFICATION` is how.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tunewright.contract.failures import TunewrightError, UserError
from tunewright.contract.rundir import read_json
from tunewright.ray_attempt import Attempt, ClusterFailed, Reason, emit, not_shared, sentence

_REACH_S = 10.0


class Orders:
    """What the flow wants, read from stdin: `stop <reason>`, or its end."""

    def __init__(self) -> None:
        self._reason: str | None = None
        signal.signal(signal.SIGTERM, lambda *_: self._stop("preempted"))
        # The terminal's Ctrl-C is for the flow, which then tells us.
        signal.signal(signal.SIGINT, lambda *_: None)

    def listen(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()

    def reason(self) -> str | None:
        return self._reason

    def _read(self) -> None:
        for line in sys.stdin:
            words = line.split()
            if words[:1] == ["stop"]:
                self._stop(" ".join(words[1:]))
        self._stop("parent-died")

    def _stop(self, reason: str) -> None:
        self._reason = self._reason or reason


def connect(address: str | None, runtime_env: Mapping[str, Any]) -> None:
    """Connect to a cluster; `address` None: the one that this process runs on as a job.

    Raises UserError where the address or the environment is wrong, ClusterFailed otherwise.
    """
    if address is not None:
        _reach(address)
    import ray

    try:
        ray.init(
            address or "auto",
            runtime_env=dict(runtime_env) or None,
            log_to_driver=False,
            namespace="tunewright",
        )
    except Exception as error:
        raise ClusterFailed(f"Ray cluster {address}: {sentence(error)}") from None


def cluster() -> dict[str, Any]:
    """What the connected cluster has: {"ray", "nodes": [{"host", "address", "CPU", "GPU"}]}."""
    import ray

    nodes = [
        {
            "host": node["NodeManagerHostname"],
            "address": node["NodeManagerAddress"],
            "CPU": node["Resources"].get("CPU", 0),
            "GPU": node["Resources"].get("GPU", 0),
        }
        for node in ray.nodes()
        if node["Alive"]
    ]
    return {"ray": ray.__version__, "nodes": nodes}


def _reach(address: str) -> None:
    """Raise when nothing listens there: Ray itself would go on trying for many minutes."""
    parts = urlsplit(address if "://" in address else f"//{address}")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), _REACH_S).close()
    except OSError as error:
        raise ClusterFailed(f"nothing answers at RAY_ADDRESS={address}: {error}") from None


def main(words: list[str]) -> int:
    """Do what the specification asks; returns the exit code."""
    try:
        if words[:1] == ["--job"]:
            from tunewright.ray_job import orders_of_job

            specification = _read(Path(words[1]))
            return _attempt(None, {**specification, "secrets": {}}, orders_of_job(specification))
        return _from_stdin()
    except TunewrightError as error:
        emit("error", message=str(error), **{"class": error.failure_class})
    except ImportError as error:
        message = (
            f"target ray needs Ray where the flow runs ({error}); pip install 'tunewright[ray]'"
        )
        emit("error", message=message, **{"class": "user"})
    return 1


def _read(path: Path) -> dict[str, Any]:
    """The specification that the flow left on the volume for a job."""
    specification = read_json(path)
    if specification is None:
        raise UserError(not_shared(path.parent, "read", "the Ray cluster's head"))
    return specification


def _from_stdin() -> int:
    orders = Orders()
    line = sys.stdin.readline()
    # A flow that died before it said anything wants nothing.
    if not line:
        return 1
    specification = json.loads(line)
    address = specification["address"]
    if address.startswith(("http://", "https://")):
        from tunewright import ray_job

        _reach(address)
        if specification.get("look"):
            emit("cluster", **ray_job.cluster(address))
            return 0
        orders.listen()
        return ray_job.follow(specification, orders.reason)
    if specification.get("look"):
        connect(address, {})
        emit("cluster", **cluster())
        return 0
    orders.listen()
    return _attempt(address, specification, orders.reason)


def _attempt(address: str | None, specification: dict[str, Any], reason: Reason) -> int:
    # A job of Ray's has its environment already.
    connect(address, specification["runtime_env"] if address else {})
    emit("connected")
    import ray

    try:
        Attempt(specification, reason).run()
    except TunewrightError:
        raise
    # Ray has errors of many families; the first line is for the reader, the rest for the log.
    except Exception as error:
        traceback.print_exc()
        raise ClusterFailed(f"Ray: {sentence(error)}") from None
    finally:
        ray.shutdown()
    return 0


if __name__ == "__main__":
    # Ray's own threads must not keep a driver whose work is done.
    os._exit(main(sys.argv[1:]))
