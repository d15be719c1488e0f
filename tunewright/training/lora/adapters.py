"""Which tensors of a model get adapters, what these are called, and how they begin.

PEFT makes the adapters; an adapter of a linear layer is two matrices A [rank, in] and
B [out, rank], and what it adds to the layer's weight is `scaling * B @ A`. A tensor of stacked
experts has one pair for each expert, stored side by side.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from torch import nn
from torch.distributed.tensor import DTensor

from tunewright.contract.failures import UserError
from tunewright.contract.settings import LoraSettings
from tunewright.training.plan import seed_of
from tunewright.training.world import World

ALL_LINEAR = "all-linear"
NAME = "default"
"""What PEFT calls the one adapter of a model."""
_PREFIX = "base_model.model."
"""What PEFT puts in front of the model's names."""


@dataclass(frozen=True)
class Adapter:
    """One adapted tensor, by its name in the base model, and the names of its two matrices.

    experts: how many are stacked in the tensor; 0 for the weight of a layer. flipped: the tensor is
    stored [in, out] where a linear layer has [out, in].
    """

    target: str
    a: str
    b: str
    scaling: float
    experts: int
    flipped: bool

    def addition(
        self, a: torch.Tensor, b: torch.Tensor, rows: slice, expert: int = 0
    ) -> torch.Tensor:
        """What is added to some rows of the tensor, or of one expert in it."""
        if self.experts:
            a = a.reshape(self.experts, -1, a.shape[-1])[expert]
            b = b.reshape(b.shape[0], -1, self.experts)[:, :, expert]
        if self.flipped:
            return self.scaling * (a.T[rows] @ b.T)
        return self.scaling * (b[rows] @ a)


def adapt(module: Any, settings: LoraSettings, layers: nn.ModuleList) -> PeftModel:
    """Put adapters, without memory for them, on a model on the meta device.

    Raises UserError when the settings name nothing in the model, or what cannot have adapters.
    """
    parameters = _parameters(module, settings, layers)
    if parameters and settings.lora_dropout:
        raise UserError(
            f"lora_dropout: the adapters of {parameters[0]} cannot have dropout; set it to 0, or "
            "lora_target_parameters to []"
        )
    config = LoraConfig(
        r=settings.lora_r,
        lora_alpha=settings.lora_alpha,
        lora_dropout=settings.lora_dropout,
        target_modules=settings.lora_target_modules,
        target_parameters=parameters or None,
        rank_pattern=dict.fromkeys(parameters, settings.lora_experts_r)
        | settings.lora_rank_pattern,
        bias="none",
        task_type="CAUSAL_LM",
    )
    return adapted(module, config)


def adapted(module: Any, config: LoraConfig) -> PeftModel:
    """The model with the adapters of a configuration, on the meta device; raises UserError."""
    try:
        with warnings.catch_warnings():
            # It looks for ranks of tensors among the layers only, and does use them.
            warnings.filterwarnings("ignore", message="The following rank_pattern keys")
            warnings.simplefilter("ignore", FutureWarning)
            found: PeftModel = get_peft_model(module, config, low_cpu_mem_usage=True)
    except ValueError as error:
        raise UserError(f"lora_target_modules: {error}") from error
    if isinstance(module.get_output_embeddings(), LoraLayer):
        raise UserError(
            "lora_target_modules: the head cannot have an adapter, its loss is made without its "
            "logits; leave it out"
        )
    return found


def adapter_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """{PEFT's name in a file: parameter} of every adapter."""
    return {_file_name(n): p for n, p in module.named_parameters() if ".lora_" in n}


def adapter_parts(module: nn.Module) -> list[nn.Module]:
    """The modules that PEFT put into a model: its wrappers, and what is theirs."""
    wrappers = [part for part in module.modules() if isinstance(part, LoraLayer)]
    return [
        part
        for wrapper in wrappers
        for name, child in wrapper.named_children()
        if name != "base_layer"
        for part in child.modules()
    ] + wrappers


def adapters(module: nn.Module) -> Iterator[Adapter]:
    """Every adapter of a model, in its order."""
    for name, layer in module.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        matrices = (f"{name}.{kind}.{NAME}.weight" for kind in ("lora_A", "lora_B"))
        a, b = map(_file_name, matrices)
        own, experts, flipped = "weight", 0, bool(getattr(layer, "fan_in_fan_out", False))
        if isinstance(layer, ParamWrapper):
            own = layer.parameter_name
            if layer.get_param().ndim == 3:
                experts, flipped = layer.num_experts, not layer._did_swap_in_out_features
        target = f"{name}.{own}".replace(".base_layer", "")
        yield Adapter(target, a, b, layer.scaling[NAME], experts, flipped)


@torch.no_grad()
def begin(module: nn.Module, seed: int, world: World) -> None:
    """Give the adapters their first values: A random, B zero, so that they add nothing yet.

    They follow from the seed alone: the same for any number of ranks and on every device.
    """
    for place, (name, parameter) in enumerate(adapter_parameters(module).items()):
        if ".lora_B." in name:
            nn.init.zeros_(parameter.to_local() if isinstance(parameter, DTensor) else parameter)
            continue
        drawn = torch.Generator().manual_seed(seed_of(seed, place))
        whole = torch.empty(parameter.shape)
        nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=drawn)
        if not isinstance(parameter, DTensor):
            parameter.copy_(whole)
            continue
        local = parameter.to_local()
        start = min(world.rank * -(-parameter.shape[0] // world.size), parameter.shape[0])
        local.copy_(whole[start : start + local.shape[0]])


def has_experts(module: nn.Module) -> bool:
    """Whether tensors, and not only layers, have adapters."""
    return any(isinstance(part, ParamWrapper) for part in module.modules())


def _parameters(module: Any, settings: LoraSettings, layers: nn.ModuleList) -> list[str]:
    """Names of the expert tensors with adapters, as they end in every layer."""
    wanted = settings.lora_target_parameters
    if wanted != "auto":
        return [*wanted]
    if settings.lora_target_modules != ALL_LINEAR:
        return []
    stacked = (n for layer in layers for n, p in layer.named_parameters() if p.ndim == 3)
    return [*dict.fromkeys(stacked)]


def _file_name(name: str) -> str:
    return _PREFIX + name.replace(f".{NAME}", "")
