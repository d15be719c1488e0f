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
        return Failed(
            name=state, message=message, data=Unsuccessful(message, run.exit_code, receipt)
        )
    version = run.registered
    well = f"registered {version['name']} version {version['version']}" if version else message
    return Completed(message=well, data=receipt)


class Unsuccessful:
    """Why there is no success, the exit code it stands for, and the receipt if a run came to be."""

    def __init__(self, reason: str, exit_code: int, receipt: dict[str, Any] | None = None) -> None:
        self.reason = reason
        self.exit_code = exit_code
        self.receipt = receipt

    def __repr__(self) -> str:
        return f"exit code {self.exit_code}"


def receipt_of(state: State[Any]) -> tuple[dict[str, Any], int]:
    """The receipt of a finished flow and its exit code.

    Where no run came to be there is only {"state", "reason"}.
    """
    found = content(state)
    if isinstance(found, dict):
        return found, 130 if state.is_cancelled() else 0
    if not isinstance(found, Unsuccessful):
        found = Unsuccessful(state.message or str(found), 1)
    return found.receipt or {"state": "Failed", "reason": found.reason}, found.exit_code


def for_the_reader(function: Callable[P, State[Any]]) -> Callable[P, State[Any]]:
    """Let what is wrong before a run exists become a Failed state with one sentence."""

    @wraps(function)
    def told(*args: P.args, **kwargs: P.kwargs) -> State[Any]:
        try:
            return function(*args, **kwargs)
        except TunewrightError as error:
            return Failed(message=str(error), data=Unsuccessful(str(error), error.exit_code))
        except OSError as error:
            return Failed(message=sentence(error), data=Unsuccessful(sentence(error), 1))

    return told
