"""A base model with an adapter added in, made piece by piece while it is written.

Each piece is some rows of one tensor, or one expert of a stack: they are read from the base model's
files, the product of the adapter's two matrices is added to them in fp32, and nothing is kept. So
merging takes the memory of a few pieces, whatever the size of the model.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from tunewright.contract.failures import UserError
from tunewright.modelfolder import Expected
from tunewright.sharded import PIECE, Entry, ShardedModel
from tunewright.training.tensorfiles import SafetensorsFolder, open_folder

_ADAPTERS_AT_ONCE = 16


class MergedModel:
    """The tensors of a base model, an adapter from a checkpoint added to them.

    `description`: the folder with config.json and adapter_config.json. Raises UserError when the
    base model's files do not have the model's tensors.
    """

    def __init__(
        self, base: Path, adapter: ShardedModel, description: Path, expected: Expected
    ) -> None:
        self.path = adapter.path
        self._base = _opened(base)
        self._expected = expected
        self._check(base)
        self._adapters = {found.target: found for found in _adapters(description)}
        self._stored = {entry.name: entry for entry in adapter.entries(torch.float32)}
        self._checkpoint = adapter
        self._matrices = lru_cache(_ADAPTERS_AT_ONCE)(self._read)
        self._lock = threading.Lock()

    def entries(self, save_dtype: torch.dtype) -> list[Entry]:
        """The tensors of the model, each tied one once; they are made in fp32."""
        shapes = self._expected.shapes
        return [
            Entry(name, shapes[name], torch.float32, save_dtype)
            for name in shapes
            if name not in self._expected.aliases
        ]

    def pieces(self, entry: Entry) -> Iterator[tuple[int, tuple[int, slice]]]:
        """How many numbers, and which rows they are: of an expert, or of the tensor (expert 0)."""
        *outer, rows = entry.shape[: max(1, len(entry.shape) - 1)] or (1,)
        width = entry.shape[-1] if len(entry.shape) > 1 else 1
        if len(outer) > 1:
            raise UserError(f"merge: {entry.name} has {len(entry.shape)} dimensions; unset merge")
        at_once = rows if outer else max(1, PIECE // (4 * width))
        for expert in range(outer[0] if outer else 1):
            for start in range(0, rows, at_once):
                stop = min(start + at_once, rows)
                yield (stop - start) * width, (expert, slice(start, stop))

    def piece(
        self, entry: Entry, where: tuple[int, slice], buffer: torch.Tensor | None = None
    ) -> torch.Tensor:
        """One of the pieces, flat, fp32."""
        expert, rows = where
        if len(entry.shape) == 3:
            found = self._base.rows(entry.name, expert, expert + 1)[0][rows].float()
        elif entry.shape:
            found = self._base.rows(entry.name, rows.start, rows.stop).float()
        else:
            found = self._base.tensor(entry.name).float()
        if adapter := self._adapters.get(entry.name):
            with self._lock:
                a, b = self._matrices(entry.name)
            found = found + adapter.addition(a, b, rows, expert)
        return found.reshape(-1)

    def blocks(self, entry: Entry) -> Iterator[torch.Tensor]:
        return (self.piece(entry, where) for _, where in self.pieces(entry))

    def _read(self, target: str) -> tuple[torch.Tensor, torch.Tensor]:
        names = self._adapters[target].a, self._adapters[target].b
        a, b = (self._checkpoint.load(self._stored[name]).float() for name in names)
        return a, b

    def _check(self, base: Path) -> None:
        found, aliases = self._base.shapes(), self._expected.aliases
        for name, shape in self._expected.shapes.items():
            if name not in aliases and found.get(name) != shape:
                raise UserError(
                    f"merge: {base} does not have the tensor {name} as {list(shape)}, so adapters "
                    "cannot be added to it; unset merge and use the adapter with its base model"
                )


def _opened(base: Path) -> SafetensorsFolder:
    try:
        return open_folder(base)
    except FileNotFoundError as error:
        raise UserError(
            f"merge: {base} has no safetensors to add adapters to; unset merge"
        ) from error


def _adapters(description: Path) -> Iterator[Any]:
    """What PEFT makes of the configurations, without any weights."""
    from peft import PeftConfig
    from transformers import AutoConfig, AutoModelForCausalLM

    from tunewright.training.lora.adapters import adapted, adapters

    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(description))
    config = PeftConfig.from_pretrained(str(description))
    config.base_model_name_or_path = None  # it is not loaded by that name here
    adapted(module, config)
    return adapters(module)
