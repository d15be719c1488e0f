"""The workload as a page of YAML with comments, and the notes for a reader."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from flows.importing.draft import Note

WIDTH = 100
_HEADS = {
    "approximated": "approximated:",
    "left": "not carried over:",
}


def yaml_text(document: Mapping[str, Any], comments: Mapping[str, str], head: list[str]) -> str:
    """The document as YAML; `comments` by dotted path, for a key of a block or of the top."""
    lines = [f"# {_plain(line)}" for line in head]
    for key, value in document.items():
        if key in ("compute", "parameters"):
            lines += ["", f"{key}:"]
            for name, part in value.items():
                comment = comments.get(f"{key}.{name}", "")
                lines += [f"  {line}" for line in _entry(name, part, comment, WIDTH - 2)]
        elif key == "command":
            lines += [
                "",
                "command: |",
                *(f"  {line}" for line in value.rstrip("\n").split("\n")),
                "",
            ]
        else:
            lines += _entry(key, value, comments.get(key, ""))
    return "\n".join(lines) + "\n"


def narration(notes: list[Note], needs: list[str]) -> Iterator[str]:
    """What a reader must know, line by line: first what differs, then what stayed behind."""
    for outcome, head in _HEADS.items():
        grouped: dict[str, list[str]] = {}
        for note in notes:
            if note.outcome == outcome:
                where = f" → {note.to}" if note.to else ""
                grouped.setdefault(note.why, []).append(f"{note.key}{where}")
        if grouped:
            yield head
            for why, keys in grouped.items():
                yield f"  {', '.join(dict.fromkeys(keys))}: {why}"
    counts = {outcome: sum(n.outcome == outcome for n in notes) for outcome in ("carried", "unset")}
    yield f"{counts['carried']} keys are carried over, {counts['unset']} are empty"
    for need in needs:
        yield f"needs: {need}"


def _entry(name: str, value: Any, comment: str, width: int = WIDTH) -> list[str]:
    text = yaml.safe_dump({name: value}, sort_keys=False, allow_unicode=True, width=10**6)
    lines = text.rstrip("\n").split("\n")
    comment = _plain(comment)
    if not comment:
        return lines
    if len(lines) == 1 and len(lines[0]) + len(comment) + 4 <= width:
        return [f"{lines[0]}  # {comment}"]
    return [*(f"# {part}" for part in textwrap.wrap(comment, width - 2)), *lines]


def _plain(text: str) -> str:
    """One line of printable characters: a value of the source cannot end its comment."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
