"""Rendered rows as tokens: ids, supervised spans, and what becomes of rows that are too long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding

from tunewright.data.examples import BadRow
from tunewright.data.render import Rendered
from tunewright.data.store import token_dtype
from tunewright.data.tokenizer import TextTokenizer

Ids = npt.NDArray[np.unsignedinteger[Any]]
OnTooLong = Literal["truncate", "drop", "split", "fail"]


class Document(NamedTuple):
    """One row's tokens. ids: unsigned [n]; spans: supervised (start, end), ascending from 1."""

    row: int
    ids: Ids
    spans: tuple[tuple[int, int], ...]


class Fitted(NamedTuple):
    """What became of a row: one document, or several where it was split.

    "prompt cut": the beginning of its prompt went, because a cut at the right alone would have left
    no answer worth the name.
    """

    documents: list[Document]
    how: Literal["whole", "cut", "prompt cut", "split"] = "whole"


def encode(tokenizer: TextTokenizer, rendered: Sequence[tuple[int, Rendered]]) -> list[Document]:
    """Rendered rows, each with its number, as documents."""
    dtype = token_dtype(tokenizer.vocabulary)
    bos = [token for token in [tokenizer.id_of("bos_token")] if token is not None]
    documents = []
    encodings = tokenizer.encode([text for _, (text, _, _) in rendered])
    for (row, (text, spans, wants_bos)), encoding in zip(rendered, encodings, strict=True):
        ids = encoding.ids
        found = [_token_span(encoding, len(text), *span) for span in spans]
        # A text that brings its own BOS must not get a second one.
        shift = len(bos) if wants_bos and ids[:1] != bos else 0
        ids = bos + ids if shift else ids
        clipped = _clip([(start + shift, end + shift) for start, end in found], len(ids))
        documents.append(Document(row, np.array(ids, dtype=dtype), clipped))
    return documents


def fitted(document: Document, max_length: int, on_too_long: OnTooLong, bos: int | None) -> Fitted:
    """The document, in at most max_length tokens where it has more.

    truncate: cut at the right, as users know it from other trainers. Where that would leave less of
    the first answer than all of it or half of max_length, the prompt is cut at its left instead
    (behind its BOS), so that a whole answer is never cut away.
    split: into consecutive documents, positions from 0 in each; those without a supervised token
    are left out.

    Raises BadRow("too long") when a long row is not wanted, and BadRow("no supervised token") for a
    row that has none.
    """
    length = len(document.ids)
    if not document.spans:
        raise BadRow("no supervised token")
    if length <= max_length:
        return Fitted([document])
    if on_too_long == "split":
        pieces = [_slice(document, s, s + max_length) for s in range(0, length, max_length)]
        return Fitted([piece for piece in pieces if piece.spans], "split")
    if on_too_long != "truncate":
        raise BadRow("too long", f"{length} tokens")
    start, end = document.spans[0]
    wanted = start + min(end - start, max_length // 2)
    if wanted <= max_length:
        return Fitted([_slice(document, 0, max_length)], "cut")
    return Fitted([_tail(document, wanted, max_length, bos)], "prompt cut")


def _tail(document: Document, end: int, max_length: int, bos: int | None) -> Document:
    """The max_length tokens before `end`; the first is still the BOS where there is one."""
    kept = _slice(document, end - max_length, end)
    if bos is None or document.ids[0] != bos:
        return kept
    ids = kept.ids.copy()
    ids[0] = bos
    return Document(document.row, ids, kept.spans)


def _slice(document: Document, first: int, last: int) -> Document:
    ids = document.ids[first:last]
    spans = [(start - first, end - first) for start, end in document.spans]
    return Document(document.row, ids, _clip(spans, len(ids)))


@dataclass
class Batch:
    """The documents of some rows, side by side.

    ids: unsigned [tokens]. For each document: lengths, rows (the number of its row) and
    span_counts, int64. spans: uint32 [spans, 2], (start, end) within their document.
    """

    ids: Ids
    lengths: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    span_counts: npt.NDArray[np.int64]
    spans: npt.NDArray[np.uint32]

    @classmethod
    def of(cls, documents: Sequence[Document], dtype: npt.DTypeLike) -> Batch:
        spans = [span for document in documents for span in document.spans]
        return cls(
            ids=np.concatenate([np.zeros(0, dtype), *(document.ids for document in documents)]),
            lengths=_counts(len(document.ids) for document in documents),
            rows=_counts(document.row for document in documents),
            span_counts=_counts(len(document.spans) for document in documents),
            spans=np.array(spans, dtype=np.uint32).reshape(-1, 2),
        )

    def chosen(self, documents: npt.NDArray[np.bool_]) -> Batch:
        """The documents for which the mask (bool [documents]) is true."""
        if documents.all():
            return self
        return Batch(
            self.ids[np.repeat(documents, self.lengths)],
            self.lengths[documents],
            self.rows[documents],
            self.span_counts[documents],
            self.spans[np.repeat(documents, self.span_counts)],
        )

    def numbered(self, numbers: npt.NDArray[np.int64]) -> Batch:
        """The same, with rows named by numbers[row]."""
        rows = numbers[self.rows]
        return Batch(self.ids, self.lengths, rows, self.span_counts, self.spans)


def _counts(values: Any) -> npt.NDArray[np.int64]:
    return np.fromiter(values, dtype=np.int64)


def _token_span(encoding: Encoding, length: int, start: int, end: int) -> tuple[int, int]:
    """The tokens that begin within the characters start..end of a text of `length` characters."""
    return _first_from(encoding, length, start), _first_from(encoding, length, end)


def _first_from(encoding: Encoding, length: int, char: int) -> int:
    """The first token that begins at this character or later."""
    for position in range(char, length):
        token = encoding.char_to_token(position)
        if token is not None:
            break
    else:
        return len(encoding.ids)
    while (chars := encoding.token_to_chars(token)) is not None and chars[0] < char:
        token += 1
    return token


def _clip(spans: Sequence[tuple[int, int]], length: int) -> tuple[tuple[int, int], ...]:
    """Spans within 1..length; a document's first token is no label, nothing predicts it."""
    clipped = ((max(1, start), min(end, length)) for start, end in spans)
    return tuple((start, end) for start, end in clipped if start < end)
