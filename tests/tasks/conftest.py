"""Real runs of small commands on the local target, and what they leave."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tasks.targets import local
from tasks.targets.databricks import target as databricks
from tasks.targets.databricks import watch as databricks_watch
from tasks.targets.databricks.api import Workspace, connect
from tasks.targets.job import Ending, Job
from tasks.targets.local import Placement
from tests.databricks_server import DatabricksServer
from tunewright.contract.rundir import RunDir

WORKLOAD = {
    "experiment_name": "tiny",
    "command": "true",
    "compute": {"num_accelerators": 1, "accelerator_type": "GPU_1xH100"},
}


@pytest.fixture
def workload_document() -> dict[str, Any]:
    return dict(WORKLOAD)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TUNEWRIGHT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path
) -> Iterator[DatabricksServer]:
    """A Databricks workspace without MLflow and with one volume, which this process is set to."""
    monkeypatch.setattr(databricks_watch, "POLL_S", (0.1, 0.5))
    monkeypatch.setattr(databricks, "LATE_S", 0.0)
    with DatabricksServer(tmp_path, mlflow=False) as found:
        found.rules.grace_s = 5
        found.add_volume("main.default.runs")
        for name, value in found.environment.items():
            monkeypatch.setenv(name, value)
        yield found


@pytest.fixture
def workspace(server: DatabricksServer) -> Workspace:
    """The workspace as our code is connected to it."""
    return connect()


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "tiny-0a1b2c3d")


@pytest.fixture
def token() -> str:
    """A word that marks the processes of one test, to be found in their command lines."""
    return f"mark-{uuid.uuid4().hex}"


class Spoken(list[tuple[int, str]]):
    """What was said about nodes; callable as `say`."""

    def __call__(self, node: int, line: str) -> None:
        self.append((node, line))

    @property
    def lines(self) -> list[str]:
        return [line for _, line in self]


@pytest.fixture
def said() -> Spoken:
    return Spoken()


RunCommand = Callable[..., Ending]


@pytest.fixture
def run_command(run_dir: RunDir, said: Spoken) -> RunCommand:
    """Run a bash command as the nodes of one attempt, to its end."""

    def run(command: str, secrets: dict[str, str] | None = None, **more: Any) -> Ending:
        own = {key: more.pop(key) for key in [*more] if key in Job.__dataclass_fields__}
        own = {"nodes": 1, "procs_per_node": 1, "has_parameters": False, **own}
        job = Job(run=run_dir, attempt=1, command=command, **own)
        placement = Placement(job.nodes, job.procs_per_node, ())
        more = {"say": said, "grace_s": 0.5, **more}
        return local.run(job, secrets or {}, placement=placement, **more)

    return run


def processes_with(token: str) -> list[psutil.Process]:
    others = (p for p in psutil.process_iter(["cmdline", "status"]) if p.pid != os.getpid())
    running = (p for p in others if p.info["status"] != psutil.STATUS_ZOMBIE)
    return [p for p in running if any(token in word for word in p.info["cmdline"] or ())]


@pytest.fixture
def alive(token: str) -> Iterator[Callable[[], list[psutil.Process]]]:
    """The live processes with this test's token; what a failed test left is ended."""
    yield lambda: processes_with(token)
    for process in processes_with(token):
        process.kill()


@pytest.fixture
def until() -> Callable[..., None]:
    """Wait for a condition, and fail when it does not come."""

    def wait(condition: Callable[[], Any], limit_s: float = 20) -> None:
        end = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < end, "it did not come to be"
            time.sleep(0.02)

    return wait


STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
for step in range(2):          # a daemon's double fork, each in a session of its own
    if os.fork():
        os._exit(0) if step else None
        break
    os.setsid()
time.sleep(120)
"""


@pytest.fixture
def stubborn(tmp_path: Path, token: str) -> str:
    """A bash line that starts processes which ignore SIGTERM and leave session and parent."""
    script = tmp_path / "stubborn.py"
    script.write_text(STUBBORN)
    return (
        f"{sys.executable} {script} {token} >/dev/null 2>&1 & "
        f"env -i {sys.executable} {script} {token} & sleep 0.3; echo begun"
    )


@pytest.fixture
def git(tmp_path: Path) -> Callable[..., str]:
    """Run git in a folder, with an identity of its own."""

    def run(folder: Path, *words: str) -> str:
        own = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main"]
        done = subprocess.run(
            ["git", "-C", str(folder), *own, *words], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    return run
