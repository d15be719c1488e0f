"""A sharded training checkpoint as safetensors files, one tensor in memory at a time.

Reads only the entries of the model: the optimizer's states, twice as large, are never touched. No
process group is needed and none is made.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from tunewright.contract.failures import TunewrightError
from tunewright.contract.rundir import write_json
from tunewright.modelfolder import INDEX, WEIGHTS, Expected, require_finite

MAX_SHARD_BYTES = 5 * 10**9
_PREFIX = "model."
_SAFETENSORS_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One tensor of the output: its name, shape, and the types it is stored in and saved as."""

    name: str
    shape: tuple[int, ...]
    stored: torch.dtype
    saved: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.saved.itemsize


class ShardedModel:
    """The model of one sharded checkpoint, tensor by tensor."""

    def __init__(self, checkpoint: Path) -> None:
        self.path = checkpoint
        try:
            self._metadata = FileSystemReader(checkpoint).read_metadata()
        except Exception as error:  # unpickling can raise anything
            raise TunewrightError(f"{checkpoint} is not a readable checkpoint: {error}") from error

    def entries(self, save_dtype: torch.dtype) -> list[Entry]:
        """The tensors of the model in the order of the checkpoint; numbers that are not floating
        keep their type."""
        found = []
        for key, meta in self._metadata.state_dict_metadata.items():
            if key.startswith(_PREFIX) and isinstance(meta, TensorStorageMetadata):
                stored = meta.properties.dtype
                saved = save_dtype if stored.is_floating_point else stored
                found.append(Entry(key.removeprefix(_PREFIX), tuple(meta.size), stored, saved))
        if not found:
            raise TunewrightError(f"{self.path} holds no model: no entry starts with {_PREFIX}")
        return found

    def load(self, entry: Entry) -> torch.Tensor:
        """One tensor as it was stored, put together from its shards."""
        key = _PREFIX + entry.name
        state = {key: torch.empty(entry.shape, dtype=entry.stored)}
        try:
            load(state, storage_reader=_KnownReader(self.path, self._metadata), no_dist=True)
        except Exception as error:  # as above: any damage of the file ends here
            raise TunewrightError(
                f"{self.path}: the tensor {entry.name} cannot be read: {error}"
            ) from error
        return state[key]


class _KnownReader(FileSystemReader):
    """A reader that does not parse the checkpoint's metadata again for every tensor."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._known = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._known


def tied_once(model: ShardedModel, entries: list[Entry], expected: Expected) -> list[Entry]:
    """The entries with each tied tensor once; raises when two that should be one tensor differ."""
    by_name = {entry.name: entry for entry in entries}
    double = {a: first for a, first in expected.aliases.items() if {a, first} <= by_name.keys()}
    with _without_group():
        for alias, first in double.items():
            if not torch.equal(model.load(by_name[alias]), model.load(by_name[first])):
                raise TunewrightError(
                    f"{alias} and {first} are one tensor in this model but differ in {model.path}"
                )
    return [entry for entry in entries if entry.name not in double]


def write_weights(
    model: ShardedModel, entries: list[Entry], folder: Path, max_shard_bytes: int = MAX_SHARD_BYTES
) -> dict[str, dict[str, Any]]:
    """Write the entries as safetensors below `folder`, cast, each checked to be finite.

    Returns size and hash of every weight file, computed while writing. More than one file gets an
    index, as transformers expects. Raises NonFinite with the tensor's name.
    """
    shards = _cut(entries, max_shard_bytes)
    names = _file_names(len(shards))
    with _without_group(), ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        jobs = [
            pool.submit(_write, model, shard, folder / name)
            for shard, name in zip(shards, names, strict=True)
        ]
        try:
            hashes = {name: job.result() for name, job in zip(names, jobs, strict=True)}
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if len(shards) > 1:
        where = {e.name: name for shard, name in zip(shards, names, strict=True) for e in shard}
        total = sum(entry.bytes for entry in entries)
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    return hashes


def _cut(entries: list[Entry], max_bytes: int) -> list[list[Entry]]:
    """Entries in files of at most `max_bytes`; a larger tensor gets a file of its own."""
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.bytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.bytes
    return shards


def _file_names(count: int) -> list[str]:
    if count == 1:
        return [WEIGHTS]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def _write(model: ShardedModel, entries: list[Entry], path: Path) -> dict[str, Any]:
    digest, size = xxhash.xxh3_128(), 0
    with path.open("wb") as file:
        for chunk in _chunks(model, entries):
            digest.update(chunk)
            size += file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return {"size": size, "xxh3_128": digest.hexdigest()}


def _chunks(model: ShardedModel, entries: list[Entry]) -> Iterator[bytes | memoryview]:
    """A safetensors file in order: length of the header, header, tensors without gaps."""
    yield from _header(entries)
    for entry in entries:
        tensor = model.load(entry).to(entry.saved)
        require_finite(entry.name, tensor)
        yield tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _header(entries: list[Entry]) -> tuple[bytes, bytes]:
    described: dict[str, Mapping[str, Any]] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        described[entry.name] = {
            "dtype": _SAFETENSORS_NAMES[entry.saved],
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.bytes],
        }
        offset += entry.bytes
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little"), text


@contextmanager
def _without_group() -> Iterator[None]:
    """Without torch's remark that there is no process group, which is the point here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        yield
