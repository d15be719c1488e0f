"""What a run shows in the Prefect UI: log lines, its name and tag, artifacts."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.context import FlowRunContext
from prefect.exceptions import MissingContextError, PrefectException
from prefect.runtime import flow_run

from tunewright.contract import receipt as receipts


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
    if flow_run_id() is None:
        return
    try:
        create_markdown_artifact(receipts.markdown(receipt), key="receipt", description="Receipt")
    except httpx.HTTPError as error:
        say(f"the receipt could not be shown in the Prefect UI: {error}")
