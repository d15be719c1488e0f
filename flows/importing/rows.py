"""Datasets: names, splits and shapes of rows, put together as `dataset_name` or `datasets`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flows.importing.draft import Draft
from tunewright.contract.settings import is_path

FILE = re.compile(r"\.(jsonl?|ndjson|csv|tsv|parquet|arrow)(\.(gz|bz2|xz|zst))?\Z", re.IGNORECASE)
KINDS = ("json", "jsonl", "csv", "parquet", "arrow", "text")
"""What Hugging Face's library takes for a dataset's name when its files are named elsewhere."""
_SPLIT = re.compile(r"(?P<split>\w[\w.-]*)?(?P<part>\[(-?\d+%?)?:(-?\d+%?)?\])?\Z")


@dataclass
class Rows:
    """One source of rows. kind: how its rows become text, alpaca, chat or text; None: unknown."""

    name: str
    split: str = ""
    part: str = ""
    format: str = "auto"
    columns: dict[str, str] = field(default_factory=dict)
    revision: str | None = None
    weight: float | None = None
    kind: str | None = None

    @property
    def full_name(self) -> str:
        """The name with its split and part, as `dataset_name` takes them."""
        split = "" if self.split in ("", "train") and not self.part else f":{self.split or 'train'}"
        if is_path(self.name) and self.split in ("", "train"):
            split = ""
        return f"{self.name}{split}{self.part}"


def as_path(name: str) -> str:
    """A name as a path: what is relative begins with ./, which tells it from a Hub name."""
    return name if is_path(name) else f"./{name}"


def located(name: str) -> str:
    """A Hub name as it is; what is told for a path by its form begins with ./ or the like."""
    by_form = FILE.search(name) or name.count("/") > 1 or name.endswith("/")
    return as_path(name) if by_form else name


def split_of(rows: Rows, text: str) -> bool:
    """Take `train[:10%]` apart; False for what has no counterpart, like a sum of splits."""
    if not (found := _SPLIT.match(text)):
        return False
    rows.split, rows.part = found["split"] or "", found["part"] or ""
    return True


def conversations(column: str, role: str = "role", content: str = "content") -> dict[str, Any]:
    """Shape and columns of rows that hold a list of turns in `column`."""
    if (role, content) == ("from", "value"):
        named = {} if column == "conversations" else {"conversations": column}
        return {"format": "sharegpt", "columns": named, "kind": "chat"}
    wanted = {"messages": column, "role": role, "content": content}
    named = {ours: theirs for ours, theirs in wanted.items() if ours != theirs}
    return {"format": "messages", "columns": named, "kind": "chat"}


def renamed(columns: Mapping[str, str | None]) -> dict[str, str]:
    """Only the columns that the data calls otherwise."""
    return {ours: theirs for ours, theirs in columns.items() if theirs and theirs != ours}


def write(draft: Draft, sources: list[Rows]) -> None:
    """The sources as parameters, and the one template that all of them can have."""
    if len(sources) == 1:
        _write_one(draft, sources[0])
    else:
        draft.assume("datasets", [_entry(rows) for rows in sources], "")
    kinds = {rows.kind for rows in sources}
    if kinds == {"alpaca"}:
        draft.assume("template", "alpaca", "the Alpaca text around each row, as there")
    elif kinds == {"chat"}:
        draft.assume("template", "chat", "the chat template of the model's tokenizer")
    if any(rows.name.startswith(".") for rows in sources):
        key = "dataset_name" if len(sources) == 1 else "datasets"
        draft.comments[f"parameters.{key}"] = "paths are relative to this file's folder"


def _write_one(draft: Draft, rows: Rows) -> None:
    draft.assume("dataset_name", rows.full_name, "")
    if rows.revision:
        draft.assume("dataset_revision", rows.revision, "")
    if rows.format != "auto":
        draft.assume("format", rows.format, "")
    if rows.columns:
        draft.assume("columns", rows.columns, "")


def _entry(rows: Rows) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": rows.full_name}
    if rows.revision:
        entry["revision"] = rows.revision
    if rows.weight is not None:
        entry["weight"] = rows.weight
    if rows.format != "auto":
        entry["format"] = rows.format
    if rows.columns:
        entry["columns"] = rows.columns
    return entry
