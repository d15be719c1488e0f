"""How functions, results and exceptions go from one process of a call to another.

Both ends are the same Python on the same machine. Functions and classes of `__main__`, of a cell
or inside a function go by value; a class that comes back is the one that was sent.
"""

from __future__ import annotations

import io
import marshal
import os
import types
from typing import Any

import cloudpickle


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Cloudpickle, with the file and the lines of a function, for tracebacks and `inspect`."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.files: set[str] = set()

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, types.CodeType):
            self.files.add(value.co_filename)
            return marshal.loads, (marshal.dumps(value),)
        return super().reducer_override(value)


def packed(value: Any) -> bytes:
    """A value as bytes; raises whatever its parts raise when they cannot be pickled."""
    return packed_with_files(value)[0]


def packed_with_files(value: Any) -> tuple[bytes, set[str]]:
    """A value as bytes, and the names of the code in it that is no file (a cell, a console)."""
    with io.BytesIO() as file:
        pickler = _Pickler(file)
        pickler.dump(value)
        return file.getvalue(), {name for name in pickler.files if not os.path.exists(name)}


def unpacked(content: bytes) -> Any:
    return cloudpickle.loads(content)


def packed_exception(error: BaseException) -> bytes | None:
    """An exception that comes back as what it is; None when there is no way.

    Many pickle and then cannot be made again, for an `__init__` of their own: these are made
    without it. One that is no `Exception` (SystemExit, KeyboardInterrupt) would end the caller,
    who did not ask for that.
    """
    if not isinstance(error, Exception):
        return None
    for way in (error, _Remade(error, error.__dict__), _Remade(error, {})):
        try:
            content = packed(way)
            if type(unpacked(content)) is type(error):
                return content
        except Exception:
            continue
    return None


class _Remade:
    """Stands for an exception in a pickle: its type, arguments and attributes."""

    def __init__(self, error: Exception, attributes: dict[str, Any]) -> None:
        self._parts = (type(error), error.args, attributes)

    def __reduce__(self) -> tuple[Any, ...]:
        return _remake, self._parts


def _remake(kind: type[Exception], args: tuple[Any, ...], attributes: dict[str, Any]) -> Exception:
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error
