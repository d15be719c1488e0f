"""Rows as text, with the part that is trained on.

The text is rendered once and holds every special token but the BOS that a tokenizer adds by itself.
Spans are characters of that text, so they do not depend on how it is cut into tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Literal, NamedTuple, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tunewright.contract.failures import DataError
from tunewright.data.examples import Alpaca, BadRow, Example, Message, as_alpaca, as_chat
from tunewright.data.tokenizer import TextTokenizer

ALPACA_PROMPT = "### Instruction:\n{instruction}\n\n"
ALPACA_INPUT = "### Input:\n{input}\n\n"
ALPACA_ANSWER = "### Response:\n"

PLAIN_CHAT = """\
{% for message in messages %}### {{ message.role | capitalize }}:
{{ message.content }}{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}


{% endfor %}{% if add_generation_prompt %}### Assistant:
{% endif %}"""
"""The chat template for a tokenizer that has none: it needs no token but the end token."""

CLOCK = datetime(2026, 1, 1)
"""The day a template sees that asks for one: the same rows must give the same tokens tomorrow."""


class Rendered(NamedTuple):
    """Text and the characters (start, end) that are supervised; `bos`: put the BOS before it."""

    text: str
    spans: tuple[tuple[int, int], ...]
    bos: bool


Render = Callable[[Example], Rendered]


def template_of(example: Example, template: Literal["auto", "alpaca", "chat"]) -> str:
    """The template an example is rendered with: alpaca or chat."""
    if template != "auto":
        return template
    return "alpaca" if isinstance(example, Alpaca) else "chat"


def chat_template_of(tokenizer: TextTokenizer) -> str:
    """The tokenizer's own chat template, or ours, with a BOS where the tokenizer adds one."""
    if tokenizer.chat_template is not None:
        return tokenizer.chat_template
    return ("{{ bos_token }}" if tokenizer.adds_bos else "") + PLAIN_CHAT


class AlpacaText:
    """The well-known Alpaca text, closed by the end token."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._eos = tokenizer.eos
        self._bos = tokenizer.adds_bos

    def __call__(self, example: Example) -> Rendered:
        row = as_alpaca(example)
        prompt = ALPACA_PROMPT.format(instruction=row.instruction)
        prompt += ALPACA_INPUT.format(input=row.input) if row.input else ""
        prompt += ALPACA_ANSWER
        text = prompt + row.output + self._eos
        return Rendered(text, ((len(prompt), len(text)),), self._bos)


class ChatText:
    """A conversation by a chat template; an answer's span is found by rendering what precedes it.

    No BOS is added: a template writes its own.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        if tokenizer.chat_template is None:
            _ = tokenizer.eos  # our template needs it, an error says so
        self._specials = dict(tokenizer.special_tokens)
        try:
            self._template = _environment().from_string(chat_template_of(tokenizer))
        except jinja2.TemplateError as error:
            raise DataError(f"the chat template of {tokenizer.name} is broken: {error}") from error

    def __call__(self, example: Example) -> Rendered:
        messages = as_chat(example).messages
        text = self._text(messages)
        spans = tuple(
            self._span(text, messages, turn) for turn, m in enumerate(messages) if m.answer
        )
        return Rendered(text, spans, False)

    def _span(self, text: str, messages: Sequence[Message], turn: int) -> tuple[int, int]:
        """From the end of the generation prompt to the end token of the answer."""
        closed = text if turn == len(messages) - 1 else self._text(messages[: turn + 1])
        if not text.startswith(closed):
            raise BadRow(
                "the chat template rewrites earlier turns",
                f"what follows message {turn + 1} changes its text",
            )
        start = self._start(closed, messages, turn)
        # A line break after the end token is the template's, no model is asked to write it.
        return start, max(start, len(closed.rstrip()))

    def _start(self, closed: str, messages: Sequence[Message], turn: int) -> int:
        prompt = self._prompt(messages[:turn])
        if prompt is not None and closed.startswith(prompt):
            return len(prompt)
        # The generation prompt holds more than a finished turn keeps, such as an opened thought.
        before = self._prompt(messages[:turn], add_generation_prompt=False)
        floor = len(before) if before is not None and closed.startswith(before) else 0
        found = closed.rfind(messages[turn].content.strip(), floor)
        if found < 0:
            raise BadRow("the chat template changes the answer", f"message {turn + 1}")
        return found

    def _prompt(
        self, messages: Sequence[Message], add_generation_prompt: bool = True
    ) -> str | None:
        """What precedes an answer; None where the template cannot render so little."""
        try:
            return self._text(messages, add_generation_prompt)
        except BadRow:
            return None

    def _text(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        turns = [{"role": m.role, "content": m.content} for m in messages]
        try:
            return self._template.render(
                messages=turns,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._specials,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            raise BadRow("the chat template refuses it", str(error)) from error


def renderers(tokenizer: TextTokenizer, templates: Sequence[str]) -> dict[str, Render]:
    """The renderers of the templates in use, by name."""
    makers: dict[str, Callable[[TextTokenizer], Render]] = {"alpaca": AlpacaText, "chat": ChatText}
    return {name: makers[name](tokenizer) for name in templates}


def template_text(tokenizer: TextTokenizer, template: str) -> str:
    """What stands for a template in the fingerprint."""
    if template == "alpaca":
        return ALPACA_PROMPT + ALPACA_INPUT + ALPACA_ANSWER
    return chat_template_of(tokenizer)


class _Generation(Extension):
    """Templates may mark answers with {% generation %}; for the text the mark means nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja reads it from the class

    def parse(self, parser: Parser) -> Node | list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as chat templates know it from transformers: same filters, same functions."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = CLOCK.strftime
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
