"""A model that every rank holds whole, its gradients averaged by torch's DDP.

The other half of what recipes can do with a model (`model` shards it): the same weights from the
same seed, the same attention, head and compiled layers, the same names in checkpoints.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tunewright.contract.settings import FsdpSettings
from tunewright.training import attention, weights
from tunewright.training.base import BaseModel, read_config
from tunewright.training.model import (
    ShardedModel,
    compute_dtype,
    decoder_layers,
    ready,
    skeleton,
    tied_names,
)
from tunewright.training.plan import seed_of
from tunewright.training.world import World


class ReplicatedModel(ShardedModel):
    """A model whose parameters are whole on every rank: plain fp32 tensors. `through`: DDP."""

    @property
    def copies(self) -> int:
        return dist.get_world_size()

    def accumulate(self, last: bool) -> None:
        """Gradients meet in the last micro-batch of a step; before it each rank adds up its own."""
        self.through.require_backward_grad_sync = last


def replicate(base: BaseModel, settings: FsdpSettings, world: World) -> ReplicatedModel:
    """The whole model on every rank, with the base model's or random weights.

    They are those that `model.build` gives the same settings.
    """
    dtype = compute_dtype(settings, world.device)
    config = world.on_main(lambda: read_config(base))
    module = skeleton(config, attention.choose(config, world.device, dtype))
    tied = tied_names(module)
    if settings.init == "random":
        _make_random(module, settings.seed, world.device)
    else:
        module.to_empty(device=world.device)
        module.tie_weights()
        weights.init_buffers(module)
        weights.load_pretrained(module, base.name, base.folder, world)
    parameters = dict(module.named_parameters())
    replica = _averaging(_Computing(module.train(), dtype))
    # Nothing is to be averaged before the first step.
    replica.require_backward_grad_sync = False
    model = ReplicatedModel(
        module,
        parameters,
        tied,
        dtype,
        "bf16" if dtype == torch.bfloat16 else "fp32",
        settings.compiles(on_gpu=world.device.type == "cuda"),
        None,
        whole=True,
        through=replica,
    )
    return ready(model, settings, world.device)


class _Computing(nn.Module):
    """A model that computes in a type of its own, with parameters that stay fp32.

    A forward pass puts copies of the parameters in the model's places. They stay there, since a
    layer that recomputes its activations reads them again in the backward pass, and gradients go
    through them to the parameters, where they are added up in fp32. Autocast would leave the
    residual stream in fp32, and not reach a head that makes its own products.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.originals = nn.ParameterList(model.parameters())
        self._dtype = dtype
        # In a tuple, where torch does not look for parameters: the copies are none.
        self._model = (model,)
        place_of = {id(parameter): place for place, parameter in enumerate(self.originals)}
        self._places = [
            (part._parameters, name, place_of[id(parameter)])
            for part in model.modules()
            for name, parameter in part._parameters.items()
            if parameter is not None
        ]
        with torch.no_grad():
            self._copy()

    def forward(self, **inputs: Any) -> Any:
        self._copy()
        return self._model[0](**inputs)

    def _copy(self) -> None:
        copies = [parameter.to(self._dtype) for parameter in self.originals]
        for holder, name, place in self._places:
            holder[name] = copies[place]


def _averaging(computing: _Computing) -> DistributedDataParallel:
    import torch._dynamo

    # It would cut compiled layers at the borders of DDP's buckets, and gain nothing: a layer is
    # about as large as one, and they are averaged while the layers before it are computed.
    torch._dynamo.config.optimize_ddp = False
    return DistributedDataParallel(computing, gradient_as_bucket_view=True)


def _make_random(module: Any, seed: int, device: torch.device) -> None:
    """Unit by unit, each from the seed that it has when it is sharded."""
    for place, unit in enumerate(weights.units(module, decoder_layers(module))):
        weights.init_random(module, unit, seed_of(seed, place), device)
    module.tie_weights()
