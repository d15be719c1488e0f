"""The sealed, memory-mapped token store: its files, how it is written, how it is read.

    <tokens_root>/<fingerprint>/
      train/tokens.npy        uint [tokens]: ids, documents contiguous, in pack order
      train/documents.npy     uint [documents + 1]: offsets into tokens
      train/rows.npy          uint [documents]: the source row of each document, counted from 1
      train/spans.npy         uint [spans, 2]: supervised (start, end) within their document
      train/span_offsets.npy  uint [documents + 1]: offsets into spans
      train/packs.npy         uint [packs + 1]: offsets into documents
      eval/                   the same, only when rows are held out
      manifest.json           the seal, with the facts

Every array takes the smallest of uint16, uint32 and int64 that holds it; README.md beside this
file is the whole format. Reading needs numpy alone. A writer works in a hidden folder beside the
final place and moves it there when it is sealed, so an interrupted one leaves nothing that looks
finished.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import psutil

from tunewright.contract import rundir
from tunewright.contract.failures import DataError, UserError

KIND = "tokens"
FORMAT_VERSION = 1
SPLITS = ("train", "eval")
_HIDDEN = re.compile(r"\.[^.]+\.(?P<host>[^.]+)\.(?P<pid>\d+)\.[^.]+\.tmp")
_ABANDONED_AFTER_S = 24 * 3600
"""Age at which another host's unfinished folder counts as left behind."""

Ints = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Blocks:
    """Ids too many for memory: `count` of them, whose blocks can be read in order, once or more."""

    count: int
    dtype: npt.DTypeLike
    read: Callable[[], Iterator[Ints]]

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Ints]:
        return self.read()


@dataclass(frozen=True)
class SplitArrays:
    """The arrays of one split as the files hold them; see the module's docstring for shapes."""

    tokens: Ints | Blocks
    documents: Ints
    rows: Ints
    spans: Ints
    span_offsets: Ints
    packs: Ints

    def counts(self) -> dict[str, int]:
        """documents, tokens, supervised_tokens, packs and the longest document in tokens."""
        return {
            "documents": len(self.rows),
            "tokens": len(self.tokens),
            "supervised_tokens": int((self.spans[:, 1].astype(np.int64) - self.spans[:, 0]).sum()),
            "packs": len(self.packs) - 1,
            "longest": int(np.diff(self.documents).max(initial=0)),
        }


class Pack(NamedTuple):
    """Whole documents one after the other, at most pack_tokens tokens together.

    input_ids: int64 [n]. supervised: bool [n], token i is a label (never a document's first, which
    nothing predicts). lengths: int64 [documents], summing to n.
    """

    input_ids: npt.NDArray[np.int64]
    supervised: npt.NDArray[np.bool_]
    lengths: npt.NDArray[np.int64]


class Split:
    """The packs of one split: `len(split)` of them, `split[i]` is a Pack."""

    def __init__(self, folder: Path, counts: Mapping[str, int]) -> None:
        found = {f.name: _mapped(folder, f.name) for f in fields(SplitArrays)}
        self._folder = folder
        self._tokens = found["tokens"]
        self._arrays = SplitArrays(**found)
        self.rows = counts["rows"]
        self.documents = counts["documents"]
        self.tokens = counts["tokens"]
        self.supervised_tokens = counts["supervised_tokens"]

    def __len__(self) -> int:
        return len(self._arrays.packs) - 1

    def __getitem__(self, index: int) -> Pack:
        first, last = self._documents_of(index)
        offsets = self._arrays.documents[first : last + 1]
        ids = self._tokens[offsets[0] : offsets[-1]].astype(np.int64)
        supervised = self._supervised(first, last, offsets - offsets[0])
        return Pack(ids, supervised, np.diff(offsets).astype(np.int64))

    def __iter__(self) -> Iterator[Pack]:
        return (self[index] for index in range(len(self)))

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return int(np.diff(self._arrays.documents.astype(np.int64)).max(initial=0))

    def counts_of(self, packs: Sequence[int]) -> tuple[int, int]:
        """Tokens and supervised tokens of some packs together; reads none of their ids."""
        tokens, supervised = self._counts
        chosen = np.asarray(packs, dtype=np.int64)
        return int(tokens[chosen].sum()), int(supervised[chosen].sum())

    @cached_property
    def _counts(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Tokens and supervised tokens of every pack, int64 [packs] each."""
        arrays = self._arrays
        spans = arrays.spans.astype(np.int64)
        # Nothing predicts a document's first token.
        labels = spans[:, 1] - np.maximum(spans[:, 0], 1)
        before = np.concatenate([[0], np.cumsum(labels)])
        tokens = np.diff(arrays.documents.astype(np.int64)[arrays.packs])
        return tokens, np.diff(before[arrays.span_offsets.astype(np.int64)[arrays.packs]])

    def source_rows(self, index: int) -> npt.NDArray[np.int64]:
        """The source rows of a pack's documents, int64 [documents], counted from 1."""
        first, last = self._documents_of(index)
        return np.array(self._arrays.rows[first:last], dtype=np.int64)

    def to_dataset(self) -> Any:
        """The packs as a `datasets.Dataset`, one row each, written once to its cache.

        Columns: input_ids and labels (-100 where nothing is learnt), position_ids (from 0 in each
        document) and seq_lengths (tokens of each document). Needs the datasets library.
        """
        from tunewright.data.interop import dataset_of

        return dataset_of(self._folder.parent, self._folder.name)

    def _documents_of(self, index: int) -> tuple[int, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"pack {index} of {len(self)}")
        index %= len(self)
        return int(self._arrays.packs[index]), int(self._arrays.packs[index + 1])

    def _supervised(self, first: int, last: int, starts: Ints) -> npt.NDArray[np.bool_]:
        """bool [n] of documents first..last, whose offsets within the pack are `starts`."""
        offsets = self._arrays.span_offsets[first : last + 1]
        spans = self._arrays.spans[offsets[0] : offsets[-1]].astype(np.int64)
        spans += np.repeat(starts[:-1], np.diff(offsets))[:, None]
        edges = np.zeros(int(starts[-1]) + 1, dtype=np.int64)
        np.add.at(edges, spans[:, 0], 1)
        np.add.at(edges, spans[:, 1], -1)
        return np.cumsum(edges)[:-1] > 0


class TokenStore:
    """A sealed token store, opened for reading. `eval` is None when no rows are held out."""

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        self.path = path
        self.facts = dict(facts)
        self.fingerprint: str = facts["fingerprint"]
        self.pack_tokens: int = facts["pack_tokens"]
        counts = facts["counts"]
        self.train = Split(path / "train", counts["train"])
        self.eval = Split(path / "eval", counts["eval"]) if "eval" in counts else None

    @classmethod
    def open(cls, path: Path | str, *, verify: bool = False) -> TokenStore:
        """Open a store; `verify` reads every byte against its hash, else sizes alone are compared.

        Raises DataError when the folder is not sealed, is damaged, or holds something else.
        """
        path = Path(path)
        facts = rundir.manifest(path)
        if facts is None:
            raise DataError(
                f"{path} is not a sealed token store (no {rundir.MANIFEST}); "
                "run tunewright.pretokenize to make one"
            )
        if facts.get("kind") != KIND or facts.get("version") != FORMAT_VERSION:
            raise DataError(
                f"{path} holds {facts.get('kind')} version {facts.get('version')}, "
                f"this Tunewright reads {KIND} version {FORMAT_VERSION}; tokenize again"
            )
        if wrong := rundir.damage(path, facts, sizes_only=not verify):
            raise DataError(f"{wrong[0]}; delete {path} and tokenize again")
        return cls(path, facts)


def compact(array: Ints) -> Ints:
    """The same numbers, none negative, in the smallest of uint16, uint32 and int64."""
    largest = int(array.max(initial=0))
    kind = np.uint16 if largest < 1 << 16 else np.uint32 if largest < 1 << 32 else np.int64
    return array.astype(kind, copy=False)


def token_dtype(vocabulary: int) -> npt.DTypeLike:
    """uint16 where every id below `vocabulary` fits, else uint32."""
    return np.uint16 if vocabulary <= 1 << 16 else np.uint32


def write_store(
    tokens_root: Path,
    fingerprint: str,
    splits: Mapping[str, SplitArrays],
    facts: Mapping[str, Any],
) -> TokenStore:
    """Write, seal and open `<tokens_root>/<fingerprint>`; a sealed one that came first is kept.

    `facts` go into the manifest; facts["counts"][split] must hold "rows", the rest is counted
    here. Raises UserError when the disk is full or the folder cannot be written.
    """
    counts = {name: {**facts["counts"][name], **arrays.counts()} for name, arrays in splits.items()}
    seal = {"kind": KIND, "version": FORMAT_VERSION, "fingerprint": fingerprint}
    final = tokens_root / fingerprint
    with _readable_errors(tokens_root):
        tokens_root.mkdir(parents=True, exist_ok=True)
        remove_leftovers(tokens_root)
        draft = _hidden(tokens_root, fingerprint)
        try:
            for name, arrays in splits.items():
                _write_split(draft / name, arrays)
            rundir.seal(draft, {**facts, **seal, "counts": counts})
            _publish(draft, final)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return TokenStore.open(final)


def sealed_stores(tokens_root: Path) -> list[dict[str, Any]]:
    """The manifests of the sealed stores below a folder, the newest first."""
    if not tokens_root.is_dir():
        return []
    visible = [p for p in tokens_root.iterdir() if not p.name.startswith(".")]
    seals = [p / rundir.MANIFEST for p in visible if rundir.is_sealed(p)]
    seals.sort(key=lambda seal: seal.stat().st_mtime_ns, reverse=True)
    found = [rundir.manifest(seal.parent) for seal in seals]
    return [facts for facts in found if facts is not None and facts.get("kind") == KIND]


def discard(path: Path) -> None:
    """Take a damaged store out of the way; readers that have it open keep their view."""
    broken = _hidden(path.parent, path.name)
    with suppress(FileNotFoundError):  # another writer may be ahead of us
        os.replace(path, broken)
    shutil.rmtree(broken, ignore_errors=True)


def remove_leftovers(tokens_root: Path) -> None:
    """Delete the hidden folders of writers that are no more."""
    for folder in tokens_root.glob(".*.tmp"):
        name = _HIDDEN.fullmatch(folder.name)
        if name and _abandoned(folder, name["host"], int(name["pid"])):
            shutil.rmtree(folder, ignore_errors=True)


def _hidden(tokens_root: Path, fingerprint: str) -> Path:
    """A path for a draft, whose name says who writes it: fingerprint, host, pid."""
    unique = secrets.token_hex(4)
    return tokens_root / f".{fingerprint}.{_host()}.{os.getpid()}.{unique}.tmp"


def _host() -> str:
    return socket.gethostname().replace(".", "-")


def _abandoned(folder: Path, host: str, pid: int) -> bool:
    try:
        touched = folder.stat().st_mtime
    except OSError:
        return False  # its writer has just finished
    if host != _host():
        return time.time() - touched > _ABANDONED_AFTER_S
    try:
        # A process younger than the folder has only inherited the number.
        return psutil.Process(pid).create_time() > touched + 1
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:
        return False


def _write_split(folder: Path, arrays: SplitArrays) -> None:
    folder.mkdir(parents=True)
    for field in fields(SplitArrays):
        found = getattr(arrays, field.name)
        with (folder / f"{field.name}.npy").open("wb") as file:
            if isinstance(found, Blocks):
                _write_blocks(file, found)
            else:
                kept = found if field.name == "tokens" else compact(found)
                np.save(file, kept, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())


def _write_blocks(file: BinaryIO, blocks: Blocks) -> None:
    """A .npy file of one dimension, block after block: volumes know no writing in the middle."""
    descr = np.lib.format.dtype_to_descr(np.dtype(blocks.dtype))
    header = {"descr": descr, "fortran_order": False, "shape": (len(blocks),)}
    np.lib.format.write_array_header_1_0(file, header)
    for block in blocks:
        file.write(np.ascontiguousarray(block, dtype=blocks.dtype).data)


def _publish(draft: Path, final: Path) -> None:
    """Move a sealed draft to its place; whoever comes second leaves the first one's there."""
    for _ in range(3):
        try:
            os.replace(draft, final)
            return
        except OSError:
            if not final.exists():
                raise
        if rundir.is_sealed(final):
            return
        discard(final)
    raise UserError(f"{final} keeps changing while it is written; is something else using it?")


@contextmanager
def _readable_errors(tokens_root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write tokens below {tokens_root}: {error.strerror or error}; "
            "free some space there, or set output_dir to a folder that can be written"
        ) from error


def _mapped(folder: Path, name: str) -> Ints:
    array: Ints = np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False))
    return array
