"""The whole route on the Databricks stand-in, and workers that die on the way."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.databricks_server import DatabricksServer
from tests.flows.cli import ROOT, Home, wait_for

pytestmark = [
    pytest.mark.flow,
    pytest.mark.skipif(find_spec("databricks") is None, reason="needs tunewright[databricks]"),
]

OUTPUT = "/Volumes/main/default/runs"
MODEL = "main.default.tiny"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[DatabricksServer]:
    with DatabricksServer(tmp_path, mlflow=False) as found:
        found.rules.grace_s = 5
        found.add_volume("main.default.runs")
        yield found


@pytest.fixture
def tracked(tmp_path: Path, mlflow_server: str) -> Iterator[DatabricksServer]:
    """The same with a real MLflow server behind it."""
    with DatabricksServer(tmp_path, mlflow=mlflow_server) as found:
        found.add_volume("main.default.runs")
        yield found


def file_for(write: Callable[..., Path], command: str, **more: Any) -> Path:
    return write(command, parameters={"output_dir": OUTPUT}, **more)


def run(home: Home, server: DatabricksServer, file: Path, *words: str) -> subprocess.Popen[str]:
    words = ("run", str(file), "--target", "databricks", "--json", *words)
    return home.start(*words, **server.environment)


def ended(process: subprocess.Popen[str], limit_s: float = 120) -> tuple[dict[str, Any], str]:
    out, narration = process.communicate(timeout=limit_s)
    return json.loads(out), narration


def history_of(opened: dict[str, str], name: str) -> list[tuple[float]]:
    """A metric's values in the flow's own MLflow run, as the database has them."""
    return _rows(opened, "select value from metrics where run_uuid = ? and key = ?", name)


def tag_of(opened: dict[str, str], name: str) -> str:
    ((value,),) = _rows(opened, "select value from tags where run_uuid = ? and key = ?", name)
    return str(value)


def _rows(opened: dict[str, str], query: str, name: str) -> list[Any]:
    path = opened["tracking_uri"].removeprefix("sqlite:///")
    with closing(sqlite3.connect(path)) as database:
        return database.execute(query, (opened["run_id"], name)).fetchall()


@pytest.mark.timeout(600)
def test_a_recipe_goes_the_whole_route(home: Home, tracked: DatabricksServer, write) -> None:
    inputs = tracked.on_disk(f"{OUTPUT}/inputs")
    shutil.copytree(ROOT / "deployments" / "model", inputs / "model")
    shutil.copy(ROOT / "deployments" / "demo.jsonl", inputs)
    pairs = {
        "parameters.model_name": f"{OUTPUT}/inputs/model",
        "parameters.dataset_name": f"{OUTPUT}/inputs/demo.jsonl",
        "parameters.output_dir": OUTPUT,
        "parameters.max_steps": 4,
        "parameters.global_batch_tokens": 1024,
        "parameters.save_steps": 2,
        "parameters.eval_steps": 4,
    }
    words = [f"--set={key}={value}" for key, value in pairs.items()]
    tiny = ROOT / "deployments" / "tiny.yaml"
    process = run(home, tracked, tiny, "--register", MODEL, *words)
    facts, narration = ended(process, 500)
    assert process.returncode == 0, narration
    assert (facts["state"], facts["nodes"], facts["steps"]) == ("Completed", 2, 4)
    assert facts["registered"] == {"name": MODEL, "version": 1, "alias": "candidate"}
    assert facts["first_loss"] > facts["last_loss"]
    assert len(tracked.runs) == 2
    model = tracked.registry.models[MODEL]
    assert model.aliases == {"candidate": 1}
    assert model.versions[1].tags["tunewright.run"] == facts["run"]
    volume = tracked.on_disk(f"{OUTPUT}/{facts['run']}")
    assert (volume / "model" / "manifest.json").is_file()
    assert not (home.path / OUTPUT.lstrip("/") / facts["run"] / "model").exists()
    assert "sending 12 of 12 files" in narration
    assert json.loads((volume / "receipt.json").read_text())["state"] == "Completed"
    assert len(history_of(facts["mlflow"], "train_loss")) == 4
    assert "/ml/experiments/" in tag_of(facts["mlflow"], "tunewright.attempt_1.mlflow_run")


def test_an_own_command_that_leaves_no_model(home: Home, server: DatabricksServer, write) -> None:
    file = file_for(write, 'echo "node $NODE_RANK"', secrets={"A_TOKEN": "scope/key"})
    server.state.secrets["scope"] = {"key": "s3cr3t-value"}
    process = run(home, server, file)
    facts, narration = ended(process)
    assert process.returncode == 0, narration
    assert (facts["state"], facts["registered"]) == ("Completed", None)
    assert "s3cr3t" not in narration
    assert "secret A_TOKEN from scope/key: the platform has it" in narration


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


@pytest.mark.parametrize(
    "moment", ["submitted but unheard", "known", "running"], ids=lambda m: m.replace(" ", "-")
)
def test_a_killed_worker_finds_its_job_again(
    home: Home, server: DatabricksServer, write, moment: str
) -> None:
    """SIGKILL of everything at several moments: never a second job, never an orphan."""
    file = file_for(write, "sleep 6; echo done")
    if moment == "submitted but unheard":
        # The answer takes so long that the worker is killed while it waits for it.
        server.fault("POST */jobs/runs/submit", "slow", seconds=20)
    process = run(home, server, file)
    folder = home.path / OUTPUT.lstrip("/")

    def is_time() -> bool:
        if moment == "submitted but unheard":
            return bool(list(folder.glob("*/state/attempt-1/platform-submitting.json")))
        if moment == "known":
            return bool(list(folder.glob("*/state/attempt-1/platform-job.json")))
        return bool(server.runs) and server.runs[0].phase.life == "RUNNING"

    wait_for(is_time, 60)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    server.clear_faults()
    again = run(home, server, file)
    facts, narration = ended(again)
    assert facts["state"] == "Completed", narration
    assert "continuing unfinished run" in narration
    assert [attempt["attempt"] for attempt in facts["attempts"]] == [1]
    assert len(server.runs) == 1
    assert server.runs[0].phase.result == "SUCCESS"


def test_a_dry_run_prints_the_requests_and_sends_none(
    home: Home, server: DatabricksServer, write
) -> None:
    file = file_for(write, "true")
    words = ("run", str(file), "--target", "databricks", "--dry-run", "--json")
    found = home.call(*words, **server.environment)
    assert found.returncode == 0, found.stderr
    sent = json.loads(found.stdout)["requests"]
    assert sent[-1]["path"] == "/api/2.2/jobs/runs/submit"
    assert server.requests == []
    assert home.runs("own") == []


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
