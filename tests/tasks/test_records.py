"""Runs of this machine, found without a server."""

from __future__ import annotations

import os

import pytest

from tasks import records
from tunewright.contract import processes
from tunewright.contract.failures import UserError
from tunewright.contract.lock import Lock
from tunewright.contract.rundir import RunDir, write_json


@pytest.fixture
def run(home, run_dir) -> RunDir:
    """A run that this machine knows, with two attempts of two nodes."""
    write_json(home / "runs" / run_dir.name, {"folder": str(run_dir.root), "flow_run_id": None})
    for attempt in (1, 2):
        write_json(run_dir.attempt_state(attempt) / "started.json", {"started": 5.0})
        run_dir.attempt_logs(attempt).mkdir(parents=True)
        for node in (0, 1, 10, 2):
            run_dir.node_log(attempt, node).write_text(f"attempt {attempt} node {node}\n")
    run_dir.step_log("pretokenize").write_text("tokens\n")
    run_dir.step_log("register").write_text("version\n")
    return run_dir


@pytest.fixture
def lock(run):
    held = Lock(run.lock)
    assert held.take()
    yield held
    held.release()


def test_no_runs(home):
    assert records.known() == []
    with pytest.raises(UserError, match=r"no run 'tiny-x' on this machine; nothing is known"):
        records.receipt("tiny-x")


def test_runs_are_listed_newest_first(run, home):
    write_json(home / "runs" / "tiny-older", {"folder": str(home)})
    write_json(home / "runs" / "tiny-deleted", {"folder": "/nowhere"})
    os.utime(home / "runs" / "tiny-older", (1, 1))
    (home / "runs" / ".draft").touch()
    (home / "runs" / "folder").mkdir()
    assert records.known() == [run.name, "tiny-older"]


@pytest.mark.parametrize("name", ["", ".", "..", "/", "../runs", "n" * 400, "tiny-0a1b2c3"])
def test_an_unknown_run_is_told_with_the_nearest(run, name):
    for ask in (records.receipt, records.run_dir, records.request_cancel):
        with pytest.raises(UserError, match="there is no run"):
            ask(name)


def test_a_finished_run_s_receipt(run):
    write_json(run.receipt, {"run": run.name, "state": "Completed"})
    assert records.receipt(run.name) == {"run": run.name, "state": "Completed"}


def test_a_run_without_receipt_is_told_from_its_folder(run):
    found = records.receipt(run.name)
    assert (found["run"], found["state"], found["folder"]) == (run.name, "Crashed", str(run.root))
    assert [attempt["attempt"] for attempt in found["attempts"]] == [1, 2]


def test_a_run_that_goes_on(run, lock):
    assert records.receipt(run.name)["state"] == "Running"
    write_json(run.receipt, {"run": run.name, "state": "Failed"})
    assert records.receipt(run.name)["state"] == "Running", "the receipt is of an earlier start"


def test_a_run_whose_folder_is_gone(home):
    write_json(home / "runs" / "tiny-x", {"folder": "/nowhere/tiny-x"})
    with pytest.raises(UserError, match="there is no run 'tiny-x'"):
        records.receipt("tiny-x")


def test_logs_in_the_order_of_the_route(run):
    paths = records.log_files(run.name, None, None)
    assert [path.stem for path in paths] == [
        "pretokenize", "node-0", "node-1", "node-2", "node-10", "register",
    ]  # fmt: skip
    assert {path.parent.name for path in paths[1:-1]} == {"attempt-2"}


def test_logs_of_one_node_and_attempt(run):
    (path,) = records.log_files(run.name, 10, 1)
    assert path == run.node_log(1, 10)
    with pytest.raises(UserError, match="has no log of node 7"):
        records.log_files(run.name, 7, None)
    for attempt in (0, 3):
        with pytest.raises(UserError, match=rf"has no attempt {attempt}; it has \[1, 2\]"):
            records.log_files(run.name, None, attempt)


def test_following_a_run_that_ended_shows_all_and_ends(run):
    run.node_log(2, 0).write_text("whole\nlast without line end")
    found = [line for path, line in records.follow(run.name, 0, None)]
    assert found == ["whole", "last without line end"]


def test_following_a_run_that_goes_on(run, lock):
    lines = records.follow(run.name, 0, 2)
    assert next(lines)[1] == "attempt 2 node 0"
    with run.node_log(2, 0).open("a") as log:
        log.write("more\n")
    assert next(lines)[1] == "more"
    lock.release()
    assert list(lines) == []


def test_cancelling_leaves_a_request_for_who_holds_the_run(run):
    assert not records.request_cancel(run.name)
    lock = Lock(run.lock)
    assert lock.take()
    assert records.request_cancel(run.name)
    assert run.cancel_request.exists()
    lock.release()
    assert processes.is_alive(processes.identity())
