"""consolidate: shards → a sealed Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks import finishing
from tasks.nouns import ModelFolder, Shards
from tasks.policy import told
from tasks.program import run_program
from tasks.run import Run
from tunewright.contract.failures import TunewrightError


class NoModel(TunewrightError):
    """A model was to be registered and the command left none."""

    retryable = False


@task(persist_result=False, cache_policy=NO_CACHE)
@told
def consolidate(run: Run, shards: Shards) -> ModelFolder:
    """Build, check and seal the model's folder, or say why there is none."""
    if finishing.is_elsewhere(run):
        return _on_platform(run)
    if not shards.run.checkpoints.is_dir() and not shards.run.model.is_dir():
        return _none(run, f"the command left no checkpoint and no model in {shards.run.model}")
    result = run_program(run, "consolidate", ["--run", str(shards.run.root)], {})
    if result["model"] is None:
        return _none(run, result["reason"])
    return ModelFolder(Path(result["model"]))


def _on_platform(run: Run) -> ModelFolder:
    """The same by a job where the volume is; the folder is named as it is on this machine."""
    done = finishing.finished(run)
    if done is None:
        return _none(run, "the command left no checkpoint and no model on the volume")
    made = done["consolidate"]
    return ModelFolder(run.dir.model) if made["model"] else _none(run, made["reason"])


def _none(run: Run, reason: str) -> ModelFolder:
    if run.options.register_as:
        raise NoModel(f"nothing to register as {run.options.register_as}: {reason}")
    run.reason = reason
    return ModelFolder(None, reason)
