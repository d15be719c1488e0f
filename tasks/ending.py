"""How a run's ending looks to Prefect: a state with the receipt, never a traceback."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

from prefect.client.schemas.objects import State
from prefect.states import Cancelled, Completed, Failed

from tasks.policy import content
from tasks.run import Run, sentence
from tunewright.contract.failures import TunewrightError

P = ParamSpec("P")


def ending(run: Run) -> State[Any]:
    """The flow's final state: Completed, Failed, TimedOut or Cancelled, with the receipt."""
    receipt, state = run.receipt, run.receipt["state"]
    message = receipt["reason"]
    if state == "Cancelled":
        return Cancelled(message=message, data=receipt)
    if state != "Completed":
        return Failed(name=state, message=message, data=Unsuccessful(receipt, run.exit_code))
    version = run.registered
    well = f"registered {version['name']} version {version['version']}" if version else message
    return Completed(message=well, data=receipt)


class Unsuccessful:
    """The receipt of a run that ended badly, with the exit code it stands for."""

    def __init__(self, receipt: dict[str, Any] | None, exit_code: int) -> None:
        self.receipt = receipt
        self.exit_code = exit_code

    def __repr__(self) -> str:
        return f"exit code {self.exit_code}"


def receipt_of(state: State[Any]) -> tuple[dict[str, Any] | None, int]:
    """The receipt of a finished flow (None when no run came to be) and its exit code."""
    found = content(state)
    if isinstance(found, Unsuccessful):
        return found.receipt, found.exit_code
    if isinstance(found, dict):
        return found, 0 if state.is_completed() else 130 if state.is_cancelled() else 1
    return None, 1


def for_the_reader(function: Callable[P, State[Any]]) -> Callable[P, State[Any]]:
    """Let what is wrong before a run exists become a Failed state with one sentence."""

    @wraps(function)
    def told(*args: P.args, **kwargs: P.kwargs) -> State[Any]:
        try:
            return function(*args, **kwargs)
        except TunewrightError as error:
            return Failed(message=str(error), data=Unsuccessful(None, error.exit_code))
        except OSError as error:
            return Failed(message=sentence(error), data=Unsuccessful(None, 1))

    return told
