"""Full fine-tuning with FSDP2, one process per GPU (or on CPUs):

    torchrun --nproc-per-node 8 -m tunewright.recipes.fsdp hyperparameters.yaml

The settings are FsdpSettings; without an argument they are read from HYPERPARAMETERS_PATH. Packed
rows, loss and gradient over all supervised tokens of a step, sealed checkpoints in
TUNEWRIGHT_RUN_DIR (by hand: in output_dir), resumed when the same command runs again.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml

from tunewright.contract.failures import UserError, reported
from tunewright.contract.rundir import EVENTS, RunDir
from tunewright.contract.settings import FsdpSettings, load_settings
from tunewright.data.store import TokenStore
from tunewright.training.attention import described
from tunewright.training.batches import open_tokens
from tunewright.training.checkpoint import Checkpoints, Progress
from tunewright.training.journal import Journal
from tunewright.training.model import BaseModel, ShardedModel, build, find_base
from tunewright.training.optimizer import adamw
from tunewright.training.plan import Plan, seed_of
from tunewright.training.schedule import learning_rate
from tunewright.training.step import Trainer, evaluate
from tunewright.training.world import World, join

# Settings that decide which model comes out. A checkpoint made with others is not resumed.
IDENTITY = (
    "model_name",
    "model_revision",
    "init",
    "precision",
    "seed",
    "global_batch_tokens",
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "warmup_ratio",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="tunewright.recipes.fsdp", description=__doc__)
    parser.add_argument("hyperparameters", nargs="?", help="YAML; default: HYPERPARAMETERS_PATH")
    settings = load_settings("fsdp", read_parameters(parser.parse_args(argv).hyperparameters))
    run, attempt, events = places(settings)
    world = join()
    base, tokens = world.prepared(lambda: prepare(settings, run))
    store = open_tokens(tokens, settings)
    with world.group(), Journal(events, world, attempt, settings.logging_steps) as journal:
        train(settings, world, run, store, base, journal)


def read_parameters(argument: str | None) -> dict[str, Any]:
    """The hyperparameters file as a mapping; raises UserError when there is none to read."""
    path = argument or os.environ.get("HYPERPARAMETERS_PATH")
    if not path:
        raise UserError("no hyperparameters: name a YAML file, or set HYPERPARAMETERS_PATH")
    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not YAML: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} must hold a mapping of names to values")
    return found


def places(settings: FsdpSettings) -> tuple[RunDir, int, Path]:
    """The run's folder, the number of this attempt, and where its events go.

    By hand there is no run folder: output_dir, or the working directory, takes its place.
    """
    attempt = int(os.environ.get("TUNEWRIGHT_ATTEMPT") or 1)
    if folder := os.environ.get("TUNEWRIGHT_RUN_DIR"):
        run = RunDir(Path(folder))
        return run, attempt, run.events(attempt)
    run = RunDir(Path(settings.output_dir or ".").expanduser().absolute())
    return run, attempt, run.root / EVENTS


def prepare(settings: FsdpSettings, run: RunDir) -> tuple[BaseModel, str]:
    """The base model and the path of the tokens; downloaded, or made, when they are not there."""
    base = find_base(settings)
    tokens = settings.tokens_path
    if tokens is None:
        from tunewright.pretokenize import pretokenize

        shared = "TUNEWRIGHT_RUN_DIR" in os.environ
        root = (run.root.parent if shared else run.root) / "tokens"
        tokens = str(pretokenize(settings, root)["path"])
    return base, tokens


def train(
    settings: FsdpSettings,
    world: World,
    run: RunDir,
    store: TokenStore,
    base: BaseModel,
    journal: Journal,
) -> None:
    """One attempt: from the newest checkpoint, or the start, to the last step of the plan."""
    plan = Plan.of(settings, len(store.train))
    model = build(base, settings, world)
    model.require_vocabulary(store.facts.get("vocabulary", 0))
    optimizer = adamw(model.parameters, settings)
    size = settings.packs_per_micro_batch
    trainer = Trainer(model, optimizer, store.train, world, size, settings.max_grad_norm)
    identity = identity_of(settings, store, plan, model)
    checkpoints = Checkpoints(
        run,
        world,
        model,
        optimizer,
        base,
        identity,
        settings,
        chat_template=store.facts.get("chat_template"),
    )

    def evaluated(progress: Progress) -> Progress:
        if store.eval is not None:
            loss = evaluate(model, store.eval, world, size, progress.step)
            progress = replace(progress, eval_loss=loss)
        journal.evaluated(progress)
        return progress

    found = checkpoints.resume()
    parameters = settings.model_dump(exclude={"output_dir", "tokens_path"})
    journal.started(found, plan.steps, facts_of(settings, store, base, model), parameters)
    progress = found.progress if found.path else evaluated(found.progress)
    for step in range(progress.step + 1, plan.steps + 1):
        # What is random in a step follows from the step, so resuming needs no generator's state.
        torch.manual_seed(seed_of(settings.seed, step, world.rank))
        rate = learning_rate(settings, step, plan.steps)
        result = trainer.take(step, plan.packs_of(step), rate)
        progress = progress.after(step, result)
        journal.stepped(step, rate, result)
        last = step == plan.steps
        if last or step % settings.eval_steps == 0:
            progress = evaluated(progress)
        if last or step % settings.save_steps == 0:
            journal.saved(step, checkpoints.save(progress, finished=last))
    journal.ended(progress, model.matmul_count)


def identity_of(
    settings: FsdpSettings, store: TokenStore, plan: Plan, model: ShardedModel
) -> dict[str, Any]:
    """What a checkpoint must share with this run for it to be resumed."""
    return {
        "data": store.fingerprint,
        "steps": plan.steps,
        "parameters": model.count,
        **{name: getattr(settings, name) for name in IDENTITY},
    }


def facts_of(
    settings: FsdpSettings, store: TokenStore, base: BaseModel, model: ShardedModel
) -> dict[str, Any]:
    """What the start event says of model, data and fast paths, for the receipt."""
    return {
        "parameters": model.count,
        "global_batch_tokens": settings.global_batch_tokens,
        "fast_paths": {
            "attention": described(model.module),
            "compile": False,
            "precision": "bf16" if model.dtype == torch.bfloat16 else "fp32",
            "recomputation": settings.gradient_checkpointing,
        },
        "base_model": {"name": base.name, "revision": base.revision},
        "data": {
            "fingerprint": store.fingerprint,
            "tokens": store.train.tokens,
            "supervised_tokens": store.train.supervised_tokens,
        },
    }


if __name__ == "__main__":
    with reported():
        main()
