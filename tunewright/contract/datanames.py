"""Names of rows, `name`, `name:split`, `name[slice]` or `name:split[slice]`, taken apart.

A name is a path or a Hub name. A slice takes a part of the rows: `[:1000]`, `[10%:20%]`,
`[-100:]`; borders in per cent are rounded to the nearest row.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from tunewright.contract.settings import is_path

_BORDER = r"(?:-?\d+%?)?"
_PART = rf"\[(?P<part>{_BORDER}:{_BORDER})\]"
_SUFFIX = re.compile(rf"(?::(?P<split>\w[\w.-]*)|:(?=\[))?(?:{_PART})?\Z")


class DataName(NamedTuple):
    """A path or Hub name with the split and the part of its rows that are wanted.

    part: the text between the brackets, like `10%:20%`; None for all rows.
    """

    base: str
    split: str | None = None
    part: str | None = None

    @property
    def suffix(self) -> str:
        """What stood behind the base: `:split[part]`."""
        split = f":{self.split}" if self.split else ""
        return split if self.part is None else f"{split}[{self.part}]"


def parse(name: str) -> DataName:
    """A name taken apart; the base is all of it where nothing else is said."""
    found = _SUFFIX.search(name)
    if not found or not found.start():
        return DataName(name)
    return DataName(name[: found.start()], found["split"], found["part"])


def resolved(name: str, base: Path) -> str:
    """A path made absolute from `base`, without `..`, its suffix kept; a Hub name as it is.

    Symbolic links stay, they are the user's names.
    """
    found = parse(name)
    if not is_path(found.base):
        return name
    return os.path.normpath(base / os.path.expanduser(found.base)) + found.suffix


def bounds(part: str, total: int) -> tuple[int, int]:
    """First row and end (0-based, end excluded) of a slice of `total` rows, within them."""
    start, end = part.split(":")
    return _border(start, 0, total), _border(end, total, total)


def counts_from_the_start(part: str) -> bool:
    """Whether a slice means the same however many rows there are."""
    return "%" not in part and "-" not in part


def _border(text: str, default: int, total: int) -> int:
    if not text:
        return default
    number = int(text.rstrip("%"))
    rows = round(number * total / 100) if text.endswith("%") else number
    return min(max(rows + total if rows < 0 else rows, 0), total)
