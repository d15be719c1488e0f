"""Retries and time-outs as data: how the workload's numbers become Prefect's.

One layer retries. Deadlines are ours, because Prefect's do not end a child process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from prefect import Task
from prefect.client.schemas.objects import State, TaskRun
from prefect.results import ResultRecord  # type: ignore[attr-defined]
from prefect.states import Completed, Failed

from tasks.run import Run, sentence
from tunewright.contract.failures import FINAL, TunewrightError

LAUNCH_DELAYS_S: list[float] = [5, 10, 20, 40, 60]
"""Prefect repeats the last and refuses more than 50 delays."""
SMALL_BUDGET = 3
SMALL_DELAYS_S: list[float] = [1, 5, 15]

P = ParamSpec("P")
R = TypeVar("R")


class Cause:
    """Why a task failed, kept beside its state so that retries and the flow can ask."""

    def __init__(self, error: TunewrightError) -> None:
        self.error = error

    def __repr__(self) -> str:
        return self.error.failure_class


def told(
    function: Callable[Concatenate[Run, P], R],
) -> Callable[Concatenate[Run, P], R | State[Any]]:
    """Let a task's error for the reader become a state with its sentence, without a traceback.

    Each call first looks whether the run is to end. A result with a `reason` why there is nothing
    becomes a state named Skipped.
    """

    @wraps(function)
    def step(run: Run, /, *args: P.args, **kwargs: P.kwargs) -> R | State[Any]:
        try:
            run.raise_if_cancelled()
            result = function(run, *args, **kwargs)
        except TunewrightError as error:
            return Failed(message=run.scrubber.text(str(error)), data=Cause(error))
        except OSError as error:
            return Failed(message=sentence(error), data=Cause(TunewrightError(sentence(error))))
        if reason := getattr(result, "reason", None):
            return Completed(name="Skipped", message=reason, data=result)
        return result

    return step


def worth_retrying(task: Task[..., Any], task_run: TaskRun, state: State[Any]) -> bool:
    """Whether the failure's class lets another attempt hope.

    What a command's failure of unknown class means nobody knows; a step of ours that fails
    without being told a passing reason fails the same way again.
    """
    found = content(state)
    if not isinstance(found, Cause):
        return task.name == "launch"
    error = found.error
    hopeless = FINAL if task.name == "launch" else FINAL | {"unknown"}
    return error.failure_class not in hopeless and getattr(error, "retryable", True)


def policies(run: Run) -> Callable[[Task[..., Any]], Callable[..., Any]]:
    """How each task of this run is called: with its retries, timed, its error raised plainly."""

    def step(task: Task[..., Any]) -> Callable[..., Any]:
        launch = task.name == "launch"
        policed = task.with_options(
            retries=run.workload.max_retries if launch else SMALL_BUDGET,
            retry_delay_seconds=LAUNCH_DELAYS_S if launch else SMALL_DELAYS_S,
            retry_condition_fn=worth_retrying,
        )

        def call(*args: Any) -> Any:
            began = time.monotonic()
            try:
                return _unwrapped(policed(run, *args))
            finally:
                run.seconds[task.name] = time.monotonic() - began

        return call

    return step


def _unwrapped(result: Any) -> Any:
    if not isinstance(result, State):
        return result
    found = content(result)
    if isinstance(found, Cause):
        raise found.error
    return found


def content(state: State[Any]) -> Any:
    """What a state was made with: Prefect wraps it in a record once the task has ended."""
    return state.data.result if isinstance(state.data, ResultRecord) else state.data
