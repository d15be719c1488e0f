"""Full fine-tuning with FSDP2, one process per GPU (or on CPUs):

    torchrun --nproc-per-node 8 -m tunewright.recipes.fsdp hyperparameters.yaml

The settings are FsdpSettings; without an argument they are read from HYPERPARAMETERS_PATH. Packed
rows, loss and gradient over all supervised tokens of a step, sealed checkpoints in
TUNEWRIGHT_RUN_DIR (by hand: in output_dir), resumed when the same command runs again.
"""

from __future__ import annotations

import argparse

from tunewright.contract.failures import reported
from tunewright.contract.rundir import RunDir
from tunewright.contract.settings import FsdpSettings, load_settings
from tunewright.data.store import TokenStore
from tunewright.training.base import BaseModel
from tunewright.training.batches import Loader, Shape, open_tokens
from tunewright.training.ceiling import measured
from tunewright.training.checkpoint import Checkpoints
from tunewright.training.entry import facts_of, identity_of, places, prepare, read_parameters
from tunewright.training.journal import Journal
from tunewright.training.loop import Attempt
from tunewright.training.memory import adjusted, fitted
from tunewright.training.model import build, compute_dtype
from tunewright.training.optimizer import adamw
from tunewright.training.plan import Plan
from tunewright.training.profiler import of as profiled
from tunewright.training.step import Trainer, evaluate
from tunewright.training.stopping import Stopping, Termination
from tunewright.training.world import World, join


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
    ceiling = measured(world, compute_dtype(settings, world.device))
    model = build(base, settings, world)
    model.require_vocabulary(store.facts.get("vocabulary", 0))
    optimizer = adamw(model.parameters, settings)
    fit = fitted(settings, model, store, run, world)
    model = adjusted(model, fit)
    shape = Shape.of(store, fit.packs) if model.needs_shape else None
    loader = Loader(store.train, plan, fit.packs, world, shape)
    trainer = Trainer(model, optimizer, loader, journal.clock, settings.max_grad_norm)
    identity = identity_of(settings, store, plan, model)
    template = store.facts.get("chat_template")
    checkpoints = Checkpoints(run, world, model, optimizer, base, identity, settings, template)
    stopping = Stopping.of_environment()
    ending = Termination(checkpoints.settle, stopping.grace_s, speaks=world.main)

    def held_out(step: int) -> float | None:
        if store.eval is None:
            return None
        return evaluate(model, store.eval, world, fit.packs, step, shape)

    with loader, checkpoints, ending, profiled(settings, journal.folder, world) as profile:
        attempt = Attempt(
            settings, plan, trainer, checkpoints, journal, profile, stopping, held_out
        )
        found = checkpoints.resume()
        journal.started(
            found,
            plan.steps,
            facts_of(settings, store, base, model, fit),
            settings.model_dump(exclude={"output_dir", "tokens_path"}),
            flops_per_token=6.0 * model.matmul_count,
            ceiling=ceiling,
        )
        progress = attempt.steps(found)
    journal.ended(progress)


if __name__ == "__main__":
    with reported():
        main()
