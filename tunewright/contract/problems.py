"""What pydantic finds wrong, in words a user can act on: dotted path, reason, way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from tunewright.contract.failures import Problem

_WORDS = {
    "string_type": "must be text",
    "string_sub_type": "must be text",
    "string_unicode": "must be text that UTF-8 can hold",
    "string_too_short": "must not be empty",
    "string_too_long": "must have at most {max_length} characters",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must be a smaller number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be a mapping of names to values",
    "model_type": "must be a mapping of names to values",
    "model_attributes_type": "must be a mapping of names to values",
    "invalid_key": "must have a name that is text; put quotes around the name",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
}
_QUOTED = "; put quotes around it"
_UNSHOWN = "secrets"
"""A block whose values are not repeated: someone may have put the value of a secret there."""


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
    return ".".join(str(part) for part in path if part != "[key]")


def leaves(annotation: Any) -> list[Any]:
    """The plain types in an annotation: [int, NoneType] of int | None."""
    inner = get_args(annotation)
    return [leaf for part in inner for leaf in leaves(part)] if inner else [annotation]


def without_empty(value: Any) -> Any:
    """A mapping without its empty keys: `key:` with nothing after it is a key that is not there."""
    if not isinstance(value, Mapping):
        return value
    return {key: part for key, part in value.items() if part is not None}


def _problem(
    detail: dict[str, Any], model: type[BaseModel], prefix: Sequence[str | int]
) -> Problem:
    loc = list(detail["loc"])
    path = dotted([*prefix, *loc])
    if detail["type"] == "extra_forbidden":
        return Problem(path, f"unknown key; {nearest(str(loc[-1]), _keys(model, loc[:-1]))}")
    if detail["type"] == "missing":
        return Problem(path, "is required; add it")
    if detail["type"] == "value_error":
        return Problem(path, detail["msg"].removeprefix("Value error, "))
    found = "" if _UNSHOWN in path.split(".")[:1] else f" (found {_short(detail['input'])})"
    return Problem(path, _words(detail) + found)


def _words(detail: Mapping[str, Any]) -> str:
    words = _WORDS.get(detail["type"], "is not what belongs here")
    facts = {key: _fact(fact) for key, fact in (detail.get("ctx") or {}).items()}
    scalar = isinstance(detail["input"], bool | int | float | date)
    return words.format_map(facts) + (_QUOTED if scalar and words == "must be text" else "")


def _fact(fact: Any) -> str:
    return f"{fact:g}" if isinstance(fact, float) else str(fact).replace("'", "")


def _short(value: Any) -> str:
    """A value as its YAML has it, in at most 60 characters."""
    text = {None: "null", True: "true", False: "false"}.get(value) if _is_word(value) else None
    text = text or repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _is_word(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _keys(model: type[BaseModel], loc: Sequence[str | int]) -> set[str]:
    """The keys known at a place below a model, found by walking its fields' types.

    `also_known` of a model names keys that it takes beside its fields.
    """
    for part in loc:
        field = model.model_fields.get(str(part))
        if field is None:
            continue
        models = [
            t for t in leaves(field.annotation) if isinstance(t, type) and issubclass(t, BaseModel)
        ]
        if models:
            model = models[0]
    return {*model.model_fields, *getattr(model, "also_known", ())}
