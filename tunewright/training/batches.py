"""Packs as the tensors of one micro-batch: one row of documents that do not see each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from tunewright.contract.failures import UserError
from tunewright.contract.settings import FsdpSettings
from tunewright.data.store import Pack, Split, TokenStore
from tunewright.training.plan import Plan, micro_batches
from tunewright.training.world import World


def open_tokens(path: str, settings: FsdpSettings) -> TokenStore:
    """The sealed tokens; raises UserError when their packs have another size than is asked for."""
    store = TokenStore.open(path)
    if store.pack_tokens != settings.pack_tokens:
        raise UserError(
            f"pack_tokens is {settings.pack_tokens}, but the packs of tokens_path ({path}) were "
            f"made with {store.pack_tokens}; set that, or leave tokens_path out to tokenize again"
        )
    return store


class Shape(NamedTuple):
    """What micro-batches are padded to, so that compiled layers always see the same number.

    tokens: of one micro-batch. longest: at least the length of any document.
    """

    tokens: int
    longest: int

    @classmethod
    def of(cls, store: TokenStore, packs: int) -> Shape:
        """The shape of micro-batches of `packs` packs of any split."""
        splits = [split for split in (store.train, store.eval) if split is not None]
        # The attention kernel works in blocks of 128 tokens.
        longest = -(-max(split.longest for split in splits) // 128) * 128
        # Products of 8 bits take multiples of 16 tokens.
        return cls(-(-packs * store.pack_tokens // 16) * 16, longest)


@dataclass(frozen=True)
class Batch:
    """One row of documents, padding included, on a device or in the host's memory.

    input_ids, position_ids: int64 [1, row]; positions start at 0 in every document.
    keep: int64 [supervised], places whose next token is a label. targets: int64 [supervised], those
    labels. borders: int32 [documents + 1], where documents begin and end. longest: no document is
    longer. tokens: without padding.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    keep: torch.Tensor
    targets: torch.Tensor
    borders: torch.Tensor
    longest: int
    tokens: int

    @property
    def supervised(self) -> int:
        return len(self.targets)

    def to(self, device: torch.device) -> Batch:
        """The same on a device; from pinned memory the copy does not hold up the host."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> Batch:
        """The same in memory that a GPU can read by itself."""
        return self._each(torch.Tensor.pin_memory)

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        tensors = {n: change(v) for n, v in values.items() if isinstance(v, torch.Tensor)}
        return Batch(**{**values, **tensors})


class Loader:
    """The micro-batches of each step for this rank, the next step's made while one is computed."""

    def __init__(
        self, split: Split, plan: Plan, packs: int, world: World, shape: Shape | None
    ) -> None:
        self.split = split
        self.plan = plan
        self.packs = packs
        self.world = world
        self.shape = shape
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="loader")
        self._next: tuple[int, Future[list[Batch]]] | None = None

    def dealt(self, step: int) -> list[list[int]]:
        """The packs of each micro-batch of this rank."""
        packs = self.plan.packs_of(step)
        return micro_batches(packs, self.packs, self.world.rank, self.world.size)

    def counts(self, step: int) -> tuple[int, int]:
        """Tokens and supervised tokens of a step over all ranks; nobody has to be asked."""
        return self.split.counts_of(self.plan.packs_of(step))

    def batches(self, step: int) -> list[Batch]:
        """The micro-batches of a step, on the device."""
        ahead, self._next = self._next, None
        made = ahead[1].result() if ahead and ahead[0] == step else self._make(step)
        if step < self.plan.steps:
            self._next = step + 1, self._worker.submit(self._make, step + 1)
        return [batch.to(self.world.device) for batch in made]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.shutdown(wait=True, cancel_futures=True)

    def _make(self, step: int) -> list[Batch]:
        made = [batch_of(self.split, packs, self.shape) for packs in self.dealt(step)]
        return [b.pinned() for b in made] if self.world.device.type == "cuda" else made


def batch_of(split: Split, packs: Sequence[int], shape: Shape | None = None) -> Batch:
    """The packs one after the other, in the host's memory. Without packs: a row of which nothing
    is learnt."""
    if not packs:
        nothing = np.zeros(2, dtype=np.int64)
        return to_batch([Pack(nothing, nothing > 0, np.array([2]))], shape, tokens=0)
    return to_batch([split[pack] for pack in packs], shape)


def full_batch(shape: Shape) -> Batch:
    """A row of zeros that fills a shape; all tokens are labels that can be."""
    lengths = _pieces(shape.tokens, shape.longest)
    labels = np.ones(shape.tokens, dtype=np.bool_)
    labels[np.cumsum(lengths) - lengths] = False
    return to_batch([Pack(np.zeros(shape.tokens, dtype=np.int64), labels, lengths)], shape)


def to_batch(packs: Sequence[Pack], shape: Shape | None = None, tokens: int | None = None) -> Batch:
    """Packs as one row, padded to `shape` when there is one; the padding is documents of its own,
    of which nothing is learnt."""
    ids = np.concatenate([pack.input_ids for pack in packs])
    lengths = np.concatenate([pack.lengths for pack in packs])
    supervised = np.concatenate([pack.supervised for pack in packs])
    real = len(ids)
    if shape is not None:
        lengths = np.concatenate([lengths, _pieces(shape.tokens - real, shape.longest)])
        ids = np.pad(ids, (0, shape.tokens - real))
    ends = np.cumsum(lengths)
    borders = np.concatenate([[0], ends])
    positions = np.arange(len(ids)) - np.repeat(ends - lengths, lengths)
    labels = np.flatnonzero(supervised & (positions[:real] > 0))
    return Batch(
        input_ids=torch.from_numpy(ids)[None],
        position_ids=torch.from_numpy(positions)[None],
        keep=torch.from_numpy(labels - 1),
        targets=torch.from_numpy(ids[labels]),
        borders=torch.from_numpy(borders.astype(np.int32)),
        longest=int(lengths.max()) if shape is None else shape.longest,
        tokens=real if tokens is None else tokens,
    )


def _pieces(total: int, longest: int) -> npt.NDArray[np.int64]:
    """Lengths of at most `longest` that sum to `total`."""
    full, rest = divmod(total, longest)
    return np.array([longest] * full + [rest] * (rest > 0), dtype=np.int64)
