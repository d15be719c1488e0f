"""One rank of a call: load the function, call it, leave what came of it.

    started by torchrun's launcher with the folder of the call as the only argument

torch is not imported here: the function decides what it needs, and what the environment says
before that.
"""

from __future__ import annotations

import linecache
import os
import pickle
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tunewright.contract.failures import UserError
from tunewright.notebook.folder import CallFolder, Raised, write_whole
from tunewright.notebook.sending import packed, packed_exception, unpacked


def main() -> int:
    """Run the function once; exit code 1 when it raised."""
    folder, rank = CallFolder(Path(sys.argv[1])), int(os.environ["RANK"])
    _speak_into(folder.log(rank))
    try:
        write_whole(folder.result(rank), _result(rank, _called(folder)))
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            write_whole(folder.result(rank), packed(None))
            return 0
        write_whole(folder.error(rank), packed(_raised(rank, error)))
        return 1
    return 0


def _speak_into(log: Path) -> None:
    """Send stdout and stderr, also those of C libraries and children, to one file in order."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def _called(folder: CallFolder) -> Any:
    call = pickle.loads(folder.call.read_bytes())
    sys.argv[:] = call["argv"]
    for name, lines in call["sources"].items():
        # So that a traceback shows the lines of a notebook's cell, which is no file.
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    function, args, kwargs = unpacked(call["call"])
    return function(*args, **kwargs)


def _result(rank: int, value: Any) -> bytes:
    try:
        return packed(value)
    except Exception as error:
        raise UserError(
            f"what rank {rank} returned (a {type(value).__name__}) cannot be sent back: "
            f"{type(error).__name__}: {error}; return plain values or tensors on the CPU, or write "
            "it to a file and return its path"
        ) from None


def _raised(rank: int, error: BaseException) -> Raised:
    # The frames of this module, which come first, are of no use to the reader.
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return Raised(
        rank=rank,
        at=time.time(),
        summary="".join(traceback.format_exception_only(error)).strip(),
        traceback="".join(traceback.format_exception(type(error), error, frames)),
        exception=packed_exception(error),
    )
