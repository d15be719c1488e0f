"""Consolidating and registering by a job on the stand-in, through every fault there is."""

from __future__ import annotations

import shutil
import signal
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tasks import finishing
from tasks.run import Options, opened
from tasks.targets.databricks import finish as databricks_finish
from tasks.targets.databricks import target as databricks
from tasks.targets.databricks import watch as databricks_watch
from tasks.targets.databricks.api import Missing
from tests.databricks_server import DatabricksServer
from tests.flows.killing import make_model
from tunewright.contract.failures import TunewrightError
from tunewright.contract.rundir import RunDir
from tunewright.contract.workload import Workload

pytestmark = pytest.mark.skipif(
    find_spec("databricks") is None, reason="needs tunewright[databricks]"
)
OUTPUT = "/Volumes/main/default/runs"
MODEL = "main.default.tiny"
FAULTS = ("429", "500", "503", "cut", "lost")
STARTS = 4
"""Of the job, as the flow's steps are tried: once, and three times more."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model as a command leaves it."""
    return make_model(tmp_path_factory.mktemp("made") / "model")


@pytest.fixture
def run_dir(server: DatabricksServer, home: Path, model: Path) -> RunDir:
    """A run whose command has left a model on the volume."""
    shutil.copytree(model, server.on_disk(f"{OUTPUT}/tiny-0a1b2c3d/model"))
    return RunDir(home / OUTPUT.lstrip("/") / "tiny-0a1b2c3d")


def finish(run_dir: RunDir, said: Any) -> tuple[dict[str, Any], int]:
    """What the job did, and how often it was started: as the flow does it."""
    document = {
        "experiment_name": "tiny", "command": "true", "parameters": {"output_dir": OUTPUT},
        "compute": {"num_accelerators": 1, "accelerator_type": "GPU_1xH100"},
    }  # fmt: skip
    for attempt in range(1, STARTS + 1):
        ending, result = databricks_finish.finish(
            run_dir, attempt, Workload.load(document), name=MODEL,
            tags={"tunewright.run": run_dir.name}, say=said, cancelled=lambda: False,
        )  # fmt: skip
        if result is not None:
            return result, attempt
    raise AssertionError(f"{ending}\n{said.lines}")


def start(server: DatabricksServer, model: Path, name: str, resume: str | None) -> dict[str, Any]:
    """One start of a run whose command has left a model, and in which something fails in the end;
    the run's name and the job's result.
    """
    document = {
        "experiment_name": "tiny", "command": "true", "parameters": {"output_dir": OUTPUT},
        "compute": {"num_accelerators": 1, "accelerator_type": "GPU_1xH100"},
    }  # fmt: skip
    result = None
    with opened(document, {}, Options("databricks", register_as=name, resume=resume)) as run:
        left = server.on_disk(f"{OUTPUT}/{run.name}/model")
        if not left.is_dir():
            shutil.copytree(model, left)
        result = finishing.finished(run)
        raise TunewrightError("what comes then fails")
    return {"run": run.name, "result": result}


@pytest.mark.parametrize("is_open", [False, True])
def test_another_name_the_next_time_gets_a_version_of_its_own(
    server: DatabricksServer, model: Path, monkeypatch: pytest.MonkeyPatch, is_open: bool
) -> None:
    """Also when the job of the first name goes on, of which the next start finds the end."""
    with monkeypatch.context() as patch:
        if is_open:
            patch.setattr(databricks_watch, "_UNKNOWN_S", 0.0)
            server.fault("GET */jobs/runs/get", "403", times=1000)
        first = start(server, model, MODEL, None)
    server.clear_faults()
    assert (first["result"] is None) == is_open
    second = start(server, model, f"{MODEL}-2", first["run"])
    assert second["run"] == first["run"]
    assert second["result"]["register"]["name"] == f"{MODEL}-2"
    assert len(server.runs) == 2
    for name in (MODEL, f"{MODEL}-2"):
        found = server.registry.models[name]
        assert (list(found.versions), found.aliases) == ([1], {"candidate": 1})
    assert start(server, model, f"{MODEL}-2", first["run"])["result"] == second["result"]
    assert len(server.runs) == 2


CALLS = {
    "POST */jobs/runs/submit": "client",
    "GET */jobs/runs/get": "client",
    "HEAD */result.json": "client",
    "GET */result.json": "client",
    "POST */registered-models/create": "node",
    "GET */model-versions/search": "node",
    "POST */model-versions/create": "node",
    "PUT */fs/files/Models/*": "node",
    "POST */model-versions/finalize": "node",
    "GET */model-versions/get": "node",
    "GET */registered-models/alias": "node",
    "POST */registered-models/alias": "node",
}


def check(server: DatabricksServer, result: dict[str, Any], starts: int) -> None:
    """One version, whole and READY, with its alias; every start is one job that has ended."""
    found = server.registry.models[MODEL]
    assert (result["register"]["name"], result["register"]["alias"]) == (MODEL, "candidate")
    assert {number: version.status for number, version in found.versions.items()} == {
        result["register"]["version"]: "READY"
    }
    assert found.aliases == {"candidate": result["register"]["version"]}
    names = [each.payload["run_name"] for each in server.runs]
    assert names == [f"tiny-0a1b2c3d-finish attempt {n}" for n in range(1, starts + 1)]
    assert all(each.phase.terminal for each in server.runs)


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_at_each_call_makes_one_version(
    server: DatabricksServer, run_dir: RunDir, said: Any, kind: str
) -> None:
    for pattern, origin in CALLS.items():
        server.fault(pattern, kind, seconds=0, origin=origin)
    result, starts = finish(run_dir, said)
    check(server, result, starts)


MOMENTS = {
    "before it is made": ("POST */model-versions/create", "cut", 1),
    "while it is sent": ("PUT */fs/files/Models/*", "cut", 2),
    "once it is whole": ("POST */model-versions/finalize", "lost", 1),
    "before its alias": ("POST */registered-models/alias", "cut", 1),
}
"""When the job is killed, and the number of the version that there is in the end."""


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_job_that_is_killed_on_the_way_leaves_nothing_half_done(
    server: DatabricksServer, run_dir: RunDir, said: Any, moment: str
) -> None:
    pattern, kind, number = MOMENTS[moment]
    kill = partial(_kill_node, server)
    server.fault(pattern, kind, origin="node", then=kill)
    result, starts = finish(run_dir, said)
    assert starts == 2
    check(server, result, starts)
    assert result["register"]["version"] == number


def _kill_node(server: DatabricksServer) -> None:
    server.runs[0].nodes[0].signal(signal.SIGKILL)


def test_a_result_that_shows_late_is_waited_for(
    server: DatabricksServer, run_dir: RunDir, said: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(databricks, "LATE_S", 10.0)
    server.fault("HEAD */result.json", "404", times=2)
    result, starts = finish(run_dir, said)
    check(server, result, starts)
    assert starts == 1


def test_a_result_that_cannot_be_had_now_is_asked_for_again(
    server: DatabricksServer, run_dir: RunDir, said: Any
) -> None:
    """The job has done its work; another one would find it done, and cost its start."""
    server.fault("HEAD */result.json", "404", times=1000)
    with pytest.raises(Missing) as caught:
        finish(run_dir, said)
    assert caught.value.unsettled  # type: ignore[attr-defined]
    server.clear_faults()
    result, starts = finish(run_dir, said)
    check(server, result, starts)
    assert len(server.runs) == 1
