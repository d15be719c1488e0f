"""How an attempt becomes a job on the platform: uploads, then one submission that counts once.

What a later flow needs to find the job stands in the run's folder before the request that makes it
leaves, and the request's token makes sure that sending it again makes no second one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tasks.targets.databricks import archives, files
from tasks.targets.databricks.api import Missing, Refused, Workspace, opened
from tasks.targets.databricks.request import IMPORT, SUBMIT, Request, places, requests, token
from tasks.targets.databricks.watch import CANCEL, GET
from tasks.targets.guardian import undisturbed
from tasks.targets.job import Job, leave_open
from tunewright.contract.failures import TunewrightError, UserError
from tunewright.contract.mirror import is_mirrored, on_volume
from tunewright.contract.rundir import read_json, write_json
from tunewright.contract.workload import Workload

_STATUS = "/api/2.0/workspace/get-status"


def submitted(
    workspace: Workspace, job: Job, workload: Workload, say: Callable[[str], None]
) -> int:
    """The attempt's job: the one that was made before, or a new one. Never two."""
    _same_workspace(workspace, job)
    known = read_json(job.run.platform(job.attempt, "job"))
    if known is not None:
        say(f"attempt {job.attempt} is job {known['run_id']} already; following it")
        return int(known["run_id"])
    built = wheel(workload)
    snapshot = archives.snapshot(job.code) if job.code else None
    found = places(job, workload, workspace.me, built, snapshot)
    _bring_tokens(workspace, job, say)
    parameters = job.run.hyperparameters.read_text() if job.has_parameters else None
    *before, submit = requests(job, workload, found, built, snapshot, parameters)
    for request in before:
        _send(workspace, request)
    intent = {"token": token(job, workload), "folder": found.folder, "host": workspace.host}
    write_json(job.run.platform(job.attempt, "submitting"), {**intent, "at": time.time()})
    run_id = _submit(workspace, job, submit, found.folder if workload.idempotency_token else None)
    say(f"attempt {job.attempt} is job {run_id} on {workspace.host}")
    return run_id


def _same_workspace(workspace: Workspace, job: Job) -> None:
    """Raise UserError when this attempt was submitted to another workspace: its job may go on."""
    host = (read_json(job.run.platform(job.attempt, "submitting")) or {}).get("host")
    if host not in (None, workspace.host):
        error = UserError(
            f"attempt {job.attempt} of {job.run.name} was submitted to {host}, and this is "
            f"{workspace.host}; log in there to go on with it, or begin anew with --fresh"
        )
        leave_open(error)
        raise error


def _submit(workspace: Workspace, job: Job, request: Request, folder: str | None) -> int:
    """Send the submission until it is answered; a signal meanwhile leaves the attempt open."""
    try:
        return _known(workspace, job, request, folder)
    except UserError:
        raise
    except BaseException as error:
        # Whether there is a job now nobody knows; the same attempt, asked again, finds out.
        leave_open(error)
        if not isinstance(error, TunewrightError):
            _end_what_was_asked_for(workspace, job, request, folder)
        raise


def _known(workspace: Workspace, job: Job, request: Request, folder: str | None) -> int:
    """The number of the job that the request makes or has made, written down.

    `folder` is that of the launch where the user's own token may name another run's job.
    """
    assert request.body is not None
    run_id = int(workspace.post(SUBMIT, request.body)["run_id"])
    if folder is not None:
        _is_ours(workspace, run_id, folder)
    write_json(job.run.platform(job.attempt, "job"), {"run_id": run_id, "at": time.time()})
    return run_id


def _end_what_was_asked_for(
    workspace: Workspace, job: Job, request: Request, folder: str | None
) -> None:
    """After a signal in mid-submission: learn the job by its token, and cancel it.

    What cannot be learned now stays open for the next start.
    """
    with undisturbed(), suppress(TunewrightError, OSError):
        run_id = _known(workspace, job, request, folder)
        write_json(job.run.platform(job.attempt, "cancel"), {"reason": "interrupted"})
        workspace.post(CANCEL, {"run_id": run_id})


def _is_ours(workspace: Workspace, run_id: int, folder: str) -> None:
    """Raise UserError when the token brought back a job that was submitted for another run."""
    try:
        found = workspace.get(GET, {"run_id": run_id})
    except Refused:
        # A job that is older would show.
        return
    commands = [
        deployment.get("command_path", "")
        for task in found.get("tasks") or []
        for deployment in (task.get("ai_runtime_task") or {}).get("deployments") or []
    ]
    if commands and not any(path.startswith(f"{folder}/") for path in commands):
        raise UserError(
            f"idempotency_token: job {run_id} was submitted with it before, for another run "
            f"({commands[0]}); remove the token, or give another one"
        )


def _send(workspace: Workspace, request: Request) -> None:
    """One request of the preparation; an archive that is there with its size is not sent again."""
    if request.content is None:
        assert request.body is not None
        workspace.post(request.path, request.body)
        return
    content = request.content
    if isinstance(content, archives.Archive):
        if _is_there(workspace, request, content.size):
            return
        assert content.content is not None
        if request.path.startswith(files.FILES):
            files.make_folders(workspace, [str(Path(request.target).parent)])
            files.put(workspace, content.content, request.target)
            return
        content = content.content  # type: ignore[assignment]
    assert isinstance(content, bytes | Path)
    workspace.send(request.method, request.path, opened(content), request.query)


def _is_there(workspace: Workspace, request: Request, size: int) -> bool:
    try:
        if request.path.startswith(IMPORT):
            path = {"path": request.target}
            return int(workspace.get(_STATUS, path).get("size") or -1) == size
        return int(workspace.head(request.path)["content-length"] or -1) == size
    except Missing:
        return False


def wheel(workload: Workload) -> archives.Archive | None:
    """tunewright itself, unless the workload's image brings it."""
    given = workload.environment
    has_image = given is not None and (given.docker_image or given.unity_catalog_image)
    return None if has_image else archives.wheel()


def _bring_tokens(workspace: Workspace, job: Job, say: Callable[[str], None]) -> None:
    """The tokens of this run to the volume, when they were made on a machine without it."""
    facts = read_json(job.run.tokens) or {}
    made = facts.get("path")
    if made and is_mirrored(made):
        files.upload(workspace, Path(made), on_volume(made), say)
