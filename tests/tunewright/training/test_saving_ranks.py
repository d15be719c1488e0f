"""Saving by two processes: failures, signals and deadlines that all ranks must agree on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tunewright.contract import rundir
from tunewright.contract.rundir import RunDir
from tunewright.training.base import BaseModel
from tunewright.training.checkpoint import Checkpoints
from tunewright.training.model import build
from tunewright.training.optimizer import adamw

pytestmark = pytest.mark.rank
DRIVER = Path(__file__).with_name("saving_driver.py")
ROOT = Path(__file__).parents[3]
OURS = ("TUNEWRIGHT_", "RANK", "WORLD_SIZE", "LOCAL_RANK")

Start = Callable[..., subprocess.Popen]


@pytest.fixture
def run(tmp_path) -> RunDir:
    return RunDir(tmp_path / "run")


@pytest.fixture
def start(run, model_folder) -> Iterator[Start]:
    """Start a scenario of the driver on two ranks."""
    started = []

    def begin(scenario: str, **more: str) -> subprocess.Popen:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
        command += ["--standalone", str(DRIVER), str(run.root), str(model_folder()), scenario]
        process = subprocess.Popen(
            command,
            env={**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.terminate()
        process.communicate()


def ended(process: subprocess.Popen) -> str:
    said, _ = process.communicate(timeout=100)
    return said


def steps(run: RunDir) -> list[int]:
    return [step for step, _ in rundir.sealed_checkpoints(run.checkpoints)]


def test_a_disk_that_is_full_for_one_rank_is_told_to_all(start, run):
    process = start("a_failing_disk")
    said = ended(process)
    assert process.returncode == 0, said
    for rank in (0, 1):
        assert f"rank {rank} is told: cannot write the checkpoint {run.checkpoint(2)}" in said
    assert steps(run) == [1]


def test_two_ranks_save_what_one_rank_reads(start, run, alone, settings, model_folder):
    process = start("two_saves")
    said = ended(process)
    assert process.returncode == 0, said
    newest = run.checkpoint(2)
    assert sorted(p.name for p in newest.glob("*.distcp")) == ["__0_0.distcp", "__1_0.distcp"]
    assert rundir.damage(newest, rundir.manifest(newest)) == []

    asked = settings(model_name="small")
    base = BaseModel("small", None, model_folder())
    fresh, model = build(base, asked, alone), build(base, asked, alone)
    optimizer = adamw(model.parameters, asked)
    found = Checkpoints(run, alone, model, optimizer, base, {"data": "some"}, asked, None).resume()
    assert found.progress.step == 2
    assert found.caveat.startswith(
        "saved with world_size 2, now 1: the same rows in the same order"
    )
    other = adamw(fresh.parameters, asked)
    for number in (1, 2):
        for parameter in fresh.parameters.values():
            parameter.grad = torch.full_like(parameter, 1.0 / number)
        other.step()
    for name, parameter in fresh.parameters.items():
        assert torch.equal(parameter.full_tensor(), model.parameters[name].full_tensor())


def test_killed_between_the_files_and_the_seal_leaves_nothing_to_trust(start, run):
    process = start("killed_before_the_seal")
    said = ended(process)
    assert process.returncode != 0, said
    assert len(list(run.checkpoint(3).glob("*.distcp"))) == 2
    assert steps(run)[-1] == 2


def test_an_error_of_one_rank_ends_all_though_a_save_is_written(start, run, tmp_path):
    process = start(
        "an_error_of_the_training", TUNEWRIGHT_GRACE_S="2", TUNEWRIGHT_FAILURE_DIR=str(tmp_path)
    )
    begun = time.monotonic()
    said = ended(process)
    assert process.returncode == 1
    assert time.monotonic() - begun < 50, said
    assert "ValueError: of the training" in said
    assert "exitcode  : 1 " in said
    assert json.loads((tmp_path / "rank-1.json").read_text())["class"] == "unknown"
    assert not (tmp_path / "rank-0.json").exists()
    assert steps(run) == []


class TestToldToEnd:
    def told(self, process: subprocess.Popen) -> tuple[str, float]:
        """Send SIGTERM to torchrun once both ranks are ready; what was said, and the seconds."""
        said = []
        while sum("is ready" in line for line in said) < 2:
            said.append(process.stdout.readline())
            assert said[-1], "".join(said)
        process.send_signal(signal.SIGTERM)
        begun = time.monotonic()
        rest = ended(process)
        return "".join(said) + rest, time.monotonic() - begun

    def test_in_time(self, start, run):
        said, seconds = self.told(start("told_to_end_in_time", TUNEWRIGHT_GRACE_S="20"))
        path = run.checkpoint(2)
        expected = f"told to end (SIGTERM): starting again goes on from step 2 ({path})"
        assert said.count(expected) == 1, said
        assert steps(run)[-1] == 2
        assert seconds < 15
        assert "training went on" not in said

    def test_too_late(self, start, run):
        said, seconds = self.told(start("told_to_end_too_late", TUNEWRIGHT_GRACE_S="3"))
        assert said.count("told to end (SIGTERM): the save of step 2 does not fit 2 s") == 1, said
        assert f"goes on from step 1 ({run.checkpoint(1)})" in said
        assert steps(run) == [1]
        assert seconds < 10
        assert "training went on" not in said


def test_near_the_deadline_the_ranks_stop_at_one_step_and_say_what_is_saved(start, run, tmp_path):
    failures = tmp_path / "failures"
    failures.mkdir()
    process = start("near_the_deadline", TUNEWRIGHT_FAILURE_DIR=str(failures))
    said = ended(process)
    assert process.returncode == 1, said
    step = steps(run)[-1]
    found = [json.loads(path.read_text()) for path in sorted(failures.iterdir())]
    assert [failure["class"] for failure in found] == ["timeout", "timeout"]
    for failure in found:
        told = re.match(
            r"stopped after step (\d+), (\d+) s before the deadline", failure["message"]
        )
        assert int(told[1]) == step > 2
        assert 2 <= int(told[2]) < 10
        assert f"{run.checkpoint(step)} is sealed" in failure["message"]
