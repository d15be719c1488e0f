"""The head and the loss in one: cross-entropy without the logits of all places in memory.

The places to be predicted are taken in chunks. Each chunk's logits are made, turned into their
gradient in place of being kept, and give their part of the gradients of the hidden states and of
the weight, which is summed in fp32 as one large product would. The mathematics is that of the plain
head followed by `cross_entropy`; only the order of sums differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

CHUNK_LOGITS = 2**29
"""Logits of one chunk: 1 GiB in bf16. Larger chunks gain nothing, smaller ones re-read the sum of
the weight's gradient more often."""


class LossHead:
    """Lets a model's head return the summed loss of `targets`, inside of `of(places, targets)`.

    Outside of it, the head is as transformers made it. The head stays
    the module it was, so names, tied weights and FSDP's hooks stay what they are.
    """

    def __init__(self, head: nn.Linear, compiled: bool) -> None:
        self._wanted: tuple[torch.Tensor, torch.Tensor] | None = None
        self._gradient = _compiled_gradient() if compiled else _gradient
        plain = head.forward

        def forward(hidden: torch.Tensor) -> torch.Tensor:
            if self._wanted is None:
                return plain(hidden)
            places, targets = self._wanted
            rows = hidden.flatten(0, -2)[places]
            return summed_loss(rows, head.weight, head.bias, targets, self._gradient)

        head.forward = forward  # type: ignore[method-assign,assignment]

    @contextmanager
    def of(self, places: torch.Tensor, targets: torch.Tensor) -> Iterator[bool]:
        """Places whose next tokens are the targets. Yields that the head makes the loss."""
        self._wanted = (places, targets)
        try:
            yield True
        finally:
            self._wanted = None


def attach(module: Any, compiled: bool, logits: Callable[[], torch.Tensor]) -> LossHead | None:
    """The loss head of a model; None where it would leave something out.

    That is so where the head is no plain matrix, or the model works on what its head returns, such
    as a cap on the logits. `logits` gives those of some small input, without gradients.
    """
    head = module.get_output_embeddings()
    if getattr(type(head), "forward", None) is not nn.Linear.forward:
        return None
    seen: list[torch.Tensor] = []
    with head.register_forward_hook(lambda *call: seen.append(call[-1])):
        found = logits()
    untouched = found.data_ptr() == seen[-1].data_ptr() and found.dtype == seen[-1].dtype
    return LossHead(head, compiled) if untouched else None


def summed_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    gradient: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    chunk: int | None = None,
) -> torch.Tensor:
    """Cross-entropy of `targets`, summed: an fp32 scalar with a graph.

    hidden [n, width], weight [vocabulary, width], bias [vocabulary] or None, targets int64 [n].
    `chunk`: places at a time, from CHUNK_LOGITS when unset.
    """
    size = chunk or max(256, CHUNK_LOGITS // weight.shape[0] // 128 * 128)
    found: torch.Tensor = _SummedLoss.apply(
        hidden, weight, bias, targets, size, gradient or _gradient
    )
    return found


class _SummedLoss(torch.autograd.Function):
    """Gradients are made together with the loss, scaled by 1, and multiplied in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        size: int,
        gradient: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        wanted = any(ctx.needs_input_grad[:3])
        if not wanted:
            for rows, labels in _chunks(size, hidden, targets):
                logits = F.linear(rows, weight, bias).float()
                total += F.cross_entropy(logits, labels, reduction="sum")
            return total
        to_hidden = torch.empty_like(hidden)
        # A frozen head below adapters needs no gradient: a third of the work, and its memory.
        to_weight = _like(weight) if ctx.needs_input_grad[1] else None
        to_bias = _like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        for rows, labels, out in _chunks(size, hidden, targets, to_hidden):
            loss, slope = gradient(F.linear(rows, weight, bias), labels)
            total += loss
            torch.mm(slope, weight, out=out)
            if to_weight is not None:
                add_product(to_weight, slope.t(), rows)
            if to_bias is not None:
                to_bias += slope.sum(0, dtype=torch.float32)
        ctx.save_for_backward(to_hidden, to_weight, to_bias)
        ctx.weights = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        scale = upstream[0]
        to_hidden, to_weight, to_bias = ctx.saved_tensors
        weights = ctx.weights
        bias = None if to_bias is None else (to_bias * scale).to(weights)
        weight = None if to_weight is None else to_weight.mul_(scale).to(weights)
        return to_hidden.mul_(scale), weight, bias, None, None, None


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros in fp32, to sum up a gradient in."""
    return torch.zeros(tensor.shape, dtype=torch.float32, device=tensor.device)


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total += left @ right, where total is fp32 and the factors may be of 16 bits.

    The product's own sums are fp32 as well; it is never rounded to 16 bits on the way.
    """
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif _mixed_product(left.device):
        torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, out=total)
    else:
        total += left.float() @ right.float()


@cache
def _mixed_product(device: torch.device) -> bool:
    """Whether this torch has a 16-bit product that is added up in fp32 here."""
    if not hasattr(torch.ops.aten.addmm, "dtype_out"):
        return False
    a = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    total = torch.zeros(16, 16, device=device)
    try:
        torch.ops.aten.addmm.dtype_out(total, a, a, torch.float32, out=total)
    except (RuntimeError, NotImplementedError):
        return False
    return bool((total == 16).all())


def _gradient(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The summed loss of some logits, fp32, and its gradient to them in their own type."""
    numbers = logits.float()
    log_sums = torch.logsumexp(numbers, dim=-1, keepdim=True)
    chosen = numbers.gather(1, labels[:, None])
    slope = torch.exp(numbers - log_sums)
    is_label = torch.arange(logits.shape[1], device=logits.device)[None] == labels[:, None]
    slope = torch.where(is_label, slope - 1, slope)
    return (log_sums - chosen).sum(), slope.to(logits.dtype)


@cache
def _compiled_gradient() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    # The last chunk of a batch is smaller than the others: one program for any number of places.
    return torch.compile(_gradient, fullgraph=True, dynamic=True)


def _chunks(size: int, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The rows of all of them, `size` at a time; none of a batch without labels."""
    return zip(*(tensor.split(size) for tensor in tensors if len(tensor)), strict=True)
