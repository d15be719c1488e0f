"""Ray on the nodes of one command, for as long as the command runs.

Each node starts a Ray node of its own with as many places as it runs processes; node 0's is the
head. It is this command's Ray alone: ports and folder are its own, another cluster on the machine
is neither joined nor disturbed, and it ends with the command however that ends.

SIGTERM is blocked in all of Ray's processes. They would end at once, and the workers with them; so
they stand until the workers have ended, who take the signal and let a save in flight come to its
end. Then the command ends what is left.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tunewright.contract.failures import TunewrightError, UserError
from tunewright.training.stopping import Stopping, Termination
from tunewright.training.world import World

NODE_LABEL = "tunewright-node"
"""Each Ray node's label: its rank among the nodes."""

_OUTPUT = "TUNEWRIGHT_RAY_OUTPUT"
_UP_S = 180
_JOINED_S = 300
_END_S = 10
_OF_GRACE = 0.9
"""The part of the grace that workers may use: more than what they take for a save."""
_OBJECTS = 80_000_000
"""Bytes of the object store, nearly the least Ray takes: tensors do not travel through it."""
_FOREIGN = ("RAY_ADDRESS", "RAY_CLIENT_MODE", "RAY_JOB_ID", "RAY_NAMESPACE", "RAY_RAYLET_PID")
"""Where another Ray that this command runs on has left its traces."""
_ENVIRONMENT = {
    # Without a mode Ray may keep a token in the home folder and ask for it ever after.
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    # What a worker prints is passed on by us, once.
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    # Workers work in the command's own folder.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    # How soon the end of a worker, or of the training, is seen.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(_JOINED_S),
}


class NodeLost(TunewrightError):
    """A process or a node of Ray's is not there; another attempt may help."""

    failure_class = "infrastructure"


@contextmanager
def ray_on(
    nodes: World, processes: int, gpus: bool, next_start: Callable[[], str]
) -> Iterator[str]:
    """Ray on all nodes; yields the head's address. `processes` of each node, with a GPU if `gpus`.

    After SIGTERM the workers of this node end, then its Ray, then this process; `next_start` says
    where starting again goes on, when no worker has. In the main thread. Raises UserError where Ray
    is not installed, NodeLost where it does not start.
    """
    _set_environment()
    words = [f"--num-cpus={processes}", f"--num-gpus={processes if gpus else 0}"]
    words += [f"--labels={NODE_LABEL}={nodes.rank}"]
    here: list[_RayNode] = []

    def head() -> tuple[str, Path]:
        address = socket.gethostbyname(os.environ.get("MASTER_ADDR") or "127.0.0.1")
        # Ray's sockets lie in it, and a socket's path must be short.
        folder = Path(tempfile.mkdtemp(prefix="tunewright-ray-", dir="/tmp"))
        port, client = _free_ports(2)
        here.append(_RayNode(folder, nodes.rank))
        head = ["--head", f"--port={port}", f"--ray-client-server-port={client}"]
        head += [f"--node-ip-address={address}", f"--temp-dir={folder}"]
        here[0].start([*head, "--include-dashboard=false", *words])
        return f"{address}:{port}", folder

    def settle(within_s: float) -> str:
        settled = [node.settle(within_s) for node in here]
        return "" if any(settled) else next_start()

    grace_s = Stopping.of_environment().grace_s
    with Termination(settle, grace_s, speaks=nodes.main, part=_OF_GRACE):
        try:
            address, folder = nodes.prepared(head, "ray")
            if not nodes.main:
                folder.mkdir(exist_ok=True)
                here.append(_RayNode(folder, nodes.rank))
                here[0].start([f"--address={address}", *words])
            yield address
        finally:
            for node in here:
                node.end()


def await_nodes(count: int) -> None:
    """Until so many nodes have joined the cluster this process is connected to."""
    import ray

    deadline = time.monotonic() + _JOINED_S
    while (found := sum(node["Alive"] for node in ray.nodes())) < count:
        if time.monotonic() > deadline:
            raise NodeLost(f"{found} of {count} nodes joined Ray within {_JOINED_S} s")
        time.sleep(0.1)


def speak() -> None:
    """In a worker: let its output be that of its node's command, as it stands and at once.

    Ray would collect it in files and print it on node 0, behind the name of the process.
    """
    for name in ("ray.train", None):  # some of Ray's loggers stand outside of its tree
        logging.getLogger(name).setLevel(logging.WARNING)
    fd = os.open(os.environ[_OUTPUT], os.O_WRONLY)
    sys.stdout.flush()
    for stream in (1, 2):
        os.dup2(fd, stream)
    os.close(fd)


@contextmanager
def awaited() -> Iterator[None]:
    """In a worker: inside, SIGTERM ends it in order, and its node's command waits for that."""
    sign = Path(f"{os.environ[_OUTPUT]}-{os.getpid()}")
    sign.touch()
    try:
        yield
    finally:
        sign.unlink()


class _Output:
    """What the workers of this node say, read from a pipe with a name and passed on."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        # For writing as well: so it never ends while no worker has it open.
        self._fd = os.open(path, os.O_RDWR)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._pass_on, name="output", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Once the workers are gone; what they said is out then."""
        self._ended.set()
        self._thread.join()
        os.close(self._fd)

    def _pass_on(self) -> None:
        while (said := self._said(0.1)) or not self._ended.is_set():
            os.write(1, said)

    def _said(self, within_s: float) -> bytes:
        ready = select.select([self._fd], [], [], within_s)[0]
        return os.read(self._fd, 65536) if ready else b""


class _RayNode:
    """`ray start --block`, which ends when one of its processes does; all of it ends with us."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._log = folder / f"start-{rank}.log"
        self._pipe = folder / f"output-{rank}"
        self._output = _Output(self._pipe)
        os.environ[_OUTPUT] = str(self._pipe)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, words: list[str]) -> None:
        """Returns once the node is up."""
        (agent,) = _free_ports(1)
        common = ["--block", f"--object-store-memory={_OBJECTS}", "--min-worker-port=0"]
        common += ["--max-worker-port=0", f"--dashboard-agent-listen-port={agent}"]
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", *words, *common]
        leash = [sys.executable, "-m", "tunewright.leash", *ray]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                leash, stdin=subprocess.PIPE, stdout=log, stderr=log, preexec_fn=_block_sigterm
            )
        deadline = time.monotonic() + _UP_S
        while "Ray runtime started" not in (said := self._log.read_text(errors="replace")):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise NodeLost(f"Ray did not start on this node: {said.strip()[-2000:]}")
            time.sleep(0.05)

    def settle(self, within_s: float) -> bool:
        """Tell the workers that end in order, wait for them, and end; whether there were any."""
        workers = [process for sign in self._folder.glob(f"{self._pipe.name}-*")
                   if (process := _process(int(sign.name.rpartition("-")[2])))]  # fmt: skip
        for worker in workers:
            with suppress(psutil.NoSuchProcess):
                worker.terminate()
        psutil.wait_procs(workers, timeout=within_s)
        self.end()
        return bool(workers)

    def end(self) -> None:
        """With all it started. At once: it keeps nothing, and its own way takes 10 s."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(_END_S)
        self._output.end()
        shutil.rmtree(self._folder, ignore_errors=True)


def _set_environment() -> None:
    """Of this process, so of all that Ray starts for it."""
    try:
        import ray  # noqa: F401
    except ImportError:
        raise UserError("this recipe needs Ray; pip install 'tunewright[ray-train]'") from None
    for name in _FOREIGN:
        os.environ.pop(name, None)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def _block_sigterm() -> None:
    """In the child: what it starts inherits it, to the last thread."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _free_ports(count: int) -> list[int]:
    """Free ones, each another."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()
