"""Packs as the tensors of one micro-batch: one row of documents that do not see each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tunewright.contract.failures import UserError
from tunewright.contract.settings import FsdpSettings
from tunewright.data.store import Pack, Split, TokenStore


def open_tokens(path: str, settings: FsdpSettings) -> TokenStore:
    """The sealed tokens; raises UserError when their packs have another size than is asked for."""
    store = TokenStore.open(path)
    if store.pack_tokens != settings.pack_tokens:
        raise UserError(
            f"pack_tokens is {settings.pack_tokens}, but the packs of tokens_path ({path}) were "
            f"made with {store.pack_tokens}; set that, or leave tokens_path out to tokenize again"
        )
    return store


@dataclass(frozen=True)
class Batch:
    """One row of `tokens` tokens, on the device.

    input_ids, position_ids: int64 [1, tokens]; positions start at 0 in every document.
    keep: int64 [supervised], places whose next token is a label. targets: int64 [supervised], those
    labels. lengths: the documents' lengths, on the host.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    keep: torch.Tensor
    targets: torch.Tensor
    lengths: list[int]
    tokens: int

    @property
    def supervised(self) -> int:
        return len(self.targets)


def batch_of(split: Split, packs: Sequence[int], device: torch.device) -> Batch:
    """The packs one after the other. Without packs: two tokens that nothing is learned from."""
    if not packs:
        nothing = np.zeros(2, dtype=np.int64)
        empty = Pack(nothing, np.zeros(2, dtype=np.bool_), np.array([2]))
        return to_batch([empty], device, tokens=0)
    return to_batch([split[pack] for pack in packs], device)


def to_batch(packs: Sequence[Pack], device: torch.device, tokens: int | None = None) -> Batch:
    ids = np.concatenate([pack.input_ids for pack in packs])
    lengths = np.concatenate([pack.lengths for pack in packs])
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    positions = np.arange(len(ids)) - starts
    supervised = np.concatenate([pack.supervised for pack in packs]) & (positions > 0)
    labels = np.flatnonzero(supervised)
    return Batch(
        input_ids=_on(device, ids)[None],
        position_ids=_on(device, positions)[None],
        keep=_on(device, labels - 1),
        targets=_on(device, ids[labels]),
        lengths=[int(length) for length in lengths],
        tokens=len(ids) if tokens is None else tokens,
    )


def _on(device: torch.device, values: npt.NDArray[np.int64]) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
