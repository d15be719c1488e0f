"""How torch's distributed checkpoint is written from a host copy, and hashed on the way."""

from __future__ import annotations

import inspect
import io
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter

from tunewright.contract.rundir import needs_staging

SUFFIX = ".distcp"


class Abandoned(Exception):
    """The save was given up, since the run ends without it."""


class Planner(DefaultSavePlanner):
    """Plans by the live tensors' names and shapes, takes the bytes from their host copies.

    What was planned is kept for the next save where torch can do that.
    """

    def __init__(self, host: Mapping[str, torch.Tensor]) -> None:
        """`host`: {flat name in the state: this rank's part}."""
        cached = "enable_plan_caching" in inspect.signature(super().__init__).parameters
        super().__init__(**({"enable_plan_caching": True} if cached else {}))
        self._host = host

    def lookup_object(self, index: Any) -> torch.Tensor:
        return self._host[index.fqn]


class Writer(FileSystemWriter):
    """One file a rank, flushed to disk. `hashes` holds their entries for the seal afterwards."""

    def __init__(self, folder: Path, abandoned: threading.Event) -> None:
        # Copying ahead is for tensors on a GPU. With it, the writer would wait for the training's
        # kernels after every few tensors.
        super().__init__(folder, thread_count=1, per_thread_copy_ahead=0)
        self.fs = self._files = _Files(abandoned)

    @property
    def hashes(self) -> dict[str, dict[str, Any]]:
        """{file name: {"size" in bytes, "xxh3_128"}} of what this rank wrote."""
        return self._files.hashes

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            # Serializing wraps what the disk said, or puts an error of its own in front.
            raise self._files.error or error from None


class _Files(FileSystem):
    """The file system, with hashes of the tensors' files as they are written.

    Where a mount takes whole files only, each is made on the local disk and copied there.
    """

    def __init__(self, abandoned: threading.Event) -> None:
        self.abandoned = abandoned
        self.hashes: dict[str, dict[str, Any]] = {}
        self.error: Exception | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        place = Path(path)
        with self._staged(place, mode) as file, super().create_stream(file, mode) as stream:
            if mode != "wb" or place.suffix != SUFFIX:
                yield stream
                return
            hashed = _Hashed(stream, self)
            yield hashed
            self.hashes[place.name] = hashed.entry()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        if needs_staging(Path(new_path)):
            shutil.copyfile(path, new_path)
            os.unlink(path)
        else:
            super().rename(path, new_path)

    @contextmanager
    def _staged(self, place: Path, mode: str) -> Iterator[Path]:
        """Where to write the file: its place, or the local disk, from which it is copied then."""
        if mode != "wb" or not needs_staging(place):
            yield place
            return
        with tempfile.TemporaryDirectory(prefix="tunewright-save-") as scratch:
            draft = Path(scratch, place.name)
            yield draft
            shutil.copyfile(draft, place)


class _Hashed(io.IOBase):
    """A stream that is written from start to end, and its hash so far.

    Hashing and writing large pieces leave other threads alone (neither holds the interpreter).
    """

    def __init__(self, stream: Any, files: _Files) -> None:
        self._stream = stream
        self._files = files
        self._digest = xxhash.xxh3_128()
        self._size = 0

    def writable(self) -> bool:
        return True

    def write(self, piece: Any) -> int:
        try:
            if self._files.abandoned.is_set():
                raise Abandoned
            self._digest.update(piece)
            count = int(self._stream.write(piece))
        except Exception as error:
            self._files.error = error
            raise
        self._size += count
        return count

    def entry(self) -> dict[str, Any]:
        return {"size": self._size, "xxh3_128": self._digest.hexdigest()}

    def tell(self) -> int:
        return self._size

    def fileno(self) -> int:
        return int(self._stream.fileno())

    def flush(self) -> None:
        if not self._stream.closed:
            self._stream.flush()

    def close(self) -> None:
        self._stream.close()
        super().close()
