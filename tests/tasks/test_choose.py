"""Which run a start continues."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tasks import choose as module
from tasks.choose import choose
from tunewright.contract import processes
from tunewright.contract.failures import UserError
from tunewright.contract.rundir import RunDir, read_json, write_json

SAME = {"workload_sha256": "w", "code": {"tunewright": "t", "snapshot": None}}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def begin(root: Path):
    """A run as an earlier start left it, by hand."""

    def make(suffix: str, created: float, state: str | None = None, identity=SAME) -> RunDir:
        run = RunDir(root / f"tiny-{suffix}")
        write_json(run.identity, {"run": run.name, "created": created, **identity})
        if state:
            write_json(run.receipt, {"state": state})
        return run

    return make


@pytest.fixture
def start(root: Path):
    """Start as a flow does; what was chosen is released at the end."""
    chosen = []

    def begin(experiment="tiny", identity=SAME, **more):
        chosen.append(choose(root, experiment, identity, **more))
        return chosen[-1]

    yield begin
    for one in chosen:
        one.lock.release()


def hold(run: RunDir, pid: int, **more) -> None:
    facts = {
        "host": socket.gethostname(),
        "boot_id": processes.boot_id(),
        "flow": processes.identity(pid),
        "guardians": [],
        "heartbeat": 0.0,
        "released": False,
    }
    write_json(run.lock, {**facts, **more})


def test_a_first_start_makes_a_new_run(start, root):
    chosen = start()
    assert chosen.dir.root.parent == root
    assert chosen.dir.name.startswith("tiny-")
    assert len(chosen.dir.name) == len("tiny-") + 8
    assert chosen.note == f"new run {chosen.dir.name}"
    facts = read_json(chosen.dir.identity)
    assert {**facts, **SAME} == facts
    assert read_json(chosen.dir.lock)["flow"]["pid"] == os.getpid()


def test_the_newest_unfinished_run_is_continued(start, begin):
    begin("00000001", 1.0)
    newest = begin("00000000", 9.0)
    begin("00000002", 5.0)
    chosen = start()
    assert chosen.dir == newest
    assert chosen.note == "continuing unfinished run tiny-00000000"


@pytest.mark.parametrize("state", ["Failed", "TimedOut", "Cancelled", "Crashed"])
def test_a_run_that_ended_badly_is_unfinished(start, begin, state):
    assert start().dir != begin("0000000a", 1e12, state)
    begin("0000000b", 2e12, state)
    assert start().dir.name == "tiny-0000000b"


@pytest.mark.parametrize("state", ["Completed", "Skipped"])
def test_a_finished_run_is_not_continued(start, begin, state):
    finished = begin("0000000a", 1e12, state)
    assert start().dir != finished


@pytest.mark.parametrize(
    "identity",
    [
        {**SAME, "workload_sha256": "other"},
        {**SAME, "code": {"tunewright": "other", "snapshot": None}},
        {**SAME, "code": {"tunewright": "t", "snapshot": "s"}},
        {},
    ],
)
def test_another_workload_or_code_is_another_run(start, begin, identity):
    begin("0000000a", 1e12, identity=identity)
    assert start().dir.name != "tiny-0000000a"


def test_another_experiment_s_run_is_left_alone(start, begin):
    begin("0000000a", 1e12)
    assert start("tin").dir.name != "tiny-0000000a"
    assert start("tiny-0000000a").dir.name.startswith("tiny-0000000a-")


def test_a_folder_without_identity_is_no_run(start, root):
    RunDir(root / "tiny-0000000a").state.mkdir(parents=True)
    (root / "tiny-0000000b").mkdir()
    (root / "tiny-0000000b" / "state").touch()
    assert start().note.startswith("new run")


def test_a_run_that_is_held_is_passed_over(start, begin):
    older, newest = begin("0000000a", 1.0), begin("0000000b", 2.0)
    hold(newest, os.getpid())
    assert start().dir == older
    assert start().note.startswith("new run")


def test_a_dead_flow_s_guardians_are_waited_for(start, begin, monkeypatch):
    run = begin("0000000a", 1.0)
    guardian = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    hold(run, guardian.pid, flow={"pid": 1, "started": 0.0},
         guardians=[processes.identity(guardian.pid)])  # fmt: skip
    said: list[str] = []

    def wait(seconds: float) -> None:
        guardian.communicate(b"\n")

    monkeypatch.setattr(module.time, "sleep", wait)
    assert start(say=said.append).dir == run
    assert said == [
        f"waiting for tiny-0000000a: held by guardian pid {guardian.pid} of a flow that is gone"
    ]


def test_a_silent_host_is_waited_for_and_one_that_lives_is_not(start, begin, monkeypatch):
    run = begin("0000000a", 1.0)
    beats: list[float] = []

    def beat(seconds: float) -> None:
        beats.append(seconds)
        write_json(run.lock, {**read_json(run.lock), "heartbeat": 1e12 + len(beats)})

    hold(run, os.getpid(), host="elsewhere", heartbeat=1e12)
    monkeypatch.setattr(module.time, "sleep", beat)
    assert start().dir != run, "it has a heartbeat: somebody is at work there"
    assert len(beats) == 1


def test_fresh_starts_over(start, begin):
    begin("0000000a", 1.0)
    assert start(fresh=True).note.startswith("new run")


def test_resume_names_a_run(start, begin):
    begin("0000000b", 2.0)
    chosen = start(resume=begin("0000000a", 1.0, "Failed").name)
    assert (chosen.dir.name, chosen.note) == ("tiny-0000000a", "resuming run tiny-0000000a")


def test_resume_says_what_has_changed_since(start, begin):
    chosen = start(resume=begin("0000000a", 1.0, "Failed", identity={}).name)
    assert chosen.note.endswith("although since it began these have changed: code, workload_sha256")


@pytest.mark.parametrize("name", ["tiny-ffffffff", "..", "../runs/tiny-0000000a", "/etc", "."])
def test_resume_of_what_is_no_run_names_those_there_are(start, begin, name):
    begin("0000000a", 1.0)
    with pytest.raises(UserError, match=r"there is no run .* known: tiny-0000000a$"):
        start(resume=name)


def test_resume_of_a_finished_or_held_run(start, begin):
    begin("0000000a", 1.0, "Completed")
    with pytest.raises(UserError, match="is Completed; use fresh to start over"):
        start(resume="tiny-0000000a")
    hold(begin("0000000b", 1.0), os.getpid())
    with pytest.raises(UserError, match=f"held by the flow with pid {os.getpid()}; wait for it"):
        start(resume="tiny-0000000b")
    with pytest.raises(UserError, match="keep one"):
        start(resume="tiny-0000000b", fresh=True)


def test_a_folder_that_cannot_be_written(start, root):
    root.write_text("a file in the way")
    with pytest.raises(UserError, match=r"cannot be written: .*; set parameters\.output_dir"):
        start()


def test_eight_starts_at_once_get_eight_runs_or_share_none(root, begin):
    run = begin("0000000a", 1.0)
    code = (
        "import sys; from pathlib import Path; from tasks.choose import choose\n"
        f"print(choose(Path({str(root)!r}), 'tiny', {SAME!r}).dir.name, flush=True)\n"
        "sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    env = {**os.environ, "PYTHONPATH": str(Path(module.__file__).parents[1])}
    started = [subprocess.Popen([sys.executable, "-c", code], env=env, **pipes) for _ in range(8)]
    names = [process.stdout.readline().strip() for process in started]
    for process in started:
        process.communicate()
    assert len(set(names)) == 8
    assert run.name in names


def test_the_code_of_the_package_is_part_of_what_a_run_is(monkeypatch, tmp_path):
    package = tmp_path / "tunewright"
    (package / "sub").mkdir(parents=True)
    (package / "sub" / "a.py").write_text("a = 1")
    monkeypatch.setattr(module.tunewright, "__file__", str(package / "__init__.py"))
    before = module.code_of_tunewright()
    (package / "sub" / "a.pyc").write_text("compiled")
    assert module.code_of_tunewright() == before
    (package / "sub" / "a.py").write_text("a = 2")
    assert module.code_of_tunewright() != before
