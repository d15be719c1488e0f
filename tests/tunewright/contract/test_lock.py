"""The lock of a run, among real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tunewright.contract import lock as lock_module
from tunewright.contract import processes
from tunewright.contract.lock import HEARTBEAT_S, STALE_S, Lock, holder, is_waiting_for_guardians

TAKE = """
import sys, time
from pathlib import Path
from tunewright.contract.lock import Lock
print(Lock(Path(sys.argv[1])).take(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "lock.json"


@pytest.fixture
def start():
    """Start processes that try to take a lock and then wait; all are ended."""
    started: list[subprocess.Popen] = []

    def begin(*words: str) -> subprocess.Popen:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen([sys.executable, "-c", *words], **pipes))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def written(path: Path, **facts) -> None:
    """A lock as another flow wrote it."""
    mine = {
        "host": lock_module.socket.gethostname(),
        "boot_id": processes.boot_id(),
        "flow": processes.identity(),
        "guardians": [],
        "heartbeat": 1000.0,
        "released": False,
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**mine, **facts}))


def gone() -> dict:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    who = processes.identity(process.pid)
    process.communicate(b"\n")
    return who


def test_one_of_eight_gets_it(path, start):
    takers = [start(TAKE, str(path)) for _ in range(8)]
    answers = [taker.stdout.readline().strip() for taker in takers]
    assert sorted(answers) == ["False"] * 7 + ["True"]
    winner = takers[answers.index("True")]
    assert holder(path) == f"the flow with pid {winner.pid}"
    assert not Lock(path).take()
    winner.kill()
    winner.wait()
    assert holder(path) is None
    lock = Lock(path)
    assert lock.take()
    lock.release()


def test_a_dead_flow_s_guardians_hold_it(path, start):
    guardian = start("input()")
    written(path, flow=gone(), guardians=[gone(), processes.identity(guardian.pid)])
    assert holder(path) == f"guardian pid {guardian.pid} of a flow that is gone"
    assert is_waiting_for_guardians(path)
    assert not Lock(path).take()
    guardian.kill()
    guardian.wait()
    assert holder(path) is None
    assert not is_waiting_for_guardians(path)


def test_a_reused_pid_is_not_the_holder(path):
    written(path, flow={**processes.identity(), "started": 5.0})
    assert holder(path) is None


def test_a_zombie_is_not_the_holder(path, start):
    zombie = start("pass")
    written(path, flow=processes.identity(zombie.pid))
    until = time.monotonic() + 10
    while holder(path) and time.monotonic() < until:
        time.sleep(0.02)
    assert zombie.returncode is None, "nobody has waited for it"
    assert holder(path) is None


def test_another_start_of_the_machine_frees_it(path):
    written(path, boot_id="another")
    assert holder(path) is None


@pytest.mark.parametrize(("age", "held"), [(0, True), (STALE_S - 1, True), (STALE_S, False)])
def test_another_host_holds_it_by_its_heartbeat(path, age, held):
    written(path, host="elsewhere", boot_id="another", flow=gone(), heartbeat=1000.0)
    who = holder(path, clock=lambda: 1000.0 + age)
    assert (who is not None) == held
    assert not held or who == f"a flow on host elsewhere, last heard {age:.0f} s ago"
    assert not is_waiting_for_guardians(path)
    assert Lock(path, clock=lambda: 1000.0 + age).take() != held


@pytest.mark.parametrize("content", ["", "{", "{}", "[]", '{"host": "x"}', "null"])
def test_what_is_no_lock_holds_nothing(path, content):
    path.parent.mkdir()
    path.write_text(content)
    assert holder(path) is None
    lock = Lock(path)
    assert lock.take()
    lock.release()


def test_release_keeps_the_record_and_frees_the_run(path):
    lock = Lock(path)
    assert lock.take()
    lock.guarded_by([os.getpid()])
    assert json.loads(path.read_text())["guardians"] == [processes.identity()]
    lock.release()
    assert json.loads(path.read_text())["released"] is True
    assert holder(path) is None


def test_a_beat_on_its_way_does_not_undo_the_release(path):
    lock = Lock(path)
    assert lock.take()
    lock.release()
    lock._write()
    assert holder(path) is None


def test_a_guardian_that_is_gone_already_is_left_out(path):
    lock = Lock(path)
    assert lock.take()
    lock.guarded_by([gone()["pid"], os.getpid()])
    assert [who["pid"] for who in json.loads(path.read_text())["guardians"]] == [os.getpid()]
    lock.release()


def test_the_heart_beats_and_stops_when_the_lock_is_another_s(path, monkeypatch):
    assert HEARTBEAT_S * 3 < STALE_S
    monkeypatch.setattr(lock_module, "HEARTBEAT_S", 0.01)
    now = iter(range(1000, 100_000))
    lock = Lock(path, clock=lambda: float(next(now)))
    assert lock.take()
    until = time.monotonic() + 10
    while json.loads(path.read_text())["heartbeat"] < 1010 and time.monotonic() < until:
        time.sleep(0.01)
    assert json.loads(path.read_text())["heartbeat"] >= 1010
    # Asleep for more than a minute, and a flow on another host went on with the run.
    until = time.monotonic() + 10
    while lock._heart.is_alive() and time.monotonic() < until:
        written(path, host="elsewhere", heartbeat=5.0)
        time.sleep(0.05)
    taken = path.read_text()
    assert json.loads(taken)["host"] == "elsewhere"
    lock.guarded_by([os.getpid()])
    lock.release()
    assert path.read_text() == taken
