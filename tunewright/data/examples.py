"""What a row says: an instruction with its answer, or a conversation.

Both are plain tuples, so that the same content hashes the same whatever file it came from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Format = Literal["auto", "alpaca", "messages"]


class BadRow(ValueError):
    """A row that cannot be trained on. `reason` is counted; `detail` is for the message."""

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason = reason
        self.detail = detail
        super().__init__(f"{reason} ({detail})" if detail else reason)


class Alpaca(NamedTuple):
    instruction: str
    input: str
    output: str


class Message(NamedTuple):
    """One turn. `answer`: it is the assistant's and not excluded by a loss_weight of 0."""

    role: str
    content: str
    answer: bool


class Chat(NamedTuple):
    messages: tuple[Message, ...]


Example = Alpaca | Chat


def example_of(row: Any, format: Format = "auto") -> Example:
    """The content of a row; raises BadRow with the reason when there is nothing to learn in it."""
    if not isinstance(row, Mapping):
        raise BadRow("not an object", type(row).__name__)
    if format != "alpaca" and row.get("messages") is not None:
        return _chat(row)
    if format != "messages" and row.get("instruction") is not None:
        return _alpaca(row)
    wanted = {"alpaca": "instruction", "messages": "messages"}.get(
        format, "instruction or messages"
    )
    keys = ", ".join(str(key) for key in row) or "none"
    raise BadRow(f"no {wanted}", f"its keys: {_short(keys)}")


def as_chat(example: Example) -> Chat:
    """An instruction as a question with its answer; a conversation as it is."""
    if isinstance(example, Chat):
        return example
    question = "\n\n".join(part for part in (example.instruction, example.input) if part)
    return Chat((Message("user", question, False), Message("assistant", example.output, True)))


def as_alpaca(example: Example) -> Alpaca:
    """A single question with its answer as an instruction; BadRow for other conversations."""
    if isinstance(example, Alpaca):
        return example
    roles = [message.role for message in example.messages]
    if roles != ["user", "assistant"]:
        raise BadRow("not one question with one answer", "template: alpaca needs that")
    question, answer = example.messages
    return Alpaca(question.content, "", answer.content)


def _alpaca(row: Mapping[str, Any]) -> Alpaca:
    texts = [_text(row.get(key), key) for key in ("instruction", "input", "output")]
    if not texts[2].strip():
        raise BadRow("no answer")
    if not (texts[0] + texts[1]).strip():
        raise BadRow("no instruction")
    return Alpaca(*texts)


def _chat(row: Mapping[str, Any]) -> Chat:
    turns = row["messages"]
    if not isinstance(turns, list) or not turns:
        raise BadRow("no messages", "a list of at least one is needed")
    if row.get("tools"):
        raise BadRow("has tools", "tool calls cannot be trained on yet")
    messages = tuple(_message(turn) for turn in turns)
    answers = [m for m in messages if m.role == "assistant"]
    if not any(message.content.strip() for message in answers):
        raise BadRow("no answer")
    if not any(message.answer for message in messages):
        raise BadRow("no supervised token", "loss_weight is 0 for every answer")
    return Chat(messages)


def _message(turn: Any) -> Message:
    if not isinstance(turn, Mapping):
        raise BadRow("a message is not an object", type(turn).__name__)
    role = turn.get("role")
    if not isinstance(role, str) or not role:
        raise BadRow("a message has no role")
    if turn.get("tool_calls"):
        raise BadRow("has tools", "tool calls cannot be trained on yet")
    content = turn.get("content")
    text = "".join(map(_part, content)) if isinstance(content, list) else _text(content, "content")
    answer = role == "assistant" and _weight(turn) > 0 and bool(text.strip())
    return Message(role, text, answer)


def _part(part: Any) -> str:
    """The text of a typed part, under "text" or "value"."""
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind != "text":
        raise BadRow("content that is not text", f"a part of type {_short(str(kind))}")
    text = part.get("text")
    return _text(part.get("value") if text is None else text, "a text part")


def _weight(turn: Mapping[str, Any]) -> float:
    weight = turn.get("loss_weight")
    if weight is None:
        return 1.0
    if weight not in (0, 1):
        raise BadRow("a loss_weight other than 0 and 1", _short(repr(weight)))
    return float(weight)


def _text(value: Any, name: str) -> str:
    """Text that can be encoded; missing is empty."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise BadRow(f"{name} is not text", type(value).__name__)
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise BadRow("broken Unicode", f"{name} has half a character") from None
    return value


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
