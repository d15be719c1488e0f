"""Tokens on their way to the store: on disk in the order of the rows, then read in pack order.

The file has no name, so that nothing is left behind however the process ends. It lies in TMPDIR and
takes as many bytes as the tokens of the store.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from functools import partial

import numpy as np
import numpy.typing as npt

from tunewright.contract.failures import UserError
from tunewright.data.documents import Batch
from tunewright.data.packing import pack
from tunewright.data.store import Blocks, Ints, SplitArrays

_BLOCK_TOKENS = 1 << 20
_BLOCKS_BETWEEN_RELEASES = 4


class Spill:
    """The documents of one split, in the order of the rows."""

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self._dtype = np.dtype(dtype)
        self._file = tempfile.TemporaryFile(prefix="tunewright-tokens-")  # noqa: SIM115 - closed by close()
        self._batches: list[Batch] = []
        self._joined: Batch | None = None
        self.tokens = 0

    def __len__(self) -> int:
        """How many documents there are."""
        return sum(len(batch.lengths) for batch in self._batches)

    def close(self) -> None:
        """Give the disk back."""
        self._file.close()

    def add(self, batch: Batch) -> None:
        """Take in documents; their ids leave memory. Raises UserError when the disk is full."""
        try:
            self._file.write(np.ascontiguousarray(batch.ids, self._dtype).data)
        except OSError as error:
            raise UserError(
                f"cannot write tokens to {tempfile.gettempdir()}: {error.strerror or error}; "
                "free some space there, or set TMPDIR to a folder that has some"
            ) from error
        self.tokens += len(batch.ids)
        nothing = np.zeros(0, self._dtype)  # a slice would keep the ids in memory
        self._batches.append(
            Batch(nothing, batch.lengths, batch.rows, batch.span_counts, batch.spans)
        )

    @property
    def documents(self) -> Batch:
        """All documents, without their ids."""
        if self._joined is None:
            self._joined = Batch(
                np.zeros(0, self._dtype),
                _joined([batch.lengths for batch in self._batches]),
                _joined([batch.rows for batch in self._batches]),
                _joined([batch.span_counts for batch in self._batches]),
                np.concatenate(
                    [np.zeros((0, 2), np.uint32), *(batch.spans for batch in self._batches)]
                ),
            )
            self._batches = [self._joined]
        return self._joined

    def document(self, index: int) -> Batch:
        """One document, in the order of the rows, with its ids."""
        found = self.documents
        chosen = np.zeros(len(found.lengths), dtype=bool)
        chosen[index] = True
        first = int(found.lengths[:index].sum())
        self._file.flush()
        size = self._dtype.itemsize
        read = os.pread(self._file.fileno(), int(found.lengths[index]) * size, first * size)
        return Batch(
            np.frombuffer(read, dtype=self._dtype),
            found.lengths[chosen],
            found.rows[chosen],
            found.span_counts[chosen],
            found.spans[np.repeat(chosen, found.span_counts)],
        )

    def packed(self, pack_tokens: int) -> SplitArrays:
        """The documents as the store keeps them; at least one. The ids are read when written."""
        found = self.documents
        order, packs = pack(found.lengths, pack_tokens)
        spans = _gathered(found.span_counts, order)
        return SplitArrays(
            tokens=Blocks(self.tokens, self._dtype, partial(self._blocks, order)),
            documents=_offsets(found.lengths[order]),
            rows=found.rows[order],
            spans=found.spans[spans],
            span_offsets=_offsets(found.span_counts[order]),
            packs=packs,
        )

    def _blocks(self, order: npt.NDArray[np.int64]) -> Iterator[Ints]:
        """The ids in this order of documents, about a million at a time."""
        lengths = self.documents.lengths
        starts = np.cumsum(lengths) - lengths
        self._file.flush()
        with mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            mapped.madvise(mmap.MADV_RANDOM)  # else each document brings its neighbours' pages
            ids = np.frombuffer(mapped, dtype=self._dtype)
            for number, part in enumerate(_blocks_of(lengths[order]), 1):
                documents = order[part]
                yield ids[_ranges(starts[documents], lengths[documents])]
                if number % _BLOCKS_BETWEEN_RELEASES == 0:
                    mapped.madvise(mmap.MADV_DONTNEED)  # pages read so far leave our memory
            del ids


def _blocks_of(lengths: npt.NDArray[np.int64]) -> Iterator[slice]:
    """Neighbouring documents of about _BLOCK_TOKENS tokens together, as slices."""
    ends = np.cumsum(lengths)
    first = 0
    while first < len(lengths):
        done = ends[first] - lengths[first]
        last = int(np.searchsorted(ends, done + _BLOCK_TOKENS, side="right"))
        last = max(last, first + 1)
        yield slice(first, last)
        first = last


def _gathered(counts: npt.NDArray[np.int64], order: npt.NDArray[np.int64]) -> Ints:
    """Where the items of documents in another order lie: int64 [items]."""
    starts = np.cumsum(counts) - counts
    return _ranges(starts[order], counts[order])


def _ranges(starts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> Ints:
    """start, start + 1, … for each pair, one after the other: int64 [sum of counts]."""
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(int(counts.sum()))


def _offsets(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])


def _joined(arrays: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.zeros(0, np.int64), *arrays])
