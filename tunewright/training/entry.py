"""How a recipe begins: its hyperparameters, its places, its model and tokens, what it says of them.

What is done here is done before any process group exists, and is the same in every recipe.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from tunewright.contract.failures import UserError
from tunewright.contract.rundir import EVENTS, RunDir
from tunewright.contract.settings import FsdpSettings
from tunewright.data.store import TokenStore
from tunewright.training.attention import described
from tunewright.training.base import BaseModel, find_base
from tunewright.training.memory import Fit
from tunewright.training.model import ShardedModel
from tunewright.training.plan import Plan

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


def identity_of(
    settings: FsdpSettings, store: TokenStore, plan: Plan, model: ShardedModel
) -> dict[str, Any]:
    """What a checkpoint must share with this run for it to be resumed."""
    return {
        "data": store.fingerprint,
        "steps": plan.steps,
        "parameters": model.count,
        **{name: getattr(settings, name) for name in IDENTITY},
        # What it came to: `auto` is another type on another machine.
        "precision": model.precision,
    }


def facts_of(
    settings: FsdpSettings, store: TokenStore, base: BaseModel, model: ShardedModel, fit: Fit
) -> dict[str, Any]:
    """What the start event says of model, data and fast paths, for the receipt."""
    return {
        "parameters": model.count,
        "matmul_parameters": model.matmul_count,
        "global_batch_tokens": settings.global_batch_tokens,
        "fast_paths": {
            "attention": described(model.module),
            "loss": "chunked" if model.head else "whole logits",
            "compile": model.compiled,
            "precision": model.precision,
            "recomputation": model.recomputes,
            "tokens_per_device": fit.packs * settings.pack_tokens,
            "weights_kept_whole": model.whole,
        },
        "base_model": {"name": base.name, "revision": base.revision},
        "memory": fit.found,
        "data": {
            "fingerprint": store.fingerprint,
            "tokens": store.train.tokens,
            "supervised_tokens": store.train.supervised_tokens,
        },
    }
