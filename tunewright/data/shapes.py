"""The shapes that rows have, told by their keys, and what a row of each shape says.

    alpaca             instruction, input, output (with system or history: a conversation)
    messages           messages of role and content, beside them tools
    sharegpt           conversations of from and value, beside them tools
    prompt_completion  prompt and completion, each text or messages
    text               text

`columns` maps these names, and those of a turn, to the data's own where they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tunewright.contract.failures import UserError
from tunewright.data.conversations import TURN_NAMES, chat_of, turns_of
from tunewright.data.examples import Alpaca, BadRow, Chat, Completion, Example, Text
from tunewright.data.values import short, text_of

_KEYS = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction",),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}
"""What a row must have to be of a shape; the first that fits is taken."""
ROW_NAMES = frozenset(
    {*(key for keys in _KEYS.values() for key in keys)}
    | {"input", "output", "system", "history", "tools"}
)


def example_of(row: Any, format: str = "auto", columns: Mapping[str, str] | None = None) -> Example:
    """What a row says. Raises BadRow where nothing can be learnt from it, UserError for `columns`
    that name nothing a shape has."""
    if isinstance(row, BadRow):
        raise row
    found = _mapped(row, columns or {})
    shape = _shape(found) if format == "auto" else format
    if any(found.get(key) is None for key in _KEYS[shape]):
        raise BadRow(f"no {' or '.join(_KEYS[shape])}", _keys(found))
    return _MAKERS[shape](found, columns or {})


def format_of(row: Any, columns: Mapping[str, str] | None = None) -> str:
    """The name of a row's shape; raises BadRow when it has none that is known."""
    return _shape(_mapped(row, columns or {}))


def _mapped(row: Any, columns: Mapping[str, str]) -> Mapping[str, Any]:
    """The row by the shapes' names; a column that is mapped elsewhere means nothing by itself."""
    if not isinstance(row, Mapping):
        raise BadRow("not an object", type(row).__name__)
    if not columns:
        return row
    if unknown := sorted({*columns} - ROW_NAMES - TURN_NAMES):
        raise UserError(
            f"columns has {', '.join(unknown)}, which no shape of a row has; "
            f"the names to map are {', '.join(sorted(ROW_NAMES))}, and those of a turn"
        )
    ours = {name: theirs for name, theirs in columns.items() if name in ROW_NAMES}
    rest = {key: value for key, value in row.items() if key not in {*ours, *ours.values()}}
    return rest | {name: row.get(theirs) for name, theirs in ours.items()}


def _shape(row: Mapping[str, Any]) -> str:
    for shape, keys in _KEYS.items():
        if all(row.get(key) is not None for key in keys):
            return shape
    raise BadRow(
        "unknown shape", f"{_keys(row)}; known are {', '.join(_KEYS)}, and columns maps names"
    )


def _alpaca(row: Mapping[str, Any], columns: Mapping[str, str]) -> Example:
    texts = [text_of(row.get(key), key) for key in ("instruction", "input", "output")]
    if not texts[2].strip():
        raise BadRow("no answer", "" if "output" in row else f"no output; {_keys(row)}")
    if not (texts[0] + texts[1]).strip():
        raise BadRow("no instruction")
    return _with_history(row, *texts) if row.get("system") or row.get("history") else Alpaca(*texts)


def _with_history(row: Mapping[str, Any], instruction: str, context: str, output: str) -> Chat:
    """An instruction with earlier turns, pairs of a question and its answer, or a system text."""
    history = row.get("history") or []
    if not isinstance(history, list) or not all(_pair(pair) for pair in history):
        raise BadRow("history is not a list of pairs", short(repr(history)))
    question = "\n\n".join(part for part in (instruction, context) if part)
    turns = [
        {"role": role, "content": text}
        for pair in [*history, (question, output)]
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    return chat_of(turns, row)


def _pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2


def _messages(row: Mapping[str, Any], columns: Mapping[str, str]) -> Chat:
    return chat_of(turns_of(row["messages"], columns), row)


def _sharegpt(row: Mapping[str, Any], columns: Mapping[str, str]) -> Chat:
    return chat_of(turns_of(row["conversations"], columns), row)


def _completion(row: Mapping[str, Any], columns: Mapping[str, str]) -> Example:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, list) or isinstance(completion, list):
        asked = _as_turns(prompt, "user", columns)
        return chat_of([*asked, *_as_turns(completion, "assistant", columns)], row, len(asked))
    texts = text_of(prompt, "prompt"), text_of(completion, "completion")
    for text, reason in zip(texts, ("no prompt", "no answer"), strict=True):
        if not text.strip():
            raise BadRow(reason)
    return Completion(*texts)


def _as_turns(value: Any, role: str, columns: Mapping[str, str]) -> list[Any]:
    text = [{"role": role, "content": value}]
    return text if isinstance(value, str) else turns_of(value, columns)


def _text(row: Mapping[str, Any], columns: Mapping[str, str]) -> Text:
    text = text_of(row["text"], "text")
    if not text.strip():
        raise BadRow("no text")
    return Text(text)


def _keys(row: Mapping[str, Any]) -> str:
    return f"its keys: {short(', '.join(map(str, row)) or 'none')}"


_MAKERS: dict[str, Callable[[Mapping[str, Any], Mapping[str, str]], Example]] = {
    "alpaca": _alpaca,
    "messages": _messages,
    "sharegpt": _sharegpt,
    "prompt_completion": _completion,
    "text": _text,
}
