"""The deployments as their users run them: deploy from the root, worker and run from elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.databricks_server import DatabricksServer
from tests.flows.cli import FEW_STEPS, ROOT, Home
from tests.flows.on_databricks import OUTPUT, small

pytestmark = pytest.mark.flow

PREFECT = [sys.executable, "-m", "prefect"]
LLAMA = ROOT / "tests" / "data" / "models" / "llama"


@pytest.fixture(scope="module")
def worker(prefect_server, tmp_path_factory) -> Iterator[Home]:
    """A process pool with everything deployed and a worker that runs in a folder of its own."""
    path = tmp_path_factory.mktemp("worker")
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MLFLOW_")}
    env = {
        **kept, "PREFECT_API_URL": prefect_server, "TUNEWRIGHT_HOME": str(path),
        "DATABRICKS_CONFIG_FILE": str(path / "none"),
        "HF_TOKEN": "hf_of_the_worker", "PREFECT_WORKER_QUERY_SECONDS": "2",
        "PREFECT_WORKER_PREFETCH_SECONDS": "1",
    }  # fmt: skip
    home = Home(path, env)
    made = _prefect(home, ROOT, "work-pool", "create", "tunewright", "--type", "process")
    assert made.returncode == 0, made.stderr
    deploy = ["deploy", "--prefect-file", "deployments/prefect.yaml", "--all", "--no-prompt"]
    deployed = _prefect(home, ROOT, *deploy)
    assert deployed.returncode == 0, deployed.stdout + deployed.stderr
    with (path / "worker.log").open("w") as log:
        process = subprocess.Popen(
            [*PREFECT, "worker", "start", "--pool", "tunewright"],
            env=env, cwd=path, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    yield home
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        # A busy worker may take its time to go; every run has ended by now.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _prefect(home: Home, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in home.env.items() if k != "HF_TOKEN"}
    return subprocess.run(
        [*PREFECT, *words], env=env, cwd=cwd, capture_output=True, text=True, timeout=280
    )


def _deployment_run(
    worker: Home, name: str, *words: str, **parameters: object
) -> subprocess.CompletedProcess[str]:
    given = [f"--param={key}={json.dumps(value)}" for key, value in parameters.items()]
    return _prefect(worker, worker.path, "deployment", "run", name, *given, *words, "--watch")


def test_everything_is_deployed(worker, api) -> None:
    found = {d["name"]: d for d in api("/deployments/filter", {})}
    assert found.keys() == {"tiny", "alpaca", "llama", "gpt-oss", "qwen"}
    assert [name for name in sorted(found) if found[name]["schedules"]] == ["alpaca"]
    assert found["tiny"]["global_concurrency_limit"]["limit"] == 1
    assert found["tiny"]["parameters"] == {"workload": "deployments/tiny.yaml", "simulate": True}


def test_tiny(worker) -> None:
    found = _deployment_run(worker, "sft/tiny", set=FEW_STEPS)
    assert found.returncode == 0, found.stdout + found.stderr
    (run,) = worker.runs("tiny")
    receipt = json.loads((run / "receipt.json").read_text())
    assert receipt["registered"] == {"name": "tiny", "version": 1, "alias": None}


def test_llama_is_refused_where_no_workspace_is_configured(worker, api) -> None:
    found = _deployment_run(worker, "sft/llama")
    assert found.returncode == 1
    (flow_run,) = api("/flow_runs/filter", {"flow_runs": {"name": {"like_": "llama-"}}})
    assert "no Databricks workspace is configured" in flow_run["state"]["message"]


def test_llama_on_two_simulated_nodes(worker) -> None:
    sets = {
        "parameters.model_name": str(LLAMA),
        "parameters.init": "random",
        "parameters.dataset_name": str(ROOT / "deployments" / "demo.jsonl"),
        "parameters.max_seq_len": 128,
        "parameters.max_steps": 3,
    }
    found = _deployment_run(worker, "sft/llama", simulate=True, target="local", set=sets)
    assert found.returncode == 0, found.stdout + found.stderr
    folder = worker.path / "Volumes/main/default/air_checkpoints/llama31-8b-sft"
    (run,) = (path.parent for path in folder.glob("llama-*/model"))
    receipt = json.loads((run / "receipt.json").read_text())
    assert (receipt["nodes"], receipt["world_size"], receipt["steps"]) == (2, 2, 3)
    name = "main.default.llama31_8b_sft"
    assert receipt["registered"] == {"name": name, "version": 1, "alias": None}
    assert not [p for p in run.rglob("*") if p.is_file() and b"hf_of_the_worker" in p.read_bytes()]
    planned = json.loads(
        worker.call("check", str(ROOT / "deployments/llama.yaml"), "--json").stdout
    )
    assert (planned["attempts"], planned["timeout_minutes"]) == (2, 120)


@pytest.mark.skipif(find_spec("databricks") is None, reason="needs tunewright[databricks]")
def test_llama_on_databricks(worker, mlflow_server: str, tmp_path: Path) -> None:
    """As it is deployed, on a worker that is logged in; the workspace is the stand-in."""
    with DatabricksServer(tmp_path, mlflow=mlflow_server) as server:
        server.add_volume("main.default.runs")
        server.state.secrets["my_scope"] = {"hf_token": "hf_of-the-platform"}
        inputs = server.on_disk(f"{OUTPUT}/inputs")
        shutil.copytree(LLAMA, inputs / "llama")
        shutil.copy(ROOT / "deployments" / "demo.jsonl", inputs)
        login = f"--job-variable=env={json.dumps(server.environment)}"
        found = _deployment_run(worker, "sft/llama", login, set=small("llama"))
        assert found.returncode == 0, found.stdout + found.stderr
        assert len(server.runs) == 2
        versions = server.registry.models["main.default.llama31_8b_sft"].versions
        assert [versions[n].status for n in versions] == ["READY"]
