"""The process that owns a run in MLflow: every ending sets the right status."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tunewright.conftest import environment
from tunewright import mlflow_store
from tunewright.mlflow_store import default_artifact_location, tracking_uri
from tunewright.tracking import serve

OPEN = {"experiment": "tracked", "run_name": "tiny-0a1b2c3d", "run_id": None}


class Tracking:
    """The other side of the pipe."""

    def __init__(self, **variables: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tunewright.tracking"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **variables},
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def end(self) -> str:
        """Close the pipe and return what was said on stderr."""
        rest, said = self.process.communicate(timeout=60)
        assert rest == ""
        return said


@pytest.fixture
def tracking(local_store: Path) -> Iterator[Tracking]:
    started = Tracking()
    yield started
    for pipe in (started.process.stdin, started.process.stdout, started.process.stderr):
        assert pipe
        pipe.close()
    started.process.kill()
    started.process.wait()


def stored(run_id: str) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=tracking_uri()).get_run(run_id)


def test_a_run_is_opened_logged_to_and_finished(tracking, local_store, tmp_path):
    (tmp_path / "receipt.json").write_text("{}")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "node-0.log").write_text("hello")
    opened = tracking.ask(open=OPEN | {"tags": {"a": "b"}, "params": {"lr": 2e-5}})
    assert opened["tracking_uri"] == f"sqlite:///{local_store}/mlflow.db"
    assert opened["artifact_uri"].startswith(f"file://{local_store}/mlartifacts/tracked/")
    artifacts = [str(tmp_path / "receipt.json"), str(tmp_path / "logs")]
    many = {f"p{i}": i for i in range(150)}
    assert tracking.ask(log={"metrics": {"loss": 2.5}, "step": 3, "params": many}) == {"ok": True}
    ending = {"artifacts": artifacts, "tags": {"z": 1}, "metrics": {"total_s": 9}}
    assert tracking.ask(finish="FINISHED", **ending) == {"ok": True}
    assert tracking.process.wait(30) == 0
    run = stored(opened["run_id"])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "tiny-0a1b2c3d")
    assert run.info.end_time >= run.info.start_time
    assert run.data.metrics == {"loss": 2.5, "total_s": 9}
    assert run.data.params == {"lr": "2e-05", **{k: str(v) for k, v in many.items()}}
    assert (run.data.tags["a"], run.data.tags["z"]) == ("b", "1")
    below = Path(run.info.artifact_uri.removeprefix("file://"))
    assert (below / "receipt.json").read_text() == "{}"
    assert (below / "logs" / "node-0.log").read_text() == "hello"


def test_without_a_last_word_the_run_is_killed(tracking):
    opened = tracking.ask(open=OPEN)
    assert stored(opened["run_id"]).info.status == "RUNNING"
    assert tracking.process.stderr
    # The starter is gone altogether: nobody reads stderr either.
    tracking.process.stderr.close()
    assert tracking.process.stdin
    tracking.process.stdin.close()
    assert tracking.process.wait(30) == 0
    assert stored(opened["run_id"]).info.status == "KILLED"


def test_signals_of_a_terminal_do_not_end_it_and_a_run_is_continued(tracking):
    opened = tracking.ask(open=OPEN | {"params": {"lr": 1}})
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        tracking.process.send_signal(number)
    assert tracking.ask(log={"metrics": {"loss": 1.0}}) == {"ok": True}
    assert tracking.ask(finish="FAILED") == {"ok": True}
    tracking.process.wait(30)
    assert stored(opened["run_id"]).info.status == "FAILED"
    again = Tracking()
    continued = again.ask(open=OPEN | {"run_id": opened["run_id"], "params": {"lr": 2, "new": 3}})
    assert continued == opened
    assert stored(opened["run_id"]).info.status == "RUNNING"
    assert again.ask(finish="KILLED") == {"ok": True}
    assert "MLflow keeps lr=1, now 2" in again.end()
    run = stored(opened["run_id"])
    assert (run.info.status, run.data.params) == ("KILLED", {"lr": "1", "new": "3"})


def test_a_run_that_no_longer_exists_is_made_anew(tracking):
    opened = tracking.ask(open=OPEN | {"run_id": "0" * 32})
    assert opened["run_id"] != "0" * 32
    assert stored(opened["run_id"]).info.status == "RUNNING"


def test_what_is_wrong_is_replied_and_the_run_goes_on(tracking):
    assert "the first request must be open" in tracking.ask(log={})["error"]
    opened = tracking.ask(open=OPEN)
    assert "has one of" not in opened
    assert "one of open, log, finish" in tracking.ask(shut={})["error"]
    assert "malformed" in tracking.ask(log={"metrics": {"loss": "high"}})["error"]
    missing = tracking.ask(log={"artifacts": ["/does/not/exist"]})
    assert missing == {"error": "the artifact /does/not/exist does not exist", "class": "user"}
    assert "ends as one of" in tracking.ask(finish="DONE")["error"]
    # A status counts even when what comes with it does not.
    assert "does not exist" in tracking.ask(finish="FAILED", artifacts=["/gone"])["error"]
    assert tracking.process.wait(30) == 0
    assert stored(opened["run_id"]).info.status == "FAILED"


def test_through_a_server(server_store, tmp_path):
    (tmp_path / "receipt.json").write_text("{}")
    tracking = Tracking()
    opened = tracking.ask(open=OPEN | {"params": {"lr": 1}})
    assert opened["tracking_uri"] == server_store
    assert tracking.ask(finish="FINISHED", artifacts=[str(tmp_path / "receipt.json")])["ok"]
    tracking.end()
    assert stored(opened["run_id"]).info.status == "FINISHED"


def test_two_first_starts_at_once_share_one_new_database(tmp_path):
    variables = environment(TUNEWRIGHT_HOME=str(tmp_path))
    both = [Tracking(**variables), Tracking(**variables)]
    for tracking in both:
        assert tracking.process.stdin
        tracking.process.stdin.write(json.dumps({"open": OPEN}) + '\n{"finish": "FINISHED"}\n')
        tracking.process.stdin.flush()
    replies = [tracking.process.communicate(timeout=90)[0].splitlines() for tracking in both]
    opened = [json.loads(lines[0]) for lines in replies]
    assert len({reply["run_id"] for reply in opened}) == 2
    assert len({reply["experiment_id"] for reply in opened}) == 1
    assert [json.loads(lines[1]) for lines in replies] == [{"ok": True}] * 2


def test_a_server_that_does_not_answer_is_said_in_one_sentence(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@127.0.0.1:9")
    monkeypatch.setattr(mlflow_store, "WAIT_S", 0.6)
    replies, started = io.StringIO(), time.monotonic()
    serve([json.dumps({"open": OPEN})], replies)
    assert 0.5 < time.monotonic() - started < 10
    reply = json.loads(replies.getvalue())
    assert reply["class"] == "infrastructure"
    assert "the MLflow server at http://127.0.0.1:9 does not answer" in reply["error"]
    assert "secret" not in reply["error"]


def test_a_database_that_cannot_be_made_is_the_users(local_store, tmp_path):
    (tmp_path / "file").write_text("")
    tracking = Tracking(MLFLOW_TRACKING_URI=f"sqlite:///{tmp_path}/file/mlflow.db")
    reply = tracking.ask(open=OPEN)
    assert reply["class"] == "user"
    assert "the MLflow database" in reply["error"]
    tracking.end()


def test_a_named_store_decides_where_artifacts_go(monkeypatch, tmp_path):
    monkeypatch.setenv("TUNEWRIGHT_HOME", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert default_artifact_location("a/b") == f"file://{tmp_path}/mlartifacts/a%252Fb"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "databricks")
    assert default_artifact_location("a/b") is None
    assert tracking_uri() == "databricks"
