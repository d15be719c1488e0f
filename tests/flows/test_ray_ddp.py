"""The Ray Train deployment on this machine: the whole route, and a worker lost on the way."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from tests.flows.cli import ROOT, events, processes_of, wait_for

pytestmark = [
    pytest.mark.flow,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs tunewright[ray-train]"),
]
QWEN = ROOT / "deployments" / "qwen.yaml"
SMALL = {
    "parameters.model_name": str(ROOT / "tests" / "data" / "models" / "qwen"),
    "parameters.init": "random",
    "parameters.dataset_name": str(ROOT / "deployments" / "demo.jsonl"),
    "parameters.max_seq_len": 256,
    "parameters.per_device_batch_size": 1,
    "parameters.learning_rate": 0.001,
    "parameters.max_steps": 40,
    "parameters.save_steps": 5,
    "parameters.eval_steps": 20,
    "environment.dependencies": [],
}


@pytest.mark.timeout(900)
def test_qwen_becomes_a_registered_model_also_after_a_worker_was_lost(home) -> None:
    straight = home.run(QWEN, "--procs-per-node=2", sets=SMALL)
    assert straight.code == 0, straight.narration
    facts = straight.facts
    assert facts["state"] == "Completed"
    assert facts["registered"] == {"name": "qwen", "version": 1, "alias": None}
    assert (facts["nodes"], facts["world_size"], facts["steps"]) == (1, 2, 40)
    assert facts["last_loss"] < 0.9 * facts["first_loss"]
    assert facts["fast_paths"]["weights_kept_whole"]
    _check_model(Path(facts["folder"]) / "model")

    pairs = [f"--set={key}={value}" for key, value in SMALL.items()]
    words = ("run", str(QWEN), "--simulate", "--json", "--procs-per-node=2", "--fresh", *pairs)
    process = home.start(*words)
    done = Path(facts["folder"])
    (run,) = wait_for(lambda: [path for path in done.parent.glob("qwen-*") if path != done])
    wait_for(lambda: events(run, 1, "checkpoint"), 150)
    _worker(processes_of(str(run))).kill()
    out, narration = process.communicate(timeout=600)
    assert process.returncode == 0, narration
    resumed = json.loads(out)
    first, second = resumed["attempts"]
    assert first["failure"]["class"] == "infrastructure"
    assert "the worker of rank" in first["failure"]["message"]
    assert second["resumed_from_step"] >= 5
    assert (second["last_step"], second["failure"]) == (40, None)
    assert resumed["last_loss"] == facts["last_loss"]
    assert resumed["eval_loss"] == facts["eval_loss"]
    assert resumed["registered"]["version"] == 2
    assert processes_of(str(run)) == []


def _worker(pids: list[int]) -> psutil.Process:
    found = [psutil.Process(pid) for pid in pids]
    return next(p for p in found if p.cmdline()[0].startswith("ray::RayTrainWorker"))


def _check_model(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer("### Instruction:\nWhat", return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=4, do_sample=False)
    assert out.shape[1] > ids["input_ids"].shape[1]
