"""The local target: what nodes see, how attempts end, and that nothing is left of them."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tasks.targets import local
from tasks.targets.job import Job
from tasks.targets.local import Placement
from tunewright.contract.failures import UserError
from tunewright.contract.rundir import read_json
from tunewright.contract.workload import Workload

PRINT_ENV = f"{sys.executable} -c 'import json, os; print(json.dumps(dict(os.environ)))'"


def workload(total: int = 1, kind: str = "GPU_1xH100", **more) -> Workload:
    compute = {"num_accelerators": total, "accelerator_type": kind}
    return Workload.load({"experiment_name": "tiny", "command": "true", "compute": compute, **more})


# What a node sees


def test_the_environment_of_the_second_node_of_two(run_dir, monkeypatch):
    """The contract compared whole: parent's own, then the node's, and no more than that."""
    for name in list(os.environ):
        monkeypatch.delenv(name)
    parent = {
        "HOME": "/root", "PATH": "/usr/bin", "MLFLOW_TRACKING_TOKEN": "m", "OTHER": "kept",
        "PREFECT_API_URL": "x", "DATABRICKS_HOST": "x", "HF_TOKEN": "x", "AN_API_KEY": "x",
        "AWS_SECRET_ACCESS_KEY": "x", "DB_PASSWORD": "x", "RANK": "7", "LOCAL_RANK": "7",
        "LOCAL_ADDR": "x", "HYPERPARAMETERS_PATH": "/old", "CODE_SOURCE_PATH": "/old",
        "NODE_RANK": "9", "OMP_NUM_THREADS": "3", "TORCHELASTIC_RUN_ID": "x", "GROUP_RANK": "1",
        "TUNEWRIGHT_HOME": "~/in the home", "TUNEWRIGHT_DEADLINE": "1", "TUNEWRIGHT_GRACE_S": "1",
    }  # fmt: skip
    for name, value in parent.items():
        monkeypatch.setenv(name, value)
    job = Job(
        run=run_dir,
        attempt=3,
        command="torchrun train.py",
        nodes=2,
        procs_per_node=2,
        env_variables={"HF_HOME": "/tmp/hf", "NCCL_SOCKET_IFNAME": "lo"},
        code=Path("/code/main"),
        mlflow={"MLFLOW_RUN_ID": "r1", "MLFLOW_TRACKING_URI": "sqlite:///x"},
    )
    node = local.node_of(job, 1, 29500, Placement(2, 2, ("4", "5", "6", "7")))
    mark = node.env["TUNEWRIGHT_NODE_MARK"]
    assert node.env == {
        "HOME": "/root",
        "PATH": f"{Path(sys.executable).parent}:/usr/bin",
        "PYTHONUNBUFFERED": "1",
        "TUNEWRIGHT_HOME": "/root/in the home",
        "MLFLOW_TRACKING_TOKEN": "m",
        "OTHER": "kept",
        "OMP_NUM_THREADS": "3",
        "CUDA_VISIBLE_DEVICES": "6,7",
        "HF_HOME": "/tmp/hf",
        "NCCL_SOCKET_IFNAME": "lo",
        "MLFLOW_RUN_ID": "r1",
        "MLFLOW_TRACKING_URI": "sqlite:///x",
        "NUM_NODES": "2",
        "NODE_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TUNEWRIGHT_RUN_DIR": str(run_dir.root),
        "TUNEWRIGHT_ATTEMPT": "3",
        "TUNEWRIGHT_GRACE_S": "10",
        "CODE_SOURCE_PATH": "/code/main",
        "HYPERPARAMETERS_PATH": str(run_dir.hyperparameters),
        "TUNEWRIGHT_NODE_MARK": mark,
    }
    assert mark.startswith(f"{run_dir.root}#1#{os.getpid()}#")
    assert node.argv == ["bash", "-c", "set -euo pipefail\ntorchrun train.py"]
    assert (node.log, node.exit) == (run_dir.node_log(3, 1), run_dir.node_exit(3, 1))


def test_what_the_process_really_sees(run_command, run_dir, said, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "undeclared")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "kept")
    monkeypatch.setenv("RANK", "5")
    ending = run_command(PRINT_ENV, {"A_TOKEN": "a-declared-value"}, env_variables={"MINE": "é $x"})
    assert ending.well
    seen = json.loads(said.lines[-1])
    assert seen["A_TOKEN"] == "********"
    assert seen["MINE"] == "é $x"
    assert seen["MLFLOW_EXPERIMENT_NAME"] == "kept"
    assert not {"RANK", "LOCAL_RANK", "SOME_TOKEN", "HYPERPARAMETERS_PATH"} & set(seen)
    assert not [name for name in seen if name.startswith(("PREFECT_", "DATABRICKS_"))]
    assert not Path(seen["TUNEWRIGHT_FAILURE_DIR"]).exists()


def test_a_command_is_told_its_deadline_and_its_grace(run_command, said, monkeypatch):
    monkeypatch.setenv("TUNEWRIGHT_DEADLINE", "of an outer job")
    show = "echo ${TUNEWRIGHT_DEADLINE:-none} $TUNEWRIGHT_GRACE_S"
    assert run_command(show).well
    assert said.lines[-1] == "none 0.5"
    before = time.time()
    assert run_command(show, deadline_s=100.0).well
    told = float(said.lines[-1].split()[0])
    assert before + 100 <= told + 0.001
    assert told <= time.time() + 100


def test_a_command_that_saved_near_its_deadline_has_timed_out(run_command):
    facts = json.dumps({"class": "timeout", "rank": 0, "message": "saved in time"})
    leave = f"echo '{facts}' > $TUNEWRIGHT_FAILURE_DIR/rank-0.json"
    ending = run_command(f"{leave}; exit 1", deadline_s=60.0)
    assert (ending.failure["class"], ending.stopped_by) == ("timeout", None)
    assert ending.failure["message"] == "saved in time"
    late = run_command(f"{leave}; sleep 60", deadline_s=1.0)
    assert (late.failure["class"], late.stopped_by) == ("timeout", "timeout")
    assert late.failure["message"] == "saved in time"


def test_cpus_are_shared_out_unless_the_user_says(run_dir, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    job = Job(run_dir, 1, "true", nodes=2, procs_per_node=2)
    env = local.node_of(job, 0, 1, Placement(2, 2, ())).env
    assert (env["OMP_NUM_THREADS"], env["CUDA_VISIBLE_DEVICES"]) == ("2", "")


@pytest.mark.parametrize(
    ("asked", "given"),
    [("lo", "lo"), ("=lo", "=lo"), ("^docker", "^docker"), ("l", "l"), ("nope0", "lo"),
     ("=l", "lo"), ("nope0,lo", "nope0,lo")],
)  # fmt: skip
def test_an_interface_that_is_missing_is_replaced_and_said(asked, given, run_dir):
    variables = {"NCCL_SOCKET_IFNAME": asked}
    job = Job(run_dir, 1, "true", nodes=1, procs_per_node=1, env_variables=variables)
    assert local.node_of(job, 0, 1, Placement(1, 1, ())).env["NCCL_SOCKET_IFNAME"] == given
    notes = local.notes(variables)
    assert [asked in note for note in notes] == ([] if asked == given else [True])


def test_the_gpus_of_a_node_are_the_target_s_to_say(run_dir):
    variables = {"CUDA_VISIBLE_DEVICES": "0,1"}
    job = Job(run_dir, 1, "true", nodes=2, procs_per_node=1, env_variables=variables)
    placement = Placement(2, 1, ("4", "5"))
    seen = [local.node_of(job, n, 1, placement).env["CUDA_VISIBLE_DEVICES"] for n in (0, 1)]
    assert seen == ["4", "5"]
    assert "CUDA_VISIBLE_DEVICES" in local.notes(variables)[0]


def test_a_secret_is_in_no_command_line_and_no_guardian(run_command, token, alive, run_dir, until):
    value = "value-of-the-secret-123"
    seen: list[bytes] = []

    def look() -> bool:
        parent = [child for child in psutil.Process().children() if "node" in str(child.cmdline())]
        until(lambda: alive())
        for process in parent:
            seen.append(Path(f"/proc/{process.pid}/environ").read_bytes())
        for process in psutil.process_iter():
            try:
                seen.append(Path(f"/proc/{process.pid}/cmdline").read_bytes())
            except OSError:
                continue
        return True

    os.environ["THE_SECRET"] = value
    try:
        run_command(f"sleep 60 # {token}\ntrue {token}", {"THE_SECRET": value}, cancelled=look)
    finally:
        del os.environ["THE_SECRET"]
    assert len(seen) > 2
    assert not [content for content in seen if value.encode() in content]


# Where it runs


def test_nodes_get_gpus_of_their_own(run_dir, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1, 2,3")
    placed = local.place(workload(4, "GPU_2xH100"), simulate=False, procs_per_node=None)
    job = Job(run_dir, 1, "true", nodes=placed.nodes, procs_per_node=placed.procs_per_node)
    seen = [local.node_of(job, rank, 1, placed).env["CUDA_VISIBLE_DEVICES"] for rank in (0, 1)]
    assert seen == ["0,1", "2,3"]


@pytest.mark.parametrize("visible", ["", "-1", "-1,0", "0,-1,1"])
def test_too_few_gpus_are_refused_with_both_numbers(visible, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(UserError) as error:
        local.place(workload(16, "GPU_8xH100"), simulate=False, procs_per_node=None)
    here = 1 if visible.startswith("0") else 0
    assert "asks for 16 accelerators (GPU_8xH100)" in str(error.value)
    assert f"has {here}; add --simulate" in str(error.value)


@pytest.mark.parametrize(
    ("gpus", "procs", "expected"),
    [
        ("", None, (2, 2, ())),
        ("", 3, (2, 3, ())),
        ("0,1,2", None, (2, 1, ("0", "1"))),
        ("0,1,2,3", 2, (2, 2, ("0", "1", "2", "3"))),
        ("0,1,2", 2, (2, 2, ())),
        ("0", None, (2, 2, ())),
        (",".join(map(str, range(20))), None, (2, 8, tuple(map(str, range(16))))),
    ],
)
def test_simulation_keeps_the_nodes_and_shrinks_the_processes(gpus, procs, expected, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    placed = local.place(workload(16, "GPU_8xH100"), simulate=True, procs_per_node=procs)
    assert (placed.nodes, placed.procs_per_node, placed.gpus) == expected
    assert placed.note.startswith("simulating 2 x 8 GPU_8xH100 by 2 x")


@pytest.mark.parametrize(("simulate", "procs"), [(False, 2), (True, 0), (True, -1)])
def test_a_number_of_processes_that_makes_no_sense(simulate, procs, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(UserError, match="--procs-per-node"):
        local.place(workload(), simulate=simulate, procs_per_node=procs)


# How it ends


def test_bash_stops_at_the_first_error_and_at_unset_names(run_command, said):
    for command in ("false\necho on", "false | cat\necho on", 'echo "$NOT_SET_ANYWHERE"\necho on'):
        ending = run_command(command)
        assert ending.failure["class"] == "unknown"
        assert "on" not in said.lines


TORCHRUN = """
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_00:00:00
  rank      : 3 (local_rank: 1)
  exitcode  : {code} (pid: 77)
"""
TOLD = (
    "import tunewright.contract.failures as f\n"
    "with f.reported():\n    raise f.{kind}('said by the program')"
)


@pytest.mark.parametrize(
    ("command", "failure_class", "rank", "words"),
    [
        ("exit 3", "unknown", None, "exited with 3"),
        ("exit 137", "infrastructure", None, "SIGKILL"),
        ("kill -9 $$", "infrastructure", None, "SIGKILL"),
        ("kill -TERM $$", "unknown", None, "exited with 143"),
        (f"echo '{TORCHRUN.format(code=-9)}'; exit 1", "infrastructure", 3, "SIGKILL"),
        (f"echo '{TORCHRUN.format(code=1)}'; exit 1", "unknown", 3, "exited with 1"),
        ("echo torch.OutOfMemoryError: CUDA out of memory.; exit 1", "oom", None, "memory"),
        ("echo CUDA out of memory; seq 60; exit 1", "oom", None, "memory"),
        (f'{sys.executable} -c "{TOLD.format(kind="UserError")}"', "user", 0, "said by the"),
        (f'{sys.executable} -c "{TOLD.format(kind="DataError")}"', "data", 0, "said by the"),
        (f'RANK=5 {sys.executable} -c "{TOLD.format(kind="NonFinite")}" || exit 137',
         "nonfinite", 5, "said by the program"),
        (f'RANK=x {sys.executable} -c "{TOLD.format(kind="OutOfMemory")}"', "oom", 0, "said by"),
        (f"{sys.executable} -c 'raise MemoryError'", "unknown", None, "exited with 1"),
    ],
)  # fmt: skip
def test_the_class_of_an_ending(command, failure_class, rank, words, run_command):
    failure = run_command(command).failure
    assert (failure["class"], failure["rank"], failure["node"]) == (failure_class, rank, 0)
    assert words in failure["message"]


def test_a_failure_file_of_a_run_that_ended_well_is_no_failure(run_command):
    assert run_command(f'{sys.executable} -c "{TOLD.format(kind="DataError")}" || true').well


def test_a_known_class_is_believed_before_an_unknown_one(run_command):
    programs = [
        f'RANK=0 {sys.executable} -c "{TOLD.format(kind="TunewrightError")}" || true',
        f'RANK=1 {sys.executable} -c "{TOLD.format(kind="NonFinite")}"',
    ]
    failure = run_command("\n".join(programs)).failure
    assert (failure["class"], failure["rank"]) == ("nonfinite", 1)


def test_the_message_and_the_log_are_scrubbed(run_command, run_dir):
    program = TOLD.format(kind="UserError").replace("'said by the program'", "os.environ['T_T']")
    ending = run_command(
        f'echo "$T_T"; {sys.executable} -c "import os; {program}"'.replace("; import", "\nimport"),
        {"T_T": "sesame-open-1"},
    )
    everything = "".join(p.read_text() for p in run_dir.root.rglob("*") if p.is_file())
    assert "sesame" not in everything + str(ending)
    assert "********" in everything


def test_one_node_failing_ends_the_other_after_its_grace(run_command, alive, token):
    began = time.monotonic()
    command = f'[ "$NODE_RANK" = 1 ] && exit 5\nsleep 60 # {token}\ntrue {token}'
    ending = run_command(command, nodes=2)
    assert time.monotonic() - began < 15
    assert (ending.failure["node"], ending.failure["message"]) == (1, "the command exited with 5")
    assert ending.nodes[0]["stopped_by"] == "peer"
    assert ending.stopped_by is None
    assert not alive()


def test_a_node_that_ends_well_lets_the_other_go_on(run_command, said):
    assert run_command('[ "$NODE_RANK" = 1 ] || sleep 1.5; echo done $NODE_RANK', nodes=2).well
    assert sorted(said) == [(0, "done 0"), (1, "done 1")]


# That nothing is left


def test_nothing_is_left_after_success(run_command, stubborn, alive):
    assert run_command(f"{stubborn}; exit 0").well
    assert not alive()


def test_nothing_is_left_after_failure(run_command, stubborn, alive):
    assert not run_command(f"{stubborn}; exit 1").well
    assert not alive()


def test_nothing_is_left_after_the_deadline(run_command, stubborn, alive, said):
    began = time.monotonic()
    ending = run_command(f"trap '' TERM\n{stubborn}\nwait; sleep 60", deadline_s=2.0)
    assert (ending.failure["class"], ending.stopped_by) == ("timeout", "timeout")
    assert "begun" in said.lines
    assert not alive()
    assert time.monotonic() - began < 15


def test_nothing_is_left_after_cancelling(run_command, stubborn, alive, said):
    ending = run_command(f"{stubborn}\nsleep 60", cancelled=lambda: "begun" in said.lines)
    assert (ending.failure, ending.stopped_by) == (None, "cancel")
    assert not alive()


def test_cancelled_before_the_guardian_has_read_what_to_do(run_command):
    began = time.monotonic()
    assert run_command("sleep 60", cancelled=lambda: True).stopped_by == "cancel"
    assert time.monotonic() - began < 10


def test_an_interrupt_ends_everything_before_it_goes_on(run_command, stubborn, alive, run_dir):
    def interrupt(node: int, line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_command(f"{stubborn}\nsleep 60", say=interrupt)
    assert not alive()
    assert read_json(run_dir.node_exit(1, 0))["stopped_by"] == "interrupted"


def test_an_interrupt_at_the_very_start_is_not_lost(run_command):
    def fail(pids: list[int]) -> None:
        raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_command("sleep 60", started=fail)
    assert time.monotonic() - began < 10


def test_output_after_sigterm_is_kept(run_command, said):
    command = "trap 'echo saved; exit 0' TERM\necho begun\nsleep 30 & wait"
    run_command(command, cancelled=lambda: "begun" in said.lines)
    assert said.lines[-1] == "saved"


PARENT = """
import sys
from pathlib import Path
from tasks.targets import local
from tasks.targets.job import Job
from tunewright.contract.rundir import RunDir
job = Job(RunDir(Path({root!r})), 1, {command!r}, nodes=2, procs_per_node=1, has_parameters=False)
local.run(job, {{}}, print, local.Placement(2, 1, ()), grace_s=0.5)
"""


@pytest.fixture
def parent(tmp_path, run_dir, stubborn, until):
    """A process that runs two stubborn nodes, in a session of its own."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT.format(root=str(run_dir.root), command=f"{stubborn}\nsleep 60"))
    root = Path(local.__file__).parents[2]
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, "PYTHONPATH": str(root)},
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    log = run_dir.node_log(1, 1)
    until(lambda: log.exists() and "begun" in log.read_text())
    yield process
    process.kill()
    process.wait()


def test_nothing_is_left_when_the_parent_is_killed(parent, alive, until, run_dir):
    assert len(alive()) >= 4
    parent.kill()
    until(lambda: not alive())
    until(lambda: read_json(run_dir.node_exit(1, 0)))
    assert read_json(run_dir.node_exit(1, 0))["failure"]["class"] == "preemption"


def test_a_guardian_that_is_killed_is_infrastructure_and_nothing_is_left(
    run_command, stubborn, alive, said
):
    pids: list[int] = []
    began = time.monotonic()

    def kill_it() -> bool:
        # What it ran is remembered every second.
        if "begun" in said.lines and time.monotonic() > began + 3:
            os.kill(pids[0], signal.SIGKILL)
        return False

    ending = run_command(f"{stubborn}\nsleep 60", cancelled=kill_it, started=pids.extend)
    assert ending.failure["class"] == "infrastructure"
    assert "guardian" in ending.failure["message"]
    assert not alive()


def test_the_command_may_be_interrupted_by_its_own_sigint(run_command):
    """Servers in a script are ended by SIGINT: nobody above may have ignored it for them."""
    wait = "import signal, time; time.sleep(20)"
    script = (
        f"import subprocess, sys, signal; p = subprocess.Popen([sys.executable, '-c', '{wait}'])"
    )
    script += "; p.send_signal(signal.SIGINT); sys.exit(p.wait(10) == 0)"
    assert run_command(f'{sys.executable} -c "{script}" 2>/dev/null').well


# Output


def test_a_line_is_seen_before_the_command_ends(run_command, tmp_path):
    heard = tmp_path / "heard"
    command = f"echo first\nuntil [ -e {heard} ]; do sleep 0.05; done"
    ending = run_command(command, say=lambda node, line: heard.touch(), deadline_s=20.0)
    assert ending.well


def test_a_line_without_end_is_kept(run_command, said, run_dir):
    run_command("printf 'a\\nb'")
    assert said.lines == ["a", "b"]
    assert run_dir.node_log(1, 0).read_text() == "a\nb"


def test_much_output_neither_blocks_nor_eats_memory(run_command, run_dir):
    size, seen = 50_000_000, [0]

    def say(node: int, line: str) -> None:
        seen[0] += len(line) + 1

    line = "x" * 99
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.monotonic()
    ending = run_command(f"yes {line} | head -c {size} || true", {"T": "a-secret-value"}, say=say)
    assert ending.well
    assert run_dir.node_log(1, 0).stat().st_size == seen[0] == size
    assert time.monotonic() - began < 60
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 150_000, f"{grown / 1024:.0f} MiB more"


def test_output_that_is_no_text_is_shown_somehow(run_command, said):
    assert run_command(r"printf '\xff\xfe ok\n'").well
    assert said.lines[0].endswith(" ok")


def test_a_log_that_cannot_be_written_does_not_end_the_command(run_command, run_dir, tmp_path):
    run_dir.node_log(1, 0).mkdir(parents=True)
    assert run_command(f"seq 100000; echo x > {tmp_path}/ran").well
    assert (tmp_path / "ran").exists()


def test_a_full_disk_does_not_end_the_command(run_command, run_dir, tmp_path):
    logs = run_dir.root / "logs"
    logs.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(logs)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs is not allowed here")
    try:
        assert run_command(f"seq 100000; echo x > {tmp_path}/ran").well
    finally:
        subprocess.run(["umount", str(logs)], check=True)
    assert (tmp_path / "ran").exists()


def test_a_command_that_cannot_be_started_is_told_in_one_sentence(run_command, run_dir):
    run_dir.root.mkdir()
    (run_dir.root / "work").write_text("a file where the command's folder should be")
    failure = run_command("true").failure
    assert failure["class"] == "infrastructure"
    assert failure["message"].startswith("the command could not be started: ")


def test_a_module_in_the_working_directory_does_not_stand_in_for_ours(
    run_command, tmp_path, monkeypatch
):
    (tmp_path / "select.py").write_text("raise SystemExit('not this one')")
    (tmp_path / "yaml.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    assert run_command("true").well


def test_when_one_guardian_cannot_be_started_none_stays(run_command, monkeypatch):
    started = []
    real = subprocess.Popen

    def popen(*args, **kwargs):
        if started:
            raise OSError("no more processes")
        started.append(real(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(OSError, match="no more"):
        run_command("sleep 60", nodes=2)
    assert started[0].poll() is not None


def test_the_exit_file_tells_all(run_command, run_dir):
    run_command("seq 30; exit 4")
    facts = read_json(run_dir.node_exit(1, 0))
    assert (facts["exit_code"], facts["stopped_by"], facts["survivors"]) == (4, None, [])
    assert facts["tail"].splitlines() == [str(n) for n in range(11, 31)]
    assert facts["started"] < facts["ended"]
