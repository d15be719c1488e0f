"""The whole route on real input: one file in, a registered model out."""

from __future__ import annotations

import json
import os
import sqlite3
from pathlib import Path

import httpx
import pytest

from tests.flows.cli import FEW_STEPS, ROOT, TINY, events

pytestmark = pytest.mark.flow

RECEIPT = {
    "run", "state", "stopped_by", "workload", "data", "base_model", "nodes", "world_size",
    "attempts", "steps", "first_loss", "last_loss", "first_eval_loss", "eval_loss",
    "tokens_per_second_per_gpu", "model_tflops_per_gpu", "peak_memory_gib", "seconds",
    "fast_paths", "registered", "ceiling_tflops_per_gpu", "ceiling_share", "seconds_by_phase",
    "checkpoints",
}  # fmt: skip


def test_tiny_becomes_a_registered_model(home, api) -> None:
    found = home.run(TINY, sets=FEW_STEPS)
    assert found.code == 0, found.narration
    facts = found.facts
    assert facts.keys() >= RECEIPT
    assert facts["state"] == "Completed"
    assert facts["registered"] == {"name": "tiny", "version": 1, "alias": None}
    assert (facts["nodes"], facts["world_size"], facts["steps"]) == (2, 2, 6)
    assert facts["last_loss"] < facts["first_loss"]
    assert facts["eval_loss"] < facts["first_eval_loss"]
    assert facts["data"]["rows"] == 480
    assert facts["data"]["cache"] == "miss: no tokens yet"
    assert 0 < facts["ceiling_share"] < 1
    assert facts["seconds_by_phase"]["start_up"] > 0
    (run,) = home.runs("tiny")
    assert json.loads((run / "receipt.json").read_text()) == facts
    _check_prefect(api, run.name)
    _check_mlflow(home.path, facts)
    _check_model(run / "model")


def test_a_second_run_through_a_tracking_server(home, mlflow_server) -> None:
    """The same tokens again, another run, and the model's files in the server's artifacts."""
    first = home.run(TINY, sets=FEW_STEPS, MLFLOW_TRACKING_URI=mlflow_server)
    again = home.run(TINY, sets=FEW_STEPS, MLFLOW_TRACKING_URI=mlflow_server)
    assert (first.code, again.code) == (0, 0), again.narration
    assert again.facts["run"] != first.facts["run"]
    assert again.facts["data"]["cache"].startswith("hit")
    assert [found.facts["registered"]["version"] for found in (first, again)] == [1, 2]
    assert not (home.path / "mlflow.db").exists()
    query = f"{mlflow_server}/api/2.0/mlflow/artifacts/list"
    wanted = {"run_id": again.facts["mlflow"]["run_id"], "path": "model"}
    listed = httpx.get(query, params=wanted).json()["files"]
    assert {"model/MLmodel", "model/model.safetensors"} <= {file["path"] for file in listed}


def _check_prefect(api, run: str) -> None:
    """Five task runs under their names, the run's tag and name, and the receipt as a page."""
    (flow_run,) = api("/flow_runs/filter", {"flow_runs": {"tags": {"all_": [f"run:{run}"]}}})
    assert flow_run["name"] == run
    assert flow_run["state_name"] == "Completed"
    mine = {"flow_runs": {"id": {"any_": [flow_run["id"]]}}}
    tasks = api("/task_runs/filter", {**mine, "sort": "EXPECTED_START_TIME_ASC"})
    assert [task["name"].rpartition("-")[0] for task in tasks] == [
        "resolve_secret", "pretokenize", "launch", "consolidate", "register",
    ]  # fmt: skip
    assert {task["state_name"] for task in tasks} == {"Completed"}
    pages = {page["key"]: page["data"] for page in api("/artifacts/filter", mine)}
    assert "tiny version 1" in pages["receipt"]
    assert "supervised" in pages["data-audit"]
    assert "| where time went |" in pages["receipt"]
    assert pages["training-progress"] == 100


def _check_mlflow(home: Path, facts: dict) -> None:
    store = sqlite3.connect(home / "mlflow.db")
    run_id = facts["mlflow"]["run_id"]
    rows = store.execute("select status, name from runs where run_uuid = ?", [run_id])
    assert rows.fetchall() == [("FINISHED", "tiny")]
    metrics = store.execute("select distinct key from metrics where run_uuid = ?", [run_id])
    assert {key for (key,) in metrics} >= {
        "train_loss", "eval_loss", "learning_rate", "grad_norm", "tokens_per_second",
        "tokens_per_second_per_gpu", "ceiling_share", "memory_gib", "time/step",
        "time/forward_backward", "checkpoint_seconds", "checkpoint_blocked_seconds",
    }  # fmt: skip
    tags = store.execute("select key, value from model_version_tags where version = 1")
    tags = dict(tags.fetchall())
    assert tags["tunewright.run"] == facts["run"]
    assert tags["tunewright.workload_sha256"] == facts["workload"]["sha256"]
    assert tags["tunewright.data_fingerprint"] == facts["data"]["fingerprint"]
    store.close()
    (receipt,) = (home / "mlartifacts").rglob("receipt.json")
    assert json.loads(receipt.read_text())["run"] == facts["run"]


def _check_model(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer("### Instruction:\nWhat", return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=4, do_sample=False)
    assert out.shape[1] > ids["input_ids"].shape[1]
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.skipif(
    "TUNEWRIGHT_TEST_DATA" not in os.environ, reason="TUNEWRIGHT_TEST_DATA is unset"
)
@pytest.mark.parametrize(
    ("name", "rows"), [("alpaca_en_demo.json", 999), ("v1_sft_demo.jsonl", 500)]
)
def test_real_rows_go_the_whole_way(home, name: str, rows: int) -> None:
    data = Path(os.environ["TUNEWRIGHT_TEST_DATA"], name)
    sets = {"parameters.dataset_name": str(data), "parameters.max_steps": 4}
    found = home.run(ROOT / "deployments" / "alpaca.yaml", sets=sets)
    assert found.code == 0, found.narration
    assert found.facts["data"]["rows"] == rows
    assert found.facts["registered"]["version"] == 1


def test_four_processes_on_two_nodes_train_like_one(home) -> None:
    """Ten steps in fp32: the same losses within 1e-4, whatever the number of ranks."""
    sets = {**FEW_STEPS, "parameters.max_steps": 10, "parameters.global_batch_tokens": 4096}
    four = home.run(TINY, "--procs-per-node=2", sets=sets)
    one = home.run(TINY, sets={**sets, "compute.num_accelerators": 1})
    assert (four.facts["world_size"], one.facts["world_size"]) == (4, 1)
    losses = [_losses(Path(found.facts["folder"])) for found in (four, one)]
    assert len(losses[0]) == 10
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def _losses(run: Path) -> list[float]:
    return [event["loss"] for event in events(run, 1, "step")]
