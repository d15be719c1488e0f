"""A file of another tool on its way to a workload, and what became of each of its keys.

Every leaf of the source ends as exactly one of: carried, approximated, left (with the reason), or
unset, since it says nothing. Whatever no rule spoke about is left and said, so a key cannot get
lost. A leaf is a value that is no mapping and no list of mappings, named by its dotted path.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from tunewright.contract.failures import UserError

Outcome = Literal["carried", "approximated", "left", "unset"]


NOT_KNOWN = "not known to the importer"


class Note(NamedTuple):
    """What became of a key of the source, or of all keys below it.

    to: where in the workload its value went, None where nothing had to be written; why: what was
    changed or the reason, empty for a value that means the same there.
    """

    key: str
    outcome: Outcome
    to: str | None
    why: str


@dataclass
class Draft:
    """What the source says, what has been made of it so far, and the notes about both."""

    source: Mapping[str, Any]
    name: str
    fields: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    recipe: str = "fsdp"

    def get(self, key: str, default: Any = None) -> Any:
        """The value at a dotted path of the source; the default where it is not there or empty."""
        found: Any = self.source
        for part in key.split("."):
            if isinstance(found, Mapping):
                found = found.get(part)
            elif isinstance(found, list) and part.isdigit() and int(part) < len(found):
                found = found[int(part)]
            else:
                return default
        return default if empty(found) else found

    def carry(self, key: str, to: str, value: Any, comment: str = "") -> None:
        """Write a value that means the same; `to` names a parameter."""
        self._write(to, value, comment)
        self.notes.append(Note(key, "carried", f"parameters.{to}", comment))

    def approximate(self, key: str, to: str, value: Any, why: str) -> None:
        """Write the nearest there is, and say what is different."""
        self._write(to, value, why)
        self.notes.append(Note(key, "approximated", f"parameters.{to}", why))

    def into(self, key: str, to: str, why: str = "", changed: bool = False) -> None:
        """Note a value that the caller writes, as a part of the parameter `to`."""
        outcome: Outcome = "approximated" if changed else "carried"
        self.notes.append(Note(key, outcome, f"parameters.{to}", why))

    def same(self, key: str, why: str) -> None:
        """Nothing to write: a run of ours does this anyhow."""
        self.notes.append(Note(key, "carried", None, why))

    def differs(self, key: str, why: str) -> None:
        """Nothing to write, but a run of ours does it another way."""
        self.notes.append(Note(key, "approximated", None, why))

    def leave(self, key: str, why: str) -> None:
        self.notes.append(Note(key, "left", None, why))

    def assume(self, to: str, value: Any, why: str) -> None:
        """Write what the source's tool does when its file says nothing, where ours would not."""
        if to not in self.parameters:
            self._write(to, value, why)

    def open_leaves(self) -> Iterator[tuple[str, Any]]:
        """The leaves that no note speaks about yet."""
        spoken = {note.key for note in self.notes}
        for key, value in leaves(self.source):
            if not any(part in spoken for part in _upwards(key)):
                yield key, value

    def finish(self) -> None:
        """Note the rest: what is empty as unset, and what no rule knows as left."""
        for key, value in [*self.open_leaves()]:
            if empty(value):
                self.notes.append(Note(key, "unset", None, "says nothing"))
            else:
                self.leave(key, NOT_KNOWN)

    def _write(self, to: str, value: Any, comment: str) -> None:
        self.parameters[to] = value
        if comment:
            self.comments[f"parameters.{to}"] = comment


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its dotted path, in the order of the file."""
    parts: Iterator[tuple[Any, Any]] | None = None
    if isinstance(value, Mapping) and value:
        parts = iter(value.items())
    elif isinstance(value, list) and any(isinstance(part, Mapping) for part in value):
        parts = iter(enumerate(value))
    if parts is None:
        yield path, value
        return
    for key, part in parts:
        yield from leaves(part, f"{path}.{key}" if path else str(key))


def empty(value: Any) -> bool:
    """Whether a value says nothing, like `wandb_project:` with nothing behind it."""
    return value is None or (isinstance(value, str | list | Mapping) and not value)


def shown(value: Any) -> str:
    """A value of the source in at most 60 characters, as YAML has it."""
    words = {True: "true", False: "false"}
    text = words[value] if isinstance(value, bool) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= 60 else text[:57] + "..."


def required(draft: Draft, key: str, why: str) -> Any:
    """The value of a key that nothing can be made without."""
    if (found := draft.get(key)) is None:
        raise UserError(f"{draft.name}: {key} is not set; {why}")
    return found


def _upwards(key: str) -> Iterator[str]:
    """a.b.c, a.b, a."""
    while key:
        yield key
        key = key.rpartition(".")[0]
