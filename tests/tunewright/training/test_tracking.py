from __future__ import annotations

import time

import pytest

from tunewright.training.tracking import Tracking


@pytest.fixture
def one_try(monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")


def test_metrics_and_settings_reach_the_run_which_stays_open(local_store, monkeypatch):
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{local_store}/mlflow.db")
    client = MlflowClient()
    run = client.create_run(client.create_experiment("of the training room")).info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", run)

    tracking = Tracking.of(main=True)
    tracking.start({"learning_rate": 1e-4, "init": "random"})
    for step in range(1, 700):
        tracking.log(step, train_loss=1 / step, eval_loss=None)
    tracking.end(within_s=60)

    history = client.get_metric_history(run, "train_loss")
    assert [(m.step, m.value) for m in history] == [(s, 1 / s) for s in range(1, 700)]
    found = client.get_run(run)
    assert found.data.params == {"learning_rate": "0.0001", "init": "random"}
    assert "eval_loss" not in found.data.metrics
    assert found.info.status == "RUNNING"


def test_a_store_that_is_away_costs_one_warning_and_no_time(monkeypatch, one_try, capsys):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    tracking = Tracking("some-run")
    tracking.start({"a": 1})
    begun = time.monotonic()
    tracking.log(1, train_loss=1.0)
    assert time.monotonic() - begun < 0.1
    tracking.end(within_s=60)
    assert not tracking._thread.is_alive()
    assert capsys.readouterr().err.count("training goes on") == 1


def test_other_ranks_and_runs_without_mlflow_send_nothing(monkeypatch):
    monkeypatch.setenv("MLFLOW_RUN_ID", "some-run")
    other = Tracking.of(main=False)
    monkeypatch.delenv("MLFLOW_RUN_ID")
    for tracking in (other, Tracking.of(main=True)):
        tracking.start({"a": 1})
        tracking.log(1, train_loss=1.0)
        tracking.end(within_s=1)
        assert not tracking._thread.is_alive()
