"""Which characters of a rendered conversation are supervised.

An answer begins where the text that invites it ends: the rendering of what precedes it, with the
generation prompt, is a prefix of the whole text. What stands between the mark of the turn and that
place is the turn's heading; it depends on the template and the role before, so it is learnt from
the first rows and from then on only compared, and a row is rendered once. Where no prefix fits,
because the template rewrites earlier turns, the generation prompt alone is looked for at the mark.

An answer ends with the token that ends the assistant's turn:

    the template closes the turn           what closes it, such as <|im_end|>; not the line break
                                           behind it, which no model is asked to write
    the next role's marker closes it       the first token of that marker
    nothing closes the last turn           that marker, or the end token, is added to the text

A template may rewrite earlier turns: drop their reasoning (Qwen3, gpt-oss) or close them in another
way. An answer is supervised as it stands in the text, which is what the model will see of it; no
token is supervised that is not there. So only the last answers teach the reasoning that such a
template drops. Rows that end at an answer, or a template that keeps reasoning, teach all of it.
What closes an earlier turn but would not end an answer (<|end|> where gpt-oss ends with <|return|>)
is not supervised: a model that learnt it would not stop.

Not supervised: the heading, an opened or empty thought that the template puts there by itself, and
turns that the template leaves out. Generation markers in a template say where answers begin; an end
that they leave out is added.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from tunewright.data.examples import BadRow
from tunewright.data.templates import Marked, Template, Turn
from tunewright.data.tokenizer import TextTokenizer

Span = tuple[int, int]

_TAG = r"[<\[][|\uff5c]?/?[\w:]*think\w*[|\uff5c]?[>\]]"
_EMPTY_THOUGHT = re.compile(rf"\s*(?:{_TAG}\s*){{1,2}}", re.IGNORECASE)
_OPENED_THOUGHT = re.compile(rf"(?:{_TAG}\s*){{1,2}}$", re.IGNORECASE)
_SPACE = re.compile(r"\s*")
_KEPT = 32
"""Characters at the end of an answer that must be in the text, whatever the template does to it."""


class Found(NamedTuple):
    """The text of a conversation and the supervised characters of each turn, by its number."""

    text: str
    spans: dict[int, list[Span]]


class _Row(NamedTuple):
    turns: Sequence[Turn]
    tools: Sequence[Any]
    marked: Marked

    @property
    def text(self) -> str:
        return self.marked.text


class Answers:
    """Finds the answers in what one template renders, and learns its headings on the way."""

    def __init__(self, template: Template, tokenizer: TextTokenizer) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._special = _special_tokens(tokenizer)
        self._headings: dict[tuple[str, bool], list[str]] = {}
        self._ending = _behind_answer(template)[0].strip()
        self._earlier_ending = _behind_answer(template, "user")[0].strip()
        self._added: dict[str, str] = {}

    def find(self, turns: Sequence[Turn], tools: Sequence[Any]) -> Found:
        """Render turns and find those that are wanted.

        Raises BadRow where the template refuses the turns or leaves nothing of an answer, and
        UserError where an end token has to be added and the tokenizer has none.
        """
        row = _Row(turns, tools, self._template.render(turns, tools))
        spans = {turn.number: self._spans(row, turn) for turn in turns if turn.wanted}
        return self._closed(row, spans)

    def _spans(self, row: _Row, turn: Turn) -> list[Span]:
        """The characters of one answer; none where the template leaves it out."""
        begin, stop = self._region(row, turn)
        start = _behind_thought(row.text, self._start(row, turn, begin, stop), turn)
        if not row.text[start:stop].strip():
            return []
        end = self._end(row, turn, start, stop)
        inside = [(a, b) for a, b in row.marked.generation if begin <= a < b <= stop]
        if not inside:
            return [(start, end)]
        # The author's marks, but for an empty thought and an end that they leave out.
        first, last = inside[0], inside[-1]
        inside[0] = (_behind_thought(row.text, first[0], turn), first[1])
        inside[-1] = (inside[-1][0], max(last[1], end))
        return [(a, b) for a, b in inside if a < b]

    def _region(self, row: _Row, turn: Turn) -> Span:
        """Where a turn is in the text, heading included: by its mark, else by prefixes."""
        found = row.marked.starts.get(turn.number)
        if found is not None:
            return found
        begin = self._length(row, turn.number)
        last = turn.number == len(row.turns) - 1
        stop = len(row.text) if last else self._length(row, turn.number + 1)
        if begin is not None and stop is not None and begin < stop:
            return begin, stop
        at = row.text.rfind(turn.body) if last else row.text.find(turn.body)
        if at < 0 or not turn.body:
            raise BadRow("the chat template changes the answer", f"message {turn.number + 1}")
        return at, len(row.text) if last else at + len(turn.body)

    def _length(self, row: _Row, count: int) -> int | None:
        """The length of the first turns in the text; None where they read otherwise alone."""
        try:
            before = self._template.render(row.turns[:count], row.tools).text.rstrip()
        except BadRow:
            return None
        return len(before) if row.text.startswith(before) else None

    def _start(self, row: _Row, turn: Turn, begin: int, stop: int) -> int:
        """Where the heading of a turn ends."""
        before = row.turns[turn.number - 1]["role"] if turn.number else ""
        key = (before, bool(row.tools))
        known = self._headings.get(key, [])
        fits = _first(known, row.text, begin)
        if fits is None:
            learnt = self._learn(row, turn, begin)
            # The longest first: a heading with an opened thought begins like the one without.
            known = sorted({*known, *learnt}, key=len, reverse=True)
            self._headings[key] = known
            fits = _first(known, row.text, begin)
        if fits:
            return begin + len(fits)
        return _unasked(row.text, turn, begin, stop)

    def _learn(self, row: _Row, turn: Turn, begin: int) -> list[str]:
        """What a template writes at a turn's place before the model goes on: with what it opens
        for the model, such as a thought, and without, since that need not stay once a turn is over.
        """
        before = row.turns[: turn.number]
        try:
            prompt = self._template.render(before, row.tools, prompt=True).text
            history = self._template.render(before, row.tools).text
        except BadRow:
            return []
        if prompt == history:
            return [""]
        if row.text.startswith(prompt) and len(prompt) >= begin:
            heading = row.text[begin : len(prompt)]
        else:
            heading = prompt[len(history) :] if prompt.startswith(history) else ""
        # A space at the end of a prompt becomes part of the answer's first token.
        found = [heading.rstrip(" "), _OPENED_THOUGHT.sub("", heading).rstrip(" ")]
        return [heading for heading in found if heading]

    def _end(self, row: _Row, turn: Turn, start: int, stop: int) -> int:
        """Behind what ends an answer; behind its last character where nothing does yet."""
        written = row.text[start:stop].rstrip()
        end = start + len(written)
        closing = self._closing(written, turn)
        if closing:
            return end if self._ends(closing) else end - len(closing)
        at = _behind_space(row.text, end)
        if at == len(row.text):
            return end
        marker = self._special.match(row.text, at)
        return marker.end() if marker else at + 1

    def _closing(self, written: str, turn: Turn) -> str:
        """What stands behind an answer in what the template writes for its turn."""
        if not turn.body:
            return self._ending
        for ending in (self._ending, self._earlier_ending, ""):
            if written.endswith(ending) and _bare(written, ending).endswith(turn.body):
                return ending
        # A template may drop a thought from an answer or set its spaces anew; its end stays.
        for kept in (turn.body[-_KEPT:], turn.body.split()[-1][-_KEPT:]):
            _, found, closing = written.rpartition(kept)
            if found:
                return closing.strip()
        raise BadRow("the chat template changes the answer", f"message {turn.number + 1}")

    def _ends(self, closing: str) -> bool:
        """Whether a model that writes this has ended its answer.

        Not where the template ends last answers in another way, as gpt-oss does: <|return|> ends an
        answer, and what stands in earlier turns instead, <|end|>, would let the model go on.
        """
        return self._ending.startswith(closing) or closing.endswith(self._ending)

    def _closed(self, row: _Row, spans: dict[int, list[Span]]) -> Found:
        """The text with an end for the last answer, where the template gives it none."""
        turn, text = row.turns[-1], row.text
        if not turn.answer:
            return Found(text, spans)
        own = spans[turn.number] if turn.wanted else self._spans(row, turn)
        if not own:
            return Found(text, spans)
        end = own[-1][1]
        if self._closing(text[own[0][0] : end].rstrip(), turn):
            return Found(text, spans)
        # Space at the end is the template's, unless it is the answer's own.
        if not (turn["content"] and text.endswith(turn["content"])):
            text = text[:end]
        text += self._end_to_add(turn)
        if turn.wanted:
            spans[turn.number] = [*own[:-1], (own[-1][0], len(text))]
        return Found(text, spans)

    def _end_to_add(self, turn: Turn) -> str:
        """The next role's marker if it is a token that ends turns, else the end token."""
        follows = "tool" if turn.get("tool_calls") else "user"
        if follows not in self._added:
            _, after = _behind_answer(self._template, follows)
            marker = self._special.match(after, _behind_space(after, 0))
            self._added[follows] = after[: marker.end()] if marker else self._tokenizer.eos
        return self._added[follows]


def _first(headings: Sequence[str], text: str, begin: int) -> str | None:
    return next((heading for heading in headings if text.startswith(heading, begin)), None)


def _unasked(text: str, turn: Turn, begin: int, stop: int) -> int:
    """Where an answer starts whose heading no generation prompt tells: at its first words, unless
    only space precedes them."""
    at = text.find(turn.body, begin, stop) if turn.body and not turn.reasoned else -1
    return at if text[begin : max(at, begin)].strip() else begin


def _behind_thought(text: str, start: int, turn: Turn) -> int:
    """Behind a thought that the template puts there by itself: opened or empty."""
    found = _EMPTY_THOUGHT.match(text, start)
    if not found or _EMPTY_THOUGHT.match(turn["content"] or ""):
        return start
    return start if turn.reasoned and "/" not in found.group() else found.end()


def _behind_space(text: str, position: int) -> int:
    found = _SPACE.match(text, position)
    return found.end() if found else position


def _behind_answer(template: Template, *roles: str) -> tuple[str, str]:
    """What the template writes behind an answer when messages of these roles follow: as part of the
    answer's turn, and all of it."""
    turns = [Turn(role=role, content="a") for role in ("user", "assistant", *roles)]
    for number, turn in enumerate(turns):
        turn.number = number
    turns[1]["content"] = "qzword"
    try:
        text, starts, _ = template.render(turns)
    except BadRow:
        return "", ""
    at = text.rfind("qzword") + len("qzword")
    if at < len("qzword"):
        return "", ""
    return text[at : starts[1][1] if 1 in starts else len(text)], text[at:]


def _bare(written: str, ending: str) -> str:
    return written.removesuffix(ending).rstrip()


def _special_tokens(tokenizer: TextTokenizer) -> re.Pattern[str]:
    """Matches any token that the tokenizer never cuts, the longest first."""
    added = tokenizer.backend.get_added_tokens_decoder().values()
    texts = sorted((token.content for token in added), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts)) or "(?!)")
