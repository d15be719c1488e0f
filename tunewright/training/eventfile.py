"""The file of an attempt's events: every line is in it at once, or soon where files come whole.

On a mount that takes no appending (a Databricks volume) the file grows on the local disk, and is
copied to its place at most every minute, after every checkpoint, and at the end.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tunewright.contract.failures import UserError
from tunewright.contract.rundir import needs_staging

_COPY_EVERY_S = 60.0


class EventFile:
    """Lines that are appended, one event each. Raises UserError when nothing can be written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._staged: Path | None = None
        self._copied = time.monotonic()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if needs_staging(path):
                handle, name = tempfile.mkstemp(prefix="tunewright-events-")
                os.close(handle)
                self._staged = Path(name)
                # The first copy tells now, and not after the first minute, what cannot be written.
                shutil.copyfile(self._staged, path)
            self._file = (self._staged or path).open("a")
        except OSError as error:
            raise UserError(
                f"cannot write {path}: {error.strerror}; set output_dir to a folder that can be "
                "written"
            ) from error

    def write(self, line: str, *, now: bool = False) -> None:
        """Append a line; `now`: it matters, so it is to be in its place at once."""
        self._file.write(line)
        self._file.flush()
        if now or time.monotonic() > self._copied + _COPY_EVERY_S:
            self._copy()

    def close(self) -> None:
        self._file.close()
        self._copy()
        if self._staged is not None:
            self._staged.unlink(missing_ok=True)

    def _copy(self) -> None:
        if self._staged is None:
            return
        self._copied = time.monotonic()
        try:
            shutil.copyfile(self._staged, self._path)
        except OSError as error:
            # The next copy holds everything; training does not stop for its record.
            print(f"{self._path} cannot be written now: {error}", file=sys.stderr, flush=True)
