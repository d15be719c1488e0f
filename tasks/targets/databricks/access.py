"""Who pays for a job and who may see it: usage policies by name, permissions of its experiment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tasks.targets.databricks.api import Refused, Workspace
from tunewright.contract.failures import TunewrightError, UserError
from tunewright.contract.workload import Workload

JOB_LEVELS = {
    "CAN_VIEW": "CAN_READ",
    "CAN_MANAGE_RUN": "CAN_EDIT",
    "CAN_MANAGE": "CAN_MANAGE",
    "IS_OWNER": "CAN_MANAGE",
}
"""What may be granted on a run, and what stands for it on an MLflow experiment."""


def check_levels(workload: Workload) -> None:
    """Raise UserError for a permission that Jobs does not know."""
    for number, permission in enumerate(workload.permissions or []):
        if permission.level not in JOB_LEVELS:
            raise UserError(
                f"permissions.{number}.level is {permission.level!r}; "
                f"on databricks it is one of {', '.join(JOB_LEVELS)}"
            )


def with_policy(workspace: Workspace, workload: Workload) -> Workload:
    """The workload with the id of the policy that it names.

    Policies are the account's, so their names can only be looked up where the account is known
    and its address answers. Raises UserError otherwise, or when there is no such policy.
    """
    name = workload.usage_policy_name
    if not name:
        return workload
    way = "give its id as usage_policy_id"
    if workspace.account_id is None:
        raise UserError(
            f"usage_policy_name {name!r} cannot be looked up: policies are the account's, and the "
            f"account is not known here; set DATABRICKS_ACCOUNT_ID, or {way}"
        )
    try:
        found = [policy for policy in _policies(workspace, name) if policy["policy_name"] == name]
    except Refused as error:
        raise UserError(f"usage_policy_name {name!r} cannot be looked up: {error}; {way}") from None
    if not found:
        raise UserError(f"usage_policy_name: the account has no policy {name!r}; {way}")
    return workload.model_copy(
        update={"usage_policy_name": None, "usage_policy_id": str(found[0]["policy_id"])}
    )


def _policies(workspace: Workspace, name: str) -> Iterator[Mapping[str, Any]]:
    path = f"/api/2.1/accounts/{workspace.account_id}/budget-policies"
    query: dict[str, Any] = {"filter_by": {"policy_name": name}, "page_size": 1000}
    while True:
        page = workspace.get(path, query)
        yield from page.get("policies") or []
        if not page.get("next_page_token"):
            return
        query = {**query, "page_token": page["next_page_token"]}


def share_experiment(
    workspace: Workspace, experiment_id: str, workload: Workload, say: Callable[[str], None]
) -> None:
    """Let those who may see the job see its metrics too; when that is refused it is only said."""
    if not workload.permissions:
        return
    entries = [
        {**permission.model_dump(exclude_none=True, exclude={"level"}),
         "permission_level": JOB_LEVELS[permission.level]}
        for permission in workload.permissions
    ]  # fmt: skip
    path = f"/api/2.0/permissions/experiments/{experiment_id}"
    try:
        workspace.patch(path, {"access_control_list": entries})
    except TunewrightError as error:
        say(f"permissions: the MLflow experiment keeps its own ({error})")
