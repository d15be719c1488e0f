"""Experts with adapters, computed without ever making their adapted weights.

PEFT adds scaling * B @ A to a whole stack of experts in every call, and the gradient has the size
of the stack again. Here the rows that an expert is given go through its two small matrices beside
its weight: x W + scaling (x L) R, in products that are grouped by expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from torch.nn import functional

from tunewright.training.lora.adapters import NAME

_ALIGNED = 8
"""Numbers in 16 bytes of the 16-bit types: what the grouped product's strides are multiples of."""
_KNOWN = {"gate_up_proj", "up_proj", "down_proj"}
_SAYS_HOW = ("num_experts", "has_gate", "has_bias", "is_transposed", "_apply_gate")
"""What transformers' experts say of themselves where other implementations may compute them."""


def attach(module: nn.Module) -> bool:
    """Let all experts of a model that have adapters compute so; whether there are such and all do.

    Experts of another make, and those on a torch without grouped products, stay as PEFT has them.
    """
    found = list(_outermost(module))
    if not found or not all(_fits(wrapper) for wrapper in found):
        return False
    for wrapper in found:
        # A compiler shares one program among the layers when their parts are of one class, not when
        # each has a function of its own.
        wrapper.__class__ = Grouped
    return True


class Grouped(ParamWrapper):  # type: ignore[misc]
    """The outermost of PEFT's wrappers around a module of experts, computing in groups."""

    def forward(
        self, hidden: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor
    ) -> torch.Tensor:
        """What the chosen experts make of each token, [tokens, width], summed by their shares.

        hidden: [tokens, width]; chosen, shares: [tokens, experts a token].
        """
        experts: Any = self.get_base_layer()
        wrappers = {part.parameter_name: part for part in _nested(self)}
        places, order = torch.sort(chosen.reshape(-1))
        groups = Groups.of(places, experts.num_experts)
        linear = partial(_linear, experts, wrappers, groups)
        rows = hidden[order // chosen.shape[-1]]
        if experts.has_gate:
            inner = experts._apply_gate(linear("gate_up_proj", rows))
        else:
            inner = experts.act_fn(linear("up_proj", rows))
        weighted = linear("down_proj", inner) * shares.reshape(-1)[order, None]
        # Back into the tokens' order by a gather, whose sum is the same in every run.
        numbers = torch.arange(len(order), device=order.device)
        back = torch.empty_like(order).scatter_(0, order, numbers)
        return weighted[back].view(*chosen.shape, -1).sum(1).to(hidden.dtype)


class Groups(NamedTuple):
    """Rows sorted by their expert: each row's, and where each expert's rows end (int32)."""

    expert: torch.Tensor
    ends: torch.Tensor

    @classmethod
    def of(cls, places: torch.Tensor, experts: int) -> Groups:
        numbers = torch.arange(experts, device=places.device)
        ends = torch.searchsorted(places, numbers, right=True)
        return cls(places, ends.to(torch.int32))

    def product(self, rows: torch.Tensor, stack: torch.Tensor) -> torch.Tensor:
        """Each row times its expert's matrix: [rows, in] and [experts, in, out]."""
        return functional.grouped_mm(rows, stack, offs=self.ends)


def _linear(
    experts: Any,
    wrappers: dict[str, ParamWrapper],
    groups: Groups,
    name: str,
    rows: torch.Tensor,
) -> torch.Tensor:
    """One of the experts' layers, with its adapter where it has one."""
    weight = getattr(experts, name)
    rows = rows.to(weight.dtype)
    stack = weight if experts.is_transposed else weight.transpose(-2, -1)
    out = groups.product(rows, stack)
    if wrapper := wrappers.get(name):
        left, right = factors(wrapper)
        small = groups.product(rows, left.to(weight.dtype))
        out = out + wrapper.scaling[NAME] * groups.product(small, right.to(weight.dtype))
    return out + getattr(experts, f"{name}_bias")[groups.expert] if experts.has_bias else out


def factors(wrapper: ParamWrapper) -> tuple[torch.Tensor, torch.Tensor]:
    """L [experts, in, rank] and R [experts, rank, out], so that x L R is what the adapter adds.

    Ranks are filled up with zeros to what the products take.
    """
    a, b = wrapper.lora_A[NAME].weight, wrapper.lora_B[NAME].weight
    a = a.reshape(wrapper.num_experts, -1, a.shape[-1])
    b = b.reshape(b.shape[0], -1, wrapper.num_experts).permute(2, 0, 1)
    missing = -a.shape[1] % _ALIGNED
    a, b = functional.pad(a, (0, 0, 0, missing)), functional.pad(b, (0, missing))
    stored_as_multiplied = wrapper.get_base_layer().is_transposed
    if stored_as_multiplied == wrapper._did_swap_in_out_features:
        # PEFT took the stack's dimensions the other way round: A is at the layer's end then.
        a, b = b.transpose(-2, -1), a.transpose(-2, -1)
    return a.transpose(-2, -1), _copied(b.transpose(-2, -1))


@torch.library.custom_op("tunewright::copied", mutates_args=())
def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy, also in compiled code: a compiler leaves a plain one out, and the grouped
    product refuses the strides of a permuted tensor."""
    return tensor.clone(memory_format=torch.contiguous_format)


@_copied.register_fake
def _(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


_copied.register_autograd(lambda _, grad: grad)


def _outermost(module: nn.Module) -> Iterator[ParamWrapper]:
    """PEFT nests a wrapper for each tensor of a module in another."""
    for name, part in module.named_modules():
        if isinstance(part, ParamWrapper) and not name.endswith(".base_layer"):
            yield part


def _nested(wrapper: Any) -> Iterator[ParamWrapper]:
    while isinstance(wrapper, ParamWrapper):
        yield wrapper
        wrapper = wrapper.base_layer


def _fits(wrapper: ParamWrapper) -> bool:
    experts: Any = wrapper.get_base_layer()
    return (
        hasattr(functional, "grouped_mm")
        and all(hasattr(experts, name) for name in _SAYS_HOW)
        and not getattr(experts, "has_post_expert_norm", False)
        and all(
            part.parameter_name in _KNOWN
            and part.get_param().ndim == 3
            and all(size % _ALIGNED == 0 for size in part.get_param().shape[1:])
            for part in _nested(wrapper)
        )
    )
