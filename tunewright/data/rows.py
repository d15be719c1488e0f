"""Rows of one or several sources, lazily and in order.

    rows = read_rows(*training_sources(settings))   # or *evaluation_sources(settings)
    for number, value in rows: ...                  # raw values; may be iterated again
    for number, content in rows.examples(): ...     # Example, or BadRow with the reason
    rows.place(number)                              # "a.jsonl row 3", for a number seen already
    rows.name                                       # the sources' names, for messages
    rows.commits                                    # {Hub name: commit}, known from the beginning
    rows.formats                                    # {file: shape}, as found by examples() so far

Numbers ascend from 1, with gaps where a weight leaves rows out; a weight of 2 gives each row twice,
one after the other and with the same number. `len()` is not known. No values are kept.
"""

from __future__ import annotations

import bisect
import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import xxhash

from tunewright.contract.datasettings import DatasetSource
from tunewright.data import shapes
from tunewright.data.examples import BadRow, Example
from tunewright.data.sources import Source, evaluation_sources, find, training_sources

__all__ = ["Rows", "evaluation_sources", "read_rows", "training_sources"]

_SPACE = 1 << 64


class _Row(NamedTuple):
    number: int
    value: Any
    copies: int
    label: str
    asked: DatasetSource


@dataclass
class Rows:
    """See the module."""

    sources: tuple[Source, ...]
    formats: dict[str, str] = field(default_factory=dict)
    _places: _Places = field(default_factory=lambda: _Places())

    @property
    def name(self) -> str:
        return ", ".join(source.asked.name for source in self.sources)

    @property
    def commits(self) -> dict[str, str]:
        """The commit of each Hub dataset; one whose commit is not known offline is left out."""
        return {s.asked.name: s.commit for s in self.sources if s.commit is not None}

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """(number, value): whatever the file holds there, or BadRow where it cannot be read."""
        for row in self._walk():
            for _ in range(row.copies):
                yield row.number, row.value

    def examples(self) -> Iterator[tuple[int, Example | BadRow]]:
        """(number, what the row says); a bad one once, whatever its weight."""
        for row in self._walk():
            content = self._content(row)
            for _ in range(1 if isinstance(content, BadRow) else row.copies):
                yield row.number, content

    def place(self, number: int) -> str:
        """Where a row is, like `rows.jsonl row 12`: a JSONL file's rows are its lines, from 1."""
        return self._places.of(number)

    def _walk(self) -> Iterator[_Row]:
        """The rows that are taken at least once."""
        total = 0
        for source in self.sources:
            for part, number, value in source.rows():
                total += 1
                if copies := _copies(source.asked.weight, value):
                    self._places.note(total, part.label, number)
                    yield _Row(total, value, copies, part.label, source.asked)

    def _content(self, row: _Row) -> Example | BadRow:
        columns = row.asked.columns
        try:
            if isinstance(row.value, BadRow):
                raise row.value
            shape: str = row.asked.format
            if shape == "auto":
                shape = self._shape(row)
            return shapes.example_of(row.value, shape, columns)
        except BadRow as error:
            return error

    def _shape(self, row: _Row) -> str:
        """The shape of a row, which must be that of the file's first."""
        found = shapes.format_of(row.value, row.asked.columns)
        first = self.formats.setdefault(row.label, found)
        if found != first:
            raise BadRow("another shape than the file's first row", f"{found}, not {first}")
        return found


def read_rows(*sources: DatasetSource) -> Rows:
    """The rows of these sources, one after the other; nothing is read before it is asked for.

    Raises UserError for what is not there. Iterating raises UserError for a file that cannot be
    read, and DataError for one that is torn and for a source without rows.
    """
    return Rows(tuple(find(source, alone=len(sources) == 1) for source in sources))


def _copies(weight: float, value: Any) -> int:
    """How often a row is taken: weight 2.5 is twice, and once more for half of the rows.

    A hash of the row's content chooses them, so they stay the same when rows are added.
    """
    whole = int(weight)
    share = weight - whole
    if not share:
        return whole
    # Numbers and the like in a table are part of the content as their text.
    text = json.dumps(value, sort_keys=True, default=str)
    return whole + (xxhash.xxh3_64_intdigest(text.encode()) < share * _SPACE)


class _Places:
    """Where rows are, in runs of consecutive ones: most files are one run."""

    def __init__(self) -> None:
        self._labels: list[str] = []
        self._starts, self._offsets, self._files = array("q"), array("q"), array("q")
        self._last = 0

    def note(self, number: int, label: str, number_in_file: int) -> None:
        """Remember a row; one that was noted already is passed over."""
        if number <= self._last:
            return
        self._last = number
        offset = number_in_file - number
        if self._labels and self._labels[-1] == label and self._offsets[-1] == offset:
            return
        if not self._labels or self._labels[-1] != label:
            self._labels.append(label)
        self._starts.append(number)
        self._offsets.append(offset)
        self._files.append(len(self._labels) - 1)

    def of(self, number: int) -> str:
        run = bisect.bisect_right(self._starts, number) - 1
        return f"{self._labels[self._files[run]]} row {number + self._offsets[run]}"
