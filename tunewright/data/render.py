"""Examples as text, with the part that is trained on.

The text is rendered once and holds every special token but the BOS that a tokenizer adds by itself
(`Rendered.bos`); it is to be tokenized without adding any. Spans are characters of that text, so
they do not depend on how it is cut into tokens: a token is supervised when it begins in a span.

    alpaca      the well-known Alpaca text and the end token; the answer is supervised
    chat        the workload's chat template, else the tokenizer's, else ours; see masks
    builtin     our chat template, see templates
    completion  prompt, completion and the end token; the last two are supervised
    text        the text and the end token, all supervised

`train_on` is decided here, spans are final: `all` supervises the whole text but answers that the
data excludes (a loss_weight of 0), `last_response` the last answer that the data does not exclude.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from tunewright.data.examples import (
    Alpaca,
    BadRow,
    Chat,
    Completion,
    Example,
    Text,
    as_alpaca,
    as_chat,
)
from tunewright.data.masks import Answers, Span
from tunewright.data.templates import Template, builtin_of, chat_template_of
from tunewright.data.tokenizer import TextTokenizer
from tunewright.data.turns import forms_of, turns_of

__all__ = ["Render", "Rendered", "chat_template_of", "renderers", "template_of", "template_text"]

ALPACA_PROMPT = "### Instruction:\n{instruction}\n\n"
ALPACA_INPUT = "### Input:\n{input}\n\n"
ALPACA_ANSWER = "### Response:\n"

TrainOn = Literal["responses", "all", "last_response"]


class Rendered(NamedTuple):
    """Text and the characters (start, end) that are supervised; `bos`: put the BOS before it."""

    text: str
    spans: tuple[Span, ...]
    bos: bool


Render = Callable[[Example], Rendered]


def template_of(example: Example, template: str, chat_template: str | None = None) -> str:
    """The name of what renders an example: alpaca, chat, builtin, completion or text.

    template: the setting. auto: Alpaca rows get the Alpaca text, unless the workload brings a chat
    template; prompts with completions and plain text need none.
    """
    if isinstance(example, Text):
        return "text"
    if template != "auto":
        return template
    if isinstance(example, Completion):
        return "completion"
    return "alpaca" if isinstance(example, Alpaca) and chat_template is None else "chat"


def renderers(
    tokenizer: TextTokenizer,
    templates: Sequence[str],
    chat_template: str | None = None,
    train_on: TrainOn = "responses",
) -> dict[str, Render]:
    """The renderers by the names that `template_of` gives; chat_template: Jinja text or a path.

    They raise BadRow for an example that they cannot render. Raises UserError for a tokenizer
    without an end token and for a chat template that is broken or cannot be read.
    """
    makers: dict[str, Callable[[], Render]] = {
        "alpaca": lambda: AlpacaText(tokenizer, train_on),
        "chat": lambda: ChatText(tokenizer, train_on, chat_template_of(tokenizer, chat_template)),
        "builtin": lambda: ChatText(tokenizer, train_on, builtin_of(tokenizer)),
        "completion": lambda: CompletionText(tokenizer, train_on),
        "text": lambda: PlainText(tokenizer),
    }
    return {name: makers[name]() for name in templates}


def template_text(tokenizer: TextTokenizer, template: str, chat_template: str | None = None) -> str:
    """What stands for a template in the fingerprint; raises as `renderers` does."""
    if template == "alpaca":
        return ALPACA_PROMPT + ALPACA_INPUT + ALPACA_ANSWER
    if template == "chat":
        return chat_template_of(tokenizer, chat_template)
    return builtin_of(tokenizer) if template == "builtin" else template


class AlpacaText:
    """The well-known Alpaca text, closed by the end token."""

    def __init__(self, tokenizer: TextTokenizer, train_on: TrainOn = "responses") -> None:
        self._close = _Closer(tokenizer, train_on)

    def __call__(self, example: Example) -> Rendered:
        row = as_alpaca(example)
        prompt = ALPACA_PROMPT.format(instruction=row.instruction)
        prompt += ALPACA_INPUT.format(input=row.input) if row.input else ""
        return self._close(prompt + ALPACA_ANSWER, row.output)


class CompletionText:
    """A prompt and its completion as they are, closed by the end token."""

    def __init__(self, tokenizer: TextTokenizer, train_on: TrainOn = "responses") -> None:
        self._close = _Closer(tokenizer, train_on)

    def __call__(self, example: Example) -> Rendered:
        if not isinstance(example, Completion):
            raise BadRow("not a prompt with a completion")
        return self._close(example.prompt, example.completion)


class PlainText:
    """Text as it is, closed by the end token."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._close = _Closer(tokenizer, "all")

    def __call__(self, example: Example) -> Rendered:
        if not isinstance(example, Text):
            raise BadRow("not plain text")
        return self._close("", example.text)


class ChatText:
    """A conversation by a chat template. No BOS is added: a template writes its own."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        train_on: TrainOn = "responses",
        source: str | None = None,
    ) -> None:
        """`source`: Jinja text instead of the tokenizer's own template or ours."""
        template = Template(source or chat_template_of(tokenizer), tokenizer.special_tokens)
        self._forms = forms_of(template)
        self._answers = Answers(template, tokenizer)
        self._train_on = train_on

    def __call__(self, example: Example) -> Rendered:
        chat = as_chat(example)
        turns, tools = turns_of(chat, self._forms, self._wanted(chat))
        text, found = self._answers.find(turns, tools)
        spans = [span for number in found for span in found[number]]
        if self._train_on == "all":
            spans = _outside(spans, len(text))
        return Rendered(text, tuple(spans), False)

    def _wanted(self, chat: Chat) -> list[bool]:
        """The messages whose spans are needed: the supervised ones, under `all` the others."""
        if self._train_on == "all":
            return [m.role == "assistant" and not m.answer for m in chat.messages]
        wanted = [message.answer for message in chat.messages]
        if self._train_on == "last_response" and any(wanted):
            last = max(number for number, answer in enumerate(wanted) if answer)
            wanted = [number == last for number in range(len(wanted))]
        return wanted


class _Closer:
    """A prompt with its answer, which the end token closes."""

    def __init__(self, tokenizer: TextTokenizer, train_on: TrainOn) -> None:
        self._eos = tokenizer.eos
        self._bos = tokenizer.adds_bos
        self._all = train_on == "all"

    def __call__(self, prompt: str, answer: str) -> Rendered:
        text = prompt + answer + self._eos
        return Rendered(text, ((0 if self._all else len(prompt), len(text)),), self._bos)


def _outside(spans: Sequence[Span], length: int) -> list[Span]:
    """What lies between spans, which ascend."""
    starts = [0, *(end for _, end in spans)]
    ends = [*(start for start, _ in spans), length]
    return [(start, end) for start, end in zip(starts, ends, strict=True) if start < end]
