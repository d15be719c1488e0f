"""One call of a function on ranks: start, output, time limit, ending, and what came of it."""

from __future__ import annotations

import json
import linecache
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunewright.contract import processes
from tunewright.contract.failures import TunewrightError, UserError
from tunewright.contract.rundir import read_json
from tunewright.notebook.accelerators import Placement
from tunewright.notebook.folder import CallFolder, Raised, read_raised
from tunewright.notebook.logs import RankLog, new_text
from tunewright.notebook.program import code_of

MARK = "TUNEWRIGHT_CALL_MARK"
_POLL_S = 0.05
_AFTER_KILL_S = 40.0
_OF_A_LAUNCHER = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "NODE_RANK", "NUM_NODES", "GROUP_RANK", "GROUP_WORLD_SIZE",
)  # fmt: skip


class RankError(TunewrightError):
    """A rank ended without an exception that the caller could be given."""


class RankTraceback(Exception):
    """The traceback on the rank, as text: the cause of what the caller gets."""

    def __init__(self, raised: Raised, ranks: int) -> None:
        super().__init__(f'\n"""\non rank {raised.rank} of {ranks}:\n{raised.traceback}"""')


@dataclass(frozen=True)
class Call:
    """A function with its arguments."""

    name: str
    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


def run(call: Call, placement: Placement, timeout_s: float | None) -> list[Any]:
    """Run a call on every rank and return their results, by rank.

    Raises the exception of the rank that failed first, TimeoutError when `timeout_s` is over,
    RankError when a rank was killed or exited, UserError for what cannot be sent. However it
    ends, also by an interrupt, no process of it is left.
    """
    sent = _sent(call)
    with tempfile.TemporaryDirectory(prefix="tunewright-", ignore_cleanup_errors=True) as root:
        folder = CallFolder(Path(root))
        folder.call.write_bytes(sent)
        _Ranks(folder, placement, timeout_s).watch()
        return _outcome(call.name, folder, placement.ranks, timeout_s)


def _sent(call: Call) -> bytes:
    """The call for the ranks, with the lines of its code that they cannot read from a file."""
    # Only here: a notebook that never calls needs no cloudpickle.
    from tunewright.notebook.sending import packed_with_files

    try:
        content, files = packed_with_files((call.function, call.args, call.kwargs))
    except Exception as error:
        raise UserError(
            f"{call.name}, its arguments or what it uses from outside cannot be sent to the ranks: "
            f"{type(error).__name__}: {error}; make it inside the function, or pass a path"
        ) from None
    sources = {name: linecache.getlines(name) for name in files}
    return pickle.dumps({"call": content, "argv": sys.argv, "sources": sources})


class _Ranks:
    """The running processes of a call: guardian, launcher and ranks, in this order below us."""

    def __init__(self, folder: CallFolder, placement: Placement, timeout_s: float | None) -> None:
        self._folder = folder
        self._ranks = range(placement.ranks)
        self._mark = f"{os.getpid()}-{uuid.uuid4().hex}"
        self._logs = [RankLog(folder.log(rank), rank) for rank in self._ranks]
        self._deadline = time.monotonic() + timeout_s if timeout_s is not None else None
        self._failed_at: float | None = None
        self._stopped_at: float | None = None
        self._specification = {
            "argv": [sys.executable, "-c", code_of("tunewright.notebook.launcher"),
                     str(folder.root), str(placement.ranks)],
            "env": {**_environment(), **placement.environment(), MARK: self._mark},
            "cwd": os.getcwd(),
            "log": str(folder.launcher_log),
            "exit": str(folder.exit),
            "grace_s": processes.GRACE_S,
        }  # fmt: skip

    def watch(self) -> None:
        """Show what the ranks say until they have ended; left early, it ends them."""
        guardian = subprocess.Popen(
            [sys.executable, "-c", code_of("tunewright.node")],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            # Ctrl-C in a terminal is for us, who then tell the guardian.
            start_new_session=True,
        )
        try:
            _tell(guardian, json.dumps(self._specification))
            while guardian.poll() is None and not self._is_overdue():
                self._show()
                if self._stopped_at is None and (reason := self._reason_to_stop()):
                    self._stopped_at = time.monotonic()
                    _tell(guardian, f"stop {reason}")
                time.sleep(_POLL_S)
        finally:
            self._end(guardian)
        self._show(ended=True)

    def _show(self, ended: bool = False) -> None:
        """Through sys.stdout, whatever it is: in a notebook it is no file descriptor."""
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        for text in new_text(self._logs, ended=ended):
            # A character that the terminal lacks must not end the ranks.
            sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
            sys.stdout.flush()

    def _reason_to_stop(self) -> str | None:
        now = time.monotonic()
        if self._failed_at is None and any(self._folder.error(r).exists() for r in self._ranks):
            self._failed_at = now
        if self._failed_at is not None:
            # A rank that failed normally ends by itself; one that hangs in its ending does not.
            return "peer" if now >= self._failed_at + processes.GRACE_S else None
        return "timeout" if self._deadline is not None and now >= self._deadline else None

    def _is_overdue(self) -> bool:
        limit = processes.GRACE_S + _AFTER_KILL_S
        return self._stopped_at is not None and time.monotonic() >= self._stopped_at + limit

    def _end(self, guardian: subprocess.Popen[bytes]) -> None:
        """Wait until the guardian has ended everything; if it is lost, end what it left."""
        assert guardian.stdin is not None
        try:
            _tell(guardian, "stop interrupted")
            guardian.wait(processes.GRACE_S + _AFTER_KILL_S)
        except subprocess.TimeoutExpired:
            guardian.kill()
            guardian.wait()
        finally:
            # Interrupted once more, we go at once: without this pipe the guardian ends it all.
            with suppress(BrokenPipeError):
                guardian.stdin.close()
        if not self._folder.exit.exists():
            processes.end_marked(MARK, self._mark)


def _tell(guardian: subprocess.Popen[bytes], line: str) -> None:
    assert guardian.stdin is not None
    # A guardian that is gone says so by its exit, which we look at anyway.
    with suppress(BrokenPipeError):
        guardian.stdin.write(line.encode() + b"\n")
        guardian.stdin.flush()


def _environment() -> dict[str, str]:
    """Ours, without what the launcher of an outer job has set in it."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_A_LAUNCHER and not name.startswith(("TORCHELASTIC_", "ROLE_"))
    }
    return {**kept, "PYTHONUNBUFFERED": "1"}


def _outcome(name: str, folder: CallFolder, ranks: int, timeout_s: float | None) -> list[Any]:
    told = read_json(folder.exit) or {}
    if all(folder.result(rank).exists() for rank in range(ranks)):
        if told.get("exit_code") != 0:
            print(f"{name}: every rank returned, then one did not end well", file=sys.stderr)
        return [_result(folder, rank) for rank in range(ranks)]
    if told.get("stopped_by") == "timeout":
        raise TimeoutError(f"{name} did not end within {timeout_s:g} s; its {ranks} ranks are gone")
    raised = [found for rank in range(ranks) if (found := read_raised(folder.error(rank)))]
    died = _died_first(folder, {found.rank for found in raised})
    # The others of a rank that was killed raise since they lost it, never the other way round.
    if died is None and raised:
        _raise(min(raised, key=lambda found: found.at), ranks)
    raise RankError(_death(name, ranks, died, told, folder))


def _result(folder: CallFolder, rank: int) -> Any:
    from tunewright.notebook.sending import unpacked

    try:
        return unpacked(folder.result(rank).read_bytes())
    except Exception as error:
        raise UserError(
            f"what rank {rank} returned cannot be read here: {type(error).__name__}: {error}; "
            "return plain values or tensors on the CPU"
        ) from error


def _raise(raised: Raised, ranks: int) -> None:
    """Raise the rank's own exception, with its traceback as the cause."""
    from tunewright.notebook.sending import unpacked

    error: Exception = RankError(f"rank {raised.rank} of {ranks} failed: {raised.summary}")
    if raised.exception is not None:
        # What the rank could load back may still need something that is only there.
        with suppress(Exception):
            error = unpacked(raised.exception)
            error.add_note(f"raised on rank {raised.rank} of {ranks}{_ended(ranks)}")
    raise error from RankTraceback(raised, ranks)


def _ended(ranks: int) -> str:
    return "; the other ranks were ended" if ranks > 1 else ""


def _died_first(folder: CallFolder, raised: set[int]) -> tuple[int, int] | None:
    """The rank and exit code of a death that nobody else caused; None when there is none.

    Not by SIGTERM, by which the launcher ends the rest, nor by SIGABRT, by which NCCL gives up
    when a peer is lost; and seen with the first ones: the rest that does not listen is killed.
    """
    deaths = read_json(folder.deaths) or {}
    first = min((facts["at"] for facts in deaths.values()), default=0)
    for rank, facts in sorted(deaths.items(), key=lambda item: int(item[0])):
        own = facts["exit_code"] not in (-signal.SIGTERM, -signal.SIGABRT)
        if own and int(rank) not in raised and facts["at"] <= first + 1:
            return int(rank), facts["exit_code"]
    return None


def _death(
    name: str,
    ranks: int,
    died: tuple[int, int] | None,
    told: Mapping[str, Any],
    folder: CallFolder,
) -> str:
    """One message about an ending without an exception, from what is known of it."""
    failure = told.get("failure") or {}
    why = failure.get("message", "its guardian was killed")
    if died is None:
        return f"{name} ended before its {ranks} ranks had returned: {why}\n{told.get('tail', '')}"
    rank, code = died
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    message = f"rank {rank} of {ranks} {how} before {name} returned{_ended(ranks)}"
    if failure.get("class") == "oom":
        message += f" ({why})"
    # Without a log of its own it ended before it began.
    return message if folder.log(rank).exists() else f"{message}\n{told.get('tail', '')}"
