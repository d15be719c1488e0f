"""One rank that saves, started by torchrun in the tests of saving:

    torchrun … saving_driver.py RUN MODEL SCENARIO

What it "trains" is a change of the weights that follows from the step.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tunewright.contract.failures import UserError, reported
from tunewright.contract.rundir import RunDir
from tunewright.contract.settings import FsdpSettings
from tunewright.training.base import BaseModel
from tunewright.training.checkpoint import Checkpoints, Progress
from tunewright.training.model import build
from tunewright.training.optimizer import adamw
from tunewright.training.stopping import Stopping, Termination
from tunewright.training.world import World, join


def step(checkpoints: Checkpoints, number: int) -> None:
    for parameter in checkpoints.model.parameters.values():
        parameter.grad = torch.full_like(parameter, 1.0 / number)
    checkpoints.optimizer.step()


def a_failing_disk(checkpoints: Checkpoints, world: World) -> None:
    """Rank 1 cannot write; every rank says what it is told."""
    checkpoints.save(Progress(step=1), finished=False)
    if world.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    checkpoints.begin(Progress(step=2), finished=False)
    try:
        checkpoints.finish()
    except UserError as error:
        print(f"rank {world.rank} is told: {error}", flush=True)


def two_saves(checkpoints: Checkpoints, world: World) -> None:
    for number in (1, 2):
        step(checkpoints, number)
        checkpoints.begin(Progress(step=number), finished=number == 2)
    checkpoints.finish()


def killed_before_the_seal(checkpoints: Checkpoints, world: World) -> None:
    two_saves(checkpoints, world)
    flush = os.fsync

    def killing(descriptor: int) -> None:
        if "manifest" in os.readlink(f"/proc/self/fd/{descriptor}"):
            os.kill(os.getpid(), signal.SIGKILL)
        flush(descriptor)

    os.fsync = killing
    checkpoints.begin(Progress(step=3), finished=False)
    checkpoints.finish()


def told_to_end(seconds: float, checkpoints: Checkpoints, world: World) -> None:
    """A save on a disk that takes `seconds` is under way, and the main threads do not return."""
    flush = os.fsync
    checkpoints.save(Progress(step=1), finished=False)

    def slow(descriptor: int) -> None:
        if "distcp" in os.readlink(f"/proc/self/fd/{descriptor}"):
            time.sleep(seconds)
        flush(descriptor)

    os.fsync = slow
    with Termination(checkpoints.settle, Stopping.of_environment().grace_s, speaks=world.main):
        checkpoints.begin(Progress(step=2), finished=False)
        print(f"rank {world.rank} is ready", flush=True)
        if world.main:
            dist.barrier()
        time.sleep(60)
        print("training went on", flush=True)


def told_to_end_in_time(checkpoints: Checkpoints, world: World) -> None:
    told_to_end(2.0, checkpoints, world)


def told_to_end_too_late(checkpoints: Checkpoints, world: World) -> None:
    told_to_end(60.0, checkpoints, world)


def an_error_of_the_training(checkpoints: Checkpoints, world: World) -> None:
    """While a save is written to a disk that takes a minute; rank 0 never hears of it."""
    flush = os.fsync
    os.fsync = lambda descriptor: (time.sleep(60), flush(descriptor))
    with Termination(checkpoints.settle, Stopping.of_environment().grace_s, speaks=world.main):
        checkpoints.begin(Progress(step=1), finished=False)
        if world.main:
            dist.barrier()
        time.sleep(1)
        raise ValueError("of the training")


def near_the_deadline(checkpoints: Checkpoints, world: World) -> None:
    """It is 10 s from now. Ranks see it come at different steps, and stop together."""
    now = world.total(time.time() if world.main else 0.0)[0]
    stopping = Stopping(now + 10, grace_s=2.0)
    for number in range(1, 1000):
        wanted = stopping.wanted(checkpoints.seconds + world.rank)
        step(checkpoints, number)
        time.sleep(0.05)
        if world.total(wanted)[0]:
            checkpoints.conclude(Progress(step=number))
            raise stopping.over(number, checkpoints.run.checkpoint(number))
        if number == 2:
            checkpoints.begin(Progress(step=number), finished=False)


def main() -> None:
    root, model, scenario = sys.argv[1:]
    torch.set_num_threads(1)
    settings = FsdpSettings(
        model_name=model, init="random", dataset_name="unused",
        pack_tokens=32, max_length=16, global_batch_tokens=64,
    )  # fmt: skip
    world = join()
    with world.group():
        base = BaseModel("small", None, Path(model))
        sharded = build(base, settings, world)
        optimizer = adamw(sharded.parameters, settings)
        identity = {"data": "some"}
        with Checkpoints(
            RunDir(Path(root)), world, sharded, optimizer, base, identity, settings, None
        ) as checkpoints:
            globals()[scenario](checkpoints, world)


if __name__ == "__main__":
    with reported():
        main()
