"""A model as safetensors files, streamed out of a sharded checkpoint: a few MB of memory a worker.

Every output file has its full length from the start. Workers take its pieces in order: each reads a
few MB from where the checkpoint has them (or a merged model makes them), casts them, looks that all
are finite numbers, waits for its turn to add them to the file's hash, and writes them to their
place.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import xxhash

from tunewright.contract.failures import TunewrightError
from tunewright.contract.rundir import write_json
from tunewright.modelfolder import (
    INDEX,
    WEIGHTS,
    Expected,
    all_finite,
    count_not_finite,
    not_finite,
)
from tunewright.sharded import PIECE, Entry, ShardedModel

MAX_SHARD_BYTES = 5 * 10**9
_MOST_WORKERS = 8
_WORTH_STARTING = 64 << 20
"""Bytes; the disk is not started for less, since starting it costs time too."""
_SAFETENSORS_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


class Tensors(Protocol):
    """Where the numbers come from; see ShardedModel, whose methods these are."""

    @property
    def path(self) -> Path: ...

    def pieces(self, entry: Entry) -> Iterator[tuple[int, Any]]: ...

    def piece(self, entry: Entry, where: Any, buffer: torch.Tensor) -> torch.Tensor: ...

    def blocks(self, entry: Entry) -> Iterator[torch.Tensor]: ...


def tied_once(model: ShardedModel, entries: list[Entry], expected: Expected) -> list[Entry]:
    """The entries with each tied tensor once; raises when two that should be one tensor differ."""
    by_name = {entry.name: entry for entry in entries}
    double = {a: first for a, first in expected.aliases.items() if {a, first} <= by_name.keys()}
    for alias, first in double.items():
        if _digest(model, by_name[alias]) != _digest(model, by_name[first]):
            raise TunewrightError(
                f"{alias} and {first} are one tensor in this model but differ in {model.path}"
            )
    return [entry for entry in entries if entry.name not in double]


def _digest(model: ShardedModel, entry: Entry) -> bytes:
    digest = xxhash.xxh3_128(str(entry.stored).encode())
    for block in model.blocks(entry):
        digest.update(_bytes_of(block))
    return digest.digest()


def write_weights(
    model: Tensors, entries: list[Entry], folder: Path, max_shard_bytes: int = MAX_SHARD_BYTES
) -> dict[str, dict[str, Any]]:
    """Write the entries as safetensors below `folder`, cast, each checked to be finite, on disk.

    Returns size and hash of every weight file, computed while writing. More than one file gets an
    index, as transformers expects. Raises NonFinite with the tensor's name, and TunewrightError
    with the place in the checkpoint where bytes are missing.
    """
    shards = _cut(entries, max_shard_bytes)
    names = _file_names(len(shards))
    with ExitStack() as stack:
        outputs = [
            stack.enter_context(_Output(folder / name, shard))
            for shard, name in zip(shards, names, strict=True)
        ]
        planned = [piece for output in outputs for piece in _pieces(model, output)]
        with _one_thread_a_worker():
            _Workers(model, planned).run()
        hashes = {output.path.name: output.facts() for output in outputs}
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


class _Output:
    """One safetensors file while it is written; in `with`, open and of its full length."""

    def __init__(self, path: Path, entries: list[Entry]) -> None:
        self.path = path
        self.entries = entries
        self.header = _header(entries)
        self.size = len(self.header) + sum(entry.bytes for entry in entries)
        self.digest = xxhash.xxh3_128()
        self._left = self.size
        self._waiting = 0
        self._lock = threading.Lock()

    def __enter__(self) -> _Output:
        with self._named_errors():
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.truncate(self._descriptor, self.size)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def facts(self) -> dict[str, Any]:
        return {"size": self.size, "xxh3_128": self.digest.hexdigest()}

    def write(self, offset: int, block: memoryview) -> None:
        """Put bytes in their place; whoever writes the last of them sees the file to the disk."""
        with self._named_errors():
            done = 0
            while done < len(block):
                done += os.pwrite(self._descriptor, block[done:], offset + done)
            with self._lock:
                self._left -= done
                whole = self._left == 0
                self._waiting += done
                ready = self._waiting if self._waiting >= _WORTH_STARTING else 0
                self._waiting -= ready
            if ready and hasattr(os, "posix_fadvise"):
                # The kernel begins to write now, not when a large part of memory is dirty. Pieces
                # come about in order, so these are the last bytes; fsync sees to the others.
                start = max(0, offset + done - ready)
                os.posix_fadvise(self._descriptor, start, ready, os.POSIX_FADV_DONTNEED)
            if whole:
                os.fsync(self._descriptor)

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """With the file's name in errors of calls that know it by its descriptor alone."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error


def _header(entries: list[Entry]) -> bytes:
    """The head of a safetensors file: its length, and where each tensor lies, without gaps."""
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
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True)
class _Piece:
    """What one worker does at a time: bytes for `offset` of an output.

    `source` is where the model says they are. Without an entry it is the header.
    """

    output: _Output
    offset: int
    entry: Entry | None = None
    source: Any = None


def _pieces(model: Tensors, output: _Output) -> Iterator[_Piece]:
    """The pieces of one file in the order of their offsets, without gaps."""
    yield _Piece(output, 0)
    offset = len(output.header)
    for entry in output.entries:
        for numbers, source in model.pieces(entry):
            yield _Piece(output, offset, entry, source)
            offset += numbers * entry.saved.itemsize


class _Workers:
    """Threads that take the pieces in order, and hash them in order."""

    def __init__(self, model: Tensors, planned: list[_Piece]) -> None:
        self._model = model
        self._numbered = iter(enumerate(planned))
        self._changed = threading.Condition()
        self._hashed = 0
        self._stopped = False

    def run(self) -> None:
        count = min(_MOST_WORKERS, max(2, os.cpu_count() or 1))
        with ThreadPoolExecutor(max_workers=count) as pool:
            jobs = [pool.submit(self._work) for _ in range(count)]
            try:
                for job in jobs:
                    job.result()
            finally:
                self._stop()

    def _work(self) -> None:
        buffer = torch.empty(PIECE, dtype=torch.uint8)
        try:
            while (taken := self._take()) is not None:
                number, piece = taken
                block = _block(self._model, piece, buffer)
                if not self._hash(number, piece, block):
                    return
                piece.output.write(piece.offset, block)
        except BaseException:
            self._stop()  # or the others would wait for this piece's turn to pass
            raise

    def _take(self) -> tuple[int, _Piece] | None:
        with self._changed:
            return None if self._stopped else next(self._numbered, None)

    def _hash(self, number: int, piece: _Piece, block: memoryview) -> bool:
        """Add the block to its file's hash when all before it are in; False: there is no need."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._hashed == number)
            if self._stopped:
                return False
            piece.output.digest.update(block)
            self._hashed += 1
            self._changed.notify_all()
        return True

    def _stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


def _block(model: Tensors, piece: _Piece, buffer: torch.Tensor) -> memoryview:
    """The bytes of one piece as they are saved; they are valid until the next one."""
    entry = piece.entry
    if entry is None:
        return memoryview(piece.output.header)
    saved = model.piece(entry, piece.source, buffer).to(entry.saved)
    if not all_finite(saved):
        bad = sum(count_not_finite(block.to(entry.saved)) for block in model.blocks(entry))
        raise not_finite(entry.name, bad, entry.saved)
    return _bytes_of(saved)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data


@contextmanager
def _one_thread_a_worker() -> Iterator[None]:
    """Torch's own threads would only be in each other's way: a piece is small, workers are many."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
