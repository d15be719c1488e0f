"""Known secret values taken out of text before it is stored or shown anywhere."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Mapping
from urllib.parse import quote, quote_plus

MASK = b"********"
SHORTEST = 4
"""A shorter value cannot be told from ordinary text and is left alone."""


class Scrubber:
    """Replaces secret values, also URL-quoted, base64, or escaped as in JSON and in repr().

    As a stream it holds back only bytes that may be the beginning of a value, so that output
    stays live and a value split between two writes is still found.
    """

    def __init__(self, secrets: Mapping[str, str]) -> None:
        values = [value for value in secrets.values() if len(value) >= SHORTEST]
        forms = {form for value in values for form in _forms(value)}
        # The longest first: a value inside another must not break the longer one.
        self._needles = sorted(forms, key=len, reverse=True)
        self._held = b""

    def text(self, text: str) -> str:
        """A whole text with every known value masked."""
        return self._mask(text.encode("utf-8", "surrogateescape")).decode("utf-8", "replace")

    def feed(self, chunk: bytes) -> bytes:
        """The next bytes of a stream; returns what can be shown by now."""
        buffer = self._mask(self._held + chunk)
        keep = max((_overlap(buffer, needle) for needle in self._needles), default=0)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def finish(self) -> bytes:
        """The rest of a stream. More than half of a value is masked like all of it."""
        held, self._held = self._held, b""
        longest = max((n for n in self._needles if n.startswith(held)), key=len, default=b"")
        return MASK if held and len(held) > len(longest) // 2 else held

    def _mask(self, text: bytes) -> bytes:
        for needle in self._needles:
            text = text.replace(needle, MASK)
        return text


def _forms(value: str) -> Iterable[bytes]:
    raw = value.encode("utf-8", "surrogateescape")
    yield raw
    # A value of several lines is often shown line by line.
    yield from (line for line in raw.splitlines() if len(line) >= 8)
    yield quote(value, safe="").encode()
    yield quote(value).encode()
    yield quote_plus(value).encode()
    yield json.dumps(value)[1:-1].encode()
    yield json.dumps(value, ensure_ascii=False)[1:-1].encode("utf-8", "surrogateescape")
    yield repr(value)[1:-1].encode("utf-8", "surrogateescape")
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        yield encode(raw)
        yield from _inside_base64(raw, encode)


def _inside_base64(raw: bytes, encode: Callable[[bytes], bytes]) -> Iterable[bytes]:
    """The characters that are the same wherever the value stands in a longer encoded text."""
    for before in range(3):
        encoded = encode(b"\0" * before + raw)
        core = encoded[(0, 2, 3)[before] : (before + len(raw)) * 8 // 6]
        if len(core) >= 8:
            yield core


def _overlap(buffer: bytes, needle: bytes) -> int:
    """Length of the longest end of the buffer that is a beginning of the needle."""
    for length in range(min(len(needle) - 1, len(buffer)), 0, -1):
        if buffer.endswith(needle[:length]):
            return length
    return 0
