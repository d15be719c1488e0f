from __future__ import annotations

import time

import pytest

from tunewright.training.tracking import Machine, Tracking


@pytest.fixture
def opened(local_store, monkeypatch, request):
    """A client of a store on this disk, and a run in it that MLFLOW_RUN_ID names."""
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{local_store}/mlflow.db")
    client = MlflowClient()
    run = client.create_run(client.create_experiment(request.node.name)).info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", run)
    return client, run


@pytest.fixture
def one_try(monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")


def test_metrics_and_settings_reach_the_run_which_stays_open(opened):
    client, run = opened
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


def test_the_machine_is_told_beside_the_training(opened):
    """Under MLflow's own names, at the training's step, once more at the end."""
    client, run = opened
    tracking = Tracking.of(main=True)
    tracking.start({})
    tracking.log(5, train_loss=1.0)
    end = time.monotonic() + 60
    while "train_loss" not in client.get_run(run).data.metrics and time.monotonic() < end:
        time.sleep(0.1)
    tracking.end(within_s=60)
    found = client.get_run(run).data.metrics
    assert 0 < found["system/system_memory_usage_percentage"] <= 100
    assert {"system/cpu_utilization_percentage", "system/disk_usage_percentage"} <= found.keys()
    (last,) = client.get_metric_history(run, "system/cpu_utilization_percentage")
    assert last.step == 5


def test_a_sample_is_taken_when_it_is_due(monkeypatch):
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "3600")
    machine = Machine()
    assert list(machine.sampled(False)) == [], "what was used since when?"
    assert list(machine.sampled(False)) == []
    assert dict(machine.sampled(True))["system/system_memory_usage_megabytes"] > 0
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "1e-9")
    machine = Machine()
    assert list(machine.sampled(False)) == []
    assert len(list(machine.sampled(False))) == len(dict(machine.sampled(False))) > 5


def test_system_metrics_can_be_turned_off_as_in_mlflow(monkeypatch):
    monkeypatch.setenv("MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", "false")
    machine = Machine()
    assert [list(machine.sampled(last)) for last in (False, True)] == [[], []]


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
