"""register: the sealed folder → a registered model version, exactly one per run."""

from __future__ import annotations

import tempfile
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks import finishing, ui
from tasks.nouns import ModelFolder, ModelVersion
from tasks.policy import told
from tasks.program import run_program
from tasks.run import Run
from tunewright.contract.rundir import write_json


@task(persist_result=False, cache_policy=NO_CACHE)
@told
def register(run: Run, model: ModelFolder) -> ModelVersion:
    """Register the model under its name, or find it registered already."""
    if model.path is None:
        return ModelVersion(None, None, model.reason)
    if finishing.is_elsewhere(run):
        return _on_platform(run)
    name = run.options.register_as or run.workload.experiment_name
    with tempfile.TemporaryDirectory(prefix="tunewright-register-") as scratch:
        tags = Path(scratch, "tags.json")
        write_json(tags, run.tags())
        args = ["--model", str(model.path), "--name", name, "--run", run.name]
        args += ["--run-id", run.mlflow()["MLFLOW_RUN_ID"], "--tags", str(tags)]
        result = run_program(run, "register", args, {})
    run.registered = {"name": result["name"], "version": result["version"], "alias": None}
    ui.say(f"registered {result['name']} version {result['version']}")
    return ModelVersion(result["name"], result["version"])


def _on_platform(run: Run) -> ModelVersion:
    """The version that the job on the platform made, or why it made none."""
    if run.options.register_as is None:
        reason = "no name catalog.schema.model was given (register_as)"
        return ModelVersion(None, None, reason)
    done = finishing.finished(run)
    version = done and done["register"]
    if not version:
        return ModelVersion(None, None, "the job on the platform registered nothing")
    run.registered = {key: version[key] for key in ("name", "version", "alias")}
    ui.say(f"registered {version['name']} version {version['version']}")
    return ModelVersion(version["name"], str(version["version"]))
