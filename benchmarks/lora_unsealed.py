"""The recipe lora without its copy of a random base model; started by lora_step.py.

    torchrun … benchmarks/lora_unsealed.py HYPERPARAMETERS

A run with `init: random` first writes its frozen weights down, since adapters mean nothing without
them: 42 GB for gpt-oss-20b, 234 GB for gpt-oss-120b, which a benchmark has neither room nor use
for. Nothing here saves or exports, so only that is left out; people train on weights that they
have, and write nothing either. All else is the recipe's own `main`.
"""

from __future__ import annotations

from tunewright.contract.failures import reported
from tunewright.contract.rundir import RunDir
from tunewright.recipes import lora
from tunewright.training.base import BaseModel
from tunewright.training.lora import base as random_base
from tunewright.training.lora.model import AdaptedModel
from tunewright.training.world import World


def unsealed(model: AdaptedModel, base: BaseModel, run: RunDir, world: World) -> BaseModel:
    return base


if __name__ == "__main__":
    random_base.seal = unsealed
    with reported():
        lora.main()
