"""Where rows come from: a file, a glob, a folder or a Hub dataset; a split and a part of it.

A folder's splits are told by its files' names, as on the Hub: a word train, test or validation (or
a common synonym) in the path, between separators. Rows for a test must never be trained on by
accident, so of a folder that has several splits only the wanted one is read.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tunewright.contract import datanames
from tunewright.contract.datanames import DataName
from tunewright.contract.datasettings import DatasetSource, DataSettings
from tunewright.contract.failures import DataError, UserError
from tunewright.contract.settings import is_path
from tunewright.data.formats import Numbered, count_rows, is_rows, known, read_file
from tunewright.data.hub import HubRows, hub_rows

_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
}
"""The words that name a split in a path, each with its split."""
_LIBRARY_FILES = frozenset(
    {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
)
"""What the datasets library writes beside rows."""


@dataclass(frozen=True)
class Part:
    """Rows that are read as one: a file, or a split of the Hub.

    label: as messages name it. count may read everything.
    """

    label: str
    read: Callable[[], Numbered]
    count: Callable[[], int]


@dataclass(frozen=True)
class Source:
    """One source as it was found, nothing of it read yet; commit: of a Hub dataset."""

    asked: DatasetSource
    parts: tuple[Part, ...]
    part: str | None
    commit: str | None = None

    def rows(self) -> Iterator[tuple[Part, int, Any]]:
        """The wanted rows in order, each with its part and its number in it; at least one."""
        found = False
        for row in islice(self._all(), *self._bounds()):
            found = True
            yield row
        if not found:
            raise DataError(f"{self.asked.name} holds no rows; a dataset needs at least one")

    def _all(self) -> Iterator[tuple[Part, int, Any]]:
        for part in self.parts:
            for number, value in part.read():
                yield part, number, value

    def _bounds(self) -> tuple[int, int | None]:
        if self.part is None:
            return 0, None
        fixed = datanames.counts_from_the_start(self.part)
        total = _ENDLESS if fixed else sum(part.count() for part in self.parts)
        return datanames.bounds(self.part, total)


_ENDLESS = 1 << 62


def training_sources(settings: DataSettings) -> list[DatasetSource]:
    """The sources of the rows that are trained on: of dataset_name, or of datasets."""
    if settings.datasets:
        return settings.datasets
    return [_source(settings, str(settings.dataset_name))]


def evaluation_sources(settings: DataSettings) -> list[DatasetSource]:
    """The source of eval_dataset, read as dataset_name is; none where it is unset."""
    return [_source(settings, settings.eval_dataset)] if settings.eval_dataset else []


def find(asked: DatasetSource, alone: bool) -> Source:
    """The files or the Hub dataset that a source means; files of a folder that is read `alone`
    are named by their path in it.

    Raises UserError for what is not there.
    """
    name = datanames.parse(asked.name)
    if is_path(asked.name) and os.path.exists(os.path.expanduser(asked.name)):
        name = DataName(asked.name)
    if not is_path(name.base):
        rows = hub_rows(name.base, name.split or asked.split, asked.revision)
        return Source(asked, (_hub_part(rows),), name.part, rows.commit)
    path = Path(os.path.expanduser(name.base))
    files = _of_split(_files(path), path, name.split, asked.split)
    parts = tuple(_file_part(file, path if alone and path.is_dir() else None) for file in files)
    return Source(asked, parts, name.part)


def _source(settings: DataSettings, name: str) -> DatasetSource:
    return DatasetSource(
        name=name,
        revision=settings.dataset_revision,
        split=settings.dataset_split,
        weight=1.0,
        format=settings.format,
        columns=settings.columns,
    )


def _hub_part(rows: HubRows) -> Part:
    return Part(rows.label, rows.read, rows.count)


def _file_part(file: Path, folder: Path | None) -> Part:
    label = str(file.relative_to(folder) if folder else file)
    return Part(label, lambda: read_file(file), lambda: count_rows(file))


def _files(path: Path) -> list[Path]:
    """The files that a path names, sorted."""
    if path.is_dir():
        inside = (p for p in sorted(path.rglob("*")) if not _hidden(p.relative_to(path)))
        found = [p for p in inside if p.is_file() and is_rows(p)]
    elif path.exists():
        if not is_rows(path):
            raise UserError(f"dataset {path} is not a file of rows; known are {known()}")
        found = [path]
    elif glob.has_magic(str(path)):
        matches = map(Path, sorted(glob.glob(str(path), recursive=True)))
        found = [p for p in matches if p.is_file() and is_rows(p)]
    else:
        raise UserError(
            f"dataset {path} does not exist; name a file, glob or folder of rows, "
            "with a part of it like [:1000] or [10%:20%] at the end"
        )
    if not found:
        raise UserError(f"dataset {path} has no file with rows ({known()})")
    return found


def _hidden(path: Path) -> bool:
    return path.name in _LIBRARY_FILES or any(p.startswith((".", "_")) for p in path.parts)


def _of_split(files: list[Path], path: Path, wanted: str | None, default: str) -> list[Path]:
    """The files of the wanted split; without one all, unless there are several splits.

    A split of another name, like train_sft, is that of the files with this word in their path.
    """
    words = {file: _split_word(_inside(file, path)) for file in files}
    there = sorted({_SPLITS[word] for word in words.values()})
    if wanted is None and len(there) == 1:
        return files
    split = wanted or default
    if split in _SPLITS:
        found = [file for file in files if words[file] == split]
        found = found or [file for file in files if _SPLITS[words[file]] == _SPLITS[split]]
    else:
        found = [file for file in files if _words_in(_inside(file, path), split)]
    if not found:
        raise UserError(
            f"dataset {path} has no split {split}, only {', '.join(there)}; "
            f"name one, like {path}:{there[0]}"
        )
    return found


def _inside(file: Path, path: Path) -> Path:
    """A file's path below the named folder; for a file or glob, its name."""
    return file.relative_to(path) if path.is_dir() else Path(file.name)


def _split_word(path: Path) -> str:
    """The last word of a path that names a split; train where none does."""
    found = _words_in(path, *_SPLITS)
    return found[-1].lower() if found else "train"


def _words_in(path: Path, *words: str) -> list[str]:
    choice = "|".join(map(re.escape, words))
    return re.findall(rf"(?<![^\W_])(?:{choice})(?![^\W_])", str(path), re.IGNORECASE)
