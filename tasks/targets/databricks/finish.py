"""Consolidate and register on the platform: one small job on the cheapest accelerator.

The volume and the registry are there, so gigabytes stay where they are, and the machine of the flow
needs neither torch nor the volume's mount.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tasks.targets.databricks import files, target
from tasks.targets.databricks.api import Missing, Workspace, connect
from tasks.targets.databricks.request import NO_ENVIRONMENT, with_recipes
from tasks.targets.guardian import Say
from tasks.targets.job import Ending, Job
from tunewright.contract.mirror import on_volume
from tunewright.contract.rundir import RunDir, read_json
from tunewright.contract.workload import Workload

ALIAS = "candidate"
"""Points at the newest version that a run registered; who promotes it is the user's to say."""
CHEAPEST = "GPU_1xA10"
_LIMIT_MINUTES = 180


def left_something(run: RunDir) -> bool:
    """Whether the command left checkpoints or a model on the volume."""
    workspace = connect()
    return any(_has_files(workspace, place) for place in (run.checkpoints, run.model))


def finish(
    run: RunDir,
    attempt: int,
    workload: Workload,
    *,
    name: str | None,
    tags: Mapping[str, str],
    say: Say,
    cancelled: Callable[[], bool],
) -> tuple[Ending, dict[str, Any] | None]:
    """Run the job to its end; its ending, and what it did when it ended well.

    `attempt` numbers the job: one that was begun and not ended is gone on with.
    """
    folder = folder_of(run)
    small = _small(workload, _command(run, folder, name, tags))
    job = Job(
        run=folder,
        attempt=attempt,
        command=small.command,
        nodes=1,
        procs_per_node=1,
        env_variables=small.env_variables,
        has_parameters=False,
        deadline_s=_LIMIT_MINUTES * 60,
    )
    folder.attempt_state(attempt).mkdir(parents=True, exist_ok=True)
    placement = target.Placement(1, 1, small)
    ending = target.run(job, {}, say, placement, cancelled=cancelled)
    with target.left_open():
        return ending, _result(folder) if ending.well else None


def folder_of(run: RunDir) -> RunDir:
    """The job's own folder inside the run's: its state is kept like that of an attempt."""
    return RunDir(run.root / f"{run.name}-finish")


def result_of(run: RunDir) -> Path:
    return folder_of(run).root / "result.json"


def _result(folder: RunDir) -> dict[str, Any] | None:
    place = folder.root / "result.json"
    limit = time.monotonic() + target.LATE_S
    while on_volume(place) != str(place):
        try:
            files.fetch(connect(), on_volume(place), place)
            break
        except Missing:
            if time.monotonic() > limit:
                raise
            time.sleep(1)
    return read_json(place)


def _small(workload: Workload, command: str) -> Workload:
    """The same secrets on one node, and the same environment unless that is an image; our own
    requirements beside the user's.
    """
    compute = workload.compute.model_copy(
        update={"accelerator_type": CHEAPEST, "num_accelerators": 1,
                "provisioned_capacity_id": None, "priority_class": None, "pool_id": None}
    )  # fmt: skip
    given = workload.environment
    if given is None or given.docker_image or given.unity_catalog_image:
        # An image may lack tunewright.
        given = NO_ENVIRONMENT
    environment = given.model_copy(update={"dependencies": with_recipes(given.dependencies)})
    update: dict[str, Any] = {
        "command": command, "compute": compute, "environment": environment, "code_source": None,
        "parameters": {}, "idempotency_token": None,
        "mlflow_run_name": f"{(workload.mlflow_run_name or workload.experiment_name)[:93]}-finish",
    }  # fmt: skip
    return workload.model_copy(update=update)


def _command(run: RunDir, folder: RunDir, name: str | None, tags: Mapping[str, str]) -> str:
    words = ["python", "-P", "-m", "tunewright.databricks_finish", "--run", on_volume(run.root)]
    words += ["--result", on_volume(folder.root / "result.json")]
    if name:
        words += ["--name", name, "--tags", json.dumps(dict(tags)), "--alias", ALIAS]
        last = max(run.attempts(), default=0)
        trained = read_json(run.platform(last, "mlflow")) or {}
        if trained.get("run_id"):
            words += ["--run-id", trained["run_id"]]
    return shlex.join(words)


def _has_files(workspace: Workspace, place: Path) -> bool:
    return bool(files.entries(workspace, on_volume(place)))
