"""The Databricks target against the stand-in: what is sent, what nodes see, how attempts end."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tasks.targets.databricks import target as databricks
from tasks.targets.databricks import watch as databricks_watch
from tasks.targets.databricks.api import Denied, Workspace, WorkspaceAway, connect
from tasks.targets.databricks.logs import Logs
from tasks.targets.databricks.states import State, judge, state_of
from tasks.targets.databricks.watch import Watch
from tasks.targets.job import Ending, Job
from tests.databricks_server import DatabricksServer
from tunewright.contract.failures import UserError
from tunewright.contract.mirror import on_volume
from tunewright.contract.rundir import RunDir, read_json, write_json
from tunewright.contract.workload import Workload

pytestmark = pytest.mark.skipif(
    find_spec("databricks") is None, reason="needs tunewright[databricks]"
)

SUBMIT = "POST */jobs/runs/submit"
OUTPUT = "/Volumes/main/default/runs"


def workload(command: str = "true", nodes: int = 2, **more: Any) -> Workload:
    document = {
        "experiment_name": "tiny",
        "command": command,
        "compute": {"num_accelerators": nodes, "accelerator_type": "GPU_1xH100"},
        "parameters": {"output_dir": OUTPUT, "learning_rate": 2e-5},
        **more,
    }
    return Workload.load(document)


@pytest.fixture
def run_dir(home: Path) -> RunDir:
    """A run in the mirror of a volume that is not mounted here."""
    return RunDir(home / OUTPUT.lstrip("/") / "tiny-0a1b2c3d")


Attempt = Callable[..., Ending]


@pytest.fixture
def attempt(server: DatabricksServer, run_dir: RunDir, said: Any) -> Attempt:
    """Run a command as one attempt, to its end."""

    def run(
        command: str = "true", number: int = 1, secrets: dict[str, str] | None = None, **more: Any
    ) -> Ending:
        options = {k: more.pop(k) for k in ("deadline_s", "cancelled") if k in more}
        if "secrets_of" in more:
            more["secrets"] = more.pop("secrets_of")
        found = workload(command, **more)
        job = job_of(found, run_dir, number, options.pop("deadline_s", None))
        placement = databricks.place(found, simulate=False, procs_per_node=None)
        return databricks.run(job, secrets or {}, said, placement, **options)

    return run


def job_of(found: Workload, run_dir: RunDir, number: int = 1, deadline_s: Any = None) -> Job:
    run_dir.hyperparameters.parent.mkdir(parents=True, exist_ok=True)
    run_dir.hyperparameters.write_text("learning_rate: 2.0e-05\n")
    (run_dir.attempt_state(number)).mkdir(parents=True, exist_ok=True)
    return Job(
        run=run_dir,
        attempt=number,
        command=found.command,
        nodes=found.nodes,
        procs_per_node=found.compute.gpus_per_node,
        env_variables=found.env_variables,
        has_parameters=bool(found.parameters),
        deadline_s=deadline_s,
    )


NODE = """
echo "node $NODE_RANK of $NUM_NODES, world $WORLD_SIZE"
echo "run $TUNEWRIGHT_RUN_DIR attempt $TUNEWRIGHT_ATTEMPT said $GREETING"
cat "$HYPERPARAMETERS_PATH"
echo "the secret is $A_TOKEN"
"""


def test_every_node_runs_the_command_and_tells_its_end(
    server: DatabricksServer, attempt: Attempt, run_dir: RunDir, said: Any
) -> None:
    server.state.secrets["scope"] = {"key": "s3cr3t-value"}
    ending = attempt(NODE, secrets_of={"A_TOKEN": "scope/key"}, env_variables={"GREETING": "hello"})
    assert ending.well
    assert [node["exit_code"] for node in ending.nodes] == [0, 0]
    for rank in (0, 1):
        log = run_dir.node_log(1, rank).read_text()
        assert f"node {rank} of 2, world 2" in log
        assert "run /Volumes/main/default/runs/tiny-0a1b2c3d attempt 1 said hello" in log
        assert "learning_rate: 2.0e-05" in log
        assert "the secret is ********" in log
        assert (rank, f"node {rank} of 2, world 2") in said
    assert "s3cr3t" not in str(said)


def test_a_value_known_here_is_masked_in_what_the_platform_says(
    server: DatabricksServer, attempt: Attempt, run_dir: RunDir, said: Any
) -> None:
    """A command that runs without our guardian, as in an image, shows what it likes."""
    attempt("echo 'it is s3cr3t-value'", secrets={"A_TOKEN": "s3cr3t-value"},
            environment={"docker_image": {"url": "org/image:1"}})  # fmt: skip
    assert "it is ********" in said.lines
    assert "s3cr3t" not in run_dir.node_log(1, 0).read_text()


def test_live_logs_show_each_line_once(attempt: Attempt, said: Any) -> None:
    attempt("for i in 1 2 3; do echo line-$i-$NODE_RANK; sleep 0.4; done")
    for rank in (0, 1):
        assert [line for node, line in said if node == rank and "line-" in line] == [
            f"line-{i}-{rank}" for i in (1, 2, 3)
        ]


def test_without_live_logs_they_come_from_the_artifacts_of_the_platforms_run(
    tmp_path: Path, mlflow_server: str, monkeypatch: pytest.MonkeyPatch, run_dir: RunDir, said: Any
) -> None:
    """As an image leaves them, whose command has no guardian of ours to keep its log."""
    with DatabricksServer(tmp_path, mlflow=mlflow_server) as server:
        server.add_volume("main.default.runs")
        server.rules.live_logs = False
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        found = workload(
            'echo "line-$NODE_RANK is s3cr3t-value"', environment={"docker_image": {"url": "a/b:1"}}
        )
        placement = databricks.place(found, simulate=False, procs_per_node=None)
        secrets = {"A_TOKEN": "s3cr3t-value"}
        assert databricks.run(job_of(found, run_dir), secrets, said, placement).well
    for rank in (0, 1):
        assert (rank, f"line-{rank} is ********") in said
        assert f"line-{rank} is ********" in run_dir.node_log(1, rank).read_text()
    assert "s3cr3t" not in str(said)


def test_a_node_says_what_failed(attempt: Attempt) -> None:
    ending = attempt('echo before; [ "$NODE_RANK" = 0 ] || { echo broken; exit 7; }; sleep 20')
    assert ending.failure == {
        "class": "unknown", "node": 1, "rank": None, "message": "the command exited with 7",
    }  # fmt: skip
    assert ending.tail.endswith("broken")
    assert not ending.well


TOLD = """
python -P -c 'from tunewright.contract.failures import write_failure; write_failure("oom", "full")'
exit 1
"""
ENDINGS = {
    "TIMEDOUT": ("timeout", "timeout"),
    "CANCELED": (None, "cancel"),
    "INTERNAL_ERROR": ("infrastructure", None),
    "SKIPPED": ("infrastructure", None),
    "FAILED": ("unknown", None),
    "MAXIMUM_CONCURRENT_RUNS_REACHED": ("infrastructure", None),
}


@pytest.mark.parametrize("result", ENDINGS)
def test_without_a_word_of_the_nodes_the_platforms_counts(
    server: DatabricksServer, attempt: Attempt, result: str
) -> None:
    server.plan(ending=result, nodes_run=False, message="as planned")
    ending = attempt()
    kind, stopped_by = ENDINGS[result]
    assert ((ending.failure or {}).get("class"), ending.stopped_by) == (kind, stopped_by)
    if ending.failure:
        assert result in ending.failure["message"]


@pytest.mark.parametrize("result", ["TIMEDOUT", "CANCELED", "INTERNAL_ERROR", "FAILED"])
def test_a_nodes_own_failure_wins(server: DatabricksServer, attempt: Attempt, result: str) -> None:
    server.plan(ending=result)
    ending = attempt(TOLD, nodes=1)
    assert ending.failure is not None
    assert (ending.failure["class"], ending.failure["message"]) == ("oom", "full")


@pytest.mark.parametrize(
    "code", ["INVALID_RUN_CONFIGURATION", "RESOURCE_NOT_FOUND", "LIBRARY_INSTALLATION_ERROR"]
)
def test_what_is_wrong_with_the_job_itself_is_the_users(
    server: DatabricksServer, attempt: Attempt, code: str
) -> None:
    server.plan(ending="FAILED", nodes_run=False, code=code, message="no such thing")
    ending = attempt()
    assert ending.failure is not None
    assert ending.failure["class"] == "user"
    assert "no such thing" in ending.failure["message"]


def test_a_parent_that_says_failed_does_not_hide_a_timeout(
    server: DatabricksServer, attempt: Attempt
) -> None:
    server.plan(ending="TIMEDOUT", parent="FAILED", nodes_run=False)
    ending = attempt()
    assert ending.failure is not None
    assert ending.failure["class"] == "timeout"


def test_waiting_is_shown_and_unknown_states_are_waiting(
    server: DatabricksServer, attempt: Attempt, said: Any
) -> None:
    server.plan(queue_s=1, capacity_s=1)
    assert attempt().well
    waits = [line for line in said.lines if line.startswith("waiting for job")]
    assert [word for word in ("QUEUED", "PENDING: Waiting for GPU compute") if word in str(waits)]
    server.plan(capacity_s=1, waiting_as="CONTEMPLATING")
    assert attempt(number=2).well
    assert "(CONTEMPLATING" in str(said.lines)


def test_our_deadline_cancels_and_waits_until_the_job_has_ended(
    server: DatabricksServer, attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the platform does not keep its own: one is known to have run on for hours."""
    monkeypatch.setattr(databricks_watch.Watch.__init__, "__kwdefaults__", {
        **(databricks_watch.Watch.__init__.__kwdefaults__ or {}), "margin_s": -58.0,
    })  # fmt: skip
    ending = attempt("sleep 120", deadline_s=60)
    assert ending.failure is not None
    assert ending.failure["class"] == "timeout"
    assert [run.attempts[-1].phase.terminal for run in server.runs] == [True]
    assert len(server.calls("POST */jobs/runs/cancel")) == 1


def test_a_request_to_cancel_ends_the_job(server: DatabricksServer, attempt: Attempt) -> None:
    asked = threading.Event()
    threading.Timer(2.0, asked.set).start()
    ending = attempt("sleep 120", cancelled=asked.is_set)
    assert (ending.failure, ending.stopped_by) == (None, "cancel")
    assert [run.attempts[-1].phase.result for run in server.runs] == ["CANCELED"]


def test_an_interrupted_flow_leaves_no_job_and_knows_how_far_it_got(
    server: DatabricksServer, attempt: Attempt, run_dir: RunDir, said: Any
) -> None:
    began = time.monotonic()
    events = '{"event": "start", "step": 0}\n{"event": "step", "step": 7, "loss": 1.0}\n'

    def interrupt() -> bool:
        if server.runs and server.runs[0].phase.life == "RUNNING":
            for place, text in (
                (run_dir.events(1), events),
                (run_dir.checkpoints / "step-00000005" / "manifest.json", "{}"),
                (run_dir.checkpoints / "step-00000007" / "torn", ""),
            ):
                there = server.on_disk(on_volume(place))
                there.parent.mkdir(parents=True, exist_ok=True)
                there.write_text(text)
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt) as caught:
        attempt("sleep 120", cancelled=interrupt)
    assert time.monotonic() - began < 60
    assert [run.attempts[-1].phase.terminal for run in server.runs] == [True]
    assert caught.value.unsettled is False  # type: ignore[attr-defined]
    assert run_dir.events(1).read_text() == events
    assert caught.value.checkpoint_step == 5  # type: ignore[attr-defined]


def test_who_comes_back_finds_the_job_again(
    server: DatabricksServer, attempt: Attempt, run_dir: RunDir, said: Any
) -> None:
    """The state that a killed flow leaves: the job is known, its end is not."""
    assert attempt("echo once >> $HOME/said; sleep 1").well
    (run_dir.attempt_state(1) / "node-0.json").unlink()
    assert attempt("echo once >> $HOME/said; sleep 1").well
    assert len(server.runs) == len(server.calls(SUBMIT)) == 1
    assert "attempt 1 is job 100000001 already; following it" in said.lines


def test_a_job_whose_number_was_never_heard_is_found_by_its_token(
    server: DatabricksServer, attempt: Attempt, run_dir: RunDir
) -> None:
    assert attempt().well
    run_dir.platform(1, "job").unlink()
    assert attempt().well
    assert len(server.runs) == 1
    assert len(server.calls(SUBMIT)) == 2


FAULTS = ("429", "500", "503", "cut", "lost")
CALLS = {
    "who": "GET */scim/v2/Me",
    "folder": "POST */workspace/mkdirs",
    "upload": "POST */workspace-files/import-file/*",
    "submit": SUBMIT,
    "get": "GET */jobs/runs/get",
    "output": "GET */jobs/runs/get-output",
    "logs": "GET */ai-training/*",
    "node": "GET */fs/files/*",
    "size": "HEAD */fs/files/*",
    "listing": "GET */fs/directories/*",
}


@pytest.mark.parametrize("kind", FAULTS)
def test_faults_at_every_call_still_make_one_job_that_ends_well(
    server: DatabricksServer, attempt: Attempt, kind: str
) -> None:
    for pattern in CALLS.values():
        server.fault(pattern, kind, times=1, seconds=0)
    assert attempt("echo said", nodes=1).well
    assert len(server.runs) == 1


def test_two_hundred_faults_in_random_order_double_and_lose_nothing(
    server: DatabricksServer, run_dir: RunDir, said: Any
) -> None:
    dice = random.Random(7)
    for _ in range(260):
        pattern, kind = dice.choice(list(CALLS.values())), dice.choice(FAULTS)
        server.fault(pattern, kind, times=1, after=dice.randrange(20), seconds=0)
    server.plan(times=25, nodes_run=False)

    def one(index: int) -> Ending:
        found = workload(nodes=1)
        job = job_of(found, RunDir(run_dir.root.parent / f"tiny-{index:08x}"))
        placement = databricks.place(found, simulate=False, procs_per_node=None)
        return databricks.run(job, {}, said, placement)

    with ThreadPoolExecutor(12) as pool:
        assert [ending.well for ending in pool.map(one, range(25))] == [True] * 25
    # The others wait for calls that never came so often.
    assert sum(fault.times < 1 for fault in server._wire.faults) >= 200
    names = [run.payload["run_name"] for run in server.runs]
    assert sorted(names) == [f"tiny-{index:08x} attempt 1" for index in range(25)]


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_while_cancelling_still_ends_the_job(
    server: DatabricksServer, attempt: Attempt, kind: str
) -> None:
    server.fault("POST */jobs/runs/cancel", kind, times=1, seconds=0)
    ending = attempt("sleep 60", cancelled=lambda: bool(server.runs))
    assert ending.stopped_by == "cancel"
    assert [run.attempts[-1].phase.terminal for run in server.runs] == [True]


def test_a_workspace_that_stays_away_leaves_the_attempt_open(
    server: DatabricksServer, attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.targets.databricks.api.PATIENCE_S", 1.0)
    server.fault(SUBMIT, "500", times=100)
    with pytest.raises(WorkspaceAway) as caught:
        attempt()
    assert caught.value.unsettled  # type: ignore[attr-defined]
    server.clear_faults()
    assert attempt().well
    assert len(server.runs) == 1


def test_a_new_job_that_does_not_show_yet_is_waited_for(
    server: DatabricksServer, attempt: Attempt
) -> None:
    server.rules.visible_after_s = 2
    assert attempt().well


def test_a_token_of_another_run_is_refused(
    server: DatabricksServer, attempt: Attempt, run_dir: RunDir, said: Any
) -> None:
    assert attempt(idempotency_token="mine").well
    other = RunDir(run_dir.root.parent / "tiny-ffffffff")
    found = workload(idempotency_token="mine")
    placement = databricks.place(found, simulate=False, procs_per_node=None)
    with pytest.raises(UserError, match=r"idempotency_token: job .* for another run"):
        databricks.run(job_of(found, other), {}, said, placement)
    assert len(server.runs) == 1


def test_what_the_workspace_refuses_is_told_with_its_reason(
    server: DatabricksServer, attempt: Attempt
) -> None:
    server.state.policies.add("00000000-0000-0000-0000-000000000002")
    with pytest.raises(UserError, match=r"Budget policy .* does not exist"):
        attempt(usage_policy_id="00000000-0000-0000-0000-000000000001")


def test_a_policy_is_found_by_its_name(
    server: DatabricksServer, attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.state.policy_names = {"team": "id-of-team", "team a": "id-of-another"}
    account, server.state.account_id = server.state.account_id, None
    with pytest.raises(UserError, match=r"the account is not known here; set DATABRICKS_ACCOUNT"):
        attempt(usage_policy_name="team")
    monkeypatch.setenv("DATABRICKS_ACCOUNT_ID", str(account))
    assert attempt(usage_policy_name="team a").well
    assert server.calls(SUBMIT)[-1].body["budget_policy_id"] == "id-of-another"
    with pytest.raises(UserError, match="the account has no policy 'tea'"):
        databricks.require(workload(usage_policy_name="tea"))
    server.fault("*/budget-policies", "404")
    with pytest.raises(UserError, match=r"cannot be looked up.*give its id as usage_policy_id"):
        databricks.require(workload(usage_policy_name="team"))
    assert len(server.runs) == 1


def test_permissions_are_of_the_job_and_of_its_experiment(
    server: DatabricksServer, attempt: Attempt, said: Any
) -> None:
    permissions = [
        {"level": "CAN_VIEW", "group_name": "team"},
        {"level": "CAN_MANAGE_RUN", "user_name": "ann@example.com"},
    ]
    assert attempt(permissions=permissions).well
    assert server.calls(SUBMIT)[0].body["access_control_list"] == [
        {"permission_level": "CAN_VIEW", "group_name": "team"},
        {"permission_level": "CAN_MANAGE_RUN", "user_name": "ann@example.com"},
    ]
    (asked,) = server.calls("PATCH */permissions/experiments/*")
    assert asked.body == {"access_control_list": [
        {"permission_level": "CAN_READ", "group_name": "team"},
        {"permission_level": "CAN_EDIT", "user_name": "ann@example.com"},
    ]}  # fmt: skip
    server.fault("PATCH */permissions/*", "403")
    assert attempt(number=2, permissions=permissions).well
    assert "permissions: the MLflow experiment keeps its own" in str(said.lines)


def test_another_attempt_has_another_token(server: DatabricksServer, attempt: Attempt) -> None:
    assert attempt().well
    assert attempt(number=2).well
    tokens = [request.body["idempotency_token"] for request in server.calls(SUBMIT)]
    assert len(set(tokens)) == 2
    assert {len(token) for token in tokens} == {64}


def test_the_code_comes_along_once(
    server: DatabricksServer, run_dir: RunDir, said: Any, tmp_path: Path
) -> None:
    folder = run_dir.code / "0123456789ab" / "project"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "said.txt").write_text("from the snapshot")
    found = workload('cat "$CODE_SOURCE_PATH/inner/said.txt"', nodes=1)
    placement = databricks.place(found, simulate=False, procs_per_node=None)
    for number in (1, 2):
        job = replace(job_of(found, run_dir, number), code=folder)
        assert databricks.run(job, {}, said, placement).well
    assert "from the snapshot" in said.lines
    archives = [r for r in server.calls("POST */import-file/*") if "tar.gz" in r.path]
    wheels = [r for r in server.calls("POST */import-file/*") if ".whl" in r.path]
    assert (len(archives), len(wheels)) == (1, 1)


def test_a_hundred_followers_stay_below_the_platforms_limits(
    server: DatabricksServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Submitted as fast as the platform lets them: 35 a second; it answers 100 looks a second."""
    monkeypatch.setattr(databricks_watch, "POLL_S", (2.0, 10.0))
    server.plan(times=100, queue_s=8, nodes_run=False)
    workspace = connect()
    body = databricks.dry_requests(job_of(workload(), RunDir(tmp_path / "r")), workload())[-1]

    def follow(index: int) -> None:
        time.sleep(index / 35)
        sent = {**body["body"], "idempotency_token": str(index)}
        job_run = int(workspace.post("/api/2.2/jobs/runs/submit", sent)["run_id"])
        watch = Watch(
            workspace, RunDir(tmp_path / str(index)), 1, job_run,
            say=lambda line: None, cancelled=lambda: False,
        )  # fmt: skip
        assert watch.to_the_end(Logs(workspace, job_run, {})).well

    with ThreadPoolExecutor(100) as pool:
        list(pool.map(follow, range(100)))
    assert len(server.runs) == 100
    assert len(server.calls(SUBMIT)) == 100
    # Over some seconds, since a machine in use bunches what was sent apart.
    assert server.busiest("GET */jobs/runs/get", 4.0) < 4 * 100
    assert server.busiest("*/mlflow/*", 4.0) < 4 * 120
    # For these no limit is documented; they take part in the looks, so they stay below as well.
    for call in ("GET */ai-training/*", "GET */jobs/runs/get-output"):
        assert server.busiest(call, 4.0) < 4 * 100


BAD = {
    "no volume": ({"parameters": {"output_dir": "/tmp/x"}}, "lies on a volume"),
    "no output_dir": ({"parameters": {}}, "it is required"),
    "a level": ({"permissions": [{"level": "VIEW", "user_name": "a"}]}, "one of CAN_VIEW"),
    "adapters alone": (
        {
            "command": "torchrun -m tunewright.recipes.lora",
            "parameters": {
                "output_dir": OUTPUT,
                "merge": False,
                "model_name": "a/b",
                "dataset_name": "a/c",
            },
        },
        "are always added to their base",
    ),
}


STATES = {
    "empty": ({}, "UNKNOWN", False),
    "old": (
        {"state": {"life_cycle_state": "TERMINATED", "result_state": "SUCCESS"}},
        "TERMINATED",
        True,
    ),
    "new": (
        {"status": {"state": "TERMINATED", "termination_details": {"code": "SUCCESS"}}},
        "TERMINATED",
        True,
    ),
    "terminating": ({"state": {"life_cycle_state": "TERMINATING"}}, "TERMINATING", False),
    "unheard of": ({"status": {"state": "DREAMING"}}, "DREAMING", False),
}


@pytest.mark.parametrize("case", STATES)
def test_a_state_is_read_in_either_form(case: str) -> None:
    run, word, ended = STATES[case]
    state = state_of(run)
    assert (state.word, state.ended, state.well) == (word, ended, ended)


def test_the_platforms_reason_counts_for_nodes_that_it_ended() -> None:
    """A guardian that was told to end says preemption; that a person cancelled, it cannot know."""
    preempted = {
        "node": 0, "exit_code": 143, "stopped_by": "preempted", "tail": "",
        "failure": {"class": "preemption", "node": 0, "rank": None, "message": "from outside"},
    }  # fmt: skip
    cancelled = State("TERMINATED", "CANCELED", "USER_CANCELED", "CLIENT_ERROR")
    assert judge(cancelled, [preempted], None, "").stopped_by == "cancel"
    timed_out = judge(State("TERMINATED", "TIMEDOUT"), [preempted], None, "")
    assert (timed_out.failure or {})["class"] == "timeout"
    lost = judge(State("INTERNAL_ERROR", "FAILED", "CLOUD_FAILURE"), [preempted], None, "")
    assert (lost.failure or {})["class"] == "preemption"
    interrupted = judge(cancelled, [], "interrupted", "")
    assert (interrupted.failure or {})["class"] == "preemption"


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_run_there_is_refused_before_anything_is_asked(case: str) -> None:
    more, message = BAD[case]
    with pytest.raises(UserError, match=message):
        databricks.place(workload(**more), simulate=False, procs_per_node=None)


def test_simulate_is_refused() -> None:
    with pytest.raises(UserError, match="are for the local and Ray targets"):
        databricks.place(workload(), simulate=True, procs_per_node=None)


@pytest.mark.parametrize("name", ["model", "a.b", "a.b.c.d", "a.b c.d", "a..c", "a.b/x.c"])
def test_a_model_name_has_three_parts(name: str) -> None:
    with pytest.raises(UserError, match=r"catalog\.schema\.model"):
        databricks.check_name(name, workload())
    databricks.check_name("main.default.model", workload())
    databricks.check_name(None, workload())


def test_the_state_of_a_run_is_written_once(
    server: DatabricksServer, attempt: Attempt, run_dir: RunDir
) -> None:
    assert attempt().well
    job = read_json(run_dir.platform(1, "job"))
    assert job is not None
    assert job["run_id"] == 100000001
    submitting = read_json(run_dir.platform(1, "submitting"))
    assert submitting is not None
    assert submitting["token"] == server.calls(SUBMIT)[0].body["idempotency_token"]


def test_what_became_of_a_job_is_asked_again_when_the_workspace_was_away(
    server: DatabricksServer, attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that ended well is neither lost nor made again, because its ending came late."""
    monkeypatch.setattr("tasks.targets.databricks.api.PATIENCE_S", 1.0)
    server.fault("*/fs/*", "500", times=100)
    with pytest.raises(WorkspaceAway) as caught:
        attempt()
    assert caught.value.unsettled  # type: ignore[attr-defined]
    server.clear_faults()
    assert attempt().well
    assert len(server.runs) == 1


def test_a_job_that_we_may_not_ask_for_is_not_taken_for_gone(
    server: DatabricksServer, attempt: Attempt, monkeypatch: pytest.MonkeyPatch, run_dir: RunDir
) -> None:
    """As when a token is withdrawn: another attempt would run beside the one that goes on."""
    monkeypatch.setattr(databricks_watch, "_UNKNOWN_S", 1.0)
    server.fault("GET */jobs/runs/get", "403", times=1000)
    with pytest.raises(Denied, match=r"cannot be followed: .*start this run again") as caught:
        attempt("sleep 3")
    assert caught.value.unsettled  # type: ignore[attr-defined]
    assert server.calls("POST */jobs/runs/cancel") == []
    server.clear_faults()
    assert attempt("sleep 3").well
    assert len(server.runs) == 1


def test_a_signal_after_the_job_has_ended_well_does_not_lose_it(
    server: DatabricksServer, attempt: Attempt
) -> None:
    def interrupt() -> bool:
        if server.runs and server.runs[0].phase.terminal:
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt) as caught:
        attempt("true", nodes=1, cancelled=interrupt)
    assert caught.value.unsettled  # type: ignore[attr-defined]
    assert attempt("true", nodes=1).well
    assert len(server.runs) == 1


@pytest.mark.parametrize("then", ["submit", "get"])
def test_a_signal_in_mid_submission_ends_our_job_and_no_other(
    server: DatabricksServer, attempt: Attempt, run_dir: RunDir, said: Any,
    monkeypatch: pytest.MonkeyPatch, then: str,
) -> None:  # fmt: skip
    """Whoever looks whether the user's token named our job may be stopped there, too."""
    sent = {"submit": "/api/2.2/jobs/runs/submit", "get": "/api/2.2/jobs/runs/get"}[then]
    genuine, left = Workspace._json, [1]

    def stopped(self: Workspace, method: str, path: str, *words: Any, **rest: Any) -> Any:
        found = genuine(self, method, path, *words, **rest)
        if path == sent and left and left.pop():
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(Workspace, "_json", stopped)
    with pytest.raises(KeyboardInterrupt) as caught:
        attempt("sleep 60", idempotency_token="mine", nodes=1)
    assert caught.value.unsettled  # type: ignore[attr-defined]
    server.await_runs(30)
    assert [run.phase.result for run in server.runs] == ["CANCELED"]
    # The token is used up; whoever comes with it and is stopped ends nothing of the others'.
    cancels = len(server.calls("POST */jobs/runs/cancel"))
    left.append(1)
    found = workload("sleep 60", idempotency_token="mine", nodes=1)
    placement = databricks.place(found, simulate=False, procs_per_node=None)
    other = job_of(found, RunDir(run_dir.root.parent / "tiny-ffffffff"))
    with pytest.raises(KeyboardInterrupt):
        databricks.run(other, {}, said, placement)
    assert len(server.calls("POST */jobs/runs/cancel")) == cancels
    assert len(server.runs) == 1


def test_a_job_of_another_workspace_is_not_begun_again_in_this_one(
    server: DatabricksServer, attempt: Attempt, run_dir: RunDir
) -> None:
    facts = {"host": "https://other.example.com", "token": "x"}
    write_json(run_dir.platform(1, "submitting"), facts)
    with pytest.raises(UserError, match=r"submitted to https://other\.example\.com") as caught:
        attempt()
    assert caught.value.unsettled  # type: ignore[attr-defined]
    assert server.runs == []


def test_our_deadline_does_not_count_the_wait_for_capacity(
    server: DatabricksServer, tmp_path: Path
) -> None:
    """Where the platform does not count it either."""
    server.plan(capacity_s=4, after_s=1, nodes_run=False)
    body = databricks.dry_requests(job_of(workload(), RunDir(tmp_path / "r")), workload())[-1]
    workspace = connect()
    job_run = int(workspace.post("/api/2.2/jobs/runs/submit", body["body"])["run_id"])
    watch = Watch(
        workspace, RunDir(tmp_path / "x"), 1, job_run, say=lambda line: None,
        cancelled=lambda: False, deadline_s=3, margin_s=0.5,
    )  # fmt: skip
    assert watch.to_the_end(Logs(workspace, job_run, {})).well


def test_a_login_that_lapses_for_a_while_ends_no_job(
    server: DatabricksServer, attempt: Attempt, monkeypatch: pytest.MonkeyPatch, said: Any
) -> None:
    """databricks-sdk raises bare errors when it gets no new token."""
    errors: list[Exception] = [
        OSError("cannot get access token: the network is down"), ValueError(b"<html>502</html>"),
        NotImplementedError("Not supported yet: 'access_token'"),
    ]  # fmt: skip
    genuine = Workspace._do

    def lapsed(self: Workspace, method: str, path: str, **rest: Any) -> Any:
        if path == databricks_watch.GET and errors:
            raise errors.pop()
        return genuine(self, method, path, **rest)

    monkeypatch.setattr(Workspace, "_do", lapsed)
    assert attempt("sleep 1").well
    assert errors == []
    assert len(server.runs) == 1


RECORDS = {
    "no numbers": [{"time_unix_nano": "2026-11-30T00:00:00Z", "body": "x", "node_index": 0}],
    "no objects": ["a line"],
    "another form": {"lines": 3},
}


@pytest.mark.parametrize("case", RECORDS)
def test_a_live_log_of_another_form_is_no_reason_to_stop(
    server: DatabricksServer, attempt: Attempt, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    genuine = Workspace.get

    def get(self: Workspace, path: str, *words: Any, **rest: Any) -> dict[str, Any]:
        if path.endswith("/logs"):
            return {"records": RECORDS[case]}
        return genuine(self, path, *words, **rest)

    monkeypatch.setattr(Workspace, "get", get)
    assert attempt().well


def test_live_lines_come_again_after_an_outage(
    server: DatabricksServer, attempt: Attempt, said: Any
) -> None:
    def tell(node: int, line: str) -> None:
        said(node, line)
        if line == "before":
            server.fault("GET */ai-training/*", "500", times=8)

    found = workload("echo before; sleep 6; echo after", nodes=1)
    placement = databricks.place(found, simulate=False, procs_per_node=None)
    run = RunDir(Path(os.environ["TUNEWRIGHT_HOME"]) / OUTPUT.lstrip("/") / "tiny-0a1b2c3d")
    assert databricks.run(job_of(found, run), {}, tell, placement).well
    assert [line for line in said.lines if line in ("before", "after")] == ["before", "after"]


def test_a_torn_artifact_is_read_again(
    tmp_path: Path, mlflow_server: str, monkeypatch: pytest.MonkeyPatch, run_dir: RunDir, said: Any
) -> None:
    with DatabricksServer(tmp_path, mlflow=mlflow_server) as server:
        server.add_volume("main.default.runs")
        server.rules.live_logs = False
        server.fault("GET /signed/*", "torn", times=1)
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        found = workload("echo a line that is torn", nodes=1)
        placement = databricks.place(found, simulate=False, procs_per_node=None)
        assert databricks.run(job_of(found, run_dir), {}, said, placement).well
        assert len(server.runs) == 1
        assert [fault.times for fault in server._wire.faults] == [0]
