"""Low-rank adapters on a frozen model with TRL's SFTTrainer, one process per GPU (or on CPUs):

    torchrun --nproc-per-node 8 -m tunewright.recipes.lora hyperparameters.yaml

The settings are LoraSettings; without an argument they are read from HYPERPARAMETERS_PATH. The
frozen weights are sharded by FSDP2, or whole on every rank (DDP) where they fit. Rows, plan, loss
and journal are those of the recipe fsdp; checkpoints hold the adapters alone.
"""

from __future__ import annotations

import argparse

from tunewright.contract.failures import reported
from tunewright.contract.rundir import RunDir
from tunewright.contract.settings import LoraSettings, load_settings
from tunewright.data.store import TokenStore
from tunewright.training.base import BaseModel
from tunewright.training.batches import Loader, Shape, open_tokens
from tunewright.training.ceiling import measured
from tunewright.training.entry import (
    facts_of,
    identity_of,
    places,
    prepare,
    read_parameters,
)
from tunewright.training.journal import Journal
from tunewright.training.loop import Attempt
from tunewright.training.lora import base as random_base
from tunewright.training.lora.checkpoint import AdapterCheckpoints
from tunewright.training.lora.engine import AdapterTrainer, Course, quiet
from tunewright.training.lora.model import AdaptedModel, build
from tunewright.training.memory import adjusted, fitted
from tunewright.training.model import compute_dtype
from tunewright.training.optimizer import adamw
from tunewright.training.plan import Plan
from tunewright.training.profiler import of as profiled
from tunewright.training.step import Trainer, evaluate
from tunewright.training.stopping import Stopping, Termination
from tunewright.training.world import World, join

# What decides which model comes out, beside what does so in every recipe.
IDENTITY = (
    "lora_r",
    "lora_alpha",
    "lora_dropout",
    "lora_target_modules",
    "lora_target_parameters",
    "lora_experts_r",
    "lora_rank_pattern",
)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="tunewright.recipes.lora", description=__doc__)
    parser.add_argument("hyperparameters", nargs="?", help="YAML; default: HYPERPARAMETERS_PATH")
    settings = load_settings("lora", read_parameters(parser.parse_args(argv).hyperparameters))
    assert isinstance(settings, LoraSettings)
    run, attempt, events = places(settings)
    world = join()
    base, tokens = world.prepared(lambda: prepare(settings, run))
    store = open_tokens(tokens, settings)
    with (
        quiet(),
        world.group(),
        Journal(events, world, attempt, settings.logging_steps) as journal,
    ):
        train(settings, world, run, store, base, journal)


def train(
    settings: LoraSettings,
    world: World,
    run: RunDir,
    store: TokenStore,
    base: BaseModel,
    journal: Journal,
) -> None:
    """One attempt: from the newest checkpoint, or the start, to the last step of the plan."""
    plan = Plan.of(settings, len(store.train))
    ceiling = measured(world, compute_dtype(settings, world.device))
    model, base = prepared(settings, world, run, base)
    model.require_vocabulary(store.facts.get("vocabulary", 0))
    optimizer = adamw(model.parameters, settings)
    fit = fitted(settings, model, store, run, world)
    model = adjusted(model, fit)
    shape = Shape.of(store, fit.packs) if model.needs_shape else None
    loader = Loader(store.train, plan, fit.packs, world, shape)
    steps = Trainer(model, optimizer, loader, journal.clock, settings.max_grad_norm)
    identity = identity_of(settings, store, plan, model)
    identity |= {name: getattr(settings, name) for name in IDENTITY}
    template = store.facts.get("chat_template")
    facts = facts_of(settings, store, base, model, fit)
    facts["adapter_parameters"] = model.adapter_count
    facts["fast_paths"]["sharding"] = "fsdp" if model.sharded else "ddp"
    facts["fast_paths"]["grouped_experts"] = model.grouped

    checkpoints = AdapterCheckpoints(
        run, world, model, optimizer, base, identity, settings, template
    )
    stopping = Stopping.of_environment()
    ending = Termination(checkpoints.settle, stopping.grace_s, speaks=world.main)

    def held_out(step: int) -> float | None:
        if store.eval is None:
            return None
        return evaluate(model, store.eval, world, fit.packs, step, shape)

    with loader, checkpoints, ending, profiled(settings, journal.folder, world) as profile:
        attempt = Attempt(settings, plan, steps, checkpoints, journal, profile, stopping, held_out)
        found = checkpoints.resume()
        journal.started(
            found,
            plan.steps,
            facts,
            settings.model_dump(exclude={"output_dir", "tokens_path"}),
            flops_per_token=model.flops_per_token,
            ceiling=ceiling,
        )
        attempt.begin(found)
        first = attempt.progress.step
        course = Course(first, plan.steps, attempt.before, attempt.after, stop=attempt.stop)
        if first < plan.steps:
            AdapterTrainer(model, optimizer, steps, settings, course, run.root).train()
        progress = attempt.finish()
    journal.ended(progress)


def prepared(
    settings: LoraSettings, world: World, run: RunDir, base: BaseModel
) -> tuple[AdaptedModel, BaseModel]:
    """The model, and its base, which is in the run from the first attempt on when it is random."""
    if settings.init == "pretrained":
        return build(base, settings, world, random=False), base
    if kept := world.on_main(lambda: random_base.kept(base, run)):
        return build(kept, settings, world, random=False), kept
    model = build(base, settings, world, random=True)
    return model, random_base.seal(model, base, run, world)


if __name__ == "__main__":
    with reported():
        main()
