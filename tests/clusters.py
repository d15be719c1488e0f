"""A real Ray cluster of several nodes on this machine, for the tests of the Ray target.

Its nodes run in an environment that has every package but not this repository: what they know of
it was shipped to them.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import venv
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

_UP_S = 90
_TORCHRUN = "#!{python}\nfrom torch.distributed.run import main\nmain()\n"


@dataclass
class Node:
    """One `ray start --block`: a raylet and what belongs to it, in a session of their own."""

    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """As a machine dies: everything of Ray's at once. What its workers started lives on."""
        for process in self._processes():
            # The others end by themselves when they see the first go.
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()

    def _processes(self) -> list[psutil.Process]:
        try:
            mine = psutil.Process(self.process.pid)
            return [mine, *mine.children(recursive=True)]
        except psutil.Error:
            return []


@dataclass
class Cluster:
    """A head and its nodes; addresses for each way in."""

    folder: Path
    python: Path
    hidden: Path
    """A folder that nodes started with `hides` see empty."""
    gcs: str = ""
    client: str = ""
    dashboard: str = ""
    nodes: list[Node] = field(default_factory=list)

    def head(self) -> None:
        gcs, client, dashboard = (_low_port() for _ in range(3))
        self.gcs, self.client = f"127.0.0.1:{gcs}", f"ray://127.0.0.1:{client}"
        self.dashboard = f"http://127.0.0.1:{dashboard}"
        words = ["--head", f"--port={gcs}", f"--ray-client-server-port={client}"]
        words += [f"--dashboard-port={dashboard}", "--include-dashboard=true"]
        self._start([*words, f"--temp-dir={self.folder}"])

    def add(self, *, hides: bool = False) -> Node:
        """Another node; returns once it belongs to the cluster."""
        return self._start([f"--address={self.gcs}"], hides)

    def stop(self) -> None:
        for node in reversed(self.nodes):
            node.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, words: list[str], hides: bool = False) -> Node:
        small = ["--num-cpus=1", "--object-store-memory=80000000", "--block"]
        agent = f"--dashboard-agent-listen-port={_low_port()}"
        command = [str(self.python), "-m", "ray.scripts.scripts", "start", *words, *small, agent]
        if hides:
            mount = 'mount -t tmpfs none "$0" && exec "$@"'
            command = ["unshare", "-rm", "bash", "-c", mount, str(self.hidden), *command]
        path = self.folder / f"node-{len(self.nodes)}.log"
        with path.open("wb") as log:
            process = subprocess.Popen(
                command, cwd="/", stdout=log, stderr=log, start_new_session=True, env=_environment()
            )
        node = Node(process)
        self.nodes.append(node)
        deadline = time.monotonic() + _UP_S
        while "Ray runtime started" not in path.read_text(errors="replace"):
            if process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                pytest.fail(f"a Ray node did not start:\n{path.read_text(errors='replace')}")
            time.sleep(0.1)
        return node


def cluster(folder: Path) -> Cluster:
    """A head with one CPU; add nodes to it, and stop it."""
    # Ray's sockets need a short path.
    short = Path(tempfile.mkdtemp(prefix="tw-ray-"))
    hidden = folder / "hidden"
    hidden.mkdir()
    found = Cluster(short, _environment_without_us(folder / "node"), hidden)
    found.head()
    return found


def can_hide() -> bool:
    """Whether a process may have mounts of its own here."""
    if shutil.which("unshare") is None:
        return False
    asked = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(asked, capture_output=True).returncode == 0


def _environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "MLFLOW_", "PYTHON"))}
    # Without a mode Ray may keep a token in the home folder and ask for it ever after.
    return {**kept, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}


def _environment_without_us(folder: Path) -> Path:
    """The Python of an environment that borrows our packages, the editable install apart."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    ours = [path for path in sys.path if path.endswith("site-packages")]
    # A path file of a path file is not read: that is how editable installs are found.
    (site / "borrowed.pth").write_text("\n".join(ours))
    torchrun = folder / "bin" / "torchrun"
    torchrun.write_text(_TORCHRUN.format(python=python))
    torchrun.chmod(0o755)
    return python


def _low_port() -> int:
    """A free port below those that Ray gives to workers (10002 to 19999)."""
    for port in range(7000 + os.getpid() % 1000, 10000):
        if port not in _given:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)):
                    _given.add(port)
                    return port
    raise RuntimeError("no free port below 10000")


_given: set[int] = set()
