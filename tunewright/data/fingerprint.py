"""The fingerprint of tokens: content alone, so that a moved or renamed file is still the same."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import xxhash

from tunewright.data.examples import BadRow, Example

NAMES = {
    "rows": "rows",
    "eval_rows": "evaluation rows",
    "tokenizer": "tokenizer files",
    "template": "template",
    "options": "options",
    "code": "code version",
}
"""The parts of a fingerprint, in the words of a cache message."""

_SHOWN_CHARACTERS = 40


def digest_of(example: Example | BadRow) -> bytes:
    """16 bytes for the content of a row; the same for the same content in another file format."""
    content = [type(example).__name__, example.reason if isinstance(example, BadRow) else example]
    return xxhash.xxh3_128_digest(json.dumps(content).encode())


def of_value(value: Any) -> str:
    """The hash of anything JSON can hold."""
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())


@cache
def code_version() -> str:
    """The hash of the code that makes tokens: every module of this package, and tokenizers.

    Nobody has to remember to raise a number, so tokens of older code are never taken for ours.
    """
    digest = xxhash.xxh3_128(version("tokenizers").encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def fingerprint_of(parts: Mapping[str, Any]) -> str:
    """32 hex digits over all parts."""
    return of_value(dict(parts))


def why_hit() -> str:
    """What a hit means: everything that the tokens depend on is the same."""
    return f"hit: same {', '.join(NAMES.values())}"


def why_missed(parts: Mapping[str, Any], sealed: Sequence[Mapping[str, Any]]) -> str:
    """`miss: rows, max_length (96 → 95) changed`: what differs from the most similar sealed store.

    `sealed` are the parts of the stores that are there, the newest first.
    """
    if not sealed:
        return "miss: no tokens yet"
    changes = min((_changes(parts, other) for other in sealed), key=len)
    return f"miss: {', '.join(changes)} changed" if changes else "miss: the tokens were damaged"


def _changes(parts: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    found = [
        name
        for key, name in NAMES.items()
        if key != "options" and parts.get(key) != before.get(key)
    ]
    now, then = parts.get("options") or {}, before.get("options") or {}
    options = [name for name in {**then, **now} if now.get(name) != then.get(name)]
    return found + [f"{name} ({_short(then, name)} → {_short(now, name)})" for name in options]


def _short(options: Mapping[str, Any], name: str) -> str:
    text = str(options[name]) if name in options else "unset"
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"
