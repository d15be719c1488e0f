"""Rules for single keys: a table maps a key, or a pattern of keys, to what is done with its value.

The first entry whose pattern fits a leaf is taken; patterns are those of shells, `wandb_*`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from flows.importing.draft import Draft, empty, shown
from tunewright.contract.failures import UserError

Rule = Callable[[Draft, str, Any], None]
Convert = Callable[[Any], Any]
OFF = (False, 0, "no", "none", "off", "disabled")
"""What says that a feature is not used, so that nothing is missing without it."""
UNUSED = "not used there, and not here"


class BadValue(ValueError):
    """A value that cannot be what its key needs; the message names it."""


def to(field: str, convert: Convert = lambda value: value, why: str = "") -> Rule:
    """The parameter `field`; with `why` it is an approximation."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        found = convert(value)
        if why:
            draft.approximate(key, field, found, why)
        else:
            draft.carry(key, field, found, "" if key == field else f"{key} there")

    return rule


def same(why: str) -> Rule:
    """Nothing to do: a run of ours does it whatever the value is."""
    return lambda draft, key, value: draft.same(key, why)


def left(why: str, off: tuple[Any, ...] = OFF) -> Rule:
    """Not carried over, unless the value is one of `off`: not used, or what a run of ours does."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        if is_off(value, off):
            draft.same(key, UNUSED if is_off(value) else "the same here")
        else:
            draft.leave(key, why)

    return rule


def apply(draft: Draft, table: Mapping[str, Rule]) -> None:
    """Apply the table's rule to each leaf that no note speaks about yet and that says something."""
    for key, value in [*draft.open_leaves()]:
        rule = table.get(key) or next((r for p, r in table.items() if fnmatchcase(key, p)), None)
        if rule is None or empty(value):
            continue
        try:
            rule(draft, key, value)
        except BadValue as error:
            draft.leave(key, str(error))


def refuse(draft: Draft, tool: str, table: Mapping[str, str | Mapping[Any, str]]) -> None:
    """Raise UserError when the source asks for a method that is not here, naming key and value.

    A table's entry is the reason for any value that is not off, or a mapping of values to reasons.
    """
    found = []
    for key, known in table.items():
        value = draft.get(key)
        if value is None:
            continue
        if isinstance(known, str) and is_off(value):
            draft.same(key, UNUSED)
        elif reason := known if isinstance(known, str) else _of_value(known, value):
            found.append(f"{key}: {_named(value)} ({reason})")
    if found:
        raise refusal(draft, tool, "; ".join(found))


def refusal(draft: Draft, tool: str, what: str) -> UserError:
    return UserError(
        f"{draft.name} cannot be imported: {tool}'s {what}. "
        "Tunewright fine-tunes all weights or LoRA adapters on texts, and prompts with answers"
    )


def is_off(value: Any, off: tuple[Any, ...] = OFF) -> bool:
    return isinstance(value, str | int | float) and value in off


def read(draft: Draft, key: str, convert: Convert, default: Any = None) -> Any:
    """The value of a key that much depends on; raises UserError when it is no such value."""
    value = draft.get(key, default)
    try:
        return None if value is None else convert(value)
    except BadValue as error:
        raise UserError(f"{draft.name}: {key}: {error}; mend it there") from None


def whole(value: Any) -> int:
    """A whole number, also as text."""
    found = number(value)
    if not found.is_integer():
        raise BadValue(f"{shown(value)} is not a whole number")
    return int(found)


def number(value: Any) -> float:
    """A finite number, also as text: `2e-5` is text to YAML."""
    try:
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            found = float(value)
            if math.isfinite(found):
                return found
    except (ValueError, OverflowError):
        pass
    raise BadValue(f"{shown(value)} is not a number")


def text(value: Any) -> str:
    """Text; a number counts, since names may be numbers to YAML."""
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    raise BadValue(f"{shown(value)} is not text")


def words(value: Any) -> list[str]:
    """A list of text, or text with commas."""
    found = value if isinstance(value, list) else text(value).split(",")
    named = [text(part).strip() for part in found]
    if not all(named):
        raise BadValue(f"{shown(value)} names nothing in one place")
    return named


def mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadValue(f"{shown(value)} is not a mapping of names to values")
    return value


def mappings(value: Any) -> list[Any]:
    if not isinstance(value, list) or not all(isinstance(part, dict) for part in value):
        raise BadValue(f"{shown(value)} is not a list of mappings")
    return value


def _named(value: Any) -> str:
    """A value in a message; of a block only what it makes."""
    if not isinstance(value, Mapping):
        return shown(value)
    return shown(value.get("_component_", "{…}"))


def _of_value(reasons: Mapping[Any, str], value: Any) -> str | None:
    return reasons.get(value) if isinstance(value, str | int | bool) else None
