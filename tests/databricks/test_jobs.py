"""The stand-in: one run a token, refusals, listings, logs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from databricks.sdk import WorkspaceClient
from databricks.sdk.errors import (
    BadRequest,
    InvalidParameterValue,
    ResourceDoesNotExist,
)

from tests.databricks.nodes import MARK
from tests.databricks.submitting import launch, submit, until
from tests.databricks_server import DatabricksServer


def test_a_token_starts_one_run(server: DatabricksServer, client: WorkspaceClient) -> None:
    server.plan(ending="FAILED", nodes_run=False)
    first = launch(client, "true", idempotency_token="a")
    server.await_runs()
    assert launch(client, "true", idempotency_token="a") == first
    assert launch(client, "true", idempotency_token="b") != first
    assert len(server.runs) == 2
    server.await_runs()
    client.jobs.delete_run(first)
    with pytest.raises(InvalidParameterValue, match="deleted"):
        launch(client, "true", idempotency_token="a")


def test_a_lost_answer_has_acted(server: DatabricksServer, client: WorkspaceClient) -> None:
    server.fault("POST */jobs/runs/submit", "lost")
    run_id = launch(client, "true", idempotency_token="once")
    server.await_runs()
    assert [run.run_id for run in server.runs] == [run_id]
    assert [call.status for call in server.calls("*/submit")] == [None, 200]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"idempotency_token": "x" * 65}, "longer than 64"),
        ({"tasks": []}, "exactly one task"),
        ({"environments": [{"environment_key": "default", "spec": {
            "environment_version": "5", "base_environment": "b"}}]}, "cannot both be set"),
        ({"task.environment_key": "absent"}, "not defined in environments"),
        ({"task.task_key": "a b"}, "task_key"),
        ({"compute.accelerator_type": "gpu_8xh100"}, "is not one of"),
        ({"compute.accelerator_type": "GPU_8xH100"}, "not a multiple of 8"),
    ],
)  # fmt: skip
def test_what_submit_refuses(
    server: DatabricksServer, client: WorkspaceClient, change: dict[str, Any], message: str
) -> None:
    compute: dict[str, Any] = {"accelerator_type": "GPU_1xA10", "accelerator_count": 1}
    task: dict[str, Any] = {"task_key": "x", "ai_runtime_task": {
        "experiment": "x", "deployments": [{"command_path": "/", "compute": compute}]}}  # fmt: skip
    body: dict[str, Any] = {"tasks": [task]}
    for name, value in change.items():
        place, _, key = name.rpartition(".")
        {"": body, "task": task, "compute": compute}[place][key] = value
    with pytest.raises(InvalidParameterValue, match=message):
        submit(client, body)
    assert server.runs == []


def test_runs_are_listed_in_pages(server: DatabricksServer, client: WorkspaceClient) -> None:
    server.plan(times=5, nodes_run=False)
    made = [launch(client, "true") for _ in range(5)]
    server.await_runs()
    server.plan(queue_s=60)
    active = launch(client, "true")
    assert [run.run_id for run in client.jobs.list_runs(limit=2)] == [active, *reversed(made)]
    assert len(server.calls("*/jobs/runs/list")) == 3
    assert [run.run_id for run in client.jobs.list_runs(active_only=True)] == [active]
    done = client.jobs.list_runs(completed_only=True, expand_tasks=True)
    assert [len(run.tasks or []) for run in done] == [1] * 5
    with pytest.raises(InvalidParameterValue):
        list(client.jobs.list_runs(limit=26))


def test_unknown_runs(client: WorkspaceClient) -> None:
    with pytest.raises(ResourceDoesNotExist):
        client.jobs.get_run(1)
    with pytest.raises(InvalidParameterValue):
        client.jobs.cancel_run(1)
    with pytest.raises(ResourceDoesNotExist):
        client.jobs.get_run_output(1)


def test_a_run_may_be_seen_late(server: DatabricksServer, client: WorkspaceClient) -> None:
    server.rules.visible_after_s = 1.5
    run_id = launch(client, "true")
    with pytest.raises(ResourceDoesNotExist):
        client.jobs.get_run(run_id)
    assert list(client.jobs.list_runs()) == []
    until(lambda: [run.run_id for run in client.jobs.list_runs()] == [run_id])


def test_nothing_is_left_of_a_run(tmp_path: Path) -> None:
    marks: set[str] = set()

    def left() -> list[int]:
        return [p.pid for p in psutil.process_iter() if marks & set(_environment(p))]

    with DatabricksServer(tmp_path, mlflow=False) as server:
        client = WorkspaceClient(host=server.url, token=server.token)
        launch(client, "setsid sleep 300 &\nsleep 300 &\necho on\nwait", nodes=2)
        until(lambda: [len(node.lines) for node in server.runs[0].nodes] == [1, 1])
        marks |= {f"{MARK}={node.mark}" for node in server.runs[0].nodes}
        assert len(left()) == 6
    assert left() == []


def _environment(process: psutil.Process) -> list[str]:
    try:
        return Path(f"/proc/{process.pid}/environ").read_text(errors="replace").split("\0")
    except OSError:
        return []


def live(client: WorkspaceClient, run_id: int, **query: Any) -> list[dict[str, Any]]:
    path, found = f"/api/2.0/ai-training/workflows/by-run-id/{run_id}/logs", []
    while True:
        page = client.api_client.do("GET", path, query=query)
        assert isinstance(page, dict)
        found += page["records"]
        if "next_page_token" not in page:
            return found
        query["page_token"] = page["next_page_token"]


def test_logs_are_live(server: DatabricksServer, client: WorkspaceClient) -> None:
    run_id = launch(client, "echo one\necho two\nsleep 60", nodes=2)
    until(lambda: len(live(client, run_id)) == 4)
    records = live(client, run_id, **{"filter.node_index": 1, "page_size": 1})
    assert [(record["node_index"], record["body"]) for record in records] == [
        (1, "one"),
        (1, "two"),
    ]
    assert len({record["record_id"] for record in live(client, run_id)}) == 4
    assert live(client, run_id, **{"from": int(time.time()) + 100}) == []
    backwards = live(client, run_id, **{"filter.node_index": 0, "ascending": "false"})
    assert [record["body"] for record in backwards] == ["two", "one"]
    server.rules.live_logs = False
    with pytest.raises(BadRequest) as refused:
        live(client, run_id)
    assert refused.value.error_code == "FEATURE_DISABLED"


def test_each_attempt_has_its_log(server: DatabricksServer, client: WorkspaceClient) -> None:
    run_id = launch(client, "echo $MLFLOW_RUN_ID\nexit 1", max_retries=1)
    server.await_runs()
    found = [live(client, run_id, **{"ref.attempt_number": number})[0]["body"] for number in (0, 1)]
    assert found == [attempt.mlflow_run_id for attempt in server.runs[0].attempts]
    assert live(client, run_id)[0]["body"] == found[1]
