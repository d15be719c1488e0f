"""The frozen model with its adapters, sharded over the ranks or whole on each of them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn

from tunewright.contract.settings import LoraSettings
from tunewright.training import attention, weights
from tunewright.training.base import BaseModel, read_config
from tunewright.training.lora import adapters, experts
from tunewright.training.model import (
    ShardedModel,
    compute_dtype,
    decoder_layers,
    gather_singly,
    mesh_of,
    ready,
    shard_outer,
    shard_unit,
    skeleton,
    tied_names,
)
from tunewright.training.plan import seed_of
from tunewright.training.world import World

_OF_DEVICE = 0.5
"""Of a device's memory that whole frozen weights and the adapters' states may take; and that shards
may take before their layers are gathered one at a time."""
_ADAPTER_BYTES = 16
"""Of each adapter's number: fp32, with its gradient and AdamW's two moments."""


@dataclass(frozen=True)
class AdaptedModel(ShardedModel):
    """A model of which only the adapters train; `parameters` are these, by PEFT's names, fp32.

    The frozen weights are stored in `dtype`. peft: PEFT's own view of the same model. sharded: by
    FSDP, frozen weights and adapters alike; else both are whole on every rank. grouped: experts
    with adapters never make their adapted weights.
    """

    peft: Any = None
    sharded: bool = True
    grouped: bool = False

    @property
    def count(self) -> int:
        """Numbers of the whole model, adapters included."""
        return sum(p.numel() for p in self.module.parameters())

    @property
    def copies(self) -> int:
        return 1 if self.sharded else dist.get_world_size()

    @property
    def adapter_count(self) -> int:
        return sum(p.numel() for p in self.parameters.values())

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """Those that belong in a checkpoint: of adapters, none."""
        return {}

    @property
    def matmul_count(self) -> int:
        """Frozen parameters that multiply for one token: of experts, those that are chosen."""
        inputs = self.module.get_input_embeddings().weight
        shared = inputs is self.module.get_output_embeddings().weight
        frozen = weights.saved_tensors(self.module).values()
        total = sum(self._active(p) for p in frozen if p.ndim > 1)
        return total if shared else total - inputs.numel()

    @property
    def flops_per_token(self) -> float:
        """Forward and backward. A frozen weight has no gradient: one product less than others."""
        own = sum(p.numel() for p in self.parameters.values())
        return 4.0 * self.matmul_count + 6.0 * own

    def accumulate(self, last: bool) -> None:
        if self.sharded:
            super().accumulate(last)
        elif self.through is not None:
            self.through.require_backward_grad_sync = last

    def _active(self, tensor: torch.Tensor) -> int:
        config = self.module.config.get_text_config()
        chosen = getattr(config, "num_experts_per_tok", None)
        share = chosen / tensor.shape[0] if tensor.ndim > 2 and chosen else 1
        return int(tensor.numel() * share)


def build(base: BaseModel, settings: LoraSettings, world: World, *, random: bool) -> AdaptedModel:
    """The model on every rank, frozen, with adapters that add nothing yet.

    Its weights come from the folder of `base`, each rank reading its part, or are `random`: those
    that the recipe fsdp makes from the same seed. The adapters are the same for any number of
    ranks.
    """
    dtype = compute_dtype(settings, world.device)
    config = world.on_main(lambda: read_config(base))
    module = skeleton(config, attention.choose(config, world.device, dtype))
    tied = tied_names(module)
    module.requires_grad_(False)
    peft = adapters.adapt(module, settings, decoder_layers(module))
    sharded = is_sharded(settings, module, dtype, world)
    fill = _make_random if random else _load
    fill(module, base, settings, dtype, sharded, world)
    adapters.begin(module, settings.seed, world)
    grouped = not settings.plain and experts.attach(module)
    if not sharded and dtype != torch.float32:
        # FSDP computes in `dtype` by itself; whole models need telling, their adapters are fp32.
        module.forward = torch.autocast(world.device.type, dtype)(module.forward)
    on_gpu = world.device.type == "cuda"
    # PEFT puts the adapters of experts in place anew in each call, which no compiler follows.
    followed = grouped or not adapters.has_experts(module)
    model = AdaptedModel(
        module.train(),
        dict(adapters.adapter_parameters(module)),
        tied,
        dtype,
        "bf16" if dtype == torch.bfloat16 else "fp32",
        settings.compiles(on_gpu) and followed,
        None,
        whole=not sharded,
        peft=peft,
        sharded=sharded,
        grouped=grouped,
    )
    if sharded and _exceeds(_frozen_bytes(module, dtype) / world.size, world):
        gather_singly(model)
    return ready(model, settings, world.device)


def is_sharded(settings: LoraSettings, module: nn.Module, dtype: torch.dtype, world: World) -> bool:
    """Whether the model is to be sharded: as set, or where it takes too much of some device."""
    if settings.sharding != "auto":
        return settings.sharding == "fsdp"
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    needed = _frozen_bytes(module, dtype) + trained * _ADAPTER_BYTES
    return _exceeds(needed, world)


def _exceeds(needed: float, world: World) -> bool:
    """Whether so many bytes are too much for some rank's device; for all ranks together."""
    return any(world.gathered(needed > _OF_DEVICE * _memory(world.device)))


def _frozen_bytes(module: nn.Module, dtype: torch.dtype) -> int:
    return dtype.itemsize * sum(p.numel() for p in module.parameters() if not p.requires_grad)


def _memory(device: torch.device) -> float:
    """Bytes of this rank's device, or its share of the host's."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return psutil.virtual_memory().total / int(os.environ.get("LOCAL_WORLD_SIZE") or 1)


def _make_random(
    module: Any,
    base: BaseModel,
    settings: LoraSettings,
    dtype: torch.dtype,
    sharded: bool,
    world: World,
) -> None:
    """The random weights of the recipe fsdp, each unit sharded as soon as it has them."""
    layers = decoder_layers(module)
    added = {id(part) for part in adapters.adapter_parts(module)}
    mesh = mesh_of(world) if sharded else None
    for place, unit in enumerate(weights.units(module, layers)):
        own = [part for part in unit if id(part) not in added]
        weights.init_random(module, own, seed_of(settings.seed, place), world.device)
        _store(own, dtype)
        for part in unit:
            if id(part) in added:
                part.to_empty(device=world.device, recurse=False)
        if mesh is not None and place < len(layers):
            shard_unit(layers[place], dtype, mesh)
    module.tie_weights()
    if mesh is not None:
        shard_outer(module, dtype, mesh)


def _load(
    module: Any,
    base: BaseModel,
    settings: LoraSettings,
    dtype: torch.dtype,
    sharded: bool,
    world: World,
) -> None:
    """The weights in the base model's folder, each rank its part of them."""
    _store(module.modules(), dtype)
    if sharded:
        mesh = mesh_of(world)
        for layer in decoder_layers(module):
            shard_unit(layer, dtype, mesh)
        shard_outer(module, dtype, mesh)
    module.to_empty(device=world.device)
    module.tie_weights()
    weights.init_buffers(module)
    weights.load_pretrained(module, base.name, base.folder, world)


def _store(parts: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Keep the frozen weights of some modules in `dtype`, which may have half the bits."""
    for part in parts:
        for parameter in part.parameters(recurse=False):
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)
