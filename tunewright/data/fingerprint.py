"""The fingerprint of tokens: content alone, so that a moved or renamed file is still the same."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import xxhash

from tunewright.data.examples import BadRow, Example

DATA_VERSION = 1
"""Raised when the same rows and settings give other tokens than before."""

NAMES = {
    "rows": "rows",
    "eval_rows": "evaluation rows",
    "tokenizer": "tokenizer",
    "template": "template",
    "options": "options",
    "version": "Tunewright's data format",
}
"""The parts of a fingerprint, in the words of a cache message."""


def digest_of(example: Example | BadRow) -> bytes:
    """16 bytes for the content of a row; the same for the same content in another file format."""
    content = [type(example).__name__, example.reason if isinstance(example, BadRow) else example]
    return xxhash.xxh3_128_digest(json.dumps(content).encode())


def of_rows(digests: Iterable[bytes]) -> str:
    """The hash of rows in their order."""
    return xxhash.xxh3_128_hexdigest(b"".join(digests))


def of_value(value: Any) -> str:
    """The hash of anything JSON can hold."""
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())


def fingerprint_of(parts: Mapping[str, str | None]) -> str:
    """32 hex digits over all parts."""
    return of_value(dict(parts))


def why_missed(parts: Mapping[str, Any], newest: Mapping[str, Any] | None) -> str:
    """`miss: rows changed`: what differs from the newest sealed store, whose parts are given."""
    if newest is None:
        return "miss: no tokens yet"
    changed = [name for key, name in NAMES.items() if parts.get(key) != newest.get(key)]
    return f"miss: {', '.join(changed)} changed" if changed else "miss: the tokens were damaged"
