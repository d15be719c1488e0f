"""The second reading: rows to tokens, packed, audited, and written as a sealed store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from tunewright.contract.datasettings import DataSettings
from tunewright.contract.failures import DataError
from tunewright.data import audit as audits
from tunewright.data import leakage
from tunewright.data.audit import Tally
from tunewright.data.badrows import BadRows
from tunewright.data.documents import Batch
from tunewright.data.holdout import is_held_out
from tunewright.data.leakage import RunIndex
from tunewright.data.progress import Progress
from tunewright.data.spill import Spill
from tunewright.data.store import SplitArrays, TokenStore, token_dtype, write_store
from tunewright.data.survey import Survey, chunks_of
from tunewright.data.tokenizer import TextTokenizer
from tunewright.data.work import Chunk, Job, Outcome
from tunewright.data.workers import outcomes

_TOKENIZED = 0.95
"""Where on the progress bar tokenizing ends and writing begins."""

_SAMPLES = 3
_SHOWN_CHARACTERS = 400

Audited = Callable[[Mapping[str, Any], Sequence[str]], None]
"""Is given the audit and what of it stops the run, before it stops."""


class Seen(NamedTuple):
    """What the first reading found. held: of eval_dataset. evaluation: what its rows say."""

    train: Survey
    held: Survey | None
    evaluation: RunIndex | None

    @property
    def sources(self) -> list[Survey]:
        return [self.train, *([self.held] if self.held else [])]

    @property
    def rows(self) -> int:
        return sum(source.rows for source in self.sources)

    @property
    def templates(self) -> tuple[str, ...]:
        """Those that any row needs; one that no row needs changes nothing."""
        return tuple(sorted({name for source in self.sources for name in source.templates}))


class Maker:
    """Makes the store of one fingerprint."""

    def __init__(
        self, settings: DataSettings, tokenizer: TextTokenizer, seen: Seen, progress: Progress
    ) -> None:
        self._settings, self._tokenizer, self._seen = settings, tokenizer, seen
        self._progress = progress
        dtype = token_dtype(tokenizer.vocabulary)
        self._spills = {"train": Spill(dtype), "eval": Spill(dtype)}
        self._tally = Tally()

    def make(self, path: Path, facts: Mapping[str, Any], audited: Audited) -> TokenStore:
        """Tokenize, audit and write, once. Raises DataError when the audit stops the run."""
        with ExitStack() as stack:
            for spill in self._spills.values():
                stack.callback(spill.close)
            return self._make(path, facts, audited)

    def _make(self, path: Path, facts: Mapping[str, Any], audited: Audited) -> TokenStore:
        self._progress.stage("tokenizing", self._seen.rows, _TOKENIZED)
        if self._seen.evaluation is not None:
            self._seen.evaluation.seal()
        done = 0
        for source in reversed(self._seen.sources):
            done = self._tokenize(source, done)
        refuse(self._settings, self._tally.bad, self._seen.rows)
        self._progress.stage("packing", None, 1.0)
        sides = {
            name: spill.packed(self._settings.pack_tokens)
            for name, spill in self._spills.items()
            if len(spill)
        }
        audit = self._audit(sides)
        judge(self._settings, audit, audited)
        self._require(sides)
        counted = {"dropped": audit["dropped"], "truncated": audit["truncated"], "audit": audit}
        all_facts = {**facts, **counted, **self._row_counts(sides)}
        return write_store(path.parent, path.name, sides, all_facts)

    def _tokenize(self, source: Survey, done: int) -> int:
        """The rows of one source; returns how many of all are done then."""
        is_eval = source is self._seen.held
        index = None if is_eval else self._seen.evaluation
        wants_runs = index is not None
        job = Job(self._settings, self._tokenizer, self._seen.templates, wants_runs)
        digest = xxhash.xxh3_128()
        for chunk, outcome in outcomes(job, chunks_of(source.source), source.rows):
            digest.update(outcome.digests)
            self._tally.add(chunk, outcome, source.source.place)
            self._keep(chunk, outcome, is_eval, index)
            done += len(chunk)
            self._progress.at(done)
        if digest.hexdigest() != source.digest:
            raise DataError(f"{source.source.name} changed while it was read; start again")
        return done

    def _keep(
        self,
        chunk: Chunk,
        outcome: Outcome,
        is_eval: bool,
        index: RunIndex | None,
    ) -> None:
        """Documents to their side, and the words of training rows past those held out."""
        numbers = np.array([number for number, _ in chunk], dtype=np.int64)
        held = np.array([is_eval or out for out in self._held(outcome.digests)], dtype=bool)
        batch, of = outcome.documents, outcome.documents.rows
        for name, wanted in (("train", ~held), ("eval", held)):
            side = batch.chosen(wanted[of])
            if len(side.lengths):
                self._spills[name].add(side.numbered(numbers))
        if index is not None and outcome.runs is not None and outcome.owners is not None:
            train = ~held[outcome.owners]
            index.look_up(outcome.runs[train], numbers[outcome.owners[train]])

    def _held(self, digests: bytes) -> Iterator[bool]:
        fraction = self._settings.eval_fraction
        for at in range(0, len(digests), 16):
            yield fraction > 0 and is_held_out(digests[at : at + 16], fraction)

    def _audit(self, sides: Mapping[str, SplitArrays]) -> dict[str, Any]:
        seen = self._seen
        duplicates = sum(source.duplicates for source in seen.sources)
        audit = audits.audit_of(
            self._tally, sides, seen.rows, duplicates, self._settings.pack_tokens
        )
        if seen.evaluation is not None:
            # With eval_fraction the same content is always on the same side.
            keys = seen.train.keys if seen.held else np.zeros(0, dtype=np.uint64)
            leaks = seen.evaluation.leaks(keys, seen.train.source.place)
            audit["leakage"] = leakage.summary(leaks, len(seen.evaluation), seen.evaluation.sampled)
        audit["samples"] = self._samples()
        return audit

    def _samples(self) -> list[dict[str, str]]:
        """The first, the middle and the last training document, decoded."""
        spill = self._spills["train"]
        last = len(spill) - 1
        chosen = sorted({0, last // 2, last}) if last >= 0 else []
        place = self._seen.train.source.place
        return [
            {
                "row": place(int(spill.documents.rows[document])),
                "text": marked(self._tokenizer, spill.document(document)),
            }
            for document in chosen[:_SAMPLES]
        ]

    def _require(self, sides: Mapping[str, SplitArrays]) -> None:
        settings = self._settings
        names = {"train": self._seen.train.source.name}
        names |= {"eval": self._seen.held.source.name} if self._seen.held else {}
        for side, name in names.items():
            if side not in sides:
                dropped = self._tally.bad.dropped().items()
                reasons = ", ".join(f"{count} {reason}" for reason, count in dropped)
                why = reasons or f"all are held out by eval_fraction={settings.eval_fraction:g}"
                raise DataError(f"no row of {name} can be trained on: {why}")
        if settings.eval_fraction and "eval" not in sides:
            raise DataError(
                f"eval_fraction={settings.eval_fraction:g} holds out none of the "
                f"{self._seen.rows} rows of {names['train']}; a row's content decides, so raise "
                "it, add rows, or set it to 0"
            )

    def _row_counts(self, sides: Mapping[str, SplitArrays]) -> dict[str, Any]:
        """Rows read, and those of each side; those held out are not trained on."""
        seen = self._seen
        apart = len(seen.evaluation) if seen.evaluation is not None and not seen.held else 0
        counts = {"train": {"rows": seen.train.rows - apart}}
        if "eval" in sides:
            counts["eval"] = {"rows": seen.held.rows if seen.held else apart}
        return {"rows": seen.train.rows, "counts": counts}


def refuse(settings: DataSettings, bad: BadRows, total: int) -> None:
    """Stop over rows that the settings do not allow to be left out; raises DataError."""
    if (long := bad.total(too_long=True)) and settings.on_too_long == "fail":
        raise DataError(
            f"{long} of {total} rows have more than max_length={settings.max_length} tokens: "
            f"{bad.listed(too_long=True)}; raise max_length, or set on_too_long: truncate, drop "
            "or split"
        )
    if (others := bad.total(too_long=False)) and settings.on_bad_row == "fail":
        raise DataError(
            f"{others} of {total} rows cannot be trained on: {bad.listed(too_long=False)}; "
            "mend them, or leave them out with on_bad_row: drop"
        )


def judge(settings: DataSettings, audit: Mapping[str, Any], audited: Audited) -> None:
    """Show the audit, and stop where it is worse than the settings allow; raises DataError."""
    problems = audits.problems(audit, settings)
    audited(audit, problems)
    if problems:
        raise DataError("\n".join(problems))


def marked(tokenizer: TextTokenizer, batch: Batch) -> str:
    """The text of one document, what is supervised in «», long parts shortened."""
    edges = [0, *batch.spans.ravel().tolist(), len(batch.ids)]
    pieces = []
    for number, (first, last) in enumerate(pairwise(edges)):
        text = _shortened(tokenizer.decode(batch.ids[first:last].tolist()))
        pieces.append(f"«{text}»" if number % 2 else text)
    return "".join(pieces)


def _shortened(text: str) -> str:
    half = _SHOWN_CHARACTERS // 2
    return text if len(text) <= 2 * half else f"{text[:half]} … {text[-half:]}"
