"""LLaMA-Factory's dataset_info.json: what the names of datasets in its files mean."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flows.importing.rows import Rows, as_path, conversations, located, renamed
from flows.importing.rules import BadValue, whole
from tunewright.contract.failures import UserError

FILE_NAME = "dataset_info.json"
_NOT_HERE = ("images", "videos", "audios", "chosen", "rejected")
_ALPACA = {"instruction": "prompt", "input": "query", "output": "response"}
_TAGS = {
    "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant", "model"),
    "observation_tag": ("observation", "tool"),
    "function_tag": ("function_call",),
    "system_tag": ("system",),
}


@dataclass(frozen=True)
class DatasetInfo:
    """The entries by name, and the folder in which their files lie; without a file, none."""

    folder: str
    entries: Mapping[str, Any] = field(default_factory=dict)
    found: bool = False

    @classmethod
    def near(cls, folder: Path, named: str) -> DatasetInfo:
        """Looked for from the file's folder and from the working directory upwards.

        named: the source's dataset_dir. Raises UserError for a file that is broken.
        """
        for start in (folder.absolute(), Path.cwd()):
            for place in (start, *start.parents):
                path = place / named / FILE_NAME
                if path.is_file():
                    return cls(str(path.parent), _read(path), True)
        return cls(as_path(named))

    def rows(self, name: str) -> Rows | None:
        """The rows of a name; None where it has no entry.

        Raises BadValue, with the reason, for rows of images or preferences.
        """
        entry = self.entries.get(name)
        if not isinstance(entry, Mapping):
            return None
        columns, tags = (_texts(entry.get(key)) for key in ("columns", "tags"))
        if unknown := [key for key in _NOT_HERE if key in columns]:
            raise BadValue(f"rows with {', '.join(unknown)} are not here")
        hub = entry.get("hf_hub_url")
        rows = Rows(str(hub) if hub else f"{self.folder}/{entry.get('file_name', name)}")
        rows.split = str(entry.get("split") or "")
        if entry.get("num_samples"):
            rows.part = f"[:{whole(entry['num_samples'])}]"
        _shape(rows, entry.get("formatting"), columns, tags)
        return rows

    def guess(self, name: str) -> Rows:
        """Where the rows of a name without an entry usually are."""
        return Rows(located(f"{self.folder}/{name}.json"))

    def doubts(self, name: str) -> list[str]:
        """What an entry says that cannot be said here."""
        entry = self.entries[name]
        tags = _texts(entry.get("tags"))
        found = [
            f"{key}: {tags[key]} is no role that is known"
            for key, known in _TAGS.items()
            if tags.get(key, known[0]) not in known
        ]
        if entry.get("subset"):
            found.append("its subset cannot be named; give its files as paths")
        return found


def _shape(
    rows: Rows, formatting: Any, columns: Mapping[str, str], tags: Mapping[str, str]
) -> None:
    if formatting == "sharegpt":
        column = columns.get("messages", "conversations")
        role, content = tags.get("role_tag", "from"), tags.get("content_tag", "value")
        found = conversations(column, role, content)
        rows.format, rows.columns = found["format"], found["columns"]
        rows.columns |= renamed({part: columns.get(part) for part in ("system", "tools")})
        return
    rows.format = "alpaca"
    named = {ours: columns.get(theirs) for ours, theirs in _ALPACA.items()}
    rows.columns = renamed({**named, **{part: columns.get(part) for part in ("system", "history")}})


def _texts(value: Any) -> dict[str, str]:
    """A mapping's entries that are text."""
    found = value if isinstance(value, Mapping) else {}
    return {key: part for key, part in found.items() if isinstance(part, str)}


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}; mend it") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} is not a mapping of names to datasets; mend it")
    return found
