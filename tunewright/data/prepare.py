"""From settings to a sealed token store: read, decide whether it is made already, make it.

The rows are read twice: first they are hashed, which with the tokenizer's files, the template, the
options and the code makes the fingerprint; only when no store of that name is there, they are
tokenized. Memory stays bounded: tokens wait on disk, of a row some bytes are kept.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tunewright.contract.datasettings import DatasetSource, DataSettings
from tunewright.contract.failures import DataError, UserError
from tunewright.contract.lock import Lock, holder
from tunewright.data import fingerprint
from tunewright.data.examples import Example
from tunewright.data.holdout import is_held_out
from tunewright.data.leakage import Row, RunIndex
from tunewright.data.making import Audited, Maker, Seen, judge, refuse
from tunewright.data.progress import Progress
from tunewright.data.render import chat_template_of, template_of, template_text
from tunewright.data.rows import evaluation_sources, read_rows, training_sources
from tunewright.data.store import TokenStore, discard, sealed_stores
from tunewright.data.survey import Survey, survey
from tunewright.data.tokenizer import TextTokenizer, load_tokenizer

_OPTIONS = (
    "template",
    "train_on",
    "on_bad_row",
    "on_too_long",
    "max_length",
    "pack_tokens",
    "eval_fraction",
)
_READ = 0.1
"""Where on the progress bar reading ends."""

_LOCKS = ".locks"
_LOOK_AGAIN_S = 0.3


class Prepared(NamedTuple):
    """An open store, why it was found or made, and the tokenizer that reads it."""

    store: TokenStore
    cache: str
    tokenizer: TextTokenizer


def prepare(
    settings: DataSettings,
    tokens_root: Path,
    audited: Audited = lambda audit, problems: None,
    progress: Progress | None = None,
) -> Prepared:
    """The token store of these settings below a folder, made only when it is not there.

    Raises UserError for what the user can fix in settings and paths, DataError for the rows; then
    nothing is sealed.
    """
    progress = progress or Progress()
    try:
        tokenizer = load_tokenizer(settings.model_name, settings.model_revision)
        seen = _read(settings, progress)
        parts = _parts(settings, tokenizer, seen)
        path = tokens_root / fingerprint.fingerprint_of(parts)
        store, cache = _existing(path), fingerprint.why_hit()
        if store is None:
            with _turn(path, progress):
                store, cache = _existing(path), f"{cache}, made just now by another run"
                if store is None:
                    cache = _why_missed(parts, path)
                    facts = _facts(settings, tokenizer, seen) | {"parts": parts}
                    maker = Maker(settings, tokenizer, seen, progress)
                    return Prepared(maker.make(path, facts, audited), cache, tokenizer)
        judge(settings, store.facts["audit"], audited)
        return Prepared(store, cache, tokenizer)
    finally:
        progress.close()


def _read(settings: DataSettings, progress: Progress) -> Seen:
    """Read all rows once, and remember the words of evaluation rows."""
    fraction = settings.eval_fraction
    wants_index = bool(fraction or settings.eval_dataset)
    index = RunIndex() if wants_index else None
    held = None
    if settings.eval_dataset:
        progress.stage("reading evaluation rows", None, _READ / 2)
        held = _survey(settings, evaluation_sources(settings), index, 1.0, progress)
    progress.stage("reading rows", None, _READ)
    train = _survey(settings, training_sources(settings), index, fraction, progress)
    for source in (train, *([held] if held else [])):
        refuse(settings, source.bad, source.rows)
    return Seen(train, held, index)


def _survey(
    settings: DataSettings,
    sources: Sequence[DatasetSource],
    index: RunIndex | None,
    fraction: float,
    progress: Progress,
) -> Survey:
    """One reading; the fraction of the rows that is held out goes into the index."""
    rows = read_rows(*sources)

    def template(example: Example) -> str:
        return template_of(example, settings.template, settings.chat_template)

    def look(found: list[Row]) -> None:
        if index is not None and fraction:
            index.add([row for row in found if is_held_out(row[2], fraction)], rows.place)

    return survey(rows, template, look, progress.at)


def _parts(settings: DataSettings, tokenizer: TextTokenizer, seen: Seen) -> dict[str, Any]:
    """What makes the fingerprint, one entry for each thing that a user could change.

    Hashes, but for the options, whose names and values a message about the cache can tell.
    """
    return {
        "rows": seen.train.digest,
        "eval_rows": seen.held.digest if seen.held else None,
        "tokenizer": tokenizer.digest,
        "template": fingerprint.of_value(
            [template_text(tokenizer, name, settings.chat_template) for name in seen.templates]
        ),
        "options": {name: getattr(settings, name) for name in _OPTIONS},
        "code": fingerprint.code_version(),
    }


def _existing(path: Path) -> TokenStore | None:
    try:
        return TokenStore.open(path, verify=True)
    except DataError:
        return None


def _why_missed(parts: dict[str, Any], path: Path) -> str:
    """Why there is no store; a damaged one is put out of the way."""
    sealed = [facts["parts"] for facts in sealed_stores(path.parent) if "parts" in facts]
    if path.exists():
        discard(path)
        return "miss: the tokens were damaged"
    return fingerprint.why_missed(parts, sealed)


@contextmanager
def _turn(path: Path, progress: Progress) -> Iterator[None]:
    """Make the tokens of a fingerprint alone; who comes second waits, and says for whom."""
    lock = Lock(path.parent / _LOCKS / f"{path.name}.json")
    said = False
    try:
        while not lock.take():
            if not said:
                progress.close()
                who = (holder(lock.path) or "another run").replace("the flow with pid", "process")
                print(f"{who} makes the same tokens; waiting for it", file=sys.stderr, flush=True)
                said = True
            time.sleep(_LOOK_AGAIN_S)
    except OSError as error:
        raise UserError(
            f"cannot write below {path.parent}: {error.strerror or error}; "
            "free some space there, or set output_dir to a folder that can be written"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _facts(settings: DataSettings, tokenizer: TextTokenizer, seen: Seen) -> dict[str, Any]:
    """What stands in the manifest beside counts and hashes."""
    specials = ("bos", "eos", "pad")
    templates = seen.templates
    commits = {name: c for source in seen.sources for name, c in source.source.commits.items()}
    return {
        "pack_tokens": settings.pack_tokens,
        "max_length": settings.max_length,
        "vocabulary": tokenizer.vocabulary,
        "special_ids": {name: tokenizer.id_of(f"{name}_token") for name in specials},
        "templates": list(templates),
        "chat_template": chat_template_of(tokenizer, settings.chat_template)
        if "chat" in templates
        else None,
        "formats": sorted({f for source in seen.sources for f in source.source.formats.values()}),
        "dataset_commits": commits,
    }
