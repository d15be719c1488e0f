"""Rows that cannot be trained on: counted by reason, the first ones with their places."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tunewright.data.examples import BadRow

LISTED = 20
"""So many rows of a kind are named in the audit."""

_SHOWN = 5


class BadRows:
    """The tally of one source or of several. Memory does not grow with the rows."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.places: dict[str, list[str]] = {}
        self._first: dict[str, list[tuple[int, str]]] = {}

    def __len__(self) -> int:
        return self.counts.total()

    def add(self, place: str, error: BadRow) -> None:
        total = len(self)
        self.counts[error.reason] += 1
        places = self.places.setdefault(error.reason, [])
        if len(places) < LISTED:
            places.append(place)
            words = f"{place} ({error.detail})" if error.reason == TOO_LONG else f"{place}: {error}"
            self._first.setdefault(error.reason, []).append((total, words))

    def total(self, *, too_long: bool) -> int:
        """Rows that are too long, or all others."""
        long = self.counts[TOO_LONG]
        return long if too_long else len(self) - long

    def dropped(self) -> dict[str, int]:
        """Rows by reason, the most frequent first."""
        return dict(self.counts.most_common())

    def listed(self, *, too_long: bool) -> str:
        """The first rows that are too long, or the first of all others, for a message."""
        found = [
            entry
            for reason, entries in self._first.items()
            if (reason == TOO_LONG) == too_long
            for entry in entries
        ]
        return some([words for _, words in sorted(found)], self.total(too_long=too_long), "; ")


TOO_LONG = "too long"


def some(words: Sequence[str], total: int, separator: str = ", ") -> str:
    """The first five of `total`, and how many more there are."""
    more = [f"and {total - _SHOWN} more"] if total > _SHOWN else []
    return separator.join([*words[:_SHOWN], *more])
