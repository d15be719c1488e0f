"""Conversations: `messages` as OpenAI and Hugging Face write them, and ShareGPT's `conversations`.

Both spellings of a turn (role and content, from and value) are understood in either. What would be
trained on wrongly if it were guessed is a BadRow: an unknown role, two turns of one role in a row
(a turn was lost, or two were meant to be one; only tool results may follow each other), an answer
without content, a tool's result that follows no answer, and an end that is not an answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tunewright.data.examples import BadRow, Chat, Message, ToolCall
from tunewright.data.values import json_of, short, text_of

_ROLES = {
    "system": "system",
    "developer": "developer",
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "ipython"), "tool"),
}
_REASONING = ("reasoning", "reasoning_content", "thinking")
_WEIGHTS = ("loss_weight", "weight", "train")
TURN_NAMES = frozenset(
    {*_REASONING, *_WEIGHTS, "role", "from", "content", "value", "tool_calls", "name"}
    | {"tool_call_id"}
)
"""What a turn may have."""


def chat_of(turns: Sequence[Any], row: Mapping[str, Any], prompt: int = 0) -> Chat:
    """The conversation of a row's turns; answers among the first `prompt` turns are not trained on.

    A column `system` goes before them unless they begin with one. Raises BadRow.
    """
    if not turns:
        raise BadRow("no messages", "a list of at least one is needed")
    messages = [_message(turn, number) for number, turn in enumerate(turns, 1)]
    messages[:prompt] = [message._replace(answer=False) for message in messages[:prompt]]
    system = text_of(row.get("system"), "system")
    if system.strip() and messages[0].role != "system":
        messages.insert(0, Message("system", system))
    _check(messages)
    return Chat(tuple(messages), tools_of(row.get("tools")))


def turns_of(value: Any, columns: Mapping[str, str]) -> list[Any]:
    """The turns of a list, or of its JSON text; `columns` says what their keys are called."""
    found = json_of(value, "messages") if isinstance(value, str) else value
    if not isinstance(found, list):
        raise BadRow("no messages", f"a list is needed, not {type(found).__name__}")
    renames = {ours: theirs for ours, theirs in columns.items() if ours in TURN_NAMES}
    return [_renamed(turn, renames) for turn in found] if renames else found


def tools_of(value: Any) -> tuple[Mapping[str, Any], ...]:
    """The tools of a list or its JSON text, each as {"type": "function", "function": {...}}."""
    if isinstance(value, str) and not value.strip():
        return ()
    found = json_of(value, "tools")
    if not isinstance(found, list | None):
        raise BadRow("tools are not a list", type(found).__name__)
    return tuple(_tool(tool) for tool in found or ())


def _tool(value: Any) -> Mapping[str, Any]:
    tool = json_of(value, "a tool")
    if not isinstance(tool, dict):
        raise BadRow("a tool is not an object", type(tool).__name__)
    if "function" in tool or "name" not in tool:
        return tool
    return {"type": "function", "function": tool}


def _renamed(turn: Any, renames: Mapping[str, str]) -> Any:
    if not isinstance(turn, Mapping):
        return turn
    rest = {key: value for key, value in turn.items() if key not in renames}
    return rest | {ours: turn.get(theirs) for ours, theirs in renames.items()}


def _message(turn: Any, number: int) -> Message:
    if not isinstance(turn, Mapping):
        raise BadRow("a message is not an object", f"message {number}: {type(turn).__name__}")
    written = turn.get("from") if turn.get("role") is None else turn["role"]
    if not isinstance(written, str) or not written:
        raise BadRow("a message has no role", f"message {number}")
    role = _ROLES.get(written)
    if role is None:
        raise BadRow("an unknown role", f"message {number}: {short(written)}")
    content, reasoning, calls = _content(turn, written)
    if (calls or reasoning) and role != "assistant":
        raise BadRow("reasoning or a call that is not an answer's", f"message {number}: {role}")
    return Message(
        role=role,
        content=content,
        answer=role == "assistant" and _trained(turn),
        reasoning=reasoning,
        tool_calls=calls,
        name=text_of(turn.get("name"), "name") or None,
        tool_call_id=text_of(turn.get("tool_call_id"), "tool_call_id") or None,
    )


def _content(turn: Mapping[str, Any], role: str) -> tuple[str, str, tuple[ToolCall, ...]]:
    """Text, reasoning and calls, of fields and of typed parts alike."""
    value = turn.get("value") if turn.get("content") is None else turn["content"]
    calls = _calls(turn.get("tool_calls"))
    if role == "function_call":
        return "", _reasoning(turn), (*_calls(value), *calls)
    if not isinstance(value, list):
        return text_of(value, "content"), _reasoning(turn), calls
    parts = [_part(part) for part in value]
    reasoning = "".join(part for kind, part in parts if kind == "reasoning")
    field = _reasoning(turn)
    if field and reasoning and field != reasoning:
        raise BadRow("reasoning is given twice", "as a part and as a field")
    called = [call for kind, part in parts if kind == "tool_call" for call in _calls(part)]
    text = "".join(part for kind, part in parts if kind == "text")
    return text, field or reasoning, (*called, *calls)


def _part(part: Any) -> tuple[str, Any]:
    """The kind and the value of a typed part: text, reasoning or tool_call."""
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind not in ("text", "reasoning", "thinking", "tool_call"):
        raise BadRow("content that is not text", f"a part of type {short(str(kind))}")
    keys = ("text", "value", kind)
    value = next((part[key] for key in keys if part.get(key) is not None), None)
    if kind == "tool_call":
        return kind, value
    return ("text" if kind == "text" else "reasoning"), text_of(value, f"a {kind} part")


def _reasoning(turn: Mapping[str, Any]) -> str:
    found = (text_of(turn.get(name), name) for name in _REASONING)
    return next((text for text in found if text), "")


def _calls(value: Any) -> tuple[ToolCall, ...]:
    """The calls of a list, of one object, or of either as JSON text."""
    if value is None or value == "":
        return ()
    found = json_of(value, "a tool call")
    return tuple(_call(call) for call in (found if isinstance(found, list) else [found]))


def _call(value: Any) -> ToolCall:
    call = json_of(value, "a tool call")
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise BadRow("a tool call is not an object", short(repr(value)))
    name = text_of(function.get("name"), "a tool call's name")
    if not name.strip():
        raise BadRow("a tool call has no name", short(repr(call)))
    given = function.get("arguments")
    arguments = json_of(given, "a tool call's arguments") if given not in (None, "") else {}
    if not isinstance(arguments, dict):
        raise BadRow("a tool call's arguments are not an object", short(repr(arguments)))
    return ToolCall(name, arguments, text_of(call.get("id"), "a tool call's id") or None)


def _trained(turn: Mapping[str, Any]) -> bool:
    """Whether the data wants this answer learnt, which it does unless it says otherwise."""
    name = next((name for name in _WEIGHTS if turn.get(name) is not None), None)
    if name is None:
        return True
    if turn[name] not in (0, 1):
        raise BadRow(f"a {name} other than 0 and 1", short(repr(turn[name])))
    return bool(turn[name])


def _check(messages: Sequence[Message]) -> None:
    """Raise BadRow for an order that no conversation has, and when there is nothing to learn."""
    if not any(message.role == "assistant" for message in messages):
        raise BadRow("no answer", "no message is the assistant's")
    for number, message in enumerate(messages, 1):
        _check_turn(message, messages[: number - 1], number)
    if messages[-1].role != "assistant":
        raise BadRow("does not end with an answer", f"the last message is: {messages[-1].role}")
    if not any(message.answer for message in messages):
        raise BadRow("no supervised token", "every answer is excluded by its weight")


def _check_turn(message: Message, before: Sequence[Message], number: int) -> None:
    previous = before[-1].role if before else None
    if message.role == previous != "tool":
        raise BadRow("a role twice in a row", f"messages {number - 1} and {number}: {previous}")
    if message.role == "tool":
        _check_result(message, before, number)
    elif not message.content.strip() and not message.tool_calls and message.role != "system":
        kind = "no answer" if message.role == "assistant" else "an empty message"
        raise BadRow(kind, f"message {number} ({message.role}) has no content")


def _check_result(message: Message, before: Sequence[Message], number: int) -> None:
    """A result follows an answer that could have called; by its id where both have ids."""
    caller = next((m for m in reversed(before) if m.role != "tool"), None)
    if caller is None or caller.role != "assistant":
        raise BadRow("a tool's result without a call", f"message {number}")
    ids = {call.id for call in caller.tool_calls if call.id}
    if ids and message.tool_call_id and message.tool_call_id not in ids:
        raise BadRow("a tool's result without a call", f"message {number}: {message.tool_call_id}")
