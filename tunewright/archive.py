"""Tensors that `torch.save` wrote: where their bytes lie in a file, found without loading them."""

from __future__ import annotations

import io
import os
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

_STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}  # fmt: skip
_LOCAL_HEADER = struct.Struct("<4s22xHH")


class Extent(NamedTuple):
    """A run of bytes in one file of the checkpoint: where it begins and how long it is."""

    file: Path
    offset: int
    length: int


class OpenFile:
    """An open file that many threads read from, each at its own place."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self._descriptor).st_size

    def close(self) -> None:
        os.close(self._descriptor)

    def read(self, offset: int, into: memoryview) -> int:
        """Fill the memory from `offset`; returns how many bytes there were."""
        done = 0
        while done < len(into):
            count = os.preadv(self._descriptor, [into[done:]], offset + done)
            if count == 0:
                break
            done += count
        return done


class _Window(io.RawIOBase):
    """One extent of a file as a file of its own, for zipfile."""

    def __init__(self, file: OpenFile, extent: Extent) -> None:
        self._file, self._extent, self._at = file, extent, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._extent.length}[whence]
        if base + offset < 0:
            raise OSError("before the start of the item")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        room = memoryview(buffer).cast("B")[: max(self._extent.length - self._at, 0)]
        count = self._file.read(self._extent.offset + self._at, room)
        self._at += count
        return count


class _Storage(NamedTuple):
    """What a pickled tensor says of its numbers: their type, the record's name, their count."""

    dtype: torch.dtype
    record: str
    numbers: int


@dataclass(frozen=True)
class _Tensor:
    """How a saved tensor lies in its storage; `first` and `stride` count numbers, not bytes."""

    storage: _Storage
    first: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A saved tensor, the extent of its storage in the file, and the storage's CRC-32."""

    dtype: torch.dtype
    first: int
    shape: tuple[int, ...]
    in_order: bool
    record: Extent
    crc: int


class _Description(pickle.Unpickler):
    """Reads what a saved tensor says of itself; it can make nothing but that."""

    def find_class(self, module: str, name: str) -> Any:
        known: dict[tuple[str, str], Callable[..., Any]] = {
            ("torch._utils", "_rebuild_tensor_v2"): _described,
            ("collections", "OrderedDict"): OrderedDict,
        }
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        return known[module, name]

    def persistent_load(self, pid: Any) -> _Storage:
        _, dtype, record, _, numbers = pid
        return _Storage(dtype, record, numbers)


def _described(
    storage: _Storage,
    first: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    hooks: Any,
) -> _Tensor:
    return _Tensor(storage, first, shape, stride)


def stored_tensor(file: OpenFile, item: Extent) -> StoredTensor | None:
    """The tensor of one `torch.save` archive, without its numbers; None for anything unusual."""
    try:
        # Buffered, both ends of the archive are one read each: on a network mount that counts.
        with (
            io.BufferedReader(_Window(file, item), 4096) as whole,
            zipfile.ZipFile(whole) as archive,
        ):
            records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            if "byteorder" in records and archive.read(records["byteorder"]) != (
                sys.byteorder.encode()
            ):
                return None
            tensor = _Description(io.BytesIO(archive.read(records["data.pkl"]))).load()
            info = records[f"data/{tensor.storage.record}"]
            record = _record(whole, item, info)
        size = tensor.storage.numbers * tensor.storage.dtype.itemsize
    except Exception:  # it is no such archive, and its content can be anything: torch will tell
        return None
    if record is None or record.length != size:
        return None
    in_order = _contiguous(tensor.shape, tensor.stride)
    return StoredTensor(
        tensor.storage.dtype, tensor.first, tensor.shape, in_order, record, info.CRC
    )


def _record(whole: IO[bytes], item: Extent, info: zipfile.ZipInfo) -> Extent | None:
    """The bytes of a record that is stored as it is; they begin behind the record's own header."""
    whole.seek(info.header_offset)
    magic, name, extra = _LOCAL_HEADER.unpack(whole.read(_LOCAL_HEADER.size))
    start = info.header_offset + _LOCAL_HEADER.size + name + extra
    plain = magic == b"PK\3\4" and info.compress_type == zipfile.ZIP_STORED
    if not plain or start + info.file_size > item.length:
        return None
    return Extent(item.file, item.offset + start, info.file_size)


def _contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the numbers follow each other in the order of their indices."""
    step = 1
    for size, given in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and given != step:
            return False
        step *= size
    return True
