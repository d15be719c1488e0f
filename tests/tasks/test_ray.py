"""The Ray target on a real cluster of two Ray nodes: what nodes see, and how attempts end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from tasks.targets import ray_cluster, ray_watch
from tasks.targets.job import Ending, Job
from tasks.targets.ray_cluster import Placement
from tests.clusters import Cluster, can_hide, cluster
from tunewright.contract.failures import UserError
from tunewright.contract.rundir import RunDir, read_json
from tunewright.contract.workload import Workload

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs tunewright[ray]")

NEEDS = "needs Linux mount namespaces"
WAYS = ("gcs", "client")


def workload(total: int = 2, kind: str = "GPU_1xH100", **more: Any) -> Workload:
    compute = {"num_accelerators": total, "accelerator_type": kind}
    return Workload.load({"experiment_name": "tiny", "command": "true", "compute": compute, **more})


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of two nodes with one CPU each; the second sees one folder empty."""
    found = cluster(tmp_path_factory.mktemp("ray"))
    try:
        found.add(hides=can_hide())
        yield found
    finally:
        found.stop()


@pytest.fixture
def attempt(two: Cluster, run_dir: RunDir, said: Any) -> Callable[..., Ending]:
    """Run a bash command as the two nodes of one attempt, to its end."""

    def run(command: str, secrets: dict[str, str] | None = None, **more: Any) -> Ending:
        address = getattr(two, more.pop("way", "gcs"))
        own = {key: more.pop(key) for key in [*more] if key in Job.__dataclass_fields__}
        own = {"nodes": 2, "procs_per_node": 1, "has_parameters": False, "run": run_dir, **own}
        job = Job(attempt=1, command=command, **own)
        placement = Placement(job.nodes, job.procs_per_node, address, {"CPU": 1})
        more = {"say": said, "grace_s": 1, **more}
        return ray_cluster.run(job, secrets or {}, placement=placement, **more)

    return run


# What fits


def node(gpu: float, cpu: float = 8, address: str = "10.0.0.1") -> dict[str, Any]:
    return {"host": "elsewhere", "address": address, "CPU": cpu, "GPU": gpu}


@pytest.mark.parametrize(
    ("nodes", "procs", "wanted"),
    [
        ([node(8), node(8)], None, (8, {"CPU": 1, "GPU": 8}, "STRICT_SPREAD")),
        ([node(2), node(8), node(4)], None, (4, {"CPU": 1, "GPU": 4}, "STRICT_SPREAD")),
        ([node(2), node(2)], 4, (4, {"CPU": 4}, "STRICT_SPREAD")),
        ([node(0), node(0, 4)], None, (4, {"CPU": 4}, "STRICT_SPREAD")),
        ([node(0, 1), node(0, 1)], 3, (3, {"CPU": 1}, "STRICT_SPREAD")),
        ([node(0, 6)], None, (3, {"CPU": 3}, "SPREAD")),
        ([node(3)], None, (1, {"CPU": 1, "GPU": 1}, "SPREAD")),
    ],
)
def test_a_simulation_uses_what_is_there(nodes, procs, wanted) -> None:
    found = ray_cluster.simulated(workload(16, "GPU_8xH100"), nodes, procs, "a:1")
    assert (found.procs_per_node, found.bundle, found.strategy) == wanted
    assert found.nodes == 2
    assert "simulating 2 x 8 GPU_8xH100" in found.note


def test_too_few_gpus_are_refused_with_both_numbers() -> None:
    asked = workload(16, "GPU_8xH100")
    fits = ray_cluster.whole(asked, [node(8), node(4), node(8)], "a:1")
    assert (fits.procs_per_node, fits.bundle) == (8, {"CPU": 1, "GPU": 8})
    with pytest.raises(UserError) as refusal:
        ray_cluster.whole(asked, [node(8), node(4), node(4)], "a:1")
    for part in ("asks for 16", "16 GPUs on 3 nodes", "at least 8 on 1 of them", "--simulate"):
        assert part in str(refusal.value)
    with pytest.raises(UserError, match="0 CPUs on 1 nodes"):
        ray_cluster.simulated(asked, [node(0, 0)], None, "a:1")


def test_a_cluster_is_asked_what_it_has(two, monkeypatch) -> None:
    for address in (two.gcs, two.client, two.dashboard):
        monkeypatch.setenv("RAY_ADDRESS", address)
        found = ray_cluster.place(workload(), simulate=True, procs_per_node=None)
        assert found.address == address
        assert (found.nodes, found.bundle) == (2, {"CPU": 1})
    with pytest.raises(UserError, match=r"asks for 2 accelerators.*has 0 GPUs on 2 nodes"):
        ray_cluster.place(workload(), simulate=False, procs_per_node=None)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("", "set RAY_ADDRESS to ray://host:10001"),
        ("auto", "RAY_ADDRESS=auto is no address"),
        ("ray://host", "is no address"),
        ("ftp://host:1", "is no address"),
        ("host:port", "is no address"),
        ("ray://127.0.0.1:9", "nothing answers at RAY_ADDRESS=ray://127.0.0.1:9"),
        ("127.0.0.1:9", "nothing answers"),
        ("http://127.0.0.1:9", "nothing answers"),
    ],
)
def test_an_address_that_leads_nowhere_is_one_sentence(address, words, monkeypatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(UserError) as refusal:
        ray_cluster.place(workload(), simulate=True, procs_per_node=None)
    assert words in str(refusal.value)
    assert "Traceback" not in str(refusal.value)


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_a_head_that_does_not_answer_is_not_waited_for(scheme, monkeypatch) -> None:
    """Ray itself goes on trying for many minutes."""
    monkeypatch.setattr(ray_watch, "_LOOK_S", 6)
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        monkeypatch.setenv("RAY_ADDRESS", f"{scheme}127.0.0.1:{mute.getsockname()[1]}")
        with pytest.raises(UserError, match="did not answer in 6 s"):
            ray_cluster.place(workload(), simulate=True, procs_per_node=None)


def test_a_flow_without_ray_is_told_what_to_install(two, tmp_path, monkeypatch) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError('no ray here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("RAY_ADDRESS", two.gcs)
    with pytest.raises(UserError, match=r"no ray here.*pip install 'tunewright\[ray\]'"):
        ray_cluster.place(workload(), simulate=True, procs_per_node=None)


def test_a_store_that_other_machines_do_not_see_is_refused(monkeypatch) -> None:
    remote = [node(8, address="10.9.8.7")]
    here = {**node(8, address="127.0.0.1"), "host": socket.gethostname()}
    for store in ("", "sqlite:////tmp/x.db", "file:///tmp/mlruns", "/tmp/mlruns"):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
        ray_cluster.refuse_local_store([here], "a:1")
        with pytest.raises(
            UserError, match=r"nodes on others \(10\.9\.8\.7\).*MLFLOW_TRACKING_URI"
        ):
            ray_cluster.refuse_local_store([here, *remote], "a:1")
    for store in ("http://mlflow:5000", "databricks", "databricks://profile"):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
        ray_cluster.refuse_local_store(remote, "a:1")


def test_secrets_do_not_go_through_a_ray_job(monkeypatch) -> None:
    """Refused by name before anything is asked: nothing listens at that address."""
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:9")
    asked = workload(secrets={"HF_TOKEN": "a/b", "WANDB": "a/c"})
    with pytest.raises(UserError, match=r"secrets \(HF_TOKEN, WANDB\).*ray://host:10001"):
        ray_cluster.place(asked, simulate=True, procs_per_node=None)


# What a node sees


def test_the_environment_that_a_run_adds_to_a_ray_node(run_dir, monkeypatch) -> None:
    for name in list(os.environ):
        monkeypatch.delenv(name)
    parent = {
        "HOME": "/root", "OTHER": "stays here", "MLFLOW_TRACKING_URI": "old",
        "MLFLOW_TRACKING_TOKEN": "travels as a secret", "MLFLOW_EXPERIMENT_NAME": "e",
    }  # fmt: skip
    for name, value in parent.items():
        monkeypatch.setenv(name, value)
    job = Job(
        run=run_dir,
        attempt=3,
        command="torchrun train.py",
        nodes=2,
        procs_per_node=2,
        env_variables={"HF_HOME": "/tmp/hf", "OMP_WAIT_POLICY": "ACTIVE"},
        mlflow={"MLFLOW_RUN_ID": "r1", "MLFLOW_TRACKING_URI": "http://m"},
    )
    found = ray_cluster.node_of(job, 1, 0, Placement(2, 2, "a:1", {"CPU": 4}))
    mark = found.env["TUNEWRIGHT_NODE_MARK"]
    assert found.env == {
        "MLFLOW_EXPERIMENT_NAME": "e",
        "HF_HOME": "/tmp/hf",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "2",
        "OMP_WAIT_POLICY": "ACTIVE",
        "MLFLOW_RUN_ID": "r1",
        "MLFLOW_TRACKING_URI": "http://m",
        "PYTHONUNBUFFERED": "1",
        "TUNEWRIGHT_HOME": "/root/.tunewright",
        "NUM_NODES": "2",
        "NODE_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "",
        "MASTER_PORT": "",
        "TUNEWRIGHT_RUN_DIR": str(run_dir.root),
        "TUNEWRIGHT_ATTEMPT": "3",
        "TUNEWRIGHT_GRACE_S": "10",
        "HYPERPARAMETERS_PATH": str(run_dir.hyperparameters),
        "TUNEWRIGHT_NODE_MARK": mark,
    }
    assert found.argv == ["bash", "-c", "set -euo pipefail\ntorchrun train.py"]
    assert (found.log, found.exit) == (run_dir.node_log(3, 1), run_dir.node_exit(3, 1))
    on_gpus = ray_cluster.node_of(job, 1, 0, Placement(2, 2, "a:1", {"CPU": 1, "GPU": 2}))
    assert not {"CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"} & set(on_gpus.env)


LOOK = """
import json, os, sys, tunewright
own = sorted(os.listdir(os.environ["CODE_SOURCE_PATH"]))
print(json.dumps({"env": dict(os.environ), "code": own, "us": tunewright.__file__}))
"""


@pytest.mark.parametrize("way", [*WAYS, "dashboard"])
def test_what_the_processes_really_see(way, attempt, run_dir, said, tmp_path, two) -> None:
    """Our code and the snapshot come from Ray; the rest is the node's own and the run's."""
    code = tmp_path / "packed" / "project"
    (code / "venv").mkdir(parents=True)
    (code / ".gitignore").write_text("kept.bin\n")
    (code / "kept.bin").write_text("the snapshot decides, not Ray")
    (code / "look.py").write_text(LOOK)
    secrets = {} if way == "dashboard" else {"A_TOKEN": "a-declared-value"}
    ending = attempt(
        'python "$CODE_SOURCE_PATH/look.py"',
        secrets,
        way=way,
        code=code,
        env_variables={"MINE": "é $x", "NCCL_SOCKET_IFNAME": "nope0"},
        mlflow={"MLFLOW_RUN_ID": "r1"},
    )
    assert ending.well, ending
    seen = [json.loads(line) for _, line in sorted(said) if line.startswith("{")]
    assert [found["env"]["NODE_RANK"] for found in seen] == ["0", "1"]
    first, second = (found["env"] for found in seen)
    for found in seen:
        env = found["env"]
        assert found["code"] == [".gitignore", "kept.bin", "look.py", "venv"]
        assert str(two.folder) in found["us"]
        assert str(two.folder) in env["CODE_SOURCE_PATH"]
        assert Path(env["CODE_SOURCE_PATH"]).name == "project"
        assert env.get("A_TOKEN") == ("********" if secrets else None)
        assert (env["MINE"], env["MLFLOW_RUN_ID"], env["NUM_NODES"]) == ("é $x", "r1", "2")
        assert env["PATH"].startswith(str(two.python.parent))
        assert Path(env["PWD"]) == run_dir.root / "work"
        assert str(Path(env["CODE_SOURCE_PATH"]).parent) not in env["PYTHONPATH"].split(":")
        assert not {"RANK", "NCCL_SOCKET_IFNAME", "PYTHONBREAKPOINT"} & set(env)
    assert first["MASTER_ADDR"] == second["MASTER_ADDR"]
    assert first["MASTER_PORT"] == second["MASTER_PORT"]
    assert any("NCCL_SOCKET_IFNAME=nope0 is no interface" in line for line in said.lines)
    assert [n for n, line in said if line.startswith("on the Ray node")] == [0, 1]


@pytest.mark.parametrize("way", WAYS)
def test_a_secret_is_in_no_file_and_no_command_line(way, attempt, run_dir, two) -> None:
    value = "value-of-the-secret-123"
    seen: list[str] = []

    def look() -> None:
        words = (p.info["cmdline"] or [] for p in psutil.process_iter(["cmdline"]))
        seen.extend(" ".join(line) for line in words)

    looked = once(run_dir.node_log(1, 1).exists, look)
    ending = attempt('sleep 1; echo "$A_TOKEN"', {"A_TOKEN": value}, way=way, cancelled=looked)
    assert ending.well, ending
    assert seen
    assert not [line for line in seen if value in line]
    assert files_with(value, run_dir.root, two.folder) == []
    assert "********" in run_dir.node_log(1, 0).read_text()


def files_with(value: str, *folders: Path) -> list[Path]:
    every = (path for folder in folders for path in folder.rglob("*") if path.is_file())
    return [path for path in every if value.encode() in path.read_bytes()]


def once(when: Callable[[], bool], act: Callable[[], Any]) -> Callable[[], bool]:
    """As `cancelled`: never, but when the time has come it acts, one time."""
    left = [act]

    def asked() -> bool:
        if left and when():
            left.pop()()
        return False

    return asked


@pytest.fixture
def running(run_dir: RunDir, alive: Callable[[], list[Any]]) -> Callable[[], bool]:
    """Whether the stubborn processes of both nodes are there."""
    return lambda: run_dir.node_log(1, 1).exists() and len(alive()) >= 4


def test_torchrun_over_two_ray_nodes(attempt, said) -> None:
    program = (
        "import torch, torch.distributed as d; d.init_process_group('gloo'); t = torch.ones(1);"
        "d.all_reduce(t); print('sum', int(t), 'rank', d.get_rank()); d.destroy_process_group()"
    )
    ending = attempt(
        f'echo "{program}" > rank.py.$NODE_RANK\n'
        'torchrun --nnodes="$NUM_NODES" --node-rank="$NODE_RANK" --nproc-per-node=1 '
        '--master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" rank.py.$NODE_RANK'
    )
    assert ending.well, said.lines
    assert {line for line in said.lines if line.startswith("sum")} == {
        "sum 2 rank 0",
        "sum 2 rank 1",
    }


# How it ends


@pytest.mark.parametrize("way", ["gcs", "dashboard"])
def test_the_node_that_failed_names_the_cause(way, attempt, said) -> None:
    """Its peer gets its grace and is ended; how long it would go on does not matter."""
    ending = attempt('echo on $NODE_RANK; [ "$NODE_RANK" = 0 ] && sleep 300; exit 3', way=way)
    assert ending.failure == {
        "class": "unknown", "node": 1, "rank": None, "message": "the command exited with 3",
    }  # fmt: skip
    assert ending.tail == "on 1"
    assert [outcome["stopped_by"] for outcome in ending.nodes] == ["peer", None]
    assert ending.stopped_by is None


@pytest.mark.parametrize("way", [*WAYS, "dashboard"])
def test_cancel_ends_what_does_not_want_to_end(way, attempt, stubborn, running, alive) -> None:
    """In another attempt's place at once: nothing of the first is left."""
    ending = attempt(f"{stubborn}; sleep 600", way=way, cancelled=running)
    assert (ending.failure, ending.stopped_by) == (None, "cancel")
    assert alive() == []


def test_the_deadline_counts_from_the_start_of_the_command(attempt, stubborn, alive, said) -> None:
    rest = "float(os.environ['TUNEWRIGHT_DEADLINE']) - time.time()"
    told = f'python -c "import os, time; print({rest})"'
    ending = attempt(f"{told}; {stubborn}; sleep 600", deadline_s=4)
    left = [float(line) for line in said.lines if line[:1].isdigit()]
    assert [0 < seconds <= 4 for seconds in left] == [True, True]
    assert (ending.failure["class"], ending.stopped_by) == ("timeout", "timeout")
    seconds = [outcome["ended"] - outcome["started"] for outcome in ending.nodes]
    assert all(4 <= s < 30 for s in seconds), seconds
    assert alive() == []


def test_a_run_waits_for_room_and_can_be_cancelled_there(attempt, tmp_path, said, until) -> None:
    first = RunDir(tmp_path / "first-00000000")
    done = threading.Event()
    thread = threading.Thread(
        target=attempt, args=("sleep 600",), kwargs={"run": first, "cancelled": done.is_set}
    )
    thread.start()
    try:
        until(lambda: first.node_log(1, 0).exists(), 60)
        waiting = lambda: any("waiting for room" in line for line in said.lines)  # noqa: E731
        ending = attempt("echo never", cancelled=waiting)
    finally:
        done.set()
        thread.join()
    assert (ending.stopped_by, ending.failure) == ("cancel", None)
    assert "never" not in said.lines


def test_a_guardian_that_is_killed_leaves_nothing_behind(attempt, stubborn, alive, run_dir) -> None:
    """What left its parent and its environment behind was seen below the guardian before."""

    def settled() -> bool:
        logs = [run_dir.node_log(1, rank) for rank in (0, 1)]
        return all(log.exists() and "settled" in log.read_text() for log in logs)

    def kill() -> None:
        parents = {parent for process in alive() for parent in process.parents()}
        next(p for p in parents if "tunewright.node" in p.cmdline()).kill()

    ending = attempt(f"{stubborn}; sleep 2; echo settled; sleep 600", cancelled=once(settled, kill))
    assert ending.failure["class"] == "infrastructure"
    assert "the guardian was killed" in ending.failure["message"]
    assert alive() == []


@pytest.mark.parametrize("way", WAYS)
def test_a_driver_that_is_killed_leaves_nothing_behind(
    way, attempt, stubborn, running, alive
) -> None:
    pids: list[int] = []
    kill = once(running, lambda: os.kill(pids[0], signal.SIGKILL))
    ending = attempt(f"{stubborn}; sleep 600", way=way, cancelled=kill, started=pids.extend)
    assert ending.failure["class"] == "infrastructure"
    assert alive() == [] or way == "client"
    assert attempt_is_gone(alive)


def attempt_is_gone(alive: Callable[[], list[Any]], limit_s: float = 60) -> bool:
    """Ray's client server waits 30 s for a driver that may come back."""
    deadline = time.monotonic() + limit_s
    while alive() and time.monotonic() < deadline:
        time.sleep(0.2)
    return alive() == []


FLOW = """
import sys
from pathlib import Path
from tasks.targets import ray_cluster
from tasks.targets.job import Job
from tunewright.contract.lock import Lock
from tunewright.contract.rundir import RunDir

run, address, command = RunDir(Path(sys.argv[1])), sys.argv[2], sys.argv[3]
lock = Lock(run.lock)
assert lock.take()
job = Job(run, 1, command, 2, 1, has_parameters=False)
placement = ray_cluster.Placement(2, 1, address, {"CPU": 1})
ray_cluster.run(job, {}, print, placement, started=lock.guarded_by, grace_s=1)
"""


@pytest.mark.parametrize("way", [*WAYS, "dashboard"])
def test_nothing_outlives_a_killed_flow(way, two, run_dir, stubborn, running, alive, until) -> None:
    command = f"{stubborn}; sleep 600"
    flow = subprocess.Popen([sys.executable, "-c", FLOW, run_dir.root, getattr(two, way), command])
    try:
        until(running, 90)
        guardians = [who["pid"] for who in read_json(run_dir.lock)["guardians"]]
    finally:
        flow.kill()
        flow.wait()
    assert all(map(psutil.pid_exists, guardians))
    until(lambda: not any(map(psutil.pid_exists, guardians)), 60)
    assert alive() == []
    told = read_json(run_dir.node_exit(1, 0))
    assert told["failure"]["class"] == "preemption"


def test_a_job_ends_when_flow_and_follower_are_gone(
    two, run_dir, stubborn, running, alive, until
) -> None:
    """As when their machine dies: the beat of the run's lock has stopped."""
    command = f"{stubborn}; sleep 600"
    impatient = FLOW.replace("assert lock", "ray_cluster.SILENCE_S = 20\nassert lock")
    flow = subprocess.Popen([sys.executable, "-c", impatient, run_dir.root, two.dashboard, command])
    try:
        until(running, 90)
        guardians = [who["pid"] for who in read_json(run_dir.lock)["guardians"]]
    finally:
        flow.kill()
        flow.wait()
        for pid in guardians:
            os.kill(pid, signal.SIGKILL)
    until(lambda: not alive(), 90)
    until(run_dir.node_exit(1, 0).exists, 10)


@pytest.mark.skipif(not can_hide(), reason=NEEDS)
def test_a_folder_that_a_node_does_not_share_is_refused(attempt, two) -> None:
    ending = attempt("echo never", run=RunDir(two.hidden / "tiny-0a1b2c3d"))
    assert ending.failure["class"] == "user"
    assert "output_dir is not shared" in ending.failure["message"]
    assert str(two.hidden) in ending.failure["message"]
    assert not RunDir(two.hidden / "tiny-0a1b2c3d").node_log(1, 0).exists()


def test_a_lost_ray_node_is_infrastructure(two, attempt, stubborn, running, alive, run_dir) -> None:
    """Its commands are ended, those of its peer too; a new node takes its place."""
    lost = two.nodes.pop()
    ending = attempt(f"{stubborn}; sleep 600", cancelled=once(running, lost.kill))
    two.add()
    assert ending.failure["class"] == "infrastructure"
    assert (ending.failure["node"], ending.stopped_by) in [(0, None), (1, None)]
    assert "on the Ray node" in ending.failure["message"]
    assert sorted(str(outcome["stopped_by"]) for outcome in ending.nodes) == ["None", "peer"]
    assert alive() == []
    shutil.rmtree(run_dir.root)
    assert attempt("echo again").well
