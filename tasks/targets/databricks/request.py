"""An attempt on AI Runtime as values: the launch folder's files, and the requests that start it.

The names of the files, and how they stand beside the command, are what the platform's launcher
looks for. Nothing here speaks to anybody: tests compare the values, `--dry-run` prints them.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tasks.targets.databricks.api import quoted
from tasks.targets.databricks.archives import Archive, recipe_requirements
from tasks.targets.job import Job
from tunewright.contract.mirror import on_volume
from tunewright.contract.parts import Environment
from tunewright.contract.workload import Workload

SUBMIT = "/api/2.2/jobs/runs/submit"
MKDIRS = "/api/2.0/workspace/mkdirs"
IMPORT = "/api/2.0/workspace-files/import-file"
FILES = "/api/2.0/fs/files"
COMMAND = "command.sh"
LAUNCH_FILES = (
    COMMAND, "training_config.yaml", "requirements.yaml", "env_vars.json", "secret_env_vars.json",
    "hyperparameters.yaml",
)  # fmt: skip
"""What the launcher takes from a launch folder when it is there."""
ENVIRONMENT_KEY = "default"
_NO_RETRIES = {"max_retries": 0, "retry_on_timeout": False}
NO_ENVIRONMENT = Environment.model_validate({})


@dataclass(frozen=True)
class Request:
    """One request. `content` is the body of an upload: bytes, or a file."""

    method: str
    path: str
    query: Mapping[str, Any] = field(default_factory=dict)
    body: Mapping[str, Any] | None = None
    content: bytes | Archive | None = None
    target: str = ""
    """Of an upload: the path as people write it."""

    def document(self) -> dict[str, Any]:
        """What a reader sees of it; an archive by its name and hash."""
        found: dict[str, Any] = {"method": self.method, "path": self.path}
        if self.query:
            found["query"] = dict(self.query)
        if self.body is not None:
            found["body"] = dict(self.body)
        if isinstance(self.content, Archive):
            found["content"] = f"<{self.content.name}>"
        elif self.content is not None:
            found["content"] = self.content.decode()
        return found


@dataclass(frozen=True)
class Places:
    """Where an attempt's files go: all below the user's own folder, or on the run's volume."""

    folder: str
    """The launch folder."""
    wheel: str | None
    """tunewright itself; None where an image brings it."""
    snapshot: str | None


def places(
    job: Job, workload: Workload, me: str, wheel: Archive | None, snapshot: Archive | None
) -> Places:
    """Where each file of this attempt goes for the user `me`."""
    own = f"/Workspace/Users/{me}/.tunewright"
    launch = f"{own}/launch/{workload.experiment_name}/{job.run.name}/attempt-{job.attempt}"
    where = None
    if snapshot is not None:
        volume = workload.code_source.remote_volume if workload.code_source else None
        if volume is None and not snapshot.fits_workspace:
            volume = on_volume(job.run.root.parent)
        where = f"{volume.rstrip('/') if volume else own}/snapshots/{snapshot.name}"
    return Places(launch, f"{own}/wheels/{wheel.name}" if wheel else None, where)


def token(job: Job, workload: Workload) -> str:
    """What makes two submissions the same one: the user's token or the run, and the attempt."""
    text = f"{workload.idempotency_token or job.run.name}\0{job.attempt}"
    return hashlib.sha256(text.encode()).hexdigest()


def requests(
    job: Job,
    workload: Workload,
    found: Places,
    wheel: Archive | None,
    snapshot: Archive | None,
    parameters: str | None,
) -> Iterator[Request]:
    """Everything that starts an attempt, in order; the last one is the submission."""
    if wheel is not None and found.wheel:
        yield from _upload(found.wheel, wheel)
    if snapshot is not None and found.snapshot:
        yield from _upload(found.snapshot, snapshot)
    yield Request("POST", MKDIRS, body={"path": found.folder})
    for name, text in launch_files(job, workload, found, parameters).items():
        yield _import(f"{found.folder}/{name}", text.encode())
    yield Request("POST", SUBMIT, body=submission(job, workload, found))


def launch_files(
    job: Job, workload: Workload, found: Places, parameters: str | None
) -> dict[str, str]:
    """The launch folder: {name: text}. Secrets are references in it, never values."""
    variables = {
        **job.env_variables,
        "PYTHONUNBUFFERED": "1",
        "TUNEWRIGHT_RUN_DIR": on_volume(job.run.root),
        "TUNEWRIGHT_ATTEMPT": str(job.attempt),
    }
    files = _sidecars(workload, variables, found.wheel, parameters)
    return {**files, COMMAND: command(job, workload)}


def bundled_files(workload: Workload) -> dict[str, str]:
    """The same for a job that the platform runs without us: the command is the workload's own."""
    variables = {**workload.env_variables, "PYTHONUNBUFFERED": "1"}
    parameters = _yaml(workload.parameters) if workload.parameters else None
    # The wheel is a file of the bundle, whose path on the platform only the bundle knows.
    return {**_sidecars(workload, variables, None, parameters), COMMAND: workload.command}


def _sidecars(
    workload: Workload, variables: Mapping[str, str], wheel: str | None, parameters: str | None
) -> dict[str, str]:
    split = {name: ref.split("/", 1) for name, ref in workload.secrets.items()}
    secret = [
        {"name": name, "secret_scope": scope, "secret_key": key}
        for name, (scope, key) in split.items()
    ]
    files = {
        "training_config.yaml": _yaml(workload.document()),
        "requirements.yaml": _yaml(_requirements(workload, wheel)),
        "env_vars.json": _json([{"name": n, "value": v} for n, v in variables.items()]),
    }
    if secret:
        files["secret_env_vars.json"] = _json(secret)
    if parameters is not None:
        files["hyperparameters.yaml"] = parameters
    return files


def command(job: Job, workload: Workload) -> str:
    """What each node runs: the workload's command, guarded where tunewright is installed.

    An image may lack it; then the command runs as it is, and only the platform tells how it ended.
    """
    end = f"TUNEWRIGHT_{hashlib.sha256(job.command.encode()).hexdigest()[:12]}"
    words = ["python", "-P", "-m", "tunewright.databricks_node"]
    if job.deadline_s:
        words += ["--limit-s", f"{job.deadline_s:g}"]
    for name in sorted(workload.secrets):
        words += ["--secret", name]
    return f"""\
# Written by Tunewright for attempt {job.attempt} of {job.run.name}. Every node runs this once.
IFS= read -r -d '' TUNEWRIGHT_COMMAND <<'{end}' || true
{job.command.rstrip()}
{end}
export TUNEWRIGHT_COMMAND
if python -P -c 'import tunewright.databricks_node'; then
  exec {shlex.join(words)}
fi
echo 'tunewright is not installed here: the command runs without its guardian' >&2
exec bash -c "set -euo pipefail
$TUNEWRIGHT_COMMAND"
"""


def submission(job: Job, workload: Workload, found: Places) -> dict[str, Any]:
    """The body of runs/submit: one task, retried by nobody but us, timed out per attempt."""
    body: dict[str, Any] = {
        "run_name": f"{job.run.name} attempt {job.attempt}",
        "idempotency_token": token(job, workload),
        # Of the whole run: none. An attempt's limit stands at the task.
        "timeout_seconds": 0,
    }
    if workload.usage_policy_id:
        body["budget_policy_id"] = workload.usage_policy_id
    elif workload.usage_policy_name:
        # Only in a dry run, which asks nobody.
        body["budget_policy_id"] = f"<id of usage policy {workload.usage_policy_name}>"
    if workload.permissions:
        body["access_control_list"] = [_permission(p) for p in workload.permissions]
    if environments := _environments(workload, found.wheel):
        body["environments"] = environments
    body["tasks"] = [
        _task(workload, found, {"timeout_seconds": int(job.deadline_s or 0), **_NO_RETRIES})
    ]
    return body


def bundled_task(
    workload: Workload, found: Places
) -> tuple[list[dict[str, Any]] | None, dict[str, Any]]:
    """Environments and task of a job that the platform retries by itself."""
    retried = {
        "timeout_seconds": (workload.timeout_minutes or 0) * 60,
        "max_retries": workload.max_retries,
        "retry_on_timeout": workload.max_retries > 0,
    }
    return _environments(workload, found.wheel), _task(workload, found, retried)


def _environments(workload: Workload, wheel: str | None) -> list[dict[str, Any]] | None:
    spec = environment_spec(workload, wheel)
    return [{"environment_key": ENVIRONMENT_KEY, "spec": spec}] if spec else None


def environment_spec(workload: Workload, wheel: str | None) -> dict[str, Any] | None:
    """Either form: a version of the serverless environment, or an AI base; None for an image."""
    given = workload.environment
    if given is not None and (given.docker_image or given.unity_catalog_image):
        return None
    version = (given or NO_ENVIRONMENT).version
    number = version.lower().removeprefix("databricks_ai_v").removeprefix("ai")
    spec: dict[str, Any] = {"environment_version": version}
    if number != version:
        spec = {"base_environment": f"workspace-base-environments/databricks_ai_v{number}"}
    dependencies = _dependencies(workload, wheel)
    return {**spec, "dependencies": dependencies} if dependencies else spec


def _task(workload: Workload, found: Places, limits: Mapping[str, Any]) -> dict[str, Any]:
    compute = workload.compute
    image = workload.environment
    has_image = image is not None and (image.docker_image or image.unity_catalog_image)
    task: dict[str, Any] = {
        "experiment": workload.experiment_name,
        "mlflow_run": workload.mlflow_run_name or workload.experiment_name,
        "mlflow_experiment_directory": workload.mlflow_experiment_directory,
        "mlflow_artifact_location": workload.mlflow_artifact_location,
        "code_source_path": found.snapshot,
        "priority_class": compute.priority_class,
        "docker_image_url": image.docker_image.url if image and image.docker_image else None,
        "unity_catalog_image_path": image.unity_catalog_image if image else None,
        "deployments": [
            {
                "command_path": f"{found.folder}/{COMMAND}",
                "compute": _present(
                    {
                        "accelerator_type": compute.accelerator_type,
                        "accelerator_count": compute.num_accelerators,
                        "provisioned_capacity_id": compute.provisioned_capacity_id,
                        "pool_id": compute.pool_id,
                    }
                ),
            }
        ],
    }
    return _present(
        {
            "task_key": workload.experiment_name,
            "run_if": "ALL_SUCCESS",
            "environment_key": None if has_image else ENVIRONMENT_KEY,
            **limits,
            "ai_runtime_task": _present(task),
        }
    )


def _permission(given: Any) -> dict[str, str]:
    facts = given.model_dump(exclude_none=True)
    return {"permission_level": facts.pop("level"), **facts}


def _requirements(workload: Workload, wheel: str | None) -> dict[str, Any]:
    given = workload.environment or NO_ENVIRONMENT
    if given.docker_image or given.unity_catalog_image:
        return {"dependencies": []}
    return {"version": given.version, "dependencies": _dependencies(workload, wheel)}


def _dependencies(workload: Workload, wheel: str | None) -> list[str]:
    """The user's requirements, then ours: the wheel by its path, since an extra of a path would
    need a space, at which the platform's launcher is said to split; so a recipe's stand beside it.
    """
    found = list(workload.environment.dependencies) if workload.environment else []
    if wheel is None:
        return found
    return [*(with_recipes(found) if workload.recipe else found), wheel]


def with_recipes(given: list[str]) -> list[str]:
    """Requirements with what our recipes need beside them; a package that is named stays so."""
    named = {_name(line) for line in given}
    return [*given, *(line for line in recipe_requirements() if _name(line) not in named)]


def _name(requirement: str) -> str:
    """The package of a requirement, as indexes compare names."""
    return (
        re.split(r"[^A-Za-z0-9._-]", requirement.strip(), maxsplit=1)[0].lower().replace("_", "-")
    )


def _upload(path: str, archive: Archive) -> Iterator[Request]:
    if path.startswith("/Volumes/"):
        address = FILES + quoted(path)
        yield Request("PUT", address, {"overwrite": "true"}, content=archive, target=path)
        return
    yield Request("POST", MKDIRS, body={"path": str(Path(path).parent)})
    yield _import(path, archive)


def _import(path: str, content: bytes | Archive) -> Request:
    address = IMPORT + quoted(path)
    return Request("POST", address, {"overwrite": "true"}, content=content, target=path)


def _present(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in facts.items() if value is not None}


def _yaml(facts: Mapping[str, Any]) -> str:
    return str(yaml.safe_dump(dict(facts), sort_keys=False, allow_unicode=True, width=math.inf))


def _json(facts: Any) -> str:
    return json.dumps(facts, indent=2) + "\n"
