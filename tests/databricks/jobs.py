"""Jobs: runs/submit with one AI Runtime task, get, get-output, list, cancel, delete; live logs."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import Any

from tests.databricks.runs import Attempt, Driver, Run
from tests.databricks.state import Plan, Rules, State
from tests.databricks.wire import ApiError, Request, Wire, invalid

ACCELERATORS = ("GPU_1xA10", "GPU_1xH100", "GPU_8xH100", "GPU_8xB300")
MAX_TOKEN = 64


class Jobs:
    """The runs, in the order of their submission, and the plans for the next ones."""

    def __init__(self, wire: Wire, state: State, rules: Rules, driver: Driver) -> None:
        self.state, self.rules, self.driver = state, rules, driver
        self.runs: list[Run] = []
        self.plans: list[Plan] = []
        self.deleted: set[str] = set()
        self._ids = count(100_000_001)
        self._lock = threading.Lock()
        routes: list[tuple[str, str, Callable[..., Any]]] = [
            ("POST", "submit", self._submit), ("GET", "get", self._get),
            ("GET", "get-output", self._output), ("GET", "list", self._list),
            ("POST", "cancel", self._cancel), ("POST", "delete", self._delete),
        ]  # fmt: skip
        for method, name, handler in routes:
            wire.route(method, rf"/api/2\.[12]/jobs/runs/{name}", handler)
        logs = r"/api/2.0/ai-training/workflows/by-run-id/(\d+)/logs"
        wire.route("GET", logs, self._logs)

    def _submit(self, request: Request) -> dict[str, Any]:
        body = request.body if isinstance(request.body, dict) else {}
        check(body, self.state)
        token = body.get("idempotency_token")
        with self._lock:
            if token and token in self.deleted:
                raise invalid(f"The run of idempotency token {token} was deleted")
            known = [run for run in self.runs if token and run.token == token]
            if known:
                return {"run_id": known[0].run_id}
            plan = self.plans.pop(0) if self.plans else Plan()
            run = Run(next(self._ids), body, plan, self.state.user)
            self.runs.append(run)
        self.driver.start(run, lambda: next(self._ids))
        return {"run_id": run.run_id}

    def _visible(self, run: Run) -> bool:
        return time.monotonic() - run.submitted >= self.rules.visible_after_s

    def _run(self, request: Request) -> Run:
        asked = request.number("run_id", 0)
        for run in self.runs:
            if run.run_id == asked and self._visible(run):
                return run
        raise invalid(f"Run {asked} does not exist.")

    def _attempt(self, asked: int) -> Attempt:
        for run in self.runs:
            for attempt in run.attempts:
                if attempt.run_id == asked:
                    return attempt
        if any(run.run_id == asked for run in self.runs):
            raise invalid(
                "Retrieving the output of a run with tasks is not supported; name a task's"
            )
        raise invalid(f"Run {asked} does not exist.")

    def _get(self, request: Request) -> dict[str, Any]:
        return self._run(request).value()

    def _output(self, request: Request) -> dict[str, Any]:
        return self._attempt(request.number("run_id", 0)).output()

    def _list(self, request: Request) -> dict[str, Any]:
        limit, start = request.number("limit", 20), request.number("page_token", 0)
        if not 1 <= limit <= 25:
            raise invalid(f"limit is {limit}; it must be between 1 and 25")
        found = [run for run in reversed(self.runs) if self._visible(run)]
        if request.true("active_only"):
            found = [run for run in found if not run.phase.terminal]
        if request.true("completed_only"):
            found = [run for run in found if run.phase.terminal]
        page = found[start : start + limit]
        tasks = request.true("expand_tasks")
        answer: dict[str, Any] = {"has_more": start + limit < len(found)}
        if page:
            answer["runs"] = [run.value(tasks=tasks) for run in page]
        if answer["has_more"]:
            answer["next_page_token"] = str(start + limit)
        return answer

    def _cancel(self, request: Request) -> None:
        self._run(request).cancelled.set()

    def _delete(self, request: Request) -> None:
        run = self._run(request)
        if not run.phase.terminal:
            raise invalid(f"Run {run.run_id} is still active")
        with self._lock:
            self.runs.remove(run)
            self.deleted |= {run.token} if run.token else set()

    def _logs(self, request: Request, run_id: str) -> dict[str, Any]:
        if not self.rules.live_logs:
            raise ApiError(400, "FEATURE_DISABLED", "Live logs are not enabled in this workspace")
        attempts = [attempt for run in self.runs for attempt in run.attempts
                    if int(run_id) in (run.run_id, attempt.run_id)]  # fmt: skip
        if not attempts:
            raise ApiError(404, "NOT_FOUND", f"Run {run_id} does not exist.")
        number = request.number("ref.attempt_number", attempts[-1].number)
        chosen = [attempt for attempt in attempts if attempt.number == number]
        records = [record for attempt in chosen for record in attempt.records()]
        return self._page(request, records)

    def _page(self, request: Request, records: list[dict[str, Any]]) -> dict[str, Any]:
        node = request.query.get("filter.node_index")
        first, last = request.number("from", 0), request.number("to", 1 << 40)
        found = [
            record for record in records
            if (node is None or record["node_index"] == int(node))
            and first * 10**9 <= int(record["time_unix_nano"]) <= last * 10**9
        ]  # fmt: skip
        found.sort(key=lambda record: int(record["time_unix_nano"]))
        if not request.true("ascending", True):
            found.reverse()
        start, size = request.number("page_token", 0), request.number("page_size", 1000)
        answer: dict[str, Any] = {"records": found[start : start + size]}
        if start + size < len(found):
            answer["next_page_token"] = str(start + size)
        return answer


def check(body: dict[str, Any], state: State) -> None:
    """What the platform refuses at once; raises ApiError with all of one kind."""
    tasks = body.get("tasks") or []
    if len(tasks) != 1 or not isinstance(tasks[0].get("ai_runtime_task"), dict):
        raise invalid("The stand-in takes exactly one task, an ai_runtime_task")
    task = tasks[0]
    if len(body.get("idempotency_token") or "") > MAX_TOKEN:
        raise invalid(f"idempotency_token is longer than {MAX_TOKEN} characters")
    if not re.fullmatch(r"[\w-]{1,100}", task.get("task_key") or ""):
        raise invalid(f"task_key {task.get('task_key')!r} is not valid")
    _check_environment(body, task)
    _check_deployments(task["ai_runtime_task"].get("deployments") or [])
    policy = body.get("budget_policy_id")
    if policy and state.policies and policy not in state.policies:
        raise ApiError(404, "RESOURCE_DOES_NOT_EXIST", f"Budget policy {policy} does not exist")


def _check_environment(body: dict[str, Any], task: dict[str, Any]) -> None:
    specs = {entry["environment_key"]: entry.get("spec", {}) for entry in
             body.get("environments") or []}  # fmt: skip
    key = task.get("environment_key")
    if key is not None and key not in specs:
        raise invalid(f"environment_key {key} is not defined in environments")
    for spec in specs.values():
        if "environment_version" in spec and "base_environment" in spec:
            raise invalid("environment_version and base_environment cannot both be set")


def _check_deployments(deployments: list[dict[str, Any]]) -> None:
    if len(deployments) != 1:
        raise invalid("ai_runtime_task takes exactly one deployment")
    compute = deployments[0].get("compute") or {}
    kind, number = compute.get("accelerator_type"), compute.get("accelerator_count")
    if kind not in ACCELERATORS:
        raise invalid(f"accelerator_type {kind!r} is not one of {', '.join(ACCELERATORS)}")
    per_node = int(kind.removeprefix("GPU_").split("x")[0])
    if not isinstance(number, int) or number < 1 or number % per_node:
        raise invalid(f"accelerator_count {number!r} is not a multiple of {per_node}")
