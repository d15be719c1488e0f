"""Known secret values taken out of text before it is stored or shown anywhere."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterable, Mapping
from urllib.parse import quote, quote_plus

MASK = b"********"
SHORTEST = 4
"""A shorter value cannot be told from ordinary text and is left alone."""
SHORTEST_LINE = 8
"""The same for one line of a value."""
BASE64_LINE = 76


class Scrubber:
    """Replaces secret values, also URL-quoted, base64, or escaped as in JSON and in repr().

    Values that overlap in the text are masked together, so that none shows its rest. As a stream
    it holds back only bytes that may be the beginning of a value: output stays live, and a value
    split between two writes is still found.
    """

    def __init__(self, secrets: Mapping[str, str]) -> None:
        values = {part for value in secrets.values() for part in (value, value.strip())}
        long_enough = (value for value in values if len(value) >= SHORTEST)
        self._needles = {form for value in long_enough for form in _forms(value)}
        self._held = b""
        self._covered = 0
        """How many of the held bytes belong to a value whose mask is out already."""

    def text(self, text: str) -> str:
        """A whole text with every known value masked."""
        raw = text.encode("utf-8", "backslashreplace")
        shown, _ = _masked(raw, self._spans(raw, 0), len(raw))
        return shown.decode("utf-8", "replace")

    def feed(self, chunk: bytes) -> bytes:
        """The next bytes of a stream; returns what can be shown by now."""
        buffer = self._held + chunk
        keep = max((_overlap(buffer, needle) for needle in self._needles), default=0)
        return self._show(buffer, len(buffer) - keep)

    def finish(self) -> bytes:
        """The rest of a stream. A value of which more than half came is masked like all of it."""
        buffer = self._held
        parts = [(_overlap(buffer, needle), len(needle)) for needle in self._needles]
        torn = max((part for part, whole in parts if part > whole // 2), default=0)
        shown = self._show(buffer, len(buffer) - torn)
        rest = MASK if torn and not self._covered else b""
        self._held, self._covered = b"", 0
        return shown + rest

    def _show(self, buffer: bytes, cut: int) -> bytes:
        """The masked bytes before `cut`; the others are held."""
        shown, end = _masked(buffer, self._spans(buffer, self._covered), cut)
        self._held, self._covered = buffer[cut:], max(0, end - cut)
        return shown

    def _spans(self, text: bytes, covered: int) -> list[tuple[int, int]]:
        """Where known values are, in order; the first `covered` bytes are one that was masked."""
        found = [(-1, covered)] if covered else []
        for needle in self._needles:
            at = text.find(needle)
            while at >= 0:
                found.append((at, at + len(needle)))
                at = text.find(needle, at + 1)
        return sorted(found)


def _masked(text: bytes, spans: list[tuple[int, int]], cut: int) -> tuple[bytes, int]:
    """The text before `cut` with one mask for each stretch of spans; where the last one ends.

    A span that starts at -1 is the end of one whose mask was shown before.
    """
    shown, at = [], 0
    for start, end in spans:
        if start >= cut:
            break
        if start >= at:
            shown += [text[at:start], MASK]
        at = max(at, end)
    return b"".join([*shown, text[at:cut]]), at


def _forms(value: str) -> Iterable[bytes]:
    raw = value.encode("utf-8", "surrogateescape")
    yield raw
    # A value of several lines is often shown line by line.
    yield from (line for line in raw.splitlines() if len(line) >= SHORTEST_LINE)
    for safe in ("", "/", "!'()*"):
        yield from _either_case(quote(raw, safe=safe))
    yield from _either_case(quote_plus(raw))
    yield json.dumps(value)[1:-1].encode()
    yield json.dumps(value, ensure_ascii=False)[1:-1].encode("utf-8", "surrogateescape")
    for shown in (repr(value), ascii(value), repr(raw)[1:]):
        yield shown[1:-1].encode("utf-8", "surrogateescape")
        # Inside a longer text that holds both sorts of quotes.
        yield shown[1:-1].replace("'", "\\'").encode("utf-8", "surrogateescape")
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        yield encode(raw)
        yield from _inside_base64(raw, encode)


def _either_case(quoted: str) -> Iterable[bytes]:
    """%2F and %2f are the same."""
    yield quoted.encode()
    yield re.sub("%[0-9A-F]{2}", lambda code: code[0].lower(), quoted).encode()


def _inside_base64(raw: bytes, encode: Callable[[bytes], bytes]) -> Iterable[bytes]:
    """The characters that are the same wherever the value stands in a longer encoded text."""
    for before in range(3):
        encoded = encode(b"\0" * before + raw)
        core = encoded[(0, 2, 3)[before] : (before + len(raw)) * 8 // 6]
        if len(core) >= SHORTEST:
            yield core
        # The command base64 breaks its lines after 76 characters.
        lines = (core[at : at + BASE64_LINE] for at in range(0, len(core), BASE64_LINE))
        yield from (line for line in lines if len(line) >= SHORTEST_LINE)


def _overlap(buffer: bytes, needle: bytes) -> int:
    """Length of the longest end of the buffer that is a beginning of the needle, not all of it."""
    at = buffer.find(needle[:1], max(0, len(buffer) - len(needle) + 1))
    while at >= 0:
        if needle.startswith(buffer[at:]):
            return len(buffer) - at
        at = buffer.find(needle[:1], at + 1)
    return 0
