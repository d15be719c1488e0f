"""A conversation in the form that a chat template understands.

Templates differ in what they show: some know no tools, some take reasoning as a field, some refuse
a system message. What a template can show is found out once, by rendering small conversations with
it and looking for their words in the text. What it cannot show takes another way:

    system      goes in front of the first question
    developer   becomes system
    reasoning   <think> ... </think> in front of the answer; else in `reasoning_content`,
                `thinking` and `reasoning`, the fields that templates read
    tools       a list at the end of the system message
    tool calls  <tool_call> JSON </tool_call> behind the answer
    results     <tool_response> ... </tool_response> as the user's message

Arguments of a call are an object that also acts as JSON text where a template adds it to text.
Calls and results without an id get one, and those with another where a template wants nine letters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from tunewright.data.examples import BadRow, Chat, Message, ToolCall
from tunewright.data.templates import Template, Turn

_WORD, _RESULT = "qzword", "qzresult"
_TOOL_ROLES = ("tool", "observation", "ipython", "function")
_LONG_ID = "call_0123456789abcdef"
_REASONING = ("reasoning_content", "thinking", "reasoning")


class Forms(NamedTuple):
    """What a template shows, and how it wants it.

    blank: the content of a message that only calls tools. result_role: None where results cannot be
    shown. long_ids: the ids of the data may be used.
    """

    system: bool
    developer: bool
    reasoning: bool
    tools: bool
    calls: bool
    blank: str | None = ""
    result_role: str | None = None
    long_ids: bool = True


class Arguments(dict[str, Any]):
    """The arguments of a call: an object, and its JSON wherever text is wanted."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


def turns_of(chat: Chat, forms: Forms, wanted: Sequence[bool]) -> tuple[list[Turn], list[Any]]:
    """The turns and tools that the template is given; `wanted`: the supervised messages."""
    tools = [] if forms.tools else list(chat.tools)
    ids = _Ids(forms.long_ids)
    turns: list[Turn] = []
    folded = False
    for message, supervised in zip(chat.messages, wanted, strict=True):
        turn = _turn(message, forms, ids)
        turn.answer, turn.wanted = message.answer, supervised
        again, folded = folded, message.role == "tool" and forms.result_role is None
        if again and folded:
            turns[-1]["content"] += "\n" + turn["content"]
        else:
            turns.append(turn)
    if tools:
        turns = _with_system(turns, _tools_text(tools))
    if not forms.system:
        turns = _without_system(turns)
    for number, turn in enumerate(turns):
        turn.number = number
    return turns, list(chat.tools) if forms.tools else []


def forms_of(template: Template) -> Forms:
    """What a template shows; a form that it refuses counts as not shown."""
    question, answer = Message("user", "a"), Message("assistant", "b", True)
    plain = Forms(True, True, True, True, calls=True, result_role="tool")

    def shows(chat: Chat, *words: str, forms: Forms = plain) -> bool:
        turns, tools = turns_of(chat, forms, [False] * len(chat.messages))
        try:
            text = template.render(turns, tools).text
        except BadRow:
            return False
        return all(word in text for word in words) and "None" not in text

    function = {
        "name": _WORD,
        "description": "c",
        "parameters": {"type": "object", "properties": {}},
    }
    tools = ({"type": "function", "function": function},)
    pair = (question, answer)
    found = Forms(
        system=shows(Chat((Message("system", _WORD), *pair)), _WORD),
        # A template that writes any role shows this one too, but its model was never taught it.
        developer="developer" in template.source
        and shows(Chat((Message("developer", _WORD), *pair)), _WORD),
        reasoning=shows(Chat((question, answer._replace(reasoning=_WORD))), _WORD),
        tools=shows(Chat(pair, tools), _WORD),
        calls=False,
    )
    call = answer._replace(content="", tool_calls=(ToolCall(_WORD, {"a": 1}, _LONG_ID),))
    result = Message("tool", _RESULT, name=_WORD, tool_call_id=_LONG_ID)
    chat = Chat((question, call, result, answer), tools)
    for blank, long_ids, role in product((None, ""), (True, False), _TOOL_ROLES):
        forms = plain._replace(blank=blank, long_ids=long_ids, result_role=role)
        if shows(chat, _WORD, _RESULT, forms=forms):
            return found._replace(calls=True, blank=blank, long_ids=long_ids, result_role=role)
    return found


class _Ids:
    """Ids of calls and of their results, in the order in which they come."""

    def __init__(self, keep: bool) -> None:
        self._keep = keep
        self._count = 0
        self._open: list[str] = []
        self._new: dict[str, str] = {}

    def of_call(self, given: str | None) -> str:
        self._count += 1
        # Nine letters and digits: what the strictest templates ask for.
        made = f"call{self._count:05d}"
        fits = self._keep or (given and len(given) == len(made) and given.isalnum())
        chosen = given if given and fits else made
        if given:
            self._new[given] = chosen
        self._open.append(chosen)
        return chosen

    def of_result(self, given: str | None) -> str:
        chosen = self._new.get(given, given) if given else None
        if chosen is None or not (self._keep or chosen in self._open):
            chosen = self._open[0] if self._open else "call00000"
        if chosen in self._open:
            self._open.remove(chosen)
        return chosen


def _turn(message: Message, forms: Forms, ids: _Ids) -> Turn:
    if message.role == "tool":
        return _result(message, forms, ids)
    role = "system" if message.role == "developer" and not forms.developer else message.role
    content, calls = message.content, message.tool_calls
    if calls and not forms.calls:
        content = "\n".join([*([content] if content else []), *map(_call_text, calls)])
        calls = ()
    if message.reasoning and not forms.reasoning:
        thought = f"<think>\n{message.reasoning}\n</think>"
        content = f"{thought}\n\n{content}" if content else thought
    turn = Turn(role=role, content=content if content or not calls else forms.blank)
    turn.reasoned = bool(message.reasoning) and forms.reasoning
    turn.body = "" if calls else content.strip()
    if message.reasoning and forms.reasoning:
        turn.update(dict.fromkeys(_REASONING, message.reasoning))
    if calls:
        turn["tool_calls"] = [_call(call, ids) for call in calls]
    return turn


def _result(message: Message, forms: Forms, ids: _Ids) -> Turn:
    used = ids.of_result(message.tool_call_id)
    if forms.result_role is None:
        turn = Turn(role="user", content=f"<tool_response>\n{message.content}\n</tool_response>")
    else:
        turn = Turn(role=forms.result_role, content=message.content, tool_call_id=used)
        if message.name:
            turn["name"] = message.name
    turn.body, turn.reasoned = turn["content"], False
    return turn


def _call(call: ToolCall, ids: _Ids) -> dict[str, Any]:
    function = {"name": call.name, "arguments": Arguments(call.arguments)}
    return {"id": ids.of_call(call.id), "type": "function", "function": function}


def _call_text(call: ToolCall) -> str:
    return f"<tool_call>\n{_json({'name': call.name, 'arguments': call.arguments})}\n</tool_call>"


def _tools_text(tools: Sequence[Mapping[str, Any]]) -> str:
    lines = "\n".join(map(_json, tools))
    return f"Tools, one JSON object a line:\n{lines}"


def _with_system(turns: list[Turn], text: str) -> list[Turn]:
    """Turns with this text at the end of the system message."""
    if turns and turns[0]["role"] in ("system", "developer"):
        given = turns[0]["content"]
        turns[0]["content"] = f"{given}\n\n{text}" if given else text
        return turns
    return [_plain("system", text), *turns]


def _without_system(turns: list[Turn]) -> list[Turn]:
    """Turns whose system messages stand in front of the next question."""
    kept: list[Turn] = []
    waiting: list[str] = []
    for turn in turns:
        if turn["role"] == "system":
            waiting.append(turn["content"])
            continue
        if waiting and turn["role"] != "user":
            kept.append(_plain("user", "\n\n".join(waiting)))
            waiting = []
        if waiting:
            turn["content"] = "\n\n".join([*waiting, turn["content"]])
            waiting = []
        kept.append(turn)
    return kept


def _plain(role: str, content: str) -> Turn:
    turn = Turn(role=role, content=content)
    turn.body, turn.reasoned, turn.answer, turn.wanted = content, False, False, False
    return turn


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
