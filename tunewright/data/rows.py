"""Reading rows: a JSON, JSONL or Parquet file, a folder of such, or a dataset of the Hub.

A row keeps its place (file and number within it), so that a message about it can be acted on.
What a row means is for `examples` to say.
"""

from __future__ import annotations

import bisect
import importlib
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunewright.contract.failures import DataError, TunewrightError, UserError
from tunewright.contract.settings import is_path

Numbered = Iterator[tuple[int, Any]]
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


@dataclass
class Rows:
    """Rows in order, of one file or several. `values[i]` is whatever the file holds there."""

    name: str
    values: list[Any] = field(default_factory=list)
    _numbers: list[int] = field(default_factory=list)
    _files: list[tuple[int, str]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.values)

    def place(self, index: int) -> str:
        """Where a row is, like `rows.jsonl row 12`: a JSONL file's rows are its lines, from 1."""
        file = bisect.bisect_right(self._files, index, key=lambda entry: entry[0]) - 1
        return f"{self._files[file][1]} row {self._numbers[index]}"

    def add(self, file: str, numbered: Numbered) -> None:
        self._files.append((len(self.values), file))
        for number, value in numbered:
            self._numbers.append(number)
            self.values.append(value)


def read_rows(name: str, revision: str | None = None, split: str = "train") -> Rows:
    """All rows of a path or of a Hub dataset's split; at least one.

    Raises UserError for what is not there, DataError for contents that cannot be read.
    """
    rows = (
        _read_path(Path(name).expanduser()) if is_path(name) else _read_hub(name, revision, split)
    )
    if not rows.values:
        raise DataError(f"{name} holds no rows; a dataset needs at least one")
    return rows


def _read_path(path: Path) -> Rows:
    rows = Rows(str(path))
    for file in _files_of(path):
        label = str(file) if file == path else str(file.relative_to(path))
        try:
            rows.add(label, _READERS[file.suffix.lower()](file))
        except OSError as error:
            raise UserError(f"cannot read {file}: {error.strerror or error}") from error
    return rows


def _files_of(path: Path) -> list[Path]:
    if not path.exists():
        raise UserError(f"dataset {path} does not exist; name a file or folder of rows")
    if path.is_dir():
        inside = (p for p in sorted(path.rglob("*")) if not _hidden(p.relative_to(path)))
        found = [p for p in inside if p.is_file() and p.suffix.lower() in _READERS]
        if not found:
            raise UserError(f"dataset {path} has no file with rows ({', '.join(_READERS)})")
        return found
    if path.suffix.lower() not in _READERS:
        raise UserError(f"dataset {path} is not a file of rows; known are {', '.join(_READERS)}")
    return [path]


def _hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)


def _read_json(path: Path) -> Numbered:
    text = _text(path)
    if text.lstrip().startswith("{"):
        # Some tools write one object a line and still call the file .json.
        return _lines(path, text)
    try:
        found = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {_reason(error)}") from error
    if not isinstance(found, list):
        raise DataError(f"{path} must be a list of objects, one a row")
    return enumerate(found, 1)


def _read_jsonl(path: Path) -> Numbered:
    return _lines(path, _text(path))


def _lines(path: Path, text: str) -> Numbered:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (json.JSONDecodeError, RecursionError) as error:
                reason = error.msg if isinstance(error, json.JSONDecodeError) else _reason(error)
                raise DataError(
                    f"{path} line {number} is not JSON: {reason}; each line must be one object"
                ) from error


def _read_parquet(path: Path) -> Numbered:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            batches = [batch.to_pylist() for batch in file.iter_batches()]
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} is not a whole Parquet file: {_reason(error)}") from error
    return enumerate((row for batch in batches for row in batch), 1)


_READERS: dict[str, Callable[[Path], Numbered]] = {
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".parquet": _read_parquet,
}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start + 1}); convert it") from error


def _read_hub(name: str, revision: str | None, split: str) -> Rows:
    if not _HUB_NAME.fullmatch(name):
        raise UserError(
            f"dataset_name {name!r} is not a Hub name (owner/name); "
            "a path starts with ./, ../, / or ~"
        )
    if Path(name).exists():
        # The datasets library would quietly read the local one.
        raise UserError(
            f"dataset_name {name!r} is a Hub name, but something of that name lies in "
            f"{Path.cwd()}; write ./{name} for it, or start from another folder"
        )
    try:
        datasets = importlib.import_module("datasets")
    except ModuleNotFoundError as error:
        raise UserError(
            f"dataset {name} is on the Hub, which needs the datasets library: "
            "pip install 'tunewright[hub]'"
        ) from error
    rows = Rows(name)
    rows.add(name, enumerate(_load(datasets, name, revision, split), 1))
    return rows


def _load(datasets: Any, name: str, revision: str | None, split: str) -> Any:
    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(name, revision=revision, split=split)
    except Exception as error:  # whatever the library raises becomes one sentence
        raise hub_error(f"dataset {name}", error) from error


def hub_error(what: str, error: Exception) -> TunewrightError:
    """What a library of the Hub raised, in one sentence: the user's, or worth another attempt."""
    reason = _reason(error)
    if _gated(error):
        return UserError(f"{what} is gated; ask for access on the Hub and give a secret HF_TOKEN")
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return UserError(
            f"{what} is not in the local cache and HF_HUB_OFFLINE is set; "
            "unset it, or name a local folder (./, ../, / or ~)"
        )
    if _connection(error):
        return TunewrightError(f"the Hub cannot be reached for {what}: {reason}")
    return UserError(f"cannot load {what} from the Hub: {reason}; check its name and revision")


def _gated(error: BaseException) -> bool:
    return any(type(e).__name__ == "GatedRepoError" for e in _chain(error))


def _connection(error: BaseException) -> bool:
    """Whether the network is to blame: no answer, or a server error."""
    for found in _chain(error):
        status = getattr(getattr(found, "response", None), "status_code", None)
        if status is not None:
            return bool(status >= 500 or status == 429)
        names = {kind.__name__ for kind in type(found).__mro__}
        if names & {"ConnectionError", "TransportError", "TimeoutError"}:
            return True
    return False


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _reason(error: BaseException) -> str:
    """The first line of a library's message, without its full stop."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
