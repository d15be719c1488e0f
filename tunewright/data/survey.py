"""The first reading of the rows: what they say, hashed, before anything is rendered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import numpy.typing as npt
import xxhash

from tunewright.data.badrows import BadRows
from tunewright.data.examples import BadRow, Example
from tunewright.data.fingerprint import digest_of
from tunewright.data.leakage import Row
from tunewright.data.rows import Rows
from tunewright.data.work import CHUNK_ROWS, Chunk


@dataclass
class Survey:
    """What one source of rows holds. Memory: 8 bytes a row.

    rows: those taken, copies by weight included. copies: of them, the second and later ones.
    digest: over all rows in their order. keys: uint64 [rows], the beginning of each content hash.
    templates: those that the rows need. bad: rows without an example.
    """

    source: Rows
    rows: int = 0
    copies: int = 0
    templates: set[str] = field(default_factory=set)
    bad: BadRows = field(default_factory=BadRows)
    _digest: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)
    _keys: bytearray = field(default_factory=bytearray)

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    @property
    def keys(self) -> npt.NDArray[np.uint64]:
        return np.frombuffer(self._keys, dtype=">u8").astype(np.uint64)

    @property
    def duplicates(self) -> int:
        """Rows whose content was there before; copies by weight are wanted and do not count."""
        return self.rows - self.copies - len(np.unique(self.keys))


def survey(
    rows: Rows,
    template_of: Callable[[Example], str],
    look: Callable[[list[Row]], None],
    shown: Callable[[int], None],
) -> Survey:
    """Read all rows once. `look` gets the examples with their hashes, `shown` the rows so far.

    Raises what reading raises: UserError and DataError.
    """
    found = Survey(rows)
    before = 0
    for chunk in chunks_of(rows):
        seen: list[Row] = []
        for number, content in chunk:
            digest = digest_of(content)
            found._digest.update(digest)
            found._keys += digest[:8]
            found.copies += number == before
            before = number
            if isinstance(content, BadRow):
                found.bad.add(rows.place(number), content)
            else:
                found.templates.add(template_of(content))
                seen.append((number, content, digest))
        found.rows += len(chunk)
        look(seen)
        shown(found.rows)
    return found


def chunks_of(rows: Rows) -> Iterator[Chunk]:
    """The rows, some hundred at a time."""
    contents = rows.examples()
    while chunk := list(islice(contents, CHUNK_ROWS)):
        yield chunk
