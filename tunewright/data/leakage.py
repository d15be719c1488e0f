"""Evaluation rows that are also training rows, whole or in part.

A row's words (questions and answers, without system prompts) are cut into runs of 13; case and
punctuation do not count. An evaluation row leaks when its content is also a training row, when one
of its runs is in a few training rows, or when all of them are in training rows. A run that is in
more than 10 training rows is taken for a fixed phrase and counts only in the last case.

The runs of the evaluation rows are held in memory, those of the training rows pass by. Beyond
MAX_RUNS a sample is kept, chosen by hash, so memory is bounded whatever the size.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from tunewright.data.examples import Alpaca, Chat, Completion, Example

RUN = 13
MAX_RUNS = 4_000_000
_FIXED_PHRASE = 10
_WORD = re.compile(r"\w+")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_FILTER_BITS = 24
_KNOWN_WORDS = 200_000
_SHOWN = 20
_KINDS = ("the same row", "all of its words", f"{RUN} words in a row")

Hashes = npt.NDArray[np.uint64]


class _Words(dict[str, int]):
    """The hash of a word; remembers those it has seen, up to a limit."""

    def __missing__(self, word: str) -> int:
        if len(self) >= _KNOWN_WORDS:
            self.clear()
        found = self[word] = xxhash.xxh3_64_intdigest(word.encode("utf-8", "surrogatepass"))
        return found


_words = _Words()


def runs_of(examples: Sequence[Example]) -> tuple[Hashes, npt.NDArray[np.int64]]:
    """The hashes of the runs of 13 words of rows, and which row each is of (counted from 0).

    A row of fewer words is one run, made of all of them.
    """
    texts = [_WORD.findall(text_of(example).lower()) for example in examples]
    counts = np.array([len(words) for words in texts], dtype=np.int64)
    total = int(counts.sum())
    hashes = np.fromiter(
        (_words[w] for words in texts for w in words), dtype=np.uint64, count=total
    )
    owners = np.repeat(np.arange(len(texts)), counts)
    long = counts >= RUN
    runs = _rolled(hashes) if total >= RUN else hashes[:0]
    # A run must not go on into the next row.
    whole = owners[: len(runs)] == owners[RUN - 1 :] if len(runs) else np.zeros(0, dtype=bool)
    starts = np.cumsum(counts) - counts
    short = [(_folded(hashes[starts[i] : starts[i] + counts[i]]), i) for i in np.flatnonzero(~long)]
    short = [(value, i) for value, i in short if counts[i]]
    return (
        np.concatenate([runs[whole], np.array([value for value, _ in short], dtype=np.uint64)]),
        np.concatenate([owners[: len(runs)][whole], np.array([i for _, i in short], np.int64)]),
    )


def text_of(example: Example) -> str:
    """The words of a row that say what it is about."""
    if isinstance(example, Chat):
        spoken = (m for m in example.messages if m.role not in ("system", "developer"))
        return "\n".join(f"{m.reasoning}\n{m.content}" for m in spoken)
    if isinstance(example, Alpaca | Completion):
        return "\n".join(example)
    return example.text


Row = tuple[int, Example, bytes]
"""A row's number, content and content hash."""


class Leak(NamedTuple):
    """An evaluation row and a training row with the same words; rows as places."""

    eval_row: str
    train_row: str
    kind: str


class RunIndex:
    """The runs of the evaluation rows, and where training rows hold the same."""

    def __init__(self) -> None:
        self._chunks: list[tuple[Hashes, npt.NDArray[np.int64]]] = []
        self._held = 0
        self._shift = 0  # runs whose hash ends in so many zero bits are kept
        self._rows = array("q")
        self._place: Callable[[int], str] = str
        self._keys = bytearray()

    def __len__(self) -> int:
        """How many evaluation rows there are."""
        return len(self._rows)

    def add(self, rows: Sequence[Row], place: Callable[[int], str]) -> None:
        """Take in evaluation rows; `place` says where the row of a number is."""
        runs, owners = runs_of([example for _, example, _ in rows])
        keep = self._sampled(runs)
        self._chunks.append((runs[keep], owners[keep] + len(self._rows)))
        self._rows.extend(number for number, _, _ in rows)
        self._place = place
        self._keys += b"".join(digest[:8] for _, _, digest in rows)
        self._held += int(keep.sum())
        while self._held > MAX_RUNS:
            self._shift += 1
            self._chunks = [(r[k], o[k]) for r, o in self._chunks for k in [self._sampled(r)]]
            self._held = sum(len(r) for r, _ in self._chunks)

    def seal(self) -> None:
        """No more evaluation rows come; training rows may."""
        empty: tuple[Hashes, npt.NDArray[np.int64]]
        empty = (np.zeros(0, np.uint64), np.zeros(0, np.int64))
        chunks = self._chunks or [empty]
        runs = np.concatenate([r for r, _ in chunks])
        self._owners = np.concatenate([o for _, o in chunks])
        self._chunks = []
        self._runs, self._run_of = np.unique(runs, return_inverse=True)
        self._seen = np.zeros(len(self._runs), dtype=np.int64)
        self._first = np.zeros(len(self._runs), dtype=np.int64)
        self._filter = np.zeros(1 << _FILTER_BITS, dtype=bool)
        self._filter[self._slot(self._runs)] = True

    def look_up(self, runs: Hashes, rows: npt.NDArray[np.int64]) -> None:
        """Pass training rows by: the runs, and the number (from 1) of the row that each is of."""
        maybe = np.flatnonzero(self._filter[self._slot(runs)])
        if not len(maybe):
            return
        at = np.searchsorted(self._runs, runs[maybe])
        at[at == len(self._runs)] = 0
        hit = self._runs[at] == runs[maybe]
        # Once a row, however often the row repeats itself.
        pairs = np.unique(np.stack([at[hit], rows[maybe[hit]]]), axis=1)
        np.add.at(self._seen, pairs[0], 1)
        new = pairs[:, self._first[pairs[0]] == 0]
        # Of a run that several rows have, the first row is written last.
        self._first[new[0, ::-1]] = new[1, ::-1]

    def leaks(self, train_keys: Hashes, place: Callable[[int], str]) -> list[Leak]:
        """The evaluation rows that leak, in their order.

        train_keys: the first 8 bytes of the content hashes of the training rows.
        place: says where the training row of a number is.
        """
        keys = np.frombuffer(self._keys, dtype=">u8").astype(np.uint64)
        exact = np.isin(keys, train_keys)
        seen = self._seen[self._run_of]
        few = (seen > 0) & (seen <= _FIXED_PHRASE)
        rows = len(self)
        total = np.bincount(self._owners, minlength=rows)
        whole = (total > 0) & (total == np.bincount(self._owners[seen > 0], minlength=rows))
        some = np.bincount(self._owners[few], minlength=rows) > 0
        witness = self._witnesses(seen > 0)
        found = []
        for row in np.flatnonzero(exact | whole | some).tolist():
            kind = _KINDS[0] if exact[row] else _KINDS[1] if whole[row] else _KINDS[2]
            where = place(witness[row]) if row in witness else "a training row"
            found.append(Leak(self._place(self._rows[row]), where, kind))
        return found

    @property
    def sampled(self) -> int:
        """One run in so many was compared."""
        return 1 << self._shift

    def _witnesses(self, seen: npt.NDArray[np.bool_]) -> dict[int, int]:
        """For each row with a run that was seen, the training row that has the rarest such run."""
        order = np.argsort(-self._seen[self._run_of[seen]], kind="stable")
        owners, runs = self._owners[seen][order], self._run_of[seen][order]
        return dict(zip(owners.tolist(), self._first[runs].tolist(), strict=True))

    def _sampled(self, runs: Hashes) -> npt.NDArray[np.bool_]:
        mask = np.uint64((1 << self._shift) - 1)
        found: npt.NDArray[np.bool_] = (runs & mask) == 0
        return found

    def _slot(self, runs: Hashes) -> npt.NDArray[np.int64]:
        return (runs >> np.uint64(64 - _FILTER_BITS)).astype(np.int64)


def _rolled(hashes: Hashes) -> Hashes:
    """The hash of each run of 13 neighbours: uint64 [n] to [n - 12]."""
    size = len(hashes) - RUN + 1
    found = np.zeros(size, dtype=np.uint64)
    for step in range(RUN):
        found = found * _MULTIPLIER + hashes[step : step + size]
    return _mixed(found)


def _folded(hashes: Hashes) -> np.uint64:
    """The hash of all the words of a short row."""
    found = np.full(1, len(hashes), dtype=np.uint64)
    for step in range(len(hashes)):
        found = found * _MULTIPLIER + hashes[step : step + 1]
    return np.uint64(_mixed(found)[0])


def _mixed(found: Hashes) -> Hashes:
    """All bits in play, high and low ones: both are used to choose."""
    found = (found ^ (found >> np.uint64(29))) * _MULTIPLIER
    mixed: Hashes = found ^ (found >> np.uint64(32))
    return mixed


def summary(leaks: Sequence[Leak], rows: int, sampled: int) -> dict[str, Any]:
    """What the audit keeps: counts, the share of the evaluation rows, and the first few."""
    return {
        "eval_rows": rows,
        "leaked": len(leaks),
        "kinds": {kind: sum(leak.kind == kind for leak in leaks) for kind in _KINDS},
        "share": len(leaks) / rows if rows else 0.0,
        "whole_share": sum(leak.kind != _KINDS[2] for leak in leaks) / rows if rows else 0.0,
        "compared": "every run" if sampled == 1 else f"one run in {sampled}",
        "rows": [leak._asdict() for leak in leaks[:_SHOWN]],
    }
