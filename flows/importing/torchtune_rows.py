"""The datasets of a torchtune file: each builder has a source and a shape of rows by default."""

from __future__ import annotations

from flows.importing.draft import Draft, required
from flows.importing.rows import KINDS, Rows, as_path, conversations, renamed, split_of
from flows.importing.rules import mapping, read, text, words
from tunewright.contract.failures import UserError

_SOURCES = {
    "alpaca_dataset": "tatsu-lab/alpaca",
    "alpaca_cleaned_dataset": "yahma/alpaca-cleaned",
    "slimorca_dataset": "Open-Orca/SlimOrca-Dedup",
    "grammar_dataset": "liweili/c4_200m",
    "samsum_dataset": "Samsung/samsum",
    "cnn_dailymail_articles_dataset": "ccdv/cnn_dailymail",
    "wikitext_dataset": "EleutherAI/wikitext_document_level",
}
_COLUMNS = {
    "samsum_dataset": {"prompt": "dialogue", "completion": "summary"},
    "cnn_dailymail_articles_dataset": {"text": "article"},
    "wikitext_dataset": {"text": "page"},
}
_SUBSETS = ("cnn_dailymail_articles_dataset", "wikitext_dataset")


def source(draft: Draft, at: str) -> Rows:
    """One dataset by its builder, whose source has a default."""
    required(draft, f"{at}._component_", "name the dataset's builder there")
    component: str = read(draft, f"{at}._component_", text)
    builder = component.rpartition(".")[2]
    source: str = read(draft, f"{at}.source", text, _SOURCES.get(builder, ""))
    if not source:
        raise UserError(f"{draft.name}: {at}.source is not set; name the rows of {component} there")
    rows = Rows(source)
    _shape(draft, at, builder, rows)
    for key in ("source", "split"):
        if draft.get(f"{at}.{key}") is not None:
            draft.into(f"{at}.{key}", "dataset_name")
    if not split_of(rows, read(draft, f"{at}.split", text, "train")):
        draft.leave(f"{at}.split", "is not one split or a part of one")
    if source in KINDS and (files := read(draft, f"{at}.data_files", words)) is not None:
        rows.name = as_path(files[0])
        more = len(files) > 1
        why = f"only {rows.name} of several; name the others under datasets" if more else ""
        draft.into(f"{at}.data_files", "dataset_name", why, changed=more)
    return rows


def _shape(draft: Draft, at: str, builder: str, rows: Rows) -> None:
    key, why = f"{at}._component_", ""
    columns = {
        key: text(part) for key, part in read(draft, f"{at}.column_map", mapping, {}).items()
    }
    if "alpaca" in builder:
        rows.format, rows.kind, rows.columns = "alpaca", "alpaca", renamed(columns)
        why = "the Alpaca text without a chat template around it"
    elif builder == "chat_dataset" or builder == "slimorca_dataset":
        _chat(draft, at, rows)
    elif builder.startswith(("text_completion", "wikitext", "cnn_dailymail")):
        rows.format, rows.kind = "text", "text"
        rows.columns = renamed(
            {"text": read(draft, f"{at}.column", text), **_COLUMNS.get(builder, {})}
        )
    elif builder in ("instruct_dataset", "grammar_dataset", "samsum_dataset"):
        found = {
            "prompt": columns.get("input", "input"),
            "completion": columns.get("output", "output"),
        }
        rows.format, rows.kind = "prompt_completion", "chat"
        rows.columns = {**found, **({} if columns else _COLUMNS.get(builder, {}))}
    else:
        why = f"{builder}: the shape is found by the rows' keys"
    if builder in _SUBSETS:
        why = "a subset of the Hub dataset is meant, which cannot be named; give its files as paths"
    draft.into(key, "format", why, changed=bool(why))
    for part in ("column", "column_map", "conversation_column", "conversation_style"):
        if draft.get(f"{at}.{part}") is not None:
            draft.into(f"{at}.{part}", "columns")


def _chat(draft: Draft, at: str, rows: Rows) -> None:
    style = read(draft, f"{at}.conversation_style", text, "sharegpt")
    column = read(draft, f"{at}.conversation_column", text)
    if style == "sharegpt":
        found = conversations(column or "conversations", "from", "value")
    else:
        found = conversations(column or "messages")
    rows.format, rows.columns, rows.kind = found["format"], found["columns"], "chat"
