"""From settings to a sealed token store: read, decide whether it is made already, make it.

Everything that the tokens depend on goes into the fingerprint before any row is rendered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from tunewright.contract.failures import DataError
from tunewright.contract.settings import DataSettings
from tunewright.data import fingerprint
from tunewright.data.documents import Document, arrays_of, encode, fitted
from tunewright.data.examples import BadRow, Example, example_of
from tunewright.data.holdout import held_out
from tunewright.data.render import (
    Render,
    Rendered,
    chat_template_of,
    renderers,
    template_of,
    template_text,
)
from tunewright.data.rows import Rows, read_rows
from tunewright.data.store import TokenStore, discard, sealed_stores, write_store
from tunewright.data.tokenizer import TextTokenizer, load_tokenizer

_CHUNK = 1024
_SHOWN = 5
_OPTIONS = (
    "format",
    "template",
    "train_on",
    "on_bad_row",
    "on_too_long",
    "max_length",
    "pack_tokens",
    "eval_fraction",
)


class Prepared(NamedTuple):
    """An open store, why it was found or made, and the tokenizer that reads it."""

    store: TokenStore
    cache: str
    tokenizer: TextTokenizer


@dataclass
class _Source:
    """Rows with what they say: an example, or the reason why there is none."""

    rows: Rows
    contents: list[Example | BadRow]
    digests: list[bytes]

    @property
    def examples(self) -> list[Example]:
        return [content for content in self.contents if not isinstance(content, BadRow)]


@dataclass
class _Tally:
    """What became of the rows that are not whole documents."""

    bad: list[tuple[str, BadRow]] = field(default_factory=list)
    truncated: int = 0

    def dropped(self) -> dict[str, int]:
        return dict(Counter(error.reason for _, error in self.bad).most_common())


def prepare(settings: DataSettings, tokens_root: Path) -> Prepared:
    """The token store of these settings below a folder, made only when it is not there.

    Raises UserError for what the user can fix in settings and paths, DataError for the rows.
    """
    tokenizer = load_tokenizer(settings.model_name, settings.model_revision)
    train = _read(settings, settings.dataset_name)
    held = _read(settings, settings.eval_dataset) if settings.eval_dataset else None
    templates = _templates(settings, train, held)
    parts = _parts(settings, tokenizer, templates, train, held)
    name = fingerprint.fingerprint_of(parts)
    if (store := _existing(tokens_root / name)) is not None:
        return Prepared(store, "hit: same content", tokenizer)
    newest = next(iter(sealed_stores(tokens_root)), None)
    cache = fingerprint.why_missed(parts, newest and newest["parts"])
    if (tokens_root / name).exists():
        discard(tokens_root / name)
    renders = renderers(tokenizer, templates)
    tally = _Tally()
    documents = _documents(settings, tokenizer, renders, train, tally)
    sides = _sides(settings, documents, train)
    if held is not None:
        sides["eval"] = _documents(settings, tokenizer, renders, held, tally)
    _refuse(settings, tally, len(train.rows) + (len(held.rows) if held else 0))
    _require(settings, sides, tally)
    facts = _facts(settings, tokenizer, templates, tally)
    facts |= {"parts": parts, **_row_counts(sides, train, held)}
    arrays = {side: arrays_of(found, settings.pack_tokens) for side, found in sides.items()}
    return Prepared(write_store(tokens_root, name, arrays, facts), cache, tokenizer)


def _read(settings: DataSettings, name: str) -> _Source:
    rows = read_rows(name, settings.dataset_revision, settings.dataset_split)
    contents = [_content(value, settings) for value in rows.values]
    return _Source(rows, contents, [fingerprint.digest_of(content) for content in contents])


def _content(value: Any, settings: DataSettings) -> Example | BadRow:
    try:
        return example_of(value, settings.format)
    except BadRow as error:
        return error


def _templates(settings: DataSettings, *sources: _Source | None) -> list[str]:
    """The templates in use; a chat template that no row needs changes nothing."""
    examples = (example for source in sources if source for example in source.examples)
    return sorted({template_of(example, settings.template) for example in examples})


def _parts(
    settings: DataSettings,
    tokenizer: TextTokenizer,
    templates: Sequence[str],
    train: _Source,
    held: _Source | None,
) -> dict[str, str | None]:
    """The hashes that make the fingerprint, one for each thing that a user could change."""
    return {
        "rows": fingerprint.of_rows(train.digests),
        "eval_rows": fingerprint.of_rows(held.digests) if held else None,
        "tokenizer": tokenizer.digest,
        "template": fingerprint.of_value([template_text(tokenizer, name) for name in templates]),
        "options": fingerprint.of_value({name: getattr(settings, name) for name in _OPTIONS}),
        "version": fingerprint.of_value(fingerprint.DATA_VERSION),
    }


def _existing(path: Path) -> TokenStore | None:
    try:
        return TokenStore.open(path, verify=True)
    except DataError:
        return None


def _documents(
    settings: DataSettings,
    tokenizer: TextTokenizer,
    renders: dict[str, Render],
    source: _Source,
    tally: _Tally,
) -> list[Document]:
    """The rows that can be trained on as documents, numbered from 1; the others are tallied."""
    found = []
    for chunk in _chunks(_rendered(settings, renders, source, tally)):
        for document in encode(tokenizer, chunk, settings.train_on):
            try:
                kept = fitted(document, settings.max_length, settings.on_too_long)
            except BadRow as error:
                tally.bad.append((source.rows.place(document.row - 1), error))
                continue
            tally.truncated += len(kept.ids) < len(document.ids)
            found.append(kept)
    return found


def _rendered(
    settings: DataSettings, renders: dict[str, Render], source: _Source, tally: _Tally
) -> Iterator[tuple[int, Rendered]]:
    for index, content in enumerate(source.contents):
        try:
            if isinstance(content, BadRow):
                raise content
            rendered = renders[template_of(content, settings.template)](content)
        except BadRow as error:
            tally.bad.append((source.rows.place(index), error))
        else:
            yield index + 1, rendered


def _chunks(items: Iterator[tuple[int, Rendered]]) -> Iterator[list[tuple[int, Rendered]]]:
    while chunk := list(islice(items, _CHUNK)):
        yield chunk


def _sides(
    settings: DataSettings, documents: list[Document], source: _Source
) -> dict[str, list[Document]]:
    digests = [source.digests[document.row - 1] for document in documents]
    held = held_out(digests, settings.eval_fraction)
    sides = {"train": [d for d, out in zip(documents, held, strict=True) if not out]}
    if any(held):
        sides["eval"] = [d for d, out in zip(documents, held, strict=True) if out]
    return sides


def _refuse(settings: DataSettings, tally: _Tally, total: int) -> None:
    """Stop over rows that the settings do not allow to be left out."""
    long = [f"{at} ({why.detail})" for at, why in tally.bad if why.reason == "too long"]
    if long and settings.on_too_long == "fail":
        raise DataError(
            f"{len(long)} of {total} rows have more than max_length={settings.max_length} tokens: "
            f"{_places(long)}; raise max_length, or set on_too_long: truncate or drop"
        )
    bad = [f"{at}: {why}" for at, why in tally.bad if why.reason != "too long"]
    if bad and settings.on_bad_row == "fail":
        raise DataError(
            f"{len(bad)} of {total} rows cannot be trained on: {_places(bad)}; "
            "mend them, or leave them out with on_bad_row: drop"
        )


def _places(found: list[str]) -> str:
    more = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    return "; ".join(found[:_SHOWN] + more)


def _require(settings: DataSettings, sides: dict[str, list[Document]], tally: _Tally) -> None:
    for side, name in (("train", settings.dataset_name), ("eval", settings.eval_dataset)):
        if side in sides and not sides[side]:
            reasons = ", ".join(f"{count} {reason}" for reason, count in tally.dropped().items())
            raise DataError(f"no row of {name} can be trained on: {reasons}")
    if settings.eval_fraction and "eval" not in sides:
        raise DataError(
            f"eval_fraction is {settings.eval_fraction} but {settings.dataset_name} has one "
            "distinct row; add rows, or set eval_fraction: 0"
        )


def _facts(
    settings: DataSettings, tokenizer: TextTokenizer, templates: Sequence[str], tally: _Tally
) -> dict[str, Any]:
    """What stands in the manifest beside counts and hashes."""
    specials = ("bos", "eos", "pad")
    return {
        "pack_tokens": settings.pack_tokens,
        "max_length": settings.max_length,
        "vocabulary": tokenizer.vocabulary,
        "special_ids": {name: tokenizer.id_of(f"{name}_token") for name in specials},
        "templates": list(templates),
        "chat_template": chat_template_of(tokenizer) if "chat" in templates else None,
        "dropped": tally.dropped(),
        "truncated": tally.truncated,
    }


def _row_counts(
    sides: dict[str, list[Document]], train: _Source, held: _Source | None
) -> dict[str, Any]:
    """Rows read, and those of each side; held-out rows of the same source are not the train's."""
    apart = len(sides.get("eval", ())) if held is None else 0
    counts = {"train": {"rows": len(train.rows) - apart}}
    if "eval" in sides:
        counts["eval"] = {"rows": apart or (len(held.rows) if held else 0)}
    return {"rows": len(train.rows), "counts": counts}
