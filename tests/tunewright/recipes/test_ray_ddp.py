"""The recipe on real Ray: the numbers of the FSDP recipe, and every ending."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from tunewright.contract import rundir
from tunewright.contract.rundir import RunDir

pytestmark = [
    pytest.mark.rank,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs tunewright[ray-train]"),
]
STEPS = 24
ROOT = Path(__file__).parents[3]
SLOW_DISK = """
import os, time
flush = os.fsync

def slow(descriptor):
    if "distcp" in os.readlink(f"/proc/self/fd/{descriptor}"):
        time.sleep(float(os.environ["DISK_S"]))
    flush(descriptor)

os.fsync = slow
"""
NOT_PASSED = ("TUNEWRIGHT_", "MLFLOW_", "RAY_", "HYPERPARAMETERS_PATH")


@pytest.fixture(scope="module")
def parameters(hyperparameters):
    return hyperparameters(max_steps=STEPS, save_total_limit=20)


@pytest.fixture(scope="module")
def two_workers(parameters, tmp_path_factory):
    """One node with two workers, from start to end."""
    run = RunDir(tmp_path_factory.mktemp("two") / "run")
    node = start(parameters, run)
    said, _ = node.communicate(timeout=500)
    assert node.returncode == 0, said
    return run, said


def start(parameters: Path, run: RunDir, processes: int = 2, **environment: str):
    """The recipe as one node starts it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(NOT_PASSED)}
    contract = {"TUNEWRIGHT_RUN_DIR": str(run.root), "LOCAL_WORLD_SIZE": str(processes)}
    return subprocess.Popen(
        [sys.executable, "-m", "tunewright.recipes.ray_ddp", str(parameters)],
        env={**kept, "PYTHONPATH": str(ROOT), **contract, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_it_gives_the_numbers_of_fsdp(two_workers, parameters, tmp_path, tools):
    """Evaluation before the first step, losses and gradient norms of every step."""
    sharded = RunDir(tmp_path / "fsdp")
    process = tools.torchrun(parameters, sharded.root, 2)
    told, _ = process.communicate(timeout=500)
    assert process.returncode == 0, told
    events = [tools.read_events(run.events(1)) for run in (two_workers[0], sharded)]
    assert events[0][0]["world_size"] == 2
    evaluations = [[e["loss"] for e in some if e["event"] == "eval"] for some in events]
    assert evaluations[0] == pytest.approx(evaluations[1], rel=1e-5)
    for one, other in zip(*map(tools.losses, events), strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    assert len(tools.losses(events[0])) == STEPS


def test_its_checkpoints_are_those_of_fsdp_and_ray_knows_them(two_workers):
    """Each worker writes a part of what all of them hold; Ray has no copy of it."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    run, _ = two_workers
    folder = run.checkpoint(STEPS)
    facts = rundir.manifest(folder)
    assert not rundir.damage(folder, facts)
    assert (facts["finished"], facts["world_size"]) == (True, 2)
    assert (folder / "hf" / "config.json").is_file()
    sizes = [path.stat().st_size for path in folder.glob("*.distcp")]
    assert len(sizes) == 2
    assert max(sizes) < 0.7 * sum(sizes)
    names = FileSystemReader(folder).read_metadata().state_dict_metadata
    assert "model.model.layers.1.mlp.up_proj.weight" in names
    assert "optimizer.model.layers.1.mlp.up_proj.weight.exp_avg_sq" in names
    known = json.loads((run.checkpoints / "checkpoint_manager_snapshot.json").read_text())
    told = [result["checkpoint_dir_name"] for result in known["checkpoint_results"]]
    assert told == [run.checkpoint(step).name for step in range(4, STEPS + 1, 4)]
    assert known["checkpoint_results"][-1]["metrics"]["step"] == STEPS
    folders = {path.name for path in run.checkpoints.iterdir() if path.is_dir()}
    assert folders == {*told}


def test_it_says_what_fsdp_says_and_nothing_of_ray(two_workers):
    lines = two_workers[1].splitlines()
    assert lines.count("attempt 1 starts at step 0: no sealed checkpoint") == 1
    steps = [line.split()[1] for line in lines if line.startswith("step ")]
    assert steps == [f"{step}/{STEPS}" for step in range(1, STEPS + 1)]
    assert any(line.startswith("where time went") for line in lines)
    assert not [line for line in lines if "ray" in line.lower() and "checkpoint" not in line]


def test_two_nodes_give_the_same_losses(two_workers, parameters, tmp_path, tools):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    run = RunDir(tmp_path / "run")
    meet = {"NUM_NODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    nodes = [start(parameters, run, 1, NODE_RANK=str(rank), **meet) for rank in (0, 1)]
    said = [node.communicate(timeout=500)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    expected = tools.losses(tools.read_events(two_workers[0].events(1)))
    found = tools.losses(tools.read_events(run.events(1)))
    assert all(a == pytest.approx(b, rel=1e-5) for a, b in zip(found, expected, strict=True))
    assert "step 1/24" in said[0]
    assert "step 1/24" not in said[1]


def test_a_lost_worker_ends_the_attempt_and_the_next_goes_on(
    two_workers, parameters, tmp_path, tools
):
    run, failures = RunDir(tmp_path / "killed"), tmp_path / "failures"
    failures.mkdir()
    node = start(parameters, run, TUNEWRIGHT_FAILURE_DIR=str(failures))
    await_event(run.events(1), "checkpoint", node)
    below = psutil.Process(node.pid).children(recursive=True)
    next(p for p in below if p.cmdline()[0].startswith("ray::RayTrainWorker")).kill()
    said, _ = node.communicate(timeout=100)
    assert node.returncode == 1, said
    (told,) = [json.loads(path.read_text()) for path in failures.iterdir()]
    assert told["class"] == "infrastructure"
    assert "the worker of rank" in told["message"]
    await_none(below)
    assert run.checkpoint(STEPS) not in dict(rundir.sealed_checkpoints(run.checkpoints)).values()
    step, path = rundir.sealed_checkpoints(run.checkpoints)[-1]

    again = start(parameters, run, TUNEWRIGHT_ATTEMPT="2")
    said, _ = again.communicate(timeout=500)
    assert again.returncode == 0, said
    assert f"attempt 2 resumes from step {step} ({path})" in said
    straight = tools.read_events(two_workers[0].events(1))
    resumed = tools.read_events(run.events(2))
    assert tools.losses(resumed) == tools.losses(straight)[step:]
    assert resumed[-1]["eval_loss"] == straight[-1]["eval_loss"]


def test_every_worker_stops_and_tells_why(hyperparameters, tmp_path):
    failures = tmp_path / "failures"
    failures.mkdir()
    wild = hyperparameters(learning_rate=1e30, warmup_steps=0)
    node = start(wild, RunDir(tmp_path / "run"), TUNEWRIGHT_FAILURE_DIR=str(failures))
    said, _ = node.communicate(timeout=500)
    assert node.returncode == 1, said
    told = [json.loads(path.read_text()) for path in failures.iterdir()]
    assert {failure["class"] for failure in told} == {"nonfinite"}
    assert {failure["rank"] for failure in told} == {0, 1}
    assert said.count("error: step 2: loss") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_ended_node_leaves_no_ray(number, parameters, tmp_path):
    run = RunDir(tmp_path / "run")
    node = start(parameters, run)
    await_event(run.events(1), "start", node)
    below = psutil.Process(node.pid).children(recursive=True)
    folder = next(word for p in below for word in p.cmdline() if word.startswith("--temp-dir="))
    os.kill(node.pid, number)
    said, _ = node.communicate(timeout=30)
    await_none(below)
    if number == signal.SIGTERM:
        assert node.returncode == 128 + signal.SIGTERM
        assert said.count("told to end (SIGTERM): ") == 1
        assert not Path(folder.partition("=")[2]).exists()


class TestToldToEndWhileSaving:
    """On a disk that takes its time; the signal goes to the command, or to all of its processes."""

    @pytest.fixture
    def saving(self, parameters, tmp_path):
        """Start a node and return it once its first checkpoint is being written."""
        run = RunDir(tmp_path / "run")

        def begin(disk_s: float, grace_s: float):
            (tmp_path / "sitecustomize.py").write_text(SLOW_DISK)
            path = f"{tmp_path}{os.pathsep}{ROOT}"
            slow = {"DISK_S": str(disk_s), "TUNEWRIGHT_GRACE_S": str(grace_s)}
            node = start(parameters, run, PYTHONPATH=path, **slow)
            end = time.monotonic() + 240
            while not (run.checkpoint(4) / "__1_0.distcp").exists():
                assert time.monotonic() < end
                assert node.poll() is None, node.communicate()[0]
                time.sleep(0.05)
            return run, node

        return begin

    @pytest.mark.parametrize("everywhere", [False, True], ids=["the command", "all processes"])
    def test_the_save_ends(self, everywhere, saving, two_workers, parameters, tools):
        run, node = saving(3, 10)
        below = psutil.Process(node.pid).children(recursive=True)
        for process in [*below, node] if everywhere else [node]:
            process.send_signal(signal.SIGTERM)
        said, _ = node.communicate(timeout=20)
        path = run.checkpoint(4)
        expected = f"told to end (SIGTERM): starting again goes on from step 4 ({path})"
        assert said.count("told to end") == said.count(expected) == 1, said
        assert node.returncode == 128 + signal.SIGTERM
        await_none(below)
        assert rundir.sealed_checkpoints(run.checkpoints) == [(4, path)]

        again = start(parameters, run, TUNEWRIGHT_ATTEMPT="2")
        said, _ = again.communicate(timeout=500)
        assert again.returncode == 0, said
        straight, resumed = (tools.read_events(path) for path in
                             (two_workers[0].events(1), run.events(2)))  # fmt: skip
        assert tools.losses(resumed) == tools.losses(straight)[4:]

    def test_a_save_that_does_not_fit_is_given_up(self, saving):
        run, node = saving(60, 3)
        below = psutil.Process(node.pid).children(recursive=True)
        begun = time.monotonic()
        node.terminate()
        said, _ = node.communicate(timeout=20)
        assert time.monotonic() - begun < 5
        assert said.count("told to end (SIGTERM): the save of step 4 does not fit 2 s") == 1, said
        await_none(below)
        assert rundir.sealed_checkpoints(run.checkpoints) == []


def test_near_the_deadline_it_saves_and_ends(hyperparameters, tmp_path):
    failures, run = tmp_path / "failures", RunDir(tmp_path / "run")
    failures.mkdir()
    limit = {"TUNEWRIGHT_DEADLINE": str(time.time() + 40), "TUNEWRIGHT_GRACE_S": "2"}
    long = hyperparameters(max_steps=100_000, save_steps=100_000, eval_steps=100_000)
    node = start(long, run, TUNEWRIGHT_FAILURE_DIR=str(failures), **limit)
    said, _ = node.communicate(timeout=100)
    assert node.returncode == 1, said
    told = [json.loads(path.read_text()) for path in failures.iterdir()]
    assert {failure["class"] for failure in told} == {"timeout"}
    ((step, path),) = rundir.sealed_checkpoints(run.checkpoints)
    assert f"stopped after step {step}, " in said
    assert f"{path} is sealed, and starting again goes on from it" in said


def test_without_ray_the_way_out_is_named(parameters, tmp_path):
    """As in an environment that has everything but Ray."""
    (tmp_path / "ray.py").write_text("raise ImportError('no ray here')")
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    node = start(parameters, RunDir(tmp_path / "run"), PYTHONPATH=path)
    said, _ = node.communicate(timeout=60)
    assert node.returncode == 2
    assert "this recipe needs Ray; pip install" in said


def await_none(processes: list[psutil.Process], within_s: float = 20) -> None:
    """Until they are gone; whether the system has reaped them is not ours."""

    def runs(process: psutil.Process) -> bool:
        try:
            return process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    end = time.monotonic() + within_s
    while left := [process for process in processes if runs(process)]:
        assert time.monotonic() < end, left
        time.sleep(0.05)


def await_event(path: Path, kind: str, node: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 240
    while time.monotonic() < end and node.poll() is None:
        if path.exists() and f'"event": "{kind}"' in path.read_text():
            return
        time.sleep(0.01)
    node.kill()
    pytest.fail(f"no {kind} event: {node.communicate()[0]}")
