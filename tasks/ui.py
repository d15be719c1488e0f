"""What a run shows in the Prefect UI: log lines, its name and tag, artifacts."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect import get_run_logger
from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    update_progress_artifact,
)
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.context import FlowRunContext
from prefect.exceptions import MissingContextError, PrefectException
from prefect.runtime import flow_run

from tunewright.contract import receipt as receipts

_PROGRESS_EVERY_S = 2.0


def say(message: str, level: int = logging.INFO) -> None:
    """One log line of the flow or task run we are in; a plain logger outside of any."""
    try:
        get_run_logger().log(level, message)
    except MissingContextError:
        logging.getLogger("tunewright").log(level, message)


def flow_run_id() -> UUID | None:
    """The id of the flow run we are in; None outside of one."""
    context = FlowRunContext.get()
    return context.flow_run.id if context and context.flow_run else None


def flow_run_name() -> str:
    """`sft <experiment or file>`, until the run has a name of its own."""
    workload = flow_run.parameters.get("workload", "")
    named = workload.get("experiment_name") if isinstance(workload, dict) else Path(workload).stem
    return f"sft {named}"


def announce(run: str) -> None:
    """Name the flow run like the run and tag it `run:<run>`, by which it is found."""
    context, run_id = FlowRunContext.get(), flow_run_id()
    if context is None or context.flow_run is None or run_id is None:
        return
    # A run that went on to another folder carries only that one's tag.
    tags = {tag for tag in context.flow_run.tags if not tag.startswith("run:")}
    with get_client(sync_client=True) as client:
        client.update_flow_run(run_id, name=run, tags=sorted(tags | {f"run:{run}"}))


def is_cancelling() -> bool:
    """Whether someone asked Prefect to cancel this flow run; an API that is away says no."""
    run_id = flow_run_id()
    if run_id is None:
        return False
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(run_id).state
    except (httpx.HTTPError, PrefectException):
        return False
    return state is not None and state.type in (StateType.CANCELLING, StateType.CANCELLED)


def publish(receipt: Mapping[str, Any]) -> None:
    """The receipt as a Markdown artifact of the flow run."""
    show(receipts.markdown(receipt), "receipt", "Receipt")


def show(page: str, key: str, description: str) -> None:
    """A Markdown artifact of the run we are in; nothing outside of one."""
    if flow_run_id() is None:
        return
    try:
        create_markdown_artifact(page, key=key, description=description)
    except httpx.HTTPError as error:
        say(f"the {key} could not be shown in the Prefect UI: {error}")


class ProgressBar:
    """A progress artifact of the run we are in, which is made when there is progress to show."""

    def __init__(
        self, key: str, description: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._key, self._description, self._clock = key, description, clock
        self._artifact: UUID | None = None
        self._shown = -math.inf
        self._on = flow_run_id() is not None

    def at(self, percent: float) -> None:
        """So much is done, of 100; shown at most every other second."""
        if self._clock() - self._shown >= _PROGRESS_EVERY_S:
            self._show(percent)

    def end(self) -> None:
        """All is done; a bar that was never shown stays away."""
        if self._artifact is not None:
            self._show(100.0)

    def _show(self, percent: float) -> None:
        if not self._on:
            return
        self._shown = self._clock()
        try:
            if self._artifact is None:
                made = create_progress_artifact(
                    percent, key=self._key, description=self._description
                )
                self._artifact = made if isinstance(made, UUID) else None
            else:
                update_progress_artifact(self._artifact, progress=percent)
        except (httpx.HTTPError, PrefectException) as error:
            self._on = False
            say(f"progress can no longer be shown in the Prefect UI: {error}")
