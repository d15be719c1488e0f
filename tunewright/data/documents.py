"""Rendered rows as tokens: ids, supervised spans, and what becomes of rows that are too long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding

from tunewright.data.examples import BadRow
from tunewright.data.packing import pack
from tunewright.data.render import Rendered
from tunewright.data.store import SplitArrays, token_dtype
from tunewright.data.tokenizer import TextTokenizer


class Document(NamedTuple):
    """One row's tokens. ids: unsigned [n]; spans: supervised (start, end), ascending from 1."""

    row: int
    ids: npt.NDArray[np.unsignedinteger[Any]]
    spans: tuple[tuple[int, int], ...]


def encode(
    tokenizer: TextTokenizer,
    rendered: Sequence[tuple[int, Rendered]],
    train_on: Literal["responses", "all"],
) -> list[Document]:
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
        if train_on == "all":
            found, shift = [(0, len(ids))], 0
        clipped = _clip([(start + shift, end + shift) for start, end in found], len(ids))
        documents.append(Document(row, np.array(ids, dtype=dtype), clipped))
    return documents


def fitted(
    document: Document, max_length: int, on_too_long: Literal["truncate", "drop", "fail"]
) -> Document:
    """The document cut at the right to max_length tokens where needed.

    Raises BadRow("too long") when that is not wanted, and BadRow("no supervised token") when
    nothing that is trained on is left.
    """
    length = len(document.ids)
    if length > max_length:
        if on_too_long != "truncate":
            raise BadRow("too long", f"{length} tokens")
        spans = _clip(document.spans, max_length)
        document = Document(document.row, document.ids[:max_length], spans)
    if not document.spans:
        cut = f"only the first {max_length} of its {length} tokens are kept"
        raise BadRow("no supervised token", cut if length > max_length else "")
    return document


def arrays_of(documents: Sequence[Document], pack_tokens: int) -> SplitArrays:
    """Documents as the store keeps them, packed; at least one document."""
    packs = pack([len(document.ids) for document in documents], pack_tokens)
    ordered = [documents[index] for members in packs for index in members]
    spans = [span for document in ordered for span in document.spans]
    return SplitArrays(
        tokens=np.concatenate([document.ids for document in ordered]),
        documents=_offsets(len(document.ids) for document in ordered),
        rows=np.array([document.row for document in ordered], dtype=np.int64),
        spans=np.array(spans, dtype=np.uint32).reshape(-1, 2),
        span_offsets=_offsets(len(document.spans) for document in ordered),
        packs=_offsets(len(members) for members in packs),
    )


def _offsets(sizes: Any) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(np.fromiter(sizes, dtype=np.int64))]).astype(np.int64)


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
