"""A sharded training checkpoint: which tensors of the model it holds, and where their bytes lie.

Torch's distributed checkpoint keeps each shard as one `torch.save` archive inside a rank's file: a
zip whose record of numbers is stored as it is. FSDP2 cuts tensors along their first dimension, so
every such record is a run of bytes of the whole tensor and can be copied without building it.
Where that does not hold, torch's own loader puts the tensor together.

Reads only the entries of the model: the optimizer's states, twice as large, are never touched. No
process group is needed and none is made.
"""

from __future__ import annotations

import math
import threading
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, reduce
from operator import xor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load

from tunewright.archive import Extent, OpenFile, stored_tensor
from tunewright.contract.failures import TunewrightError

PIECE = 4 << 20
"""Bytes read at once; a multiple of every number's size."""

_PREFIX = "model."


@dataclass(frozen=True)
class Entry:
    """One tensor of the output: its name, shape, and the types it is stored in and saved as."""

    name: str
    shape: tuple[int, ...]
    stored: torch.dtype
    saved: torch.dtype

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numbers * self.saved.itemsize


class Piece(NamedTuple):
    """Some bytes of a shard."""

    bytes: Extent
    shard: Extent


class Checksum:
    """The CRC-32 of a shard, made of those of its pieces, which come in any order."""

    def __init__(self, what: str, expected: int, length: int) -> None:
        self._what = what
        self._expected = expected
        self._length = length
        self._pieces: dict[int, int] = {}

    def add(self, start: int, crc: int) -> None:
        """Raises TunewrightError when this was the last piece and the whole is another one."""
        self._pieces[start] = crc
        if len(self._pieces) * PIECE < self._length:
            return
        whole = 0
        for offset in sorted(self._pieces):
            length = min(PIECE, self._length - offset)
            whole = _behind(whole, length) ^ self._pieces[offset]
        if whole != self._expected:
            raise TunewrightError(
                f"{self._what} is not what was written, its checksum differs; remove this "
                "checkpoint and start the run again, which goes on from the one before"
            )


def _behind(crc: int, length: int) -> int:
    """What a CRC-32 adds to that of `length` bytes behind it; it is linear in each of its bits."""
    if length != PIECE:
        zeros = bytes(length)
        return zlib.crc32(zeros, crc) ^ zlib.crc32(zeros)
    return reduce(xor, (moved for bit, moved in enumerate(_moved()) if crc >> bit & 1), 0)


@cache
def _moved() -> list[int]:
    """Each bit of a CRC-32, moved behind a whole piece."""
    zeros = bytes(PIECE)
    nothing = zlib.crc32(zeros)
    return [zlib.crc32(zeros, 1 << bit) ^ nothing for bit in range(32)]


class ShardedModel:
    """The model of one sharded checkpoint. Use it in `with`: it keeps the files open it reads."""

    def __init__(self, checkpoint: Path) -> None:
        """Raises TunewrightError when the metadata cannot be read, or speaks of no model."""
        self.path = checkpoint
        self._files: dict[Path, OpenFile] = {}
        self._records: dict[Extent, Checksum] = {}
        self._counting = threading.Lock()
        try:
            self._metadata = FileSystemReader(checkpoint).read_metadata()
        except Exception as error:  # unpickling can raise anything
            raise TunewrightError(f"{checkpoint} is not a readable checkpoint: {error}") from error
        self._tensors = {
            key.removeprefix(_PREFIX): meta
            for key, meta in self._metadata.state_dict_metadata.items()
            if key.startswith(_PREFIX) and isinstance(meta, TensorStorageMetadata)
        }
        if not self._tensors:
            raise TunewrightError(f"{checkpoint} holds no model: no entry starts with {_PREFIX}")

    def __enter__(self) -> ShardedModel:
        return self

    def __exit__(self, *_: object) -> None:
        while self._files:
            self._files.popitem()[1].close()

    def entries(self, save_dtype: torch.dtype) -> list[Entry]:
        """The tensors of the model in the order of the checkpoint; numbers that are not floating
        keep their type."""
        found = []
        for name, meta in self._tensors.items():
            stored = meta.properties.dtype
            saved = save_dtype if stored.is_floating_point else stored
            found.append(Entry(name, tuple(meta.size), stored, saved))
        return found

    def extents(self, entry: Entry) -> list[Extent] | None:
        """Where the tensor's bytes lie, in their order; None when only `load` can tell.

        Raises TunewrightError, with the place, when bytes are missing.
        """
        chunks = [c for c in self._tensors[entry.name].chunks if math.prod(c.sizes)]
        chunks.sort(key=lambda chunk: tuple(chunk.offsets))
        if sum(math.prod(chunk.sizes) for chunk in chunks) < entry.numbers:
            raise TunewrightError(f"{self.path}: shards of the tensor {entry.name} are missing")
        if not _in_rows(entry.shape, chunks):
            return None
        found = []
        for chunk in chunks:
            info = self._metadata.storage_data.get(
                MetadataIndex(_PREFIX + entry.name, chunk.offsets)
            )
            if info is None:
                raise TunewrightError(
                    f"{self.path}: the shard of {entry.name} at {list(chunk.offsets)} is missing"
                )
            if (extent := self._extent(entry, chunk, info)) is None:
                return None
            found.append(extent)
        return found

    def _extent(self, entry: Entry, chunk: ChunkStorageMetadata, info: Any) -> Extent | None:
        if not isinstance(info, _StorageInfo) or info.transform_descriptors:
            return None
        item = Extent(self.path / info.relative_path, info.offset, info.length)
        file = self._open(item.file)
        what = f"{item.file}: the shard of {entry.name} at byte {item.offset}"
        if item.offset + item.length > file.size:
            raise TunewrightError(
                f"{what} should have {item.length} bytes, but the file ends at byte {file.size}"
            )
        found = stored_tensor(file, item)
        if found is None or found.dtype != entry.stored or not found.in_order:
            return None
        size = math.prod(chunk.sizes) * entry.stored.itemsize
        start = found.first * entry.stored.itemsize
        if found.shape != tuple(chunk.sizes) or start + size > found.record.length:
            raise TunewrightError(
                f"{what} holds {list(found.shape)} in {found.record.length} bytes, the "
                f"checkpoint's metadata says {list(chunk.sizes)}"
            )
        extent = Extent(item.file, found.record.offset + start, size)
        if extent == found.record and found.crc:  # zero where its writer left it out
            with self._counting:
                self._records.setdefault(extent, Checksum(what, found.crc, size))
        return extent

    def _open(self, path: Path) -> OpenFile:
        if path not in self._files:
            try:
                self._files[path] = OpenFile(path)
            except OSError as error:
                raise TunewrightError(f"{path} cannot be read: {error.strerror}") from error
        return self._files[path]

    def read(self, extent: Extent, into: memoryview) -> None:
        """The bytes of an extent that `extents` gave, into as many bytes of memory."""
        try:
            count = self._files[extent.file].read(extent.offset, into)
        except OSError as error:
            raise TunewrightError(f"{extent.file} cannot be read: {error.strerror}") from error
        if count != extent.length:
            raise TunewrightError(
                f"{extent.file} ends at byte {extent.offset + count}, within a tensor"
            )

    def pieces(self, entry: Entry) -> Iterator[tuple[int, Piece | None]]:
        """The tensor in pieces, one after the other: how many numbers, and where they lie; nowhere
        when only `load` can tell."""
        extents = self.extents(entry)
        if extents is None:
            yield entry.numbers, None
        for extent in extents or []:
            for piece in pieces(extent):
                numbers = piece.length // entry.stored.itemsize
                yield numbers, Piece(piece, extent)

    def piece(self, entry: Entry, where: Piece | None, buffer: torch.Tensor) -> torch.Tensor:
        """One of the `pieces` as it was stored, flat; valid until `buffer`, uint8 [PIECE], is used
        again. Raises TunewrightError when it completes a shard that is not what was written."""
        if where is None:
            return self.load(entry).reshape(-1)
        raw = buffer[: where.bytes.length]
        self.read(where.bytes, raw.numpy().data)
        if checksum := self._records.get(where.shard):
            crc = zlib.crc32(raw.numpy().data)
            with self._counting:
                checksum.add(where.bytes.offset - where.shard.offset, crc)
        return raw.view(entry.stored)

    def blocks(self, entry: Entry) -> Iterator[torch.Tensor]:
        """The tensor as it was stored, flat, in blocks that are valid until the next one."""
        buffer = torch.empty(PIECE, dtype=torch.uint8)
        for _, where in self.pieces(entry):
            yield self.piece(entry, where, buffer)

    def load(self, entry: Entry) -> torch.Tensor:
        """One tensor as it was stored, put together from its shards by torch."""
        key = _PREFIX + entry.name
        state = {key: torch.empty(entry.shape, dtype=entry.stored)}
        try:
            with _without_group():
                load(state, storage_reader=_KnownReader(self.path, self._metadata), no_dist=True)
        except (Exception, CheckpointException) as error:  # as above: any damage ends here
            raise TunewrightError(
                f"{self.path}: the tensor {entry.name} cannot be read: {_cause(error)}"
            ) from error
        return state[key]


def _cause(error: BaseException) -> BaseException:
    """What went wrong, without the traceback that torch makes part of its message."""
    failures = getattr(error, "failures", None)
    return next(iter(failures.values()))[0] if failures else error


def pieces(extent: Extent) -> Iterator[Extent]:
    """The extent cut into pieces of at most PIECE bytes."""
    for start in range(0, extent.length, PIECE):
        length = min(PIECE, extent.length - start)
        yield Extent(extent.file, extent.offset + start, length)


def _in_rows(shape: Sequence[int], chunks: list[ChunkStorageMetadata]) -> bool:
    """Whether the chunks are whole rows, one after the other: a cut along the first dimension."""
    row = 0
    for chunk in chunks:
        if list(chunk.sizes[1:]) != list(shape[1:]) or list(chunk.offsets[:1]) not in ([row], []):
            return False
        row += sum(chunk.sizes[:1])
    return row == shape[0] if shape else len(chunks) == 1


class _KnownReader(FileSystemReader):
    """A reader that does not parse the checkpoint's metadata again for every tensor."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._known = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._known


@contextmanager
def _without_group() -> Iterator[None]:
    """Without torch's remark that there is no process group, which is the point here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        yield
