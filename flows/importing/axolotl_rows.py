"""The datasets of an axolotl file: where each is, and the shape of its rows by its `type`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flows.importing.draft import Draft, required, shown
from flows.importing.rows import KINDS, Rows, as_path, conversations, located, renamed, split_of
from flows.importing.rules import Rule, left, read, refusal, text, words
from flows.importing.trainer import NO_REMOTE_CODE

_ROLES = ("system", "user", "human", "assistant", "gpt", "model", "tool", "function", "observation")
_ANSWERS = ("assistant", "gpt", "model")
_THINKING = ("thinking", "reasoning", "reasoning_content")


def known(names: tuple[str, ...]) -> Rule:
    """Names of roles or parts of a turn: those that are known need not be said."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        given = value if isinstance(value, list) else [value]
        if all(name in names for name in given):
            draft.same(key, "known without being said")
        else:
            draft.leave(key, f"what is known here: {', '.join(names)}")

    return rule


TABLE: Mapping[str, Rule] = {
    "*datasets.*.roles.*": known(_ROLES),
    "*datasets.*.roles_to_train": known(_ANSWERS),
    "*datasets.*.train_on_eo*": left("answers are trained on with their end", off=("turn",)),
    "*datasets.*.name": left("a subset of a Hub dataset cannot be named; give its files as paths"),
    "*datasets.*.shards*": left("a part of the rows is said by its split, like train[:10%]"),
    "*datasets.*.*thinking*": known(_THINKING),
    "*datasets.*.drop_system_message": left("system turns stay"),
    "*datasets.*.chat_template*": left("one chat template for all rows"),
    "*datasets.*.trust_remote_code": left(NO_REMOTE_CODE),
    "*datasets.*.conversation": left("the chat template of the tokenizer is taken"),
}


def sources(draft: Draft, at: str) -> list[Rows]:
    """The sources of one entry of `datasets`: one, or one for each file it names."""
    required(draft, f"{at}.path", "name the rows there")
    path: str = read(draft, f"{at}.path", text)
    rows = Rows(located(path), revision=read(draft, f"{at}.revision", text))
    for key in ("path", "revision", "ds_type"):
        if draft.get(f"{at}.{key}") is not None:
            draft.into(f"{at}.{key}", "dataset_name")
    _shape(draft, at, rows)
    if (split := read(draft, f"{at}.split", text)) is not None:
        if split_of(rows, split):
            draft.into(f"{at}.split", "dataset_name")
        else:
            draft.leave(f"{at}.split", f"{shown(split)} is not one split or a part of one")
    files = read(draft, f"{at}.data_files", words)
    if files is None:
        return [rows]
    if path not in KINDS:
        draft.leave(f"{at}.data_files", "all files of the split are taken; name files as paths")
        return [rows]
    draft.into(f"{at}.data_files", "dataset_name")
    return [replace(rows, name=as_path(file)) for file in files]


def _shape(draft: Draft, at: str, rows: Rows) -> None:
    """Shape and columns of the rows from `type` and the keys that name columns."""
    kind = draft.get(f"{at}.type")
    if isinstance(kind, Mapping):
        _own_prompt(draft, f"{at}.type", rows)
        return
    name, _, style = read(draft, f"{at}.type", text, "").replace(":", ".").partition(".")
    if name == "input_output":
        why = "rows of segments are not here; in messages, train: false marks what is not learnt"
        raise refusal(draft, "axolotl", f"{at}.type: input_output ({why})")
    if name in ("chat_template", "sharegpt"):
        _turns(draft, at, rows, name)
    elif name == "alpaca":
        rows.format, rows.kind = "alpaca", "chat" if style else "alpaca"
    elif name in ("completion", "pretrain"):
        rows.format, rows.kind = "text", "text"
        rows.columns = renamed({"text": read(draft, f"{at}.field", text)})
        _columns(draft, at, ("field",))
    if kind is None:
        return
    if rows.kind is None:
        draft.into(f"{at}.type", "format", f"{kind}: the shape is found by the rows' keys", True)
    elif style and style != "default":
        draft.into(f"{at}.type", "format", f"{kind}: the prompt's words differ", True)
    else:
        draft.into(f"{at}.type", "format")


def _turns(draft: Draft, at: str, rows: Rows, name: str) -> None:
    """Rows with a list of turns; the old sharegpt type has other names by default."""
    old = name == "sharegpt"
    mapped = f"{at}.message_property_mappings"
    role = read(draft, f"{mapped}.role", text) or read(draft, f"{at}.message_field_role", text)
    content = read(draft, f"{mapped}.content", text) or read(
        draft, f"{at}.message_field_content", text
    )
    found = conversations(
        read(draft, f"{at}.field_messages", text, "conversations" if old else "messages"),
        role or ("from" if old else "role"),
        content or ("value" if old else "content"),
    )
    rows.format, rows.columns, rows.kind = found["format"], found["columns"], "chat"
    if tools := read(draft, f"{at}.field_tools", text):
        rows.columns |= renamed({"tools": tools})
    _columns(draft, at, _TURN_KEYS)


def _own_prompt(draft: Draft, at: str, rows: Rows) -> None:
    """A prompt that the file spells out: its columns are taken, its words are not."""
    rows.format, rows.kind = "alpaca", "alpaca"
    names = {"system": "system", "instruction": "instruction", "input": "input", "output": "output"}
    rows.columns = renamed(
        {ours: read(draft, f"{at}.field_{theirs}", text) for ours, theirs in names.items()}
    )
    _columns(draft, at, tuple(f"field_{theirs}" for theirs in names))
    for key in ("format", "no_input_format", "system_prompt", "system_format"):
        if draft.get(f"{at}.{key}") is not None:
            draft.leave(f"{at}.{key}", "the Alpaca text is taken; give chat_template for your own")


def _columns(draft: Draft, at: str, keys: tuple[str, ...]) -> None:
    for key in keys:
        if draft.get(f"{at}.{key}") is not None:
            draft.into(f"{at}.{key}", "columns")


_TURN_KEYS = (
    "field_messages", "field_tools", "message_field_role", "message_field_content",
    "message_property_mappings.role", "message_property_mappings.content",
)  # fmt: skip
