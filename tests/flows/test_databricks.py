"""Runs on the Databricks stand-in: secrets, retries, cancellation, and workers that die."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.databricks_server import DatabricksServer
from tests.flows import killing
from tests.flows.cli import ROOT, Home, wait_for
from tests.flows.on_databricks import OUTPUT, ended, run, run_mounted

pytestmark = [
    pytest.mark.flow,
    pytest.mark.skipif(find_spec("databricks") is None, reason="needs tunewright[databricks]"),
]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[DatabricksServer]:
    with DatabricksServer(tmp_path, mlflow=False) as found:
        found.rules.grace_s = 5
        found.add_volume("main.default.runs")
        yield found


def file_for(write: Callable[..., Path], command: str, **more: Any) -> Path:
    return write(command, parameters={"output_dir": OUTPUT}, **more)


def test_an_own_command_that_leaves_no_model(home: Home, server: DatabricksServer, write) -> None:
    file = file_for(write, 'echo "node $NODE_RANK"', secrets={"A_TOKEN": "scope/key"})
    server.state.secrets["scope"] = {"key": "s3cr3t-value"}
    process = run(home, server, file)
    facts, narration = ended(process)
    assert process.returncode == 0, narration
    assert (facts["state"], facts["registered"]) == ("Completed", None)
    assert "s3cr3t" not in narration
    assert "secret A_TOKEN from scope/key: the platform has it" in narration


def test_a_mounted_volume_is_used_as_it_is(home: Home, server: DatabricksServer, write) -> None:
    if not server.mounts:
        pytest.skip("a process may have no mounts of its own here")
    file = file_for(write, 'echo "node $NODE_RANK"; exit "$((TUNEWRIGHT_ATTEMPT % 2))"',
                    max_retries=1)  # fmt: skip
    facts, narration = ended(run_mounted(home, server, file))
    assert facts["state"] == "Completed", narration
    assert facts["folder"] == f"{OUTPUT}/{facts['run']}"
    assert [(each["failure"] or {}).get("class") for each in facts["attempts"]] == ["unknown", None]
    folder = server.on_disk(facts["folder"])
    for attempt in (1, 2):
        assert "node 0" in (folder / f"logs/attempt-{attempt}/node-0.log").read_text()
    assert json.loads((folder / "receipt.json").read_text())["state"] == "Completed"
    assert not (home.path / "Volumes").exists()
    assert server.calls("*/fs/files/*", origin="client") == []


def test_what_is_missing_there_is_told_before_anything_runs(
    home: Home, server: DatabricksServer, write
) -> None:
    file = file_for(write, "true", secrets={"A_TOKEN": "scope/key"})
    process = run(home, server, file)
    facts, narration = ended(process)
    assert process.returncode == 2, narration
    assert "A_TOKEN (scope/key): there is no scope scope" in facts["reason"]
    assert server.runs == []


def test_one_layer_retries(home: Home, server: DatabricksServer, write) -> None:
    server.plan(ending="INTERNAL_ERROR", nodes_run=False)
    file = file_for(write, "true", max_retries=1)
    facts, narration = ended(run(home, server, file))
    assert facts["state"] == "Completed", narration
    classes = [(attempt["failure"] or {}).get("class") for attempt in facts["attempts"]]
    assert classes == ["infrastructure", None]
    assert len(server.runs) == 2


def test_a_job_that_someone_cancels_there_is_not_tried_again(
    home: Home, server: DatabricksServer, write
) -> None:
    process = run(home, server, file_for(write, "sleep 120", max_retries=2))
    wait_for(lambda: server.runs and server.runs[0].phase.life == "RUNNING", 60)
    server.runs[0].cancelled.set()
    facts, narration = ended(process)
    assert facts["state"] == "Cancelled", narration
    assert len(server.runs) == 1


@pytest.mark.parametrize("way", ["tunewright", "prefect"])
def test_cancelling_the_run_cancels_the_job(
    home: Home, server: DatabricksServer, write, api, way: str
) -> None:
    process = run(home, server, file_for(write, "sleep 120", max_retries=2))
    wait_for(lambda: server.runs and server.runs[0].phase.life == "RUNNING", 60)
    (folder,) = (home.path / OUTPUT.lstrip("/")).glob("own-*")
    if way == "tunewright":
        assert home.call("cancel", folder.name).returncode == 0
    else:
        index = json.loads((home.path / "runs" / folder.name).read_text())
        state = {"state": {"type": "CANCELLING"}}
        api(f"/flow_runs/{index['flow_run_id']}/set_state", state)
    facts, narration = ended(process)
    assert facts["state"] == "Cancelled", narration
    assert [each.phase.result for each in server.runs] == ["CANCELED"]
    assert len(server.calls("POST */jobs/runs/cancel")) == 1


def test_a_killed_worker_finds_its_running_job_again(
    home: Home, server: DatabricksServer, write
) -> None:
    file = file_for(write, "sleep 6; echo done")
    process = run(home, server, file)
    wait_for(lambda: server.runs and server.runs[0].phase.life == "RUNNING", 60)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    facts, narration = ended(run(home, server, file))
    assert facts["state"] == "Completed", narration
    assert "continuing unfinished run" in narration
    assert [attempt["attempt"] for attempt in facts["attempts"]] == [1]
    assert [each.phase.result for each in server.runs] == ["SUCCESS"]


# benchmarks/worker_kills.py goes through every moment of the route.
@pytest.mark.parametrize(
    "moment",
    [killing.Moment(killing.SUBMIT, 0, done=True), killing.Moment(killing.SUBMIT, 1, done=True)],
    ids=["training", "finishing"],
)
def test_a_killed_worker_finds_the_job_that_it_never_heard_of(
    home: Home, tmp_path: Path, moment: killing.Moment
) -> None:
    with DatabricksServer(tmp_path, mlflow=False) as server:
        file = killing.prepare(tmp_path, server)
        assert killing.killed_at(moment, home, server, file)


def test_a_dry_run_prints_the_requests_and_sends_none(
    home: Home, server: DatabricksServer, write
) -> None:
    code = home.path.parent / "project"
    code.mkdir()
    (code / "train.py").write_text("print()")
    file = file_for(write, "true", code_source={
        "type": "snapshot", "snapshot": {"root_path": str(code)},
    })  # fmt: skip
    words = ("run", str(file), "--target", "databricks", "--dry-run", "--json")
    found = home.call(*words, **server.environment)
    assert found.returncode == 0, found.stderr
    sent = json.loads(found.stdout)["requests"]
    assert sent[-1]["path"] == "/api/2.2/jobs/runs/submit"
    assert any("/snapshots/project_" in each["path"] for each in sent)
    assert server.requests == []
    assert home.runs("own") == []


def test_a_bundle_is_written_once(home: Home, tmp_path: Path) -> None:
    words = ("export", str(ROOT / "deployments" / "qwen.yaml"), "--bundle", str(tmp_path / "b"))
    found = home.call(*words)
    assert found.returncode == 0, found.stderr
    assert "databricks.yml" in found.stdout.splitlines()
    assert (tmp_path / "b" / "launch" / "command.sh").is_file()
    again = home.call(*words)
    assert again.returncode == 2
    assert "is not empty" in again.stderr


def test_check_looks_at_the_workspace(home: Home, server: DatabricksServer, write) -> None:
    file = file_for(write, "true", secrets={"A_TOKEN": "scope/key"})
    words = ("check", str(file), "--target", "databricks", "--json")
    found = home.call(*words, **server.environment)
    assert found.returncode == 2
    told = json.loads(found.stdout)
    assert told["valid"] is False
    assert told["platform"]["user"] == server.state.user
    states = {each["what"]: each["state"] for each in told["platform"]["findings"]}
    assert states["secret A_TOKEN"] == "missing"
    assert states["volume main.default.runs"] == "ok"


def test_a_recipe_without_a_name_for_its_model_is_refused(
    home: Home, server: DatabricksServer
) -> None:
    file = ROOT / "deployments" / "llama.yaml"
    found = home.call("run", str(file), "--target", "databricks", **server.environment)
    assert found.returncode == 2
    assert "catalog.schema.model" in found.stderr
    assert server.requests == []
