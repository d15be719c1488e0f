"""Checks of single values in a row; each raises BadRow with a short, countable reason."""

from __future__ import annotations

import json
from typing import Any

from tunewright.data.examples import BadRow


def text_of(value: Any, name: str) -> str:
    """Text that can be encoded; missing is empty."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise BadRow(f"{name} is not text", type(value).__name__)
    if not value.isascii():
        _whole(value, name)
    return value


def json_of(value: Any, name: str) -> Any:
    """What JSON text says; anything else as it is. Texts inside can be encoded."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise BadRow(f"{name}: not JSON", short(f"{error}: {value}")) from None
    if isinstance(value, dict | list):
        _whole(json.dumps(value, ensure_ascii=False, default=str), name)
    return value


def short(text: str) -> str:
    """At most 80 characters of a text, for a message of one line."""
    text = " ".join(text.encode(errors="replace").decode().split())
    return text if len(text) <= 80 else text[:77] + "..."


def _whole(text: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # A byte that was no UTF-8 was read as one of these.
        if "\udc80" <= text[error.start] <= "\udcff":
            byte = ord(text[error.start]) - 0xDC00
            raise BadRow("not UTF-8 text", f"{name} has the byte 0x{byte:02x}") from None
        raise BadRow("broken Unicode", f"{name} has half a character") from None
