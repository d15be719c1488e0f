"""What the data is like, before any GPU is asked for: the figures, and what stops a run.

The figures are plain JSON and stand in the store's manifest, so that a store that is found again
shows the same page, and is judged by the thresholds of today.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tunewright.contract.datasettings import DataSettings
from tunewright.data.badrows import LISTED, BadRows, some
from tunewright.data.store import SplitArrays
from tunewright.data.work import Chunk, Outcome

_PERCENTILES = (1, 5, 25, 50, 75, 90, 95, 99, 100)
_BARS = 12
BOS = ("0", "1", "2 or more")


@dataclass
class Tally:
    """What became of the rows, gathered while they are tokenized. Memory: 8 bytes a row."""

    bad: BadRows = field(default_factory=BadRows)
    how: dict[str, int] = field(default_factory=dict)
    prompt_cut: list[str] = field(default_factory=list)
    bos: list[int] = field(default_factory=lambda: [0, 0, 0])
    two_bos: list[str] = field(default_factory=list)
    kept: int = 0
    ended: int = 0
    not_ended: list[str] = field(default_factory=list)
    _whole: list[Any] = field(default_factory=list)

    def add(self, chunk: Chunk, outcome: Outcome, place: Callable[[int], str]) -> None:
        """Take in the outcome of a chunk; `place` says where the row of a number is."""
        for index, error in outcome.bad:
            self.bad.add(place(chunk[index][0]), error)
        for how in outcome.how:
            self.how[how] = self.how.get(how, 0) + 1
        self._list(self.prompt_cut, chunk, outcome, [h == "prompt cut" for h in outcome.how], place)
        self._list(self.two_bos, chunk, outcome, [n > 1 for n in outcome.bos], place)
        self._list(self.not_ended, chunk, outcome, [not ended for ended in outcome.ended], place)
        for count in outcome.bos:
            self.bos[min(count, 2)] += 1
        self.kept += len(outcome.kept)
        self.ended += sum(outcome.ended)
        self._whole.append(np.array(outcome.whole, dtype=np.int64))

    @property
    def whole(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The tokens of each row that is kept, before any cut: int64 [rows]."""
        return np.concatenate([np.zeros(0, np.int64), *self._whole])

    def _list(
        self,
        listed: list[str],
        chunk: Chunk,
        outcome: Outcome,
        chosen: Sequence[bool],
        place: Callable[[int], str],
    ) -> None:
        for index, is_chosen in zip(outcome.kept, chosen, strict=True):
            if len(listed) >= LISTED:
                return
            if is_chosen:
                listed.append(place(chunk[index][0]))


def audit_of(
    tally: Tally,
    sides: Mapping[str, SplitArrays],
    rows: int,
    duplicates: int,
    pack_tokens: int,
) -> dict[str, Any]:
    """The figures. `rows` were read, of all sources; `sides` are the packed splits."""
    unsupervised = "no supervised token"
    return {
        "rows": rows,
        "dropped": tally.bad.dropped(),
        "dropped_rows": dict(tally.bad.places),
        "duplicates": duplicates,
        "truncated": tally.how.get("cut", 0) + tally.how.get("prompt cut", 0),
        "prompt_cut": {"count": tally.how.get("prompt cut", 0), "rows": tally.prompt_cut},
        "split": tally.how.get("split", 0),
        "sides": {name: _side(arrays, pack_tokens) for name, arrays in sides.items()},
        "lengths": _lengths(tally.whole),
        "no_supervised_token": {
            "count": tally.bad.counts[unsupervised],
            "rows": tally.bad.places.get(unsupervised, []),
        },
        "end_token": {"of": tally.kept, "count": tally.ended, "rows_without": tally.not_ended},
        "bos": {**dict(zip(BOS, tally.bos, strict=True)), "rows": tally.two_bos},
    }


def _side(arrays: SplitArrays, pack_tokens: int) -> dict[str, Any]:
    counts = arrays.counts()
    filled = counts["tokens"] / (counts["packs"] * pack_tokens) if counts["packs"] else 0.0
    return {**counts, "filled": round(filled, 5)}


def _lengths(whole: np.ndarray[Any, np.dtype[np.int64]]) -> dict[str, Any]:
    """Percentiles and a histogram with borders that grow by the same factor."""
    if not len(whole):
        return {"percentiles": {}, "histogram": []}
    found = np.percentile(whole, _PERCENTILES, method="higher")
    borders = np.unique(np.geomspace(max(1, whole.min()), whole.max() + 1, _BARS + 1).astype(int))
    counts, _ = np.histogram(whole, bins=np.append(borders[:-1], whole.max() + 1))
    return {
        "percentiles": {str(p): int(v) for p, v in zip(_PERCENTILES, found, strict=True)},
        "histogram": [
            [int(a), int(b) - 1, int(n)]
            for a, b, n in zip(borders, borders[1:], counts, strict=False)
        ],
    }


def problems(audit: Mapping[str, Any], settings: DataSettings) -> list[str]:
    """What must stop the run, one sentence each, with row ids and a way out."""
    checks = (_too_many_dropped, _nothing_supervised, _prompts_cut, _no_end, _two_bos, _leaks)
    return [found for check in checks if (found := check(audit, settings))]


def _too_many_dropped(audit: Mapping[str, Any], settings: DataSettings) -> str | None:
    dropped, rows = sum(audit["dropped"].values()), audit["rows"]
    if dropped <= settings.max_dropped * rows:
        return None
    reasons = "; ".join(
        f"{count:,} {reason} ({some(audit['dropped_rows'][reason], count)})"
        for reason, count in audit["dropped"].items()
    )
    return (
        f"{dropped:,} of {rows:,} rows would be dropped, more than max_dropped="
        f"{settings.max_dropped:g} allows: {reasons}; mend them, or raise max_dropped"
    )


def _nothing_supervised(audit: Mapping[str, Any], settings: DataSettings) -> str | None:
    if any(side["supervised_tokens"] for side in audit["sides"].values()):
        return None
    return "no token of any row is supervised; look at the answers, loss weights and the template"


def _prompts_cut(audit: Mapping[str, Any], settings: DataSettings) -> str | None:
    count, rows = audit["prompt_cut"]["count"], audit["rows"]
    if count <= settings.max_dropped * rows:
        return None
    return (
        f"in {count:,} of {rows:,} rows truncation to max_length={settings.max_length} would leave "
        f"next to nothing of the answer, so their prompts lose their beginning: "
        f"{some(audit['prompt_cut']['rows'], count)}; raise max_length, set on_too_long: drop or "
        f"split, or allow it with max_dropped (now {settings.max_dropped:g})"
    )


def _no_end(audit: Mapping[str, Any], settings: DataSettings) -> str | None:
    end = audit["end_token"]
    if end["count"] or not end["of"]:
        return None
    return (
        f"no answer of {end['of']:,} rows ends with a supervised end token, so the model would "
        f"never learn to stop: {some(end['rows_without'], end['of'])}; the template must close an "
        "answer with the end token, and max_length must leave room for it"
    )


def _two_bos(audit: Mapping[str, Any], settings: DataSettings) -> str | None:
    count = audit["bos"][BOS[2]]
    if not count:
        return None
    return (
        f"{count:,} rows have their BOS twice: {some(audit['bos']['rows'], count)}; remove it from "
        "the rows or from the chat template"
    )


def _leaks(audit: Mapping[str, Any], settings: DataSettings) -> str | None:
    leakage = audit.get("leakage")
    if not leakage:
        return None
    limit = _passed_limit(leakage, settings)
    if limit is None:
        return None
    pairs = [
        f"{leak['eval_row']} = {leak['train_row']} ({leak['kind']})" for leak in leakage["rows"]
    ]
    return (
        f"{leakage['leaked']:,} of {leakage['eval_rows']:,} evaluation rows are training rows too, "
        f"more than {limit}={getattr(settings, limit):g} allows: "
        f"{some(pairs, leakage['leaked'], '; ')}; remove them from one side, or raise {limit}"
    )


def _passed_limit(leakage: Mapping[str, Any], settings: DataSettings) -> str | None:
    """The setting whose limit the leaked rows pass: whole rows, or rows that share some words."""
    if leakage["whole_share"] > settings.max_leakage:
        return "max_leakage"
    return "max_overlap" if leakage["share"] > settings.max_overlap else None
