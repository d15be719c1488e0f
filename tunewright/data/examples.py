"""What a row says: an instruction, a conversation, a prompt with its completion, or plain text.

The types that all data code speaks. They are plain tuples, so that the same content hashes the
same whatever file it came from. `shapes` makes them from rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class BadRow(ValueError):
    """A row that cannot be trained on. `reason` is short and counted; `detail` is for messages."""

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason = reason
        self.detail = detail
        super().__init__(f"{reason} ({detail})" if detail else reason)

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.reason, self.detail)


class Alpaca(NamedTuple):
    """An instruction, its input (often empty) and its answer (never blank)."""

    instruction: str
    input: str
    output: str


class ToolCall(NamedTuple):
    """One call by the assistant. arguments: always an object, also where the data had JSON text."""

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None


class Message(NamedTuple):
    """One turn, in the order in which a model writes it: reasoning, content, tool calls.

    role: system, developer, user, assistant or tool.
    answer: the assistant's, not excluded by the data (a loss_weight of 0, train: false, or part of
    a prompt), so trained on where answers are. It has content or tool_calls.
    name, tool_call_id: of a tool's result, where the data says them.
    """

    role: str
    content: str
    answer: bool = False
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None
    tool_call_id: str | None = None


class Chat(NamedTuple):
    """A conversation. tools: as templates expect them, {"type": "function", "function": {...}}.

    The last message is the assistant's. No role but tool comes twice in a row.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()


class Completion(NamedTuple):
    """A prompt in plain text (not trained on) and the text that follows it (not blank)."""

    prompt: str
    completion: str


class Text(NamedTuple):
    """Plain text, all of it trained on."""

    text: str


Example = Alpaca | Chat | Completion | Text


def as_chat(example: Example) -> Chat:
    """An instruction or prompt as a question with its answer; a conversation as it is.

    Raises BadRow for plain text, which has no roles.
    """
    if isinstance(example, Chat):
        return example
    if isinstance(example, Text):
        raise BadRow("plain text has no roles", "a chat template needs messages")
    if isinstance(example, Completion):
        question, answer = example
    else:
        question = "\n\n".join(part for part in (example.instruction, example.input) if part)
        answer = example.output
    return Chat((Message("user", question), Message("assistant", answer, answer=True)))


def as_alpaca(example: Example) -> Alpaca:
    """A single question with its answer as an instruction; BadRow for anything else."""
    if isinstance(example, Alpaca):
        return example
    if isinstance(example, Completion):
        return Alpaca(example.prompt, "", example.completion)
    messages = example.messages if isinstance(example, Chat) else ()
    plain = not any(message.tool_calls or message.reasoning for message in messages)
    if [message.role for message in messages] != ["user", "assistant"] or not plain:
        raise BadRow("not one question with one answer", "template: alpaca needs that")
    question, answer = messages
    return Alpaca(question.content, "", answer.content)
