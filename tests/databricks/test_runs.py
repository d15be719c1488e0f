"""The stand-in: states, endings, time-outs, retries of a run."""

from __future__ import annotations

import time

import pytest
from databricks.sdk import WorkspaceClient
from databricks.sdk.errors import (
    InvalidParameterValue,
)

from tests.databricks.submitting import get, launch, lines, submit, until, words
from tests.databricks_server import DatabricksServer


def test_a_run_that_goes_well_is_told_whole(
    server: DatabricksServer, client: WorkspaceClient
) -> None:
    run_id = launch(client, "true", max_retries=0)
    server.await_runs()
    run = server.runs[0]
    attempt, page = run.attempts[0], f"https://stand-in.invalid/?o=1#job/0/run/{run_id}"
    ends = {
        "state": {"life_cycle_state": "TERMINATED", "result_state": "SUCCESS", "state_message": "",
                  "user_cancelled_or_timedout": False},
        "status": {"state": "TERMINATED", "termination_details":
                   {"code": "SUCCESS", "type": "SUCCESS", "message": ""}},
    }  # fmt: skip
    task = {
        "run_id": attempt.run_id, "task_key": "tiny", "attempt_number": 0, "run_page_url": page,
        "ai_runtime_task": run.task["ai_runtime_task"], "max_retries": 0,
        "start_time": attempt.started, "end_time": attempt.ended, **ends,
    }  # fmt: skip
    assert get(client, run_id) == {
        "run_id": run_id, "job_id": 0, "run_name": "tiny", "run_type": "SUBMIT_RUN",
        "creator_user_name": "ann@example.com", "start_time": run.started, "end_time": run.ended,
        "run_page_url": page, "tasks": [task], **ends,
    }  # fmt: skip
    output = client.jobs.get_run_output(attempt.run_id)
    assert output.error is None
    assert output.ai_runtime_task_output is not None
    assert output.ai_runtime_task_output.mlflow_run_id == attempt.mlflow_run_id
    with pytest.raises(InvalidParameterValue):
        client.jobs.get_run_output(run_id)


@pytest.mark.parametrize(
    ("ending", "life", "result", "code"),
    [
        ("SUCCESS", "TERMINATED", "SUCCESS", "SUCCESS"),
        ("FAILED", "TERMINATED", "FAILED", "RUN_EXECUTION_ERROR"),
        ("TIMEDOUT", "TERMINATED", "TIMEDOUT", "RUN_EXECUTION_ERROR"),
        ("CANCELED", "TERMINATED", "CANCELED", "USER_CANCELED"),
        ("INTERNAL_ERROR", "INTERNAL_ERROR", "FAILED", "INTERNAL_ERROR"),
        ("SKIPPED", "SKIPPED", None, "SKIPPED"),
        ("MAXIMUM_CONCURRENT_RUNS_REACHED", "SKIPPED", "MAXIMUM_CONCURRENT_RUNS_REACHED",
         "MAX_CONCURRENT_RUNS_EXCEEDED"),
        ("UPSTREAM_FAILED", "TERMINATED", "UPSTREAM_FAILED", "UPSTREAM_FAILED"),
    ],
)  # fmt: skip
def test_a_run_ends_as_planned(
    server: DatabricksServer, client: WorkspaceClient, ending: str, life: str, result: str | None,
    code: str,
) -> None:  # fmt: skip
    server.plan(ending=ending, nodes_run=False)
    first, second = launch(client, "true"), launch(client, "true")
    server.await_runs()
    for part in (get(client, first), get(client, first)["tasks"][0]):
        assert words(part) == (life, result, "TERMINATED")
        assert part["status"]["termination_details"]["code"] == code
    assert words(get(client, second)) == ("TERMINATED", "SUCCESS", "TERMINATED")


@pytest.mark.parametrize("abruptly", [False, True])
def test_nodes_run_until_the_plan_ends_them(
    server: DatabricksServer, client: WorkspaceClient, abruptly: bool
) -> None:
    server.plan(ending="TIMEDOUT", after_line="begun", abruptly=abruptly)
    run_id = launch(client, "trap 'echo told; exit 3' TERM\necho begun\nsleep 60 & wait")
    server.await_runs()
    assert lines(server) == (["begun"] if abruptly else ["begun", "told"])
    assert words(get(client, run_id)["tasks"][0])[1] == "TIMEDOUT"


def test_nodes_are_ended_after_a_time(server: DatabricksServer, client: WorkspaceClient) -> None:
    server.plan(after_s=0.5)
    run_id = launch(client, "sleep 60")
    server.await_runs()
    task = get(client, run_id)["tasks"][0]
    assert (words(task)[0], task["state"]["state_message"]) == (
        "INTERNAL_ERROR", "The node was lost",
    )  # fmt: skip


def test_the_task_may_tell_more_than_its_run(
    server: DatabricksServer, client: WorkspaceClient
) -> None:
    server.plan(nodes_run=False, ending="TIMEDOUT", parent="INTERNAL_ERROR")
    run_id = launch(client, "true")
    server.await_runs()
    run = get(client, run_id)
    assert words(run) == ("INTERNAL_ERROR", "FAILED", "TERMINATED")
    assert words(run["tasks"][0]) == ("TERMINATED", "TIMEDOUT", "TERMINATED")


@pytest.mark.parametrize("failed_as", ["INTERNAL_ERROR", "FAILED"])
def test_a_failing_node_ends_the_others(
    server: DatabricksServer, client: WorkspaceClient, failed_as: str
) -> None:
    server.rules.failed_as, server.rules.grace_s = failed_as, 1
    run_id = launch(client, '[ "$NODE_RANK" = 0 ] || exit 7\nsleep 60', nodes=2)
    server.await_runs()
    task = get(client, run_id)["tasks"][0]
    assert words(task)[:2] == (
        ("INTERNAL_ERROR", "FAILED") if failed_as == "INTERNAL_ERROR" else ("TERMINATED", "FAILED")
    )
    assert task["state"]["state_message"] == "node 1 exited with code 7"
    assert client.jobs.get_run_output(task["run_id"]).error == "node 1 exited with code 7"
    assert [node.exit_code for node in server.runs[0].nodes] == [-15, 7]


def test_the_waits_before_a_run(server: DatabricksServer, client: WorkspaceClient) -> None:
    server.plan(queue_s=0.6, capacity_s=0.6, start_s=0.6)
    run_id = launch(client, "sleep 0.6")
    seen: list[tuple[tuple[str, str | None, str], ...]] = []
    while not seen or seen[-1][0][0] != "TERMINATED":
        run = get(client, run_id)
        both = words(run), words(run["tasks"][0])
        if not seen or seen[-1] != both:
            seen.append(both)
        time.sleep(0.02)
    running, pending = ("RUNNING", None, "RUNNING"), ("PENDING", None, "PENDING")
    # TERMINATING is there for a moment only.
    assert [pair for pair in seen if "TERMINATING" not in (pair[0][0], pair[1][0])][:4] == [
        (("QUEUED", None, "QUEUED"),) * 2, (running, pending), (pending, pending),
        (running, running),
    ]  # fmt: skip


def test_unknown_words_for_a_wait(server: DatabricksServer, client: WorkspaceClient) -> None:
    server.plan(queue_s=30, waiting_as="REVIEWING")
    run_id = launch(client, "true")
    until(lambda: words(get(client, run_id)["tasks"][0]) == ("REVIEWING", None, "REVIEWING"))
    client.jobs.cancel_run(run_id)
    server.await_runs()
    assert words(get(client, run_id)) == ("TERMINATED", "CANCELED", "TERMINATED")


def test_cancelling_is_not_done_at_once(server: DatabricksServer, client: WorkspaceClient) -> None:
    run_id = launch(client, "trap 'sleep 0.5; exit 9' TERM\necho on\nsleep 60 & wait")
    until(lambda: server.runs[0].nodes and lines(server) == ["on"])
    client.jobs.cancel_run(run_id)
    until(lambda: words(get(client, run_id)) == ("TERMINATING", None, "TERMINATING"))
    server.await_runs()
    task = get(client, run_id)["tasks"][0]
    assert words(task) == ("TERMINATED", "CANCELED", "TERMINATED")
    assert task["state"]["user_cancelled_or_timedout"] is True
    assert server.runs[0].nodes[0].exit_code == 9
    client.jobs.cancel_run(run_id)
    assert words(get(client, run_id)) == ("TERMINATED", "CANCELED", "TERMINATED")


def test_a_task_time_out_is_of_one_attempt(
    server: DatabricksServer, client: WorkspaceClient
) -> None:
    server.rules.grace_s = 0
    run_id = launch(client, "sleep 60", timeout_seconds=1, max_retries=1, retry_on_timeout=True)
    server.await_runs()
    tasks = get(client, run_id)["tasks"]
    assert [(task["attempt_number"], words(task)[1]) for task in tasks] == [
        (0, "TIMEDOUT"), (1, "TIMEDOUT"),
    ]  # fmt: skip
    assert tasks[1]["start_time"] - tasks[0]["start_time"] >= 1000
    assert len({attempt.mlflow_run_id for attempt in server.runs[0].attempts}) == 2


def test_a_run_time_out_is_of_all_attempts(
    server: DatabricksServer, client: WorkspaceClient
) -> None:
    server.plan(capacity_s=60)
    work = {"experiment": "x", "deployments": [{"command_path": "/no", "compute": {
        "accelerator_type": "GPU_1xA10", "accelerator_count": 1}}]}  # fmt: skip
    task = {"task_key": "x", "ai_runtime_task": work, "max_retries": 3, "retry_on_timeout": True}
    run_id = submit(client, {"tasks": [task], "timeout_seconds": 1})
    server.await_runs()
    assert [words(task)[1] for task in get(client, run_id)["tasks"]] == ["TIMEDOUT"]


@pytest.mark.parametrize(("retries", "attempts"), [(0, 1), (2, 3)])
def test_jobs_retries_what_failed(
    server: DatabricksServer, client: WorkspaceClient, retries: int, attempts: int
) -> None:
    run_id = launch(client, "exit 1", max_retries=retries)
    server.await_runs()
    assert len(get(client, run_id)["tasks"]) == attempts


def test_no_retry_after_a_time_out_unless_asked(
    server: DatabricksServer, client: WorkspaceClient
) -> None:
    server.plan(ending="TIMEDOUT", nodes_run=False)
    run_id = launch(client, "true", max_retries=2)
    server.await_runs()
    assert len(get(client, run_id)["tasks"]) == 1
