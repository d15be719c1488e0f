"""One node of a workload on a Ray cluster: the actor that starts the guardian there.

Ray ends the children of an actor with it, by SIGKILL. The guardian (`tunewright.node`) is started
so that it is none of them: what ends it is its pipe, which breaks however the actor, its Ray node
or the driver dies, and then it ends the command in order.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tunewright.contract import processes
from tunewright.contract.environment import has_interface, may_pass
from tunewright.contract.failures import DEADLINE_VARIABLE
from tunewright.contract.rundir import read_json, write_json

_LOOK_S = 1.0
_DETACHED = """
import os, sys
if pid := os.fork():
    os.write(1, b"%d\\n" % pid)
    os._exit(0)
os.setsid()
os.execv(sys.executable, [sys.executable, "-P", "-m", "tunewright.node"])
"""


class RayNode:
    """What runs on one Ray node; a call for each thing that the driver wants there."""

    def __init__(self) -> None:
        self._guardian: subprocess.Popen[bytes] | None = None
        self._reason: str | None = None
        self._mutex = threading.Lock()

    def look(self, probe: str, rank: int, interface: str | None) -> dict[str, Any]:
        """Where this is, and whether the run's folder is the same here.

        {"host", "address", "port" (free here), "token" (what the file `probe` says; None when it
        is not there), "interface" (whether NCCL_SOCKET_IFNAME names one of this machine)}. Leaves
        an answer beside `probe`.
        """
        import ray

        found = read_json(Path(probe)) or {}
        with suppress(OSError):
            if found:
                write_json(Path(f"{probe}.node-{rank}"), found)
        return {
            "host": socket.gethostname(),
            "address": ray.util.get_node_ip_address(),
            "port": _free_port(),
            "token": found.get("token"),
            "interface": interface is None or has_interface(interface),
        }

    def run(self, node: Mapping[str, Any], secrets: Mapping[str, str]) -> dict[str, Any] | None:
        """Run the node's command to its end; how it ended, None when the guardian was killed."""
        specification = {**node, "env": _environment(node), "secrets": dict(secrets)}
        with self._mutex:
            guardian = self._guardian = subprocess.Popen(
                [sys.executable, "-c", _DETACHED], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            self._tell(json.dumps(specification))
            if self._reason:
                self._tell(f"stop {self._reason}")
        seen = _await_end(guardian)
        told = read_json(Path(node["exit"]))
        if told is None:
            mark = node["env"]["TUNEWRIGHT_NODE_MARK"]
            processes.end_marked("TUNEWRIGHT_NODE_MARK", mark, seen)
        return told

    def stop(self, reason: str) -> None:
        """Ask the guardian to end its command: SIGTERM, grace, SIGKILL. `run` then returns."""
        with self._mutex:
            if self._reason is None:
                self._reason = reason
                self._tell(f"stop {reason}")

    def _tell(self, line: str) -> None:
        if self._guardian is None:
            return
        assert self._guardian.stdin is not None
        # A guardian that is gone has nothing left to do.
        with suppress(BrokenPipeError):
            self._guardian.stdin.write(line.encode() + b"\n")
            self._guardian.stdin.flush()


def _await_end(guardian: subprocess.Popen[bytes]) -> list[dict[str, Any]]:
    """Until the guardian is gone; what ran below it when we looked last."""
    assert guardian.stdout is not None
    pid, seen = int(guardian.stdout.readline()), []
    # It says nothing more there; the end of its output is its own.
    while not select.select([guardian.stdout], [], [], _LOOK_S)[0]:
        seen = processes.below(pid)
    guardian.wait()
    return seen


def _environment(node: Mapping[str, Any]) -> dict[str, str]:
    """This Ray node's own environment without secrets, and what the run says on top.

    The folder of this Python comes first in PATH. The snapshot that Ray unpacked here is found at
    CODE_SOURCE_PATH. The GPUs are those that Ray gave to this actor.
    """
    env = {name: value for name, value in os.environ.items() if may_pass(name)}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
    # Meant for the actor: threads by its CPUs rather than per process, and Ray's own debugger.
    for name in ("OMP_NUM_THREADS", "PYTHONBREAKPOINT"):
        env.pop(name, None)
    here = os.getcwd()
    paths = env.get("PYTHONPATH", "").split(os.pathsep)
    # Ray puts the working directory there; what a snapshot may stand in for is its command's say.
    env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path not in ("", here))
    env |= node["env"]
    if node.get("code"):
        env["CODE_SOURCE_PATH"] = str(Path(here, node["code"]))
    if node.get("deadline_s"):
        env[DEADLINE_VARIABLE] = f"{time.time() + node['deadline_s']:.3f}"
    return env


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
