"""The recipe on several processes: the same numbers, and going on after one is killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import time

import pytest

from tests.tunewright.recipes.watching import await_event, worker
from tunewright.contract import rundir
from tunewright.contract.rundir import RunDir

pytestmark = pytest.mark.rank
STEPS = 24


@pytest.fixture(scope="module")
def long_parameters(hyperparameters):
    return hyperparameters(max_steps=STEPS, save_total_limit=20)


@pytest.fixture(scope="module")
def two_ranks(long_parameters, tmp_path_factory, tools):
    """The run of one node with two processes, from start to end."""
    run = RunDir(tmp_path_factory.mktemp("two") / "run")
    process = tools.torchrun(long_parameters, run.root, 2)
    said, _ = process.communicate(timeout=500)
    assert process.returncode == 0, said
    return run, said


def test_one_process_gives_the_losses_of_two(two_ranks, here, long_parameters, tmp_path, tools):
    run, said = two_ranks
    pairs = zip(
        tools.losses(here(long_parameters, tmp_path / "one")),
        tools.losses(tools.read_events(run.events(1))),
        strict=True,
    )
    assert all(one == pytest.approx(two, rel=1e-5) for one, two in pairs)
    assert said.count("step 1/24") == 1


def test_two_nodes_of_two_processes_give_the_losses_of_two(
    two_ranks, long_parameters, tmp_path, tools
):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = ("--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={port}")
    run = RunDir(tmp_path / "four")
    nodes = [
        tools.torchrun(long_parameters, run.root, 2, *where, f"--node-rank={node}")
        for node in (0, 1)
    ]
    said = [node.communicate(timeout=500)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    events = tools.read_events(run.events(1))
    assert events[0]["world_size"] == 4
    expected = tools.losses(tools.read_events(two_ranks[0].events(1)))
    pairs = zip(tools.losses(events), expected, strict=True)
    assert all(four == pytest.approx(two, rel=1e-5) for four, two in pairs)
    assert len(list(run.checkpoint(STEPS).glob("*.distcp"))) == 4
    assert "step 1/24" not in said[1]


def test_a_killed_run_goes_on_to_the_same_losses(two_ranks, long_parameters, tmp_path, tools):
    run = RunDir(tmp_path / "killed")
    process = tools.torchrun(long_parameters, run.root, 2)
    await_event(run.events(1), "checkpoint", process)
    os.kill(worker(process.pid, rank=1).pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert run.checkpoint(STEPS) not in dict(rundir.sealed_checkpoints(run.checkpoints)).values()
    step, path = rundir.sealed_checkpoints(run.checkpoints)[-1]

    again = tools.torchrun(long_parameters, run.root, 2, TUNEWRIGHT_ATTEMPT="2")
    said, _ = again.communicate(timeout=500)
    assert again.returncode == 0, said
    assert f"attempt 2 resumes from step {step} ({path})" in said
    straight = tools.read_events(two_ranks[0].events(1))
    resumed = tools.read_events(run.events(2))
    assert resumed[0]["step"] == step
    assert tools.losses(resumed) == tools.losses(straight)[step:]
    assert resumed[-1]["eval_loss"] == straight[-1]["eval_loss"]


def test_a_run_of_two_ranks_goes_on_with_one(two_ranks, here, long_parameters, tmp_path, tools):
    import shutil

    run = RunDir(tmp_path / "one")
    shutil.copytree(two_ranks[0].checkpoint(16), run.checkpoint(16))
    events = here(long_parameters, run.root)
    expected = tools.losses(tools.read_events(two_ranks[0].events(1)))[16:]
    pairs = zip(tools.losses(events), expected, strict=True)
    assert all(one == pytest.approx(two, rel=1e-5) for one, two in pairs)
    assert rundir.manifest(run.checkpoint(STEPS))["world_size"] == 1


def test_all_ranks_stop_together_and_leave_the_reason(hyperparameters, tmp_path, tools):
    failures = tmp_path / "failures"
    failures.mkdir()
    wild = hyperparameters(learning_rate=1e30, warmup_steps=0)
    begun = time.monotonic()
    process = tools.torchrun(
        wild, tmp_path / "run", 2, "--standalone", TUNEWRIGHT_FAILURE_DIR=str(failures)
    )
    said, _ = process.communicate(timeout=500)
    assert process.returncode != 0
    assert time.monotonic() - begun < 60
    found = [json.loads(path.read_text()) for path in failures.iterdir()]
    assert {failure["class"] for failure in found} == {"nonfinite"}
    assert "stopped before the weights changed" in said
