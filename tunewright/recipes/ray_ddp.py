"""Full fine-tuning with Ray Train and DDP, one Ray worker per GPU (or on CPUs); once per node:

    python -m tunewright.recipes.ray_ddp hyperparameters.yaml

The settings are RayDdpSettings; without an argument they are read from HYPERPARAMETERS_PATH. Each
node starts Ray for itself, and node 0 trains over all of them. Rows, loss, steps and checkpoints
are those of the FSDP recipe: the same numbers, each rank with the whole model. Ray retries nothing;
a lost worker ends the attempt, and the same command goes on from the newest sealed checkpoint.
"""

from __future__ import annotations

import argparse
import os
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from tunewright.contract.failures import TunewrightError, UserError, reported, write_failure
from tunewright.contract.rundir import RunDir, next_start
from tunewright.contract.settings import RayDdpSettings, load_settings
from tunewright.data.store import TokenStore
from tunewright.training.base import BaseModel
from tunewright.training.batches import Loader, Shape, open_tokens
from tunewright.training.ceiling import measured
from tunewright.training.checkpoint import Checkpoints, Progress
from tunewright.training.entry import facts_of, identity_of, places, prepare, read_parameters
from tunewright.training.journal import Journal
from tunewright.training.loop import Attempt
from tunewright.training.memory import fitted
from tunewright.training.model import compute_dtype, recompute
from tunewright.training.optimizer import adamw
from tunewright.training.plan import Plan
from tunewright.training.profiler import of as profiled
from tunewright.training.ray_nodes import NODE_LABEL, NodeLost, await_nodes, awaited, ray_on, speak
from tunewright.training.replicas import replicate
from tunewright.training.saving import Saved
from tunewright.training.step import Trainer, evaluate
from tunewright.training.stopping import BlockedTermination, Stopping, stand_still
from tunewright.training.world import COLLECTIVE_TIMEOUT, World, meet


class Job(NamedTuple):
    """What every worker is told."""

    settings: RayDdpSettings
    run: RunDir
    attempt: int
    events: Path
    base: BaseModel
    tokens: str


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="tunewright.recipes.ray_ddp", description=__doc__)
    parser.add_argument("hyperparameters", nargs="?", help="YAML; default: HYPERPARAMETERS_PATH")
    settings = load_settings("ray_ddp", read_parameters(parser.parse_args(argv).hyperparameters))
    assert isinstance(settings, RayDdpSettings)
    run, attempt, events = places(settings)
    processes, gpus = processes_here()
    nodes = meet()
    base, tokens = nodes.prepared(lambda: prepare(settings, run))
    open_tokens(tokens, settings)
    job = Job(settings, run, attempt, events, base, tokens)
    try:
        with ray_on(nodes, processes, gpus, lambda: next_start(run.checkpoints)) as address:
            nodes.prepared(lambda: fit(job, address, nodes.size, processes, gpus), "trained")
    finally:
        nodes.parted()


def processes_here() -> tuple[int, bool]:
    """How many workers each node has, and whether each has a GPU; raises UserError for too few."""
    gpus = torch.cuda.device_count()
    wanted = int(os.environ.get("LOCAL_WORLD_SIZE") or gpus or 1)
    if 0 < gpus < wanted:
        raise UserError(
            f"LOCAL_WORLD_SIZE asks for {wanted} processes on this node, which has {gpus} GPUs; "
            f"set it to {gpus}, or set CUDA_VISIBLE_DEVICES= to train on the CPU"
        )
    return wanted, gpus > 0


def fit(job: Job, address: str, nodes: int, processes: int, gpus: bool) -> None:
    """Train on all nodes; on node 0. Raises what stopped it as the FSDP recipe does."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(address, log_to_driver=False, logging_level="WARNING")
    # Ray has put its own handler there, which would not wait for the workers.
    signal.signal(signal.SIGTERM, stand_still)
    await_nodes(nodes)
    # Ray would look for the checkpoints that an earlier attempt told it of; some are pruned.
    (job.run.checkpoints / "checkpoint_manager_snapshot.json").unlink(missing_ok=True)
    trainer = TorchTrainer(
        work,
        train_loop_config=job._asdict(),
        torch_config=TorchConfig(
            backend="cpu:gloo,cuda:nccl" if gpus else "gloo",
            timeout_s=int(COLLECTIVE_TIMEOUT.total_seconds()),
        ),
        scaling_config=ScalingConfig(
            num_workers=nodes * processes,
            use_gpu=gpus,
            resources_per_worker={"CPU": 1, **({"GPU": 1} if gpus else {})},
            # Ranks in the order of the nodes, so that rank 0 finds what node 0 has prepared.
            label_selector=[{NODE_LABEL: str(n)} for n in range(nodes) for _ in range(processes)],
        ),
        # Its folder is that of the checkpoints: Ray is told of them where they are.
        run_config=RunConfig(
            name=job.run.checkpoints.name,
            storage_path=str(job.run.root),
            failure_config=FailureConfig(max_failures=0, controller_failure_limit=0),
        ),
    )
    try:
        trainer.fit()
    except TrainingFailedError as error:
        raise cause_of(error) from None
    finally:
        ray.shutdown()


def cause_of(error: Exception) -> Exception:
    """What made training fail: an error of ours, a lost worker, or what a worker raised itself.

    When one worker is gone, the others fail too, in what they were doing with it.
    """
    from ray.exceptions import RayActorError

    failures: dict[int, Exception] = getattr(error, "worker_failures", {})
    for failure in failures.values():
        if isinstance(failure, TunewrightError):
            return failure
    for rank, failure in sorted(failures.items()):
        # Ray puts the end of a worker into an error of its health check.
        gone = getattr(failure, "health_check_failure", failure)
        if isinstance(gone, RayActorError):
            why, _, _ = str(gone).strip().splitlines()[-1].partition(" Some common causes")
            return NodeLost(f"the worker of rank {rank} is gone: {why}")
    return failures[min(failures)] if failures else NodeLost(str(error))


def work(told: dict[str, Any]) -> None:
    """One worker, in the process group that Ray has made."""
    from ray.train import get_context
    from ray.train.torch import get_device

    speak()
    job = Job(**told)
    context = get_context()
    world = World(context.get_world_rank(), context.get_world_size(), get_device(), HashStore())
    try:
        store = open_tokens(job.tokens, job.settings)
        with Journal(job.events, world, job.attempt, job.settings.logging_steps) as journal:
            train(job.settings, world, job.run, store, job.base, journal)
    except TunewrightError as error:
        # The guardian of this node hears it from the rank that it happened to.
        write_failure(error.failure_class, str(error))
        raise


def train(
    settings: RayDdpSettings,
    world: World,
    run: RunDir,
    store: TokenStore,
    base: BaseModel,
    journal: Journal,
) -> None:
    """One attempt: from the newest checkpoint, or the start, to the last step of the plan."""
    plan = Plan.of(settings, len(store.train))
    ceiling = measured(world, compute_dtype(settings, world.device))
    model = replicate(base, settings, world)
    model.require_vocabulary(store.facts.get("vocabulary", 0))
    optimizer = adamw(model.parameters, settings)
    fit = fitted(settings, model, store, run, world)
    if fit.recompute:
        recompute(model)
    shape = Shape.of(store, fit.packs) if model.needs_shape else None
    loader = Loader(store.train, plan, fit.packs, world, shape)
    trainer = Trainer(model, optimizer, loader, journal.clock, settings.max_grad_norm)
    identity = identity_of(settings, store, plan, model)
    template = store.facts.get("chat_template")

    checkpoints = Checkpoints(run, world, model, optimizer, base, identity, settings, template)
    stopping = Stopping.of_environment()
    ending = BlockedTermination(checkpoints.settle, stopping.grace_s, speaks=world.main)

    def held_out(step: int) -> float | None:
        if store.eval is None:
            return None
        return evaluate(model, store.eval, world, fit.packs, step, shape)

    profiling = profiled(settings, journal.folder, world)
    with loader, checkpoints, ending, awaited(), profiling as profile:
        attempt = Attempt(
            settings, plan, trainer, checkpoints, journal, profile, stopping, held_out, report
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


def report(progress: Progress, sealed: list[Saved]) -> None:
    """Tell Ray how far training is, and of the newest checkpoint that it has not been told of.

    For all ranks together, so never where they merely see a seal: that is not in the same step. The
    checkpoint stays where it is, and Ray never deletes one.
    """
    from ray import train

    checkpoint = train.Checkpoint(str(sealed[-1].path)) if sealed else None
    train.report(
        asdict(progress),
        checkpoint if train.get_context().get_world_rank() == 0 else None,
        checkpoint_upload_mode=train.CheckpointUploadMode.NO_UPLOAD,
    )


if __name__ == "__main__":
    with reported():
        main()
