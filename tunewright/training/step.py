"""One optimizer step, and one evaluation: what they compute does not depend on the ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from tunewright.contract.failures import NonFinite
from tunewright.data.store import Split
from tunewright.training import fp8
from tunewright.training.attention import extra_inputs
from tunewright.training.batches import Batch, Loader, Shape, batch_of
from tunewright.training.model import ShardedModel, inference, takes_places
from tunewright.training.plan import micro_batches
from tunewright.training.timing import Clock
from tunewright.training.world import World

_ROWS_NAMED = 10


class StepResult(NamedTuple):
    """loss: mean over the supervised tokens, None where there were none. Counts: all ranks.

    stop: some rank wants the run to end after this step.
    """

    loss: float | None
    grad_norm: float | None
    tokens: int
    supervised_tokens: int
    stop: bool = False


class Trainer:
    """Takes the steps of a plan."""

    def __init__(
        self,
        model: ShardedModel,
        optimizer: torch.optim.Optimizer,
        loader: Loader,
        clock: Clock,
        max_grad_norm: float,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.loader = loader
        self.world = loader.world
        self.clock = clock
        self.max_grad_norm = max_grad_norm

    def take(self, step: int, rate: float, stop: bool = False) -> StepResult:
        """Change the weights by one step of the plan; `stop` is this rank's wish to end after it.

        Raises NonFinite on every rank, with the weights untouched, when the loss or the gradient
        is not a number. A step without a supervised token changes nothing.
        """
        result = self.gradients(step, stop)
        if result.loss is not None:
            with self.clock.phase("optimizer"):
                self._update(rate)
        return result

    def gradients(self, step: int, stop: bool = False) -> StepResult:
        """The first half of `take`: clipped gradients of a step, and none without a label."""
        tokens, supervised = self.loader.counts(step)
        with self.clock.phase("data"):
            batches = self.loader.batches(step)
        if not supervised:
            stopping = self.world.total(float(stop))[0] > 0
            return StepResult(None, None, tokens, 0, stopping)
        self.optimizer.zero_grad()
        with self.clock.phase("forward_backward"):
            sums = self._accumulated(batches, supervised)
        with self.clock.phase("optimizer"):
            gradients = self._gradients()
            # The one time in a step that the host waits for the device.
            loss, squares, wishes = self.world.total(
                torch.stack(sums).sum() / supervised,
                squared_norm(gradients) / self.model.copies,
                float(stop),
            )
            norm = math.sqrt(squares)
            if not (math.isfinite(loss) and math.isfinite(norm)):
                self._stop(step, loss, norm, sums)
            if norm > self.max_grad_norm:
                torch._foreach_mul_(gradients, self.max_grad_norm / norm)
        return StepResult(loss, norm, tokens, supervised, wishes > 0)

    def _accumulated(self, batches: list[Batch], supervised: int) -> list[torch.Tensor]:
        """Gradients of all micro-batches; their summed losses, each float64 on the device."""
        # FSDP and DDP take the mean of the ranks' gradients; the sum is wanted.
        scale = self.world.size / supervised
        sums = []
        for place, batch in enumerate(batches):
            self.model.accumulate(last=place == len(batches) - 1)
            summed = loss_sum(self.model, batch)
            (summed * scale).backward()
            sums.append(summed.detach().double())
        return sums

    def _gradients(self) -> list[torch.Tensor]:
        """This rank's parts of the gradients."""
        found = (p.grad for p in self.model.parameters.values() if p.grad is not None)
        return [g.to_local() if isinstance(g, DTensor) else g for g in found]

    def _update(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        fp8.refresh_scales(self.model.module)

    def _stop(
        self,
        step: int,
        loss: float,
        norm: float,
        sums: list[torch.Tensor],
    ) -> None:
        pairs = zip(self.loader.dealt(step), sums, strict=True)
        bad = [pack for some, value in pairs if not value.isfinite() for pack in some]
        named = sorted(pack for part in self.world.gathered(bad) for pack in part)
        named = named or sorted(self.loader.plan.packs_of(step))
        raise NonFinite(
            f"step {step}: loss {loss}, gradient norm {norm}; stopped before the weights changed. "
            f"Rows {rows_of(self.loader.split, named)}. Lower learning_rate, or look at these rows"
        )


def loss_sum(model: ShardedModel, batch: Batch) -> torch.Tensor:
    """The summed cross-entropy of the batch's targets in fp32; a scalar with a graph.

    Where the model allows it the head makes the loss in chunks; else its logits, of the places that
    have a target, are kept whole.
    """
    module = model.module
    with model.head.of(batch.keep, batch.targets) if model.head else nullcontext(False) as fused:
        some = {"logits_to_keep": batch.keep} if takes_places(module) and not fused else {}
        found: torch.Tensor = (model.through or module)(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            **some,
            **extra_inputs(module, batch),
        ).logits
    if fused:
        return found
    kept = found[0] if some else found[0][batch.keep]
    return F.cross_entropy(kept.float(), batch.targets, reduction="sum")


def squared_norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The squared norm of all of them together, float64."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack(torch._foreach_norm(tensors)).double().square().sum()


def evaluate(
    model: ShardedModel, split: Split, world: World, packs: int, step: int, shape: Shape | None
) -> float | None:
    """Mean loss over all supervised tokens of a split, `packs` at a time; None where there is none.

    Raises NonFinite on every rank when it is not a number.
    """
    _, supervised = split.counts_of(range(len(split)))
    if not supervised:
        return None
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    with inference(model):
        for some in micro_batches(range(len(split)), packs, world.rank, world.size):
            total += loss_sum(model, batch_of(split, some, shape).to(world.device)).double()
    loss = world.total(total)[0] / supervised
    if not math.isfinite(loss):
        raise NonFinite(f"step {step}: the evaluation loss is {loss}; lower learning_rate")
    return loss


def rows_of(split: Split, packs: Iterable[int]) -> str:
    """The source rows of some packs in words, the first few of them."""
    rows = [str(row) for pack in packs for row in split.source_rows(pack)]
    more = f" and {len(rows) - _ROWS_NAMED} more" if len(rows) > _ROWS_NAMED else ""
    return ", ".join(rows[:_ROWS_NAMED]) + more
