"""Files of rows, read lazily: JSON, JSONL, CSV, Parquet, Arrow, and compressed text.

A reader yields (number, value), numbered from 1 as a user counts them: a JSONL file's rows are its
lines. A row that cannot be read for itself comes as a BadRow, so that it can be left out; where no
row behind can be found any more, DataError is raised.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

from tunewright.contract.failures import DataError, UserError
from tunewright.data.examples import BadRow
from tunewright.data.jsonrows import json_rows

Numbered = Iterator[tuple[int, Any]]
_BATCH = 1024
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_DELIMITERS = ",;\t"


def is_rows(path: Path) -> bool:
    """Whether a file's name says that it holds rows."""
    kind, compression = _kind(path)
    return kind in _TEXT or (kind in _BINARY and not compression)


def known() -> str:
    """The kinds of files, for a message."""
    return f"{', '.join([*_TEXT, *_BINARY])}, text also with {', '.join(_OPENERS)}"


def read_file(path: Path) -> Numbered:
    """The rows of one file. Raises UserError when it cannot be read, DataError when it is torn."""
    kind, compression = _kind(path)
    try:
        if kind in _BINARY:
            yield from _BINARY[kind](path)
        else:
            with _opened(path, compression, newline="" if kind in _TABLES else "\n") as file:
                yield from _TEXT[kind](file, path)
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise _torn(path, compression or kind, error) from error
    except OSError as error:
        if error.errno is None:  # the decompressors' word for bytes that are not theirs
            raise _torn(path, compression or kind, error) from error
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def count_rows(path: Path) -> int:
    """How many rows `read_file` yields; a Parquet file says it without being read."""
    if _kind(path)[0] == ".parquet":
        return _parquet_count(path)
    return sum(1 for _ in read_file(path))


def _kind(path: Path) -> tuple[str, str]:
    """Like (".jsonl", ".gz"); no compression is ""."""
    last = path.suffix.lower()
    return (Path(path.stem).suffix.lower(), last) if last in _OPENERS else (last, "")


def _torn(path: Path, kind: str, error: Exception) -> DataError:
    reason = str(error).strip().rstrip(".") or type(error).__name__
    return DataError(f"{path} is not a whole {kind} file: {reason}; make it anew")


def _opened(path: Path, compression: str, newline: str) -> TextIO:
    """A file as text. Bytes that are no UTF-8 become surrogates, so that only their row is bad."""
    raw = cast(io.BufferedReader, _OPENERS[compression](path) if compression else path.open("rb"))
    if raw.peek(2)[:2] in _UTF16:
        raw.close()
        raise DataError(f"{path} is UTF-16, not UTF-8 text; convert it")
    return io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape", newline=newline)


def _zstd(path: Path) -> BinaryIO:
    import pyarrow

    if not pyarrow.Codec.is_available("zstd"):
        raise UserError(f"{path} needs a pyarrow with zstd; unpack it, or install pyarrow anew")
    return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))


def _json(file: TextIO, path: Path) -> Numbered:
    return enumerate(json_rows(file, str(path)), 1)


def _jsonl(file: TextIO, path: Path) -> Numbered:
    for number, line in enumerate(file, 1):
        if not line.isspace():
            yield number, _line(line)


def _line(line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        return BadRow("not JSON", f"{error.msg}, column {error.pos + 1}; a line is one object")
    except RecursionError:
        return BadRow("not JSON", "nested too deep")


def _table(file: TextIO, path: Path) -> Numbered:
    """Rows below a header line, as {column: text}."""
    csv.field_size_limit(1 << 30)
    head = file.readline().rstrip("\r\n")
    delimiter = max(_DELIMITERS, key=head.count)
    names = next(csv.reader([head], delimiter=delimiter), [])
    if len({*names}) < len(names):
        raise DataError(f"{path} has a header with a column twice: {head[:80]}; rename one")
    reader = csv.reader(file, delimiter=delimiter, strict=True)
    number = 0
    while True:
        number += 1
        try:
            fields = next(reader, None)
        except csv.Error as error:
            if "end of data" in str(error):
                raise DataError(
                    f"{path} row {number} opens a quote that is never closed; mend it there"
                ) from error
            yield number, BadRow("not CSV", str(error))
            continue
        if fields is None:
            return
        if fields:
            yield number, _record(names, fields)


def _record(names: list[str], fields: list[str]) -> Any:
    if len(fields) != len(names):
        return BadRow("not as wide as the header", f"{len(fields)} fields, not {len(names)}")
    return dict(zip(names, fields, strict=True))


def _parquet(path: Path) -> Numbered:
    import pyarrow
    from pyarrow import parquet

    try:
        # Buffered ahead, as is the default, a file ends up in memory whole.
        with parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
            yield from _of_batches(file.iter_batches(_BATCH))
    except pyarrow.ArrowException as error:
        raise _torn(path, ".parquet", error) from error


def _parquet_count(path: Path) -> int:
    import pyarrow
    from pyarrow import parquet

    try:
        return int(parquet.read_metadata(path).num_rows)
    except pyarrow.ArrowException as error:
        raise _torn(path, ".parquet", error) from error


def _arrow(path: Path) -> Numbered:
    """An Arrow file, or an Arrow stream as the datasets library saves it."""
    import pyarrow

    try:
        with path.open("rb") as opened:
            in_file = opened.read(6) == b"ARROW1"
        with pyarrow.OSFile(str(path)) as source:
            yield from _of_batches(_file_batches(source) if in_file else _stream(source))
    except pyarrow.ArrowException as error:
        raise _torn(path, ".arrow", error) from error


def _stream(source: Any) -> Iterator[Any]:
    from pyarrow import ipc

    return iter(ipc.open_stream(source))


def _file_batches(source: Any) -> Iterator[Any]:
    from pyarrow import ipc

    reader = ipc.open_file(source)
    return (reader.get_batch(index) for index in range(reader.num_record_batches))


def _of_batches(batches: Iterator[Any]) -> Numbered:
    """Rows of record batches, a bounded number of them as Python values at a time."""
    number = 0
    for batch in batches:
        for start in range(0, batch.num_rows, _BATCH):
            for row in batch.slice(start, _BATCH).to_pylist():
                number += 1
                yield number, without_nulls(row)


def without_nulls(value: Any) -> Any:
    """The value without the nulls that a column's one type adds to objects with fewer keys."""
    if isinstance(value, dict):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value


_TABLES = (".csv", ".tsv")
_TEXT: dict[str, Callable[[TextIO, Path], Numbered]] = {
    ".json": _json,
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
    ".csv": _table,
    ".tsv": _table,
}
_BINARY: dict[str, Callable[[Path], Numbered]] = {".parquet": _parquet, ".arrow": _arrow}
_OPENERS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _zstd,
}
