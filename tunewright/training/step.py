"""One optimizer step, and one evaluation: what they compute does not depend on the ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from tunewright.contract.failures import NonFinite
from tunewright.data.store import Split
from tunewright.training.attention import extra_inputs
from tunewright.training.batches import Batch, batch_of
from tunewright.training.model import ShardedModel, inference, takes_places
from tunewright.training.plan import micro_batches
from tunewright.training.world import World

_ROWS_NAMED = 10


class StepResult(NamedTuple):
    """loss: mean over the supervised tokens, None where there were none. Counts: all ranks."""

    loss: float | None
    grad_norm: float | None
    tokens: int
    supervised_tokens: int


class Trainer:
    """Takes steps over the packs of a split."""

    def __init__(
        self,
        model: ShardedModel,
        optimizer: torch.optim.Optimizer,
        split: Split,
        world: World,
        packs_per_micro_batch: int,
        max_grad_norm: float,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.split = split
        self.world = world
        self.packs_per_micro_batch = packs_per_micro_batch
        self.max_grad_norm = max_grad_norm

    def take(self, step: int, packs: list[int], rate: float) -> StepResult:
        """Change the weights by one step over these packs, dealt out to all ranks.

        Raises NonFinite on every rank, with the weights untouched, when the loss or the gradient
        is not a number. A step without a supervised token changes nothing.
        """
        mine = self._dealt(packs)
        batches = [batch_of(self.split, some, self.world.device) for some in mine]
        counts = self.world.total(
            sum(batch.tokens for batch in batches), sum(batch.supervised for batch in batches)
        )
        tokens, supervised = (int(count) for count in counts)
        if not supervised:
            return StepResult(None, None, tokens, 0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        sums = []
        for batch in batches:
            summed = loss_sum(self.model, batch)
            # FSDP takes the mean of the ranks' gradients; the sum is wanted.
            (summed * (self.world.size / supervised)).backward()
            sums.append(summed.detach().double())
        loss = self.world.total(sum(sums, torch.zeros(())))[0] / supervised
        norm = self._clipped()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._stop(step, loss, norm, packs, mine, sums)
        self.optimizer.step()
        return StepResult(loss, norm, tokens, supervised)

    def _dealt(self, packs: list[int]) -> list[list[int]]:
        return micro_batches(packs, self.packs_per_micro_batch, self.world.rank, self.world.size)

    def _clipped(self) -> float:
        """Clip the gradients together; their norm before that."""
        parameters = list(self.model.parameters.values())
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.max_grad_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def _stop(
        self,
        step: int,
        loss: float,
        norm: float,
        packs: list[int],
        mine: list[list[int]],
        sums: list[torch.Tensor],
    ) -> None:
        pairs = zip(mine, sums, strict=True)
        bad = [pack for some, value in pairs if not value.isfinite() for pack in some]
        named = sorted(pack for part in self.world.gathered(bad) for pack in part) or sorted(packs)
        raise NonFinite(
            f"step {step}: loss {loss}, gradient norm {norm}; stopped before the weights changed. "
            f"Rows {rows_of(self.split, named)}. Lower learning_rate, or look at these rows"
        )


def loss_sum(model: ShardedModel, batch: Batch) -> torch.Tensor:
    """The summed cross-entropy of the batch's targets, from fp32 logits; a scalar with a graph."""
    module = model.module
    some = {"logits_to_keep": batch.keep} if takes_places(module) else {}
    logits = module(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        use_cache=False,
        **some,
        **extra_inputs(module, batch),
    ).logits[0]
    kept = logits if some else logits[batch.keep]
    return F.cross_entropy(kept.float(), batch.targets, reduction="sum")


def evaluate(
    model: ShardedModel, split: Split, world: World, packs_per_micro_batch: int, step: int
) -> float | None:
    """Mean loss over all supervised tokens of a split; None where there is none.

    Raises NonFinite on every rank when it is not a number.
    """
    dealt = micro_batches(range(len(split)), packs_per_micro_batch, world.rank, world.size)
    total, supervised = torch.zeros((), dtype=torch.float64, device=world.device), 0
    with inference(model):
        for some in dealt:
            batch = batch_of(split, some, world.device)
            total += loss_sum(model, batch).double()
            supervised += batch.supervised
    loss, count = world.total(total, supervised)
    if not count:
        return None
    if not math.isfinite(loss):
        raise NonFinite(f"step {step}: the evaluation loss is {loss}; lower learning_rate")
    return loss / count


def rows_of(split: Split, packs: Iterable[int]) -> str:
    """The source rows of some packs in words, the first few of them."""
    rows = [str(row) for pack in packs for row in split.source_rows(pack)]
    more = f" and {len(rows) - _ROWS_NAMED} more" if len(rows) > _ROWS_NAMED else ""
    return ", ".join(rows[:_ROWS_NAMED]) + more
