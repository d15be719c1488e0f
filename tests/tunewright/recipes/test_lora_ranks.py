"""Adapters on several processes: the same numbers however the model lies on them."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.tunewright.recipes.watching import await_event, worker
from tunewright.contract import rundir
from tunewright.contract.rundir import RunDir

pytestmark = pytest.mark.rank
STEPS = 12
TWIN = Path(__file__).parents[2] / "data" / "models" / "gpt-oss"


@pytest.fixture(scope="module")
def parameters(hyperparameters):
    def write(sharding):
        return hyperparameters(
            model_name=str(TWIN), lora_r=4, sharding=sharding, save_total_limit=20, save_steps=2
        )

    return write


@pytest.fixture(scope="module")
def two_ranks(parameters, tmp_path_factory, tools):
    """The runs of two processes, sharded and whole on each, from start to end."""
    found = {}
    for sharding in ("fsdp", "ddp"):
        run = RunDir(tmp_path_factory.mktemp(sharding) / "run")
        process = tools.torchrun(parameters(sharding), run.root, 2, recipe="lora")
        said, _ = process.communicate(timeout=500)
        assert process.returncode == 0, said
        found[sharding] = run, tools.read_events(run.events(1))
    return found


@pytest.mark.parametrize("sharding", ["fsdp", "ddp"])
def test_two_processes_give_the_losses_of_one(
    sharding, two_ranks, here, parameters, tmp_path, tools
):
    _, events = two_ranks[sharding]
    assert events[0]["world_size"] == 2
    assert events[0]["fast_paths"]["sharding"] == sharding
    alone = here(parameters("fsdp"), tmp_path / "one", "lora")
    pairs = zip(tools.losses(alone), tools.losses(events), strict=True)
    assert all(one == pytest.approx(two, rel=1e-4) for one, two in pairs)
    assert tools.losses(alone)[0] == pytest.approx(tools.losses(events)[0], rel=1e-5)


def test_a_killed_run_goes_on_to_the_same_losses(two_ranks, parameters, tmp_path, tools):
    run = RunDir(tmp_path / "killed")
    process = tools.torchrun(parameters("fsdp"), run.root, 2, recipe="lora")
    await_event(run.events(1), "checkpoint", process)
    os.kill(worker(process.pid, rank=1).pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode != 0
    step, path = rundir.sealed_checkpoints(run.checkpoints)[-1]
    assert step < STEPS

    again = tools.torchrun(parameters("fsdp"), run.root, 2, recipe="lora", TUNEWRIGHT_ATTEMPT="2")
    said, _ = again.communicate(timeout=500)
    assert again.returncode == 0, said
    assert f"attempt 2 resumes from step {step} ({path})" in said
    straight, resumed = two_ranks["fsdp"][1], tools.read_events(run.events(2))
    assert tools.losses(resumed) == tools.losses(straight)[step:]
    assert resumed[-1]["eval_loss"] == straight[-1]["eval_loss"]


def test_a_sharded_run_goes_on_whole_on_one_process(two_ranks, here, parameters, tmp_path, tools):
    run, events = two_ranks["fsdp"]
    one = RunDir(tmp_path / "one")
    shutil.copytree(run.checkpoint(8), one.checkpoint(8))
    shutil.copytree(run.base, one.base)
    resumed = here(parameters("ddp"), one.root, "lora")
    pairs = zip(tools.losses(resumed), tools.losses(events)[8:], strict=True)
    assert all(one == pytest.approx(two, rel=1e-4) for one, two in pairs)
