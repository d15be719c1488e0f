"""The whole route on a Ray cluster of two nodes, one of which is lost in mid-run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.clusters import Cluster, cluster
from tests.flows.cli import ROOT, TINY, events, processes_of, wait_for

pytestmark = [
    pytest.mark.flow,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs tunewright[ray]"),
]

EIGHT = {
    "parameters.max_steps": 8,
    "parameters.global_batch_tokens": 4096,
    "parameters.save_steps": 3,
    "parameters.eval_steps": 8,
}
QWEN = ROOT / "deployments" / "qwen.yaml"
QWEN_SMALL = {
    "parameters.model_name": str(ROOT / "tests" / "data" / "models" / "qwen"),
    "parameters.init": "random",
    "parameters.dataset_name": str(ROOT / "deployments" / "demo.jsonl"),
    "parameters.max_seq_len": 256,
    "parameters.per_device_batch_size": 1,
    "parameters.max_steps": 150,
    "parameters.save_steps": 5,
    "parameters.eval_steps": 1000,
    "environment.dependencies": [],
}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    found = cluster(tmp_path_factory.mktemp("ray"))
    try:
        found.add()
        yield found
    finally:
        found.stop()


def test_a_lost_ray_node_costs_an_attempt_and_no_step(home, two) -> None:
    """One layer retries, ours: the second attempt waits for a new node and resumes there."""
    pairs = [f"--set={key}={value}" for key, value in EIGHT.items()]
    words = ("run", str(TINY), "--target", "ray", "--simulate", "--json", *pairs)
    process = home.start(*words, RAY_ADDRESS=two.gcs)
    (run,) = wait_for(lambda: home.runs("tiny"))
    wait_for(lambda: events(run, 1, "step")[3:], 150)
    two.nodes.pop().kill()
    wait_for((run / "state" / "attempt-1" / "ended.json").exists, 90)
    two.add()
    out, narration = process.communicate(timeout=600)
    assert process.returncode == 0, narration
    facts = json.loads(out)
    first, second = facts["attempts"]
    assert first["failure"]["class"] == "infrastructure"
    assert "on the Ray node" in first["failure"]["message"]
    assert (second["resumed_from_step"], second["last_step"], second["failure"]) == (3, 8, None)
    assert "attempt 2 resumes from step 3" in narration
    assert (facts["state"], facts["nodes"], facts["world_size"]) == ("Completed", 2, 2)
    assert facts["registered"]["version"] == 1
    assert processes_of(str(run)) == []
    assert "(2 nodes)" in narration
    assert Path(facts["folder"]).samefile(run)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", ["local", "ray"])
def test_a_cancelled_run_under_ray_train_ends_in_order(home, two, target) -> None:
    """Its own Ray, also inside of a cluster's, stands until the workers have ended."""
    sets = QWEN_SMALL | {"parameters.output_dir": str(home.path / "volume")}
    pairs = [f"--set={key}={value}" for key, value in sets.items()]
    words = ("run", str(QWEN), "--target", target, "--simulate", "--procs-per-node=2", "--json")
    process = home.start(*words, *pairs, RAY_ADDRESS=two.gcs)
    (run,) = wait_for(lambda: [*home.path.glob("volume/qwen-*")])
    wait_for(lambda: events(run, 1, "checkpoint"), 300)
    assert home.call("cancel", run.name).returncode == 0
    out, narration = process.communicate(timeout=100)
    assert (process.returncode, json.loads(out)["state"]) == (130, "Cancelled"), narration
    log = (run / "logs" / "attempt-1" / "node-0.log").read_text()
    newest = sorted(path.parent.name for path in run.glob("checkpoints/*/manifest.json"))[-1]
    step = int(newest.removeprefix("step-"))
    assert log.count(f"told to end (SIGTERM): starting again goes on from step {step} (") == 1
    assert "error:" not in log
    assert "Traceback" not in log
    assert processes_of(str(run)) == []

    found = home.call(*words, *pairs, RAY_ADDRESS=two.gcs)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["attempts"][-1]["resumed_from_step"] == step


def test_what_ray_cannot_do_is_refused_before_anything_starts(home, two, write) -> None:
    file = write("true", secrets={"A_TOKEN": "scope/key"})
    found = home.call("run", str(file), "--target", "ray", "--simulate", RAY_ADDRESS=two.dashboard)
    assert found.returncode == 2
    assert "secrets (A_TOKEN) do not travel" in found.stderr
    assert "Traceback" not in found.stderr
    assert home.runs("own") == []


def test_a_dry_run_shows_what_each_ray_node_would_run(home, two, write) -> None:
    words = ("run", str(write("echo $NODE_RANK")), "--target", "ray", "--simulate", "--dry-run")
    found = home.call(*words, "--json", RAY_ADDRESS=two.gcs)
    assert found.returncode == 0, found.stderr
    (launch,) = json.loads(found.stdout)["launches"]
    assert launch["argv"] == ["bash", "-c", "set -euo pipefail\necho $NODE_RANK"]
    assert {"NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"} <= set(launch["environment"])
    assert home.runs("own") == []
