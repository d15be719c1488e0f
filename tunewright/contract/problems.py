"""What pydantic finds wrong, in words a user can act on: dotted path, reason, way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from tunewright.contract.failures import Problem

_WORDS = {
    "string_type": "must be text; put quotes around it",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be a mapping of names to values",
    "model_type": "must be a mapping of names to values",
    "missing": "is required; add it",
}


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean x?` for a typo, else the list of what is known."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]}?"
    return f"known here: {', '.join(known)}" if known else "nothing is known here"


def problems_of(
    error: ValidationError, model: type[BaseModel], prefix: Sequence[str | int] = ()
) -> list[Problem]:
    """Every finding of a pydantic error as a Problem, in the order of the model's fields."""
    return [_problem(dict(detail), model, prefix) for detail in error.errors()]


def dotted(path: Iterable[str | int]) -> str:
    """("a", 0, "b") as a.0.b, the form --set takes."""
    return ".".join(str(part) for part in path)


def _problem(
    detail: dict[str, Any], model: type[BaseModel], prefix: Sequence[str | int]
) -> Problem:
    loc = list(detail["loc"])
    path = dotted([*prefix, *loc])
    if detail["type"] == "extra_forbidden":
        return Problem(path, f"unknown key; {nearest(str(loc[-1]), _keys(model, loc[:-1]))}")
    if detail["type"] == "missing":
        return Problem(path, _WORDS["missing"])
    words = _WORDS.get(detail["type"]) or _plain(detail["msg"])
    if detail["type"] == "value_error":
        return Problem(path, words)
    return Problem(path, f"{words} (found {_short(detail.get('input'))})")


def _plain(message: str) -> str:
    message = message.removeprefix("Value error, ")
    return message[:1].lower() + message[1:] if message.startswith("Input ") else message


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _keys(model: type[BaseModel], loc: Sequence[str | int]) -> set[str]:
    """The keys known at a place below a model, found by walking its fields' types."""
    for part in loc:
        field = model.model_fields.get(str(part))
        if field is None:
            continue
        models = [
            t
            for t in _flatten(field.annotation)
            if isinstance(t, type) and issubclass(t, BaseModel)
        ]
        if models:
            model = models[0]
    return set(model.model_fields)


def _flatten(annotation: Any) -> list[Any]:
    inner = get_args(annotation)
    return [leaf for part in inner for leaf in _flatten(part)] if inner else [annotation]
