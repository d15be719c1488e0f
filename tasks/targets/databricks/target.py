"""The Databricks target: every attempt is one AI Runtime job, submitted, followed, and collected.

The platform is reached through databricks-sdk alone. On each node the command runs under the same
guardian as everywhere else, so that its own failure file says what went wrong. What is known of
the wire, and what is not proven, stands in `deployments/README.md`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from tasks.targets.databricks import access, archives, check, files, inputs
from tasks.targets.databricks.api import Missing, Workspace, connect
from tasks.targets.databricks.logs import Logs, NodeLog
from tasks.targets.databricks.request import places, requests
from tasks.targets.databricks.states import State, judge
from tasks.targets.databricks.submit import submitted, wheel
from tasks.targets.databricks.watch import Watch
from tasks.targets.guardian import Say, undisturbed
from tasks.targets.job import Ending, Job, is_left_open, leave_open
from tunewright.contract import logtail
from tunewright.contract.failures import TunewrightError, UserError
from tunewright.contract.mirror import is_mirrored, on_volume, values_on_volume
from tunewright.contract.processes import GRACE_S
from tunewright.contract.rundir import RunDir, home, needs_staging, read_json, write_json
from tunewright.contract.scrub import Scrubber
from tunewright.contract.workload import Workload

ME = "<you>"
"""The user in a dry run, which asks nobody."""
_MODEL_NAME = re.compile(r"[^./\s\x00-\x1f\x7f]{1,255}(\.[^./\s\x00-\x1f\x7f]{1,255}){2}\Z")
_VOLUME = re.compile(r"/Volumes/[^/]+/[^/]+/[^/]+")
LATE_S = 10.0
"""How long a file that has just been written on the volume may not show."""
_CHUNK = 1 << 20
_LAST_WORD_S = 10.0


@dataclass(frozen=True)
class Placement:
    """What a workload gets on the platform: what its file asks for."""

    nodes: int
    procs_per_node: int
    workload: Workload
    note: str | None = None


def place(workload: Workload, *, simulate: bool, procs_per_node: int | None) -> Placement:
    """Check what can be checked without the platform; raises UserError."""
    if simulate or procs_per_node is not None:
        raise UserError(
            "--simulate and --procs-per-node are for the local and Ray targets; on databricks a "
            "workload gets the accelerators that it names"
        )
    output_dir = workload.parameters.get("output_dir")
    if not (isinstance(output_dir, str) and _VOLUME.match(output_dir)):
        raise UserError(
            f"parameters.output_dir is {output_dir!r}; on databricks it is required and lies on a "
            "volume, e.g. /Volumes/catalog/schema/volume/runs"
        )
    model = workload.parameters.get("model_name")
    if workload.recipe and isinstance(model, str) and model.startswith("/"):
        _refuse_local(model)
    if workload.recipe == "lora" and workload.parameters.get("merge") is False:
        raise UserError(
            "parameters.merge is false; on databricks adapters are always added to their base "
            "model, since a version in Unity Catalog is served by itself; remove the line"
        )
    access.check_levels(workload)
    return Placement(workload.nodes, workload.compute.gpus_per_node, workload)


def check_name(register_as: str | None, workload: Workload) -> None:
    """Raise UserError for a model name that Unity Catalog does not take.

    Without one a command of ours is refused, since its model could not be registered; a user's own
    may leave none.
    """
    if register_as is None and workload.recipe is None:
        return
    name = register_as or workload.experiment_name
    if not _MODEL_NAME.match(name):
        raise UserError(
            f"on databricks a model is registered as catalog.schema.model, not as {name!r}; "
            "give it with --register (in a deployment: register_as)"
        )


def look(workload: Workload, register_as: str | None) -> dict[str, Any]:
    """Who and where we are, and what the workload lacks there; see `check`."""
    return check.look(workload, register_as)


def require(workload: Workload) -> None:
    """Raise UserError for a usage policy that is not found, and for secrets that are not there."""
    if workload.usage_policy_name or workload.secrets:
        workspace = connect()
        access.with_policy(workspace, workload)
        check.require_secrets(workspace, workload.secrets)


def bring_inputs(workload: Workload, say: Callable[[str], None]) -> None:
    """What pre-tokenization reads from volumes that are not mounted here."""
    inputs.bring(workload, say)


def notes(env_variables: Mapping[str, str]) -> list[str]:
    """What this target does with a workload's variables that its user may not expect."""
    return []


def notes_of(workload: Workload) -> list[str]:
    """What of a workload does not reach the platform, or is not known to."""
    found = []
    image = workload.environment.docker_image if workload.environment else None
    if image and (image.tag_policy or image.credentials_secret_scope):
        found.append(
            "docker_image: tag_policy and credentials are not sent, since how the platform takes "
            "them is not documented"
        )
    if workload.recipe == "lora":
        found.append("merge: the adapters are added to the base model before it is registered")
    if workload.compute.pool_id:
        found.append("compute.pool_id is sent as it is; whether the platform reads it is not known")
    return found


def dry_requests(job: Job, workload: Workload) -> list[dict[str, Any]]:
    """The exact requests of an attempt, as values; the user's name and hashes of code apart."""
    built, snapshot = (
        wheel(workload),
        archives.snapshot(job.code, build=False) if job.code else None,
    )
    found = places(job, workload, ME, built, snapshot)
    given = _dry_parameters(job, workload) if job.has_parameters else None
    return [r.document() for r in requests(job, workload, found, built, snapshot, given)]


def parameters_of(workload: Workload, given: Mapping[str, Any]) -> dict[str, Any]:
    """A command's parameters as the nodes of the platform need them.

    Paths are those of the volumes. Adapters are added to their base model in the end: what is
    registered in Unity Catalog is served by itself.
    """
    found = values_on_volume(dict(given))
    return {**found, "merge": True} if workload.recipe == "lora" else found


def _dry_parameters(job: Job, workload: Workload) -> str:
    """The parameters as the command would read them; the tokens' fingerprint apart."""
    settings = workload.settings
    given = settings.model_dump(exclude_none=True) if settings else workload.parameters
    found = {**parameters_of(workload, given), "output_dir": on_volume(job.run.model)}
    if settings:
        found["tokens_path"] = on_volume(job.run.root.parent / "tokens" / "<fingerprint>")
    return str(yaml.safe_dump(found, sort_keys=False))


def run(
    job: Job,
    secrets: Mapping[str, str],
    say: Say,
    placement: Placement,
    *,
    cancelled: Callable[[], bool] = lambda: False,
    started: Callable[[list[int]], None] = lambda pids: None,
    grace_s: float = GRACE_S,
) -> Ending:
    """Run one attempt to its end, whatever the end is; an attempt that was begun is gone on with.

    Raises UserError when the workspace refuses it, and WorkspaceAway when it stays away. Every
    error leaves the attempt open from the moment that a job may have been made: the next start
    finds that job.
    """
    workspace = connect()
    workload = access.with_policy(workspace, placement.workload)
    job_run = submitted(workspace, job, workload, lambda line: say(0, line))
    with left_open():
        return _to_the_end(workspace, job, workload, job_run, secrets, say, cancelled)


@contextmanager
def left_open() -> Iterator[None]:
    """Mark an error, unless it knows better: what became of the job can still be asked for."""
    try:
        yield
    except BaseException as error:
        leave_open(error, is_left_open(error, unmarked=True))
        raise


def _to_the_end(
    workspace: Workspace,
    job: Job,
    workload: Workload,
    job_run: int,
    secrets: Mapping[str, str],
    say: Say,
    cancelled: Callable[[], bool],
) -> Ending:
    """Follow the job, and collect what it left."""
    logs = {node: NodeLog(node, _followed(job, node), secrets, say) for node in range(job.nodes)}
    watch = Watch(
        workspace,
        job.run,
        job.attempt,
        job_run,
        say=lambda line: say(0, line),
        cancelled=cancelled,
        deadline_s=job.deadline_s,
        tracked=lambda found: access.share_experiment(
            workspace, found.experiment_id, workload, lambda line: say(0, line)
        ),
    )
    try:
        state = watch.to_the_end(Logs(workspace, job_run, logs))
    except Missing as error:
        state = State("INTERNAL_ERROR", "INTERNAL_ERROR", message=str(error))
    except BaseException as error:
        if not is_left_open(error, unmarked=True):
            # Cancelled by us, and over: nobody collects it later.
            with undisturbed():
                error.checkpoint_step = _reached(workspace, job)  # type: ignore[attr-defined]
        raise
    _link(watch, job)
    return _collect(workspace, job, watch, state, Scrubber(secrets))


def _followed(job: Job, node: int) -> Path:
    """Where a node's log grows while it is followed: a mounted volume takes no appending."""
    place = job.run.node_log(job.attempt, node)
    if not needs_staging(place):
        return place
    return home() / "cache" / "databricks" / job.run.name / f"attempt-{job.attempt}" / place.name


def keep_records(run: RunDir, say: Callable[[str], None]) -> None:
    """The run's small files to the volume, which holds the records; without it they stay here."""
    if not is_mirrored(run.root):
        return
    places = [run.workload, run.hyperparameters, run.audit, run.identity, run.receipt]
    try:
        workspace = connect()
        workspace.patience_s = _LAST_WORD_S
        for place in (place for place in places if place.is_file()):
            files.put(workspace, place, on_volume(place))
    except TunewrightError as error:
        say(f"the run's records stay on this machine: {error}")


def _link(watch: Watch, job: Job) -> None:
    """Tag the platform's MLflow run with ours, and keep its metrics; neither fails anything."""
    platform = watch.platform
    if platform is None:
        return
    tags = {"tunewright.run": job.run.name, "tunewright.attempt": str(job.attempt)}
    if job.mlflow.get("MLFLOW_TRACKING_URI") == "databricks":
        tags["mlflow.parentRunId"] = job.mlflow["MLFLOW_RUN_ID"]
    with suppress(TunewrightError):
        platform.tag(tags)
        write_json(job.run.platform(job.attempt, "metrics"), platform.metrics())


def _collect(
    workspace: Workspace, job: Job, watch: Watch, state: State, scrubber: Scrubber
) -> Ending:
    """What the nodes left on the volume, and how the attempt ended by all that is known."""
    outcomes = list(_outcomes(workspace, job, is_late=not state.well))
    for node in range(job.nodes):
        _keep_log(workspace, job, node, scrubber)
    step = _progress(workspace, job)
    end = logtail.tail(logtail.last_lines(_followed(job, 0)))
    ending = judge(state, outcomes, watch.reason, end)
    return replace(ending, checkpoint_step=step)


def _reached(workspace: Workspace, job: Job) -> int | None:
    """How far an attempt got that we have cancelled, as far as that can be had soon."""
    workspace.patience_s = _LAST_WORD_S
    with suppress(TunewrightError, OSError):
        return _progress(workspace, job)
    return None


def _progress(workspace: Workspace, job: Job) -> int | None:
    """The step of the newest checkpoint on a volume that is not mounted, its events brought here;
    None on one that is.
    """
    if not is_mirrored(job.run.root):
        return None
    _fetch_if_there(workspace, job.run.events(job.attempt))
    return _newest_step(workspace, job)


def _outcomes(workspace: Workspace, job: Job, is_late: bool) -> Iterator[dict[str, Any]]:
    """Each node's own word on its end; a file that has just been written may show late."""
    limit = time.monotonic() + (LATE_S if is_late else 0)
    for node in range(job.nodes):
        exit_file = job.run.node_exit(job.attempt, node)
        while True:
            if is_mirrored(exit_file):
                _fetch_if_there(workspace, exit_file)
            if (told := read_json(exit_file)) is not None:
                yield told
                break
            if time.monotonic() > limit:
                break
            time.sleep(1)


def _keep_log(workspace: Workspace, job: Job, node: int, scrubber: Scrubber) -> None:
    """The node's own copy of its log, whole; what we followed where it left none."""
    place, followed = job.run.node_log(job.attempt, node), _followed(job, node)
    if is_mirrored(place):
        # Masked there by the values that the node knows; here we may know others.
        fetched = place.with_name(f"{place.name}.fetched")
        _fetch_if_there(workspace, place, fetched)
        if fetched.is_file():
            _masked(fetched, place, scrubber)
    elif not place.is_file() and followed.is_file():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(followed.read_bytes())


def _masked(source: Path, place: Path, scrubber: Scrubber) -> None:
    """Move a file to its place with every known secret masked."""
    with source.open("rb") as read, place.open("wb") as write:
        while chunk := read.read(_CHUNK):
            write.write(scrubber.feed(chunk))
        write.write(scrubber.finish())
    source.unlink()


def _fetch_if_there(workspace: Workspace, place: Path, into: Path | None = None) -> None:
    try:
        files.fetch(workspace, on_volume(place), into or place)
    except (Missing, files.Transfer):
        return


def _newest_step(workspace: Workspace, job: Job) -> int | None:
    """The step of the newest sealed checkpoint on the volume: one that has its marker."""
    folder = on_volume(job.run.checkpoints)
    steps = {}
    for entry in files.entries(workspace, folder):
        match = re.fullmatch(r"step-(\d{8})", Path(entry["path"]).name)
        if match:
            steps[int(match[1])] = entry["path"]
    for step in sorted(steps, reverse=True):
        if files.content(workspace, f"{steps[step]}/manifest.json") is not None:
            return step
    return None


def _refuse_local(model: str) -> None:
    if not model.startswith("/Volumes/"):
        raise UserError(
            f"parameters.model_name is {model}, a folder of this machine that no node of the "
            "platform sees; put it on a volume (/Volumes/…) or name a model of the Hub"
        )
