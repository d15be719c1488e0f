"""Rows of a JSON file, decoded one after the other, so that a file may be larger than memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TextIO

from tunewright.contract.failures import DataError

_WINDOW = 1 << 20
_BLANK = " \t\r\n"
_LONGEST_LITERAL = 16
"""An error this close to the end of the window may be a literal or an escape that was cut."""


def json_rows(file: TextIO, name: str) -> Iterator[Any]:
    """The rows of a list, of objects one after the other, or of one object's list `data`.

    Raises DataError, naming file, row and line, where the text is not JSON.
    """
    window = _Window(file, name)
    first = window.peek()
    if first == "[":
        yield from window.elements()
    elif first == "{":
        yield from _objects(window)
    elif first:
        raise DataError(f"{name} must be a list of objects, one a row")


def _objects(window: _Window) -> Iterator[Any]:
    first = window.value()
    if not window.peek() and isinstance(first.get("data"), list):
        yield from first["data"]
        return
    yield first
    while window.peek():
        yield window.value()


class _Window:
    """The part of the text that is being decoded; `rows` counts what was."""

    def __init__(self, file: TextIO, name: str) -> None:
        self._file, self._name = file, name
        self._text, self._at = "", 0
        self._lines, self.rows = 1, 0
        self._ended = False

    def peek(self) -> str:
        """The next character that is no blank, before which the window stands; "" at the end."""
        while True:
            while self._at < len(self._text):
                if (found := self._text[self._at]) not in _BLANK:
                    return found
                self._at += 1
            if self._ended:
                return ""
            self._more()

    def elements(self) -> Iterator[Any]:
        """The elements of the list that opens here, which must be all there is."""
        self._at += 1
        if self.peek() != "]":
            yield self.value()
            while self.peek() == ",":
                self._at += 1
                self.peek()
                yield self.value()
        if self.peek() != "]":
            raise self._wrong("Expecting ',' delimiter", self._at)
        self._at += 1
        if self.peek():
            raise self._wrong("Extra data", self._at)

    def value(self) -> Any:
        """The value that begins here; the window is widened until it holds it whole."""
        while True:
            try:
                found, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._ended or not self._cut(error):
                    raise self._wrong(error.msg, error.pos) from error
            except RecursionError as error:
                raise self._wrong("nested too deep", self._at) from error
            else:
                if self._ended or self._whole(found, end):
                    self._at, self.rows = end, self.rows + 1
                    return found
            self._more()

    def _whole(self, found: Any, end: int) -> bool:
        """Whether a value is more than the beginning of a number that the window cuts."""
        number = isinstance(found, int | float)
        return self._text[end : end + 1] in (*_BLANK, *",]") if number else end < len(self._text)

    def _cut(self, error: json.JSONDecodeError) -> bool:
        """Whether the window's end could be the reason."""
        near = error.pos > len(self._text) - _LONGEST_LITERAL
        return near or error.msg.startswith("Unterminated string")

    def _more(self) -> None:
        self._lines += self._text.count("\n", 0, self._at)
        kept = self._text[self._at :]
        # Reading as much again as is kept makes long rows cost no more than their length.
        chunk = self._file.read(max(_WINDOW, len(kept)))
        self._text, self._at, self._ended = kept + chunk, 0, not chunk

    def _wrong(self, reason: str, position: int) -> DataError:
        line = self._lines + self._text.count("\n", 0, position)
        return DataError(
            f"{self._name} is not JSON: {reason} at line {line}, row {self.rows + 1}; mend it"
        )


_DECODER = json.JSONDecoder()
