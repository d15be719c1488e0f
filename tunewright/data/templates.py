"""Chat templates: Jinja in a sandbox, with the globals of transformers, and where each turn begins.

A template is compiled once. While it is parsed, every loop over messages gets a call that writes a
mark in front of what the loop writes for a message, and every `{% generation %}` block gets a mark
at both ends. The marks are taken out of the text again, so one rendering gives the text and the
place of every turn. Marks stand only where a template writes straight to its output, never inside
a macro or a `{% set %}` block, so they cannot change what it writes. They are halves of surrogate
pairs, which no text that can be encoded holds.

The built-in template, for models without one (`template: builtin` forces it), needs no token but
the end token. Each message is a heading and its text, two line breaks apart:

    ### System: / ### Developer:    the text
    ### Tools:                      one JSON object a line, before the first message
    ### User:                       the text
    ### Assistant:                  <think> reasoning </think>, the text, <tool_call> JSON
                                    </tool_call> for each call, and the end token
    ### Tool:                       the result
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tunewright.contract.failures import UserError
from tunewright.data.examples import BadRow
from tunewright.data.tokenizer import TextTokenizer

BUILTIN = """\
{% if tools %}### Tools:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}

{% endif %}{% for message in messages %}### {{ message.role | capitalize }}:
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>
{% endif %}{{ message.content }}{% for call in message.tool_calls or [] %}
{% if message.content or not loop.first %}

{% endif %}<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}


{% endfor %}{% if add_generation_prompt %}### Assistant:
{% endif %}"""

CLOCK = datetime(2026, 1, 1)
"""The day a template sees that asks for one: the same rows must give the same tokens tomorrow."""

_OPEN, _CLOSE = "\ud800", "\udfff"
_MARK = re.compile(f"{_OPEN}([^{_CLOSE}]*){_CLOSE}")
_EDGE = -1
_BUFFERED = (nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock)
"""What they hold is text that a template may still change."""


class Turn(dict[str, Any]):
    """A message as a template sees it, and what is known of it beside.

    number: its place among the turns, from 0. body: the text that its rendering should end with,
    before whatever closes the turn; empty where tool calls end it. reasoned: it has reasoning that
    the template is shown. answer, wanted: see `Message.answer`, and whether it is supervised now.
    """

    number: int
    body: str
    reasoned: bool
    answer: bool
    wanted: bool


class Marked(NamedTuple):
    """A rendering. starts: where the template begins each turn, by number, and where what it wrote
    there ends; empty where no loop shows that. generation: characters inside generation markers."""

    text: str
    starts: Mapping[int, tuple[int, int]]
    generation: Sequence[tuple[int, int]]


class Template:
    """A compiled chat template with the special tokens it may write."""

    def __init__(self, source: str, specials: Mapping[str, str]) -> None:
        """Raises UserError when the source is not a template."""
        self.source = source
        self._specials = dict(specials)
        environment = _environment()
        try:
            self._compiled = environment.from_string(_marked(environment, source))
        except jinja2.TemplateError as error:
            line = getattr(error, "lineno", None)
            raise UserError(
                f"the chat template is broken{f' (line {line})' if line else ''}: {_line(error)}; "
                "mend it, or set chat_template, or template: builtin"
            ) from error

    def render(
        self, turns: Sequence[Turn], tools: Sequence[Any] | None = None, prompt: bool = False
    ) -> Marked:
        """The text of turns; `prompt`: with what invites the next answer. Raises BadRow."""
        try:
            found = self._compiled.render(
                messages=list(turns),
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=prompt,
                **self._specials,
            )
        except Exception as error:  # a template can raise anything
            raise BadRow("the chat template refuses it", _line(error)) from error
        return _read_marks(found)


def chat_template_of(tokenizer: TextTokenizer, chat_template: str | None = None) -> str:
    """The Jinja text for conversations: the workload's (text or path), the tokenizer's, or ours.

    Ours gets a BOS where the tokenizer adds one. Raises UserError for a path that cannot be read.
    """
    if chat_template is not None:
        return _given(chat_template)
    return tokenizer.chat_template or builtin_of(tokenizer)


def builtin_of(tokenizer: TextTokenizer) -> str:
    """The built-in template for this tokenizer; raises UserError where it has no end token."""
    _ = tokenizer.eos
    return ("{{ bos_token }}" if tokenizer.adds_bos else "") + BUILTIN


def _given(chat_template: str) -> str:
    if "{{" in chat_template or "{%" in chat_template:
        return chat_template
    path = Path(chat_template.strip()).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise UserError(
            f"chat_template {path} cannot be read ({reason}); "
            "give a file that is there, or Jinja text, which holds {{ or {%"
        ) from error


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as chat templates know it from transformers: same filters, same functions."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = CLOCK.strftime
    environment.globals["_mark"] = _mark
    return environment


class _Generation(Extension):
    """Templates may mark answers with {% generation %}; the block becomes a scope."""

    tags = {"generation"}  # noqa: RUF012 - jinja reads it from the class

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _marked(environment: jinja2.Environment, source: str) -> nodes.Template:
    """The parsed template with calls that write the marks."""
    tree = environment.parse(source)
    for number, node in enumerate(_plain(tree)):
        if isinstance(node, nodes.For) and isinstance(node.target, nodes.Name):
            node.body.insert(0, _call(nodes.Name(node.target.name, "load"), number))
        elif isinstance(node, nodes.Scope):
            node.body.insert(0, _call(nodes.Const("<"), _EDGE))
            node.body.append(_call(nodes.Const(">"), _EDGE))
    tree.set_environment(environment)
    return tree


def _plain(node: nodes.Node) -> Iterator[nodes.Node]:
    """All nodes that write straight to the output."""
    for child in node.iter_child_nodes():
        if not isinstance(child, _BUFFERED):
            yield from _plain(child)
            yield child


def _call(argument: nodes.Expr, place: int) -> nodes.Output:
    function = nodes.Name("_mark", "load")
    return nodes.Output([nodes.Call(function, [argument, nodes.Const(place)], [], None, None)])


def _mark(value: Any, place: int) -> str:
    """The mark of a turn or of the edge of a generation block; nothing for other loops' items."""
    if isinstance(value, Turn):
        return f"{_OPEN}{place} {value.number}{_CLOSE}"
    return f"{_OPEN}{value}{_CLOSE}" if place == _EDGE else ""


def _read_marks(rendered: str) -> Marked:
    """A rendering with its marks taken out."""
    pieces = _MARK.split(rendered)
    text = "".join(pieces[::2])
    loops: dict[str, list[tuple[int, int]]] = {}
    generation: list[tuple[int, int]] = []
    position, opened = len(pieces[0]), 0
    for mark, piece in zip(pieces[1::2], pieces[2::2], strict=True):
        if mark == "<":
            opened = position
        elif mark == ">":
            generation.append((opened, position))
        else:
            place, number = mark.split()
            loops.setdefault(place, []).append((int(number), position))
        position += len(piece)
    return Marked(text, _starts(loops.values(), len(text)), generation)


def _starts(loops: Iterable[list[tuple[int, int]]], length: int) -> Mapping[int, tuple[int, int]]:
    """The turns of the loop that writes them: forward, each once, over most of the text.

    Templates loop over messages for other reasons too, such as finding the last question.
    """
    best: list[tuple[int, int]] = []
    extent = 0
    for marks in loops:
        numbers = [number for number, _ in marks]
        written = length - marks[0][1]
        forward = all(a < b for a, b in pairwise(numbers))
        apart = len(marks) == 1 or marks[-1][1] > marks[0][1]
        if forward and apart and written > 0 and (len(marks), written) > (len(best), extent):
            best, extent = marks, written
    ends = [position for _, position in [*best[1:], (0, length)]]
    return {number: (at, end) for (number, at), end in zip(best, ends, strict=False)}


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _line(error: Exception) -> str:
    lines = str(error).split()
    return " ".join(lines).rstrip(".") if lines else type(error).__name__
