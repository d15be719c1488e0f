"""One submitted run: its attempts, its states in both forms, and the thread that drives it."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tasks.targets.local import free_port
from tests.databricks import nodes as on_nodes
from tests.databricks.nodes import LaunchError, Node, Places
from tests.databricks.state import Plan, Rules, State
from tests.databricks.wire import now_ms

POLL_S = 0.02
_ENDED = {"TERMINATED", "SKIPPED", "INTERNAL_ERROR"}
_V2 = {"WAITING_FOR_RETRY": "WAITING", **dict.fromkeys(_ENDED, "TERMINATED")}
# Termination code and type of each ending. Those of a time-out are a guess.
_DETAILS = {
    "SUCCESS": ("SUCCESS", "SUCCESS"),
    "FAILED": ("RUN_EXECUTION_ERROR", "CLIENT_ERROR"),
    "TIMEDOUT": ("RUN_EXECUTION_ERROR", "CLIENT_ERROR"),
    "CANCELED": ("USER_CANCELED", "CLIENT_ERROR"),
    "INTERNAL_ERROR": ("INTERNAL_ERROR", "INTERNAL_ERROR"),
    "SKIPPED": ("SKIPPED", "CLIENT_ERROR"),
    "MAXIMUM_CONCURRENT_RUNS_REACHED": ("MAX_CONCURRENT_RUNS_EXCEEDED", "CLIENT_ERROR"),
}


@dataclass(frozen=True)
class Phase:
    """Where a run or one of its tasks stands."""

    life: str
    result: str | None = None
    message: str = ""
    code: str | None = None
    kind: str | None = None

    @property
    def terminal(self) -> bool:
        return self.life in _ENDED

    def value(self) -> dict[str, Any]:
        """Both forms that the API gives."""
        state: dict[str, Any] = {
            "life_cycle_state": self.life,
            "state_message": self.message,
            "user_cancelled_or_timedout": self.result in ("CANCELED", "TIMEDOUT"),
        }
        if self.result:
            state["result_state"] = self.result
        status: dict[str, Any] = {"state": _V2.get(self.life, self.life)}
        if self.terminal:
            status["termination_details"] = {
                "code": self.code, "type": self.kind, "message": self.message,
            }  # fmt: skip
        return {"state": state, "status": status}


def ended(ending: str, message: str = "", code: str | None = None) -> Phase:
    """The last phase of a run that ends so."""
    default, kind = _DETAILS.get(ending, (ending, "CLIENT_ERROR"))
    if ending == "INTERNAL_ERROR":
        return Phase(ending, "FAILED", message, code or default, kind)
    if ending in ("SKIPPED", "MAXIMUM_CONCURRENT_RUNS_REACHED"):
        result = None if ending == "SKIPPED" else ending
        return Phase("SKIPPED", result, message, code or default, kind)
    return Phase("TERMINATED", ending, message, code or default, kind)


@dataclass
class Attempt:
    """One run of the task, with an id, an MLflow run and nodes of its own."""

    run_id: int
    number: int
    run: Run
    phase: Phase = field(default_factory=lambda: Phase("PENDING"))
    nodes: list[Node] = field(default_factory=list)
    mlflow_run_id: str | None = None
    mlflow_experiment_id: str | None = None
    started: int = field(default_factory=now_ms)
    ended: int = 0

    def value(self) -> dict[str, Any]:
        """As runs/get lists it below `tasks`."""
        task = self.run.task
        kept = ("task_key", "ai_runtime_task", "environment_key", "run_if", "max_retries",
                "retry_on_timeout", "timeout_seconds")  # fmt: skip
        return {
            **{name: task[name] for name in kept if name in task},
            "run_id": self.run_id,
            "attempt_number": self.number,
            "start_time": self.started,
            "end_time": self.ended,
            "run_page_url": self.run.page,
            **self.phase.value(),
        }

    def output(self) -> dict[str, Any]:
        """As runs/get-output gives it; `error` only when the attempt did not go well."""
        ids = {"mlflow_experiment_id": self.mlflow_experiment_id,
               "mlflow_run_id": self.mlflow_run_id}  # fmt: skip
        found: dict[str, Any] = {"metadata": self.value()}
        if self.mlflow_run_id:
            found["ai_runtime_task_output"] = {**ids, "status_message": self.phase.message}
        if self.phase.terminal and self.phase.result != "SUCCESS":
            found["error"] = self.phase.message
        return found

    def records(self) -> list[dict[str, Any]]:
        """The output of the nodes, as the live log endpoint gives it."""
        return [
            {"time_unix_nano": str(line.at_ns), "body": line.text, "node_index": node.rank,
             "record_id": f"{self.run_id}-{node.rank}-{index}"}
            for node in self.nodes for index, line in enumerate(list(node.lines))
        ]  # fmt: skip


@dataclass
class Run:
    """What runs/submit made."""

    run_id: int
    payload: dict[str, Any]
    plan: Plan
    creator: str
    phase: Phase = field(default_factory=lambda: Phase("PENDING"))
    attempts: list[Attempt] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)
    submitted: float = field(default_factory=time.monotonic)
    started: int = field(default_factory=now_ms)
    ended: int = 0
    thread: threading.Thread | None = None

    @property
    def token(self) -> str | None:
        return self.payload.get("idempotency_token")

    @property
    def task(self) -> dict[str, Any]:
        return dict(self.payload["tasks"][0])

    @property
    def page(self) -> str:
        return f"https://stand-in.invalid/?o=1#job/0/run/{self.run_id}"

    @property
    def nodes(self) -> list[Node]:
        """Those of the last attempt."""
        return self.attempts[-1].nodes if self.attempts else []

    def value(self, *, tasks: bool = True) -> dict[str, Any]:
        """As runs/get and runs/list give it."""
        found = {
            "run_id": self.run_id,
            "job_id": 0,
            "run_name": self.payload.get("run_name", "Untitled"),
            "run_type": "SUBMIT_RUN",
            "creator_user_name": self.creator,
            "start_time": self.started,
            "end_time": self.ended,
            "run_page_url": self.page,
            **self.phase.value(),
        }
        if tasks:
            found["tasks"] = [attempt.value() for attempt in self.attempts]
        return found


class Tracking(Protocol):
    """What a run needs of MLflow."""

    def begin(self, attempt: Attempt) -> None: ...
    def finish(self, attempt: Attempt, result: str | None) -> None: ...
    def environment(self, attempt: Attempt) -> dict[str, str]: ...


@dataclass
class Driver:
    """Takes runs through their states; one thread a run."""

    state: State
    rules: Rules
    places: Places
    folder: Path
    tracking: Tracking
    python: Path = field(default_factory=on_nodes.this_python)
    errors: list[Exception] = field(default_factory=list)

    def start(self, run: Run, new_id: Callable[[], int]) -> None:
        run.attempts.append(Attempt(new_id(), 0, run))
        run.thread = threading.Thread(target=self._drive, args=(run, new_id), daemon=True)
        run.thread.start()

    def _drive(self, run: Run, new_id: Callable[[], int]) -> None:
        try:
            last = self._through(run, new_id)
        except Exception as error:
            self.errors.append(error)
            last = ended("INTERNAL_ERROR", f"stand-in: {error!r}")
        finally:
            on_nodes.end_all([node for attempt in run.attempts for node in attempt.nodes], 0)
        run.ended = now_ms()
        if not run.attempts[-1].phase.terminal:
            run.attempts[-1].phase = last
        run.phase = ended(run.plan.parent, last.message) if run.plan.parent else last

    def _through(self, run: Run, new_id: Callable[[], int]) -> Phase:
        """Every attempt, until one is the last; its phase."""
        seconds = run.payload.get("timeout_seconds") or 0
        deadline = time.monotonic() + seconds if seconds else None
        retries = run.task.get("max_retries") or 0
        while True:
            attempt = run.attempts[-1]
            attempt.phase = self._attempt(run, attempt, deadline)
            attempt.ended = now_ms()
            over = deadline is not None and time.monotonic() >= deadline
            if run.cancelled.is_set() or over or not _again(run, attempt, retries):
                return attempt.phase
            run.attempts.append(Attempt(new_id(), attempt.number + 1, run))

    def _attempt(self, run: Run, attempt: Attempt, deadline: float | None) -> Phase:
        seconds = run.task.get("timeout_seconds") or 0
        own = time.monotonic() + seconds if seconds else None
        clock = _Clock(run, [end for end in (deadline, own) if end is not None])
        stopped = self._wait(run, attempt, clock)
        if stopped:
            return stopped
        run.phase = attempt.phase = Phase("RUNNING", message="In run")
        self.tracking.begin(attempt)
        if run.plan.nodes_run:
            phase = self._run_nodes(run, attempt, clock)
        else:
            early = clock.wait(run.plan.after_s or 0)
            phase = ended(early, _why(early)) if early else ended("SUCCESS")
        if run.plan.ending and not run.cancelled.is_set():
            phase = _planned(run.plan, run.plan.ending)
        attempt.phase = Phase("TERMINATING", message=phase.message)
        self.tracking.finish(attempt, phase.result)
        time.sleep(self.rules.terminating_s)
        return phase

    def _wait(self, run: Run, attempt: Attempt, clock: _Clock) -> Phase | None:
        """The waits before a command starts; how the attempt ends, if it never will."""
        plan, word = run.plan, run.plan.waiting_as
        start_s = self.rules.start_s if plan.start_s is None else plan.start_s
        waits = [
            (plan.queue_s, "QUEUED", "QUEUED", "Run is queued"),
            (plan.capacity_s, "RUNNING", "PENDING", "Waiting for GPU compute capacity"),
            (start_s, "PENDING", "PENDING", "Waiting for cluster"),
        ]
        for seconds, parent, task, message in waits:
            if seconds:
                run.phase = Phase(word or parent, message=message)
                attempt.phase = Phase(word or task, message=message)
            if stopped := clock.wait(seconds):
                return ended(stopped, _why(stopped))
        if plan.ending in ("SKIPPED", "MAXIMUM_CONCURRENT_RUNS_REACHED"):
            return _planned(plan, plan.ending)
        return None

    def _run_nodes(self, run: Run, attempt: Attempt, clock: _Clock) -> Phase:
        try:
            self._start(run, attempt)
        except LaunchError as error:
            return ended("INTERNAL_ERROR", str(error), error.code)
        begun = time.monotonic()
        while True:
            codes = [node.exit_code for node in attempt.nodes]
            bad = [code for code in codes if code]
            stopped = clock.stopped()
            killed = _due(run.plan, begun, attempt.nodes)
            if bad or stopped or killed or None not in codes:
                break
            time.sleep(POLL_S)
        if stopped:
            attempt.phase = run.phase = Phase("TERMINATING", message=_why(stopped))
        abruptly = killed and run.plan.abruptly
        on_nodes.end_all(attempt.nodes, self.rules.grace_s, abruptly=abruptly)
        if stopped:
            return ended(stopped, _why(stopped))
        if bad:
            rank = codes.index(bad[0])
            return ended(self.rules.failed_as, f"node {rank} exited with code {bad[0]}",
                         "RUN_EXECUTION_ERROR")  # fmt: skip
        return ended("INTERNAL_ERROR", "The node was lost") if killed else ended("SUCCESS")

    def _start(self, run: Run, attempt: Attempt) -> None:
        specs = [entry.get("spec", {}) for entry in run.payload.get("environments") or []
                 if entry["environment_key"] == run.task.get("environment_key")]  # fmt: skip
        dependencies = [name for spec in specs for name in spec.get("dependencies") or []]
        launch = on_nodes.read_launch(
            run.task, dependencies, self.places, self.rules, self.state.secrets
        )
        shared = {
            **self.tracking.environment(attempt),
            **self.rules.node_environment,
            "MASTER_PORT": str(free_port()),
        }
        for rank in range(launch.nodes):
            folder = self.folder / f"run-{attempt.run_id}" / f"node-{rank}"
            node = Node(folder, rank, f"{uuid.uuid4().hex}")
            attempt.nodes.append(node)
            node.start(launch, shared, self.python)


@dataclass
class _Clock:
    """Whether a run was cancelled, or one of its deadlines is past."""

    run: Run
    deadlines: list[float]

    def stopped(self) -> str | None:
        if self.run.cancelled.is_set():
            return "CANCELED"
        now = time.monotonic()
        return "TIMEDOUT" if any(now >= end for end in self.deadlines) else None

    def wait(self, seconds: float) -> str | None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.stopped():
            time.sleep(min(POLL_S, max(0, end - time.monotonic())))
        return self.stopped()


def _again(run: Run, attempt: Attempt, retries: int) -> bool:
    """Whether Jobs starts the task again: it failed, and retries are left."""
    if retries >= 0 and attempt.number >= retries:
        return False
    if attempt.phase.result == "TIMEDOUT":
        return bool(run.task.get("retry_on_timeout"))
    return attempt.phase.result == "FAILED"


def _due(plan: Plan, begun: float, nodes: list[Node]) -> bool:
    """Whether the plan ends the nodes now."""
    if plan.after_s is not None and time.monotonic() - begun >= plan.after_s:
        return True
    said = plan.after_line
    return said is not None and any(said in line.text for node in nodes for line in node.lines)


def _planned(plan: Plan, ending: str) -> Phase:
    return ended(ending, plan.message or _why(ending), plan.code)


def _why(ending: str) -> str:
    return {
        "CANCELED": "Run cancelled.",
        "TIMEDOUT": "Run timed out.",
        "SKIPPED": "Run skipped.",
        "SUCCESS": "",
    }.get(ending, f"Run ended as {ending}.")
