"""The work on rows: rendered, tokenized, fitted, looked at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tunewright.contract.datasettings import DataSettings
from tunewright.data.documents import Batch, Document, Fitted, encode, fitted
from tunewright.data.examples import BadRow, Example
from tunewright.data.fingerprint import digest_of
from tunewright.data.leakage import runs_of
from tunewright.data.render import Rendered, renderers, template_of
from tunewright.data.store import token_dtype
from tunewright.data.tokenizer import TextTokenizer

Chunk = list[tuple[int, Example | BadRow]]
CHUNK_ROWS = 512
_NOTHING = np.zeros(0, dtype=np.int64)
_ENDING = 3
"""An end token counts among the last so many tokens of an answer: a line break may follow it."""


@dataclass
class Outcome:
    """What became of a chunk. Rows are named by their index in it.

    digests: 16 bytes a row. kept: rows with documents, and for each its tokens before any cut
    (whole), what fitted() did to it (how), the most BOS up to the end of an answer (bos), and
    whether an end token is supervised (ended). documents: Batch whose `rows` are indices.
    runs, owners: see leakage.runs_of.
    """

    digests: bytes
    documents: Batch = field(default_factory=lambda: Batch.of([], np.uint16))
    bad: list[tuple[int, BadRow]] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)
    bos: list[int] = field(default_factory=list)
    ended: list[bool] = field(default_factory=list)
    how: list[str] = field(default_factory=list)
    runs: npt.NDArray[np.uint64] | None = None
    owners: npt.NDArray[np.int64] | None = None


class Job(NamedTuple):
    """What a worker needs to know; travels to other processes."""

    settings: DataSettings
    tokenizer: TextTokenizer
    templates: tuple[str, ...]
    wants_runs: bool


class Worker:
    """Turns chunks of rows into outcomes."""

    def __init__(self, job: Job) -> None:
        self._settings = job.settings
        self._tokenizer = job.tokenizer
        self._wants_runs = job.wants_runs
        self._renders = renderers(
            job.tokenizer, job.templates, job.settings.chat_template, job.settings.train_on
        )
        self._bos = job.tokenizer.id_of("bos_token")
        self._eos = job.tokenizer.id_of("eos_token")
        self._ends = end_ids(job.tokenizer)
        self._dtype = token_dtype(job.tokenizer.vocabulary)

    def __call__(self, chunk: Chunk) -> Outcome:
        outcome = Outcome(b"".join(digest_of(content) for _, content in chunk))
        rendered = list(self._rendered(chunk, outcome))
        found: list[Document] = []
        for document in encode(self._tokenizer, rendered):
            found += self._kept(document, outcome)
        outcome.documents = Batch.of(found, self._dtype)
        if self._wants_runs:
            examples = [content for _, content in chunk if not isinstance(content, BadRow)]
            indices = [i for i, (_, content) in enumerate(chunk) if not isinstance(content, BadRow)]
            outcome.runs, owners = runs_of(examples)
            outcome.owners = np.array(indices, dtype=np.int64)[owners]
        return outcome

    def _rendered(self, chunk: Chunk, outcome: Outcome) -> Iterator[tuple[int, Rendered]]:
        for index, (_, content) in enumerate(chunk):
            try:
                if isinstance(content, BadRow):
                    raise content
                settings = self._settings
                template = template_of(content, settings.template, settings.chat_template)
                rendered = self._renders[template](content)
            except BadRow as error:
                outcome.bad.append((index, error))
            else:
                yield index, rendered

    def _kept(self, document: Document, outcome: Outcome) -> list[Document]:
        settings = self._settings
        try:
            found = fitted(document, settings.max_length, settings.on_too_long, self._bos)
        except BadRow as error:
            outcome.bad.append((document.row, error))
            return []
        self._note(document, found, outcome)
        return found.documents

    def _note(self, document: Document, found: Fitted, outcome: Outcome) -> None:
        outcome.kept.append(document.row)
        outcome.whole.append(len(document.ids))
        outcome.how.append(found.how)
        outcome.bos.append(self._bos_of(document))
        outcome.ended.append(any(self._ended(piece) for piece in found.documents))

    def _ended(self, document: Document) -> bool:
        """Whether an answer of this document ends with an end token."""
        tails = (document.ids[max(start, end - _ENDING) : end] for start, end in document.spans)
        return any(not self._ends.isdisjoint(tail.tolist()) for tail in tails)

    def _bos_of(self, document: Document) -> int:
        """The most BOS up to the end of an answer: some templates begin each question with one."""
        at = np.flatnonzero(document.ids == self._bos) if self._bos is not None else _NOTHING
        if len(at) < 2:
            return len(at)
        if self._bos == self._eos:
            return int((np.cumsum(document.ids != self._bos) == 0).sum())
        ends = np.flatnonzero(document.ids == self._eos) + 1 if self._eos is not None else _NOTHING
        borders = np.sort(np.concatenate([ends, [end for _, end in document.spans]]))
        return int(np.bincount(np.searchsorted(borders, at, side="right")).max())


def end_ids(tokenizer: TextTokenizer) -> frozenset[int]:
    """The tokens that can close an answer: the tokenizer's end token and its other special ones."""
    added = tokenizer.backend.get_added_tokens_decoder()
    eos = tokenizer.id_of("eos_token")
    return frozenset(i for i, token in added.items() if token.special or i == eos)
