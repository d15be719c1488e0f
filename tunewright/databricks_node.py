"""One node's command on AI Runtime, under its guardian:

    python -P -m tunewright.databricks_node [--limit-s SECONDS] [--secret NAME ...]

The command stands in TUNEWRIGHT_COMMAND, everything else where the platform puts it. Output goes on
to stdout as it comes, with the values of the named secrets masked. When the command has ended, its
log is copied to the run's folder, and last the file that tells how it ended: a volume takes whole
files only, so both are made on the local disk.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunewright.contract.failures import DEADLINE_VARIABLE, GRACE_VARIABLE, UserError, reported
from tunewright.contract.processes import GRACE_S
from tunewright.contract.rundir import RunDir, read_json, write_json

COMMAND_VARIABLE = "TUNEWRIGHT_COMMAND"
_POLL_S = 0.1
_CHUNK = 1 << 20
_COPY_PAUSES_S = (0, 1, 5, 15)


def main(argv: list[str] | None = None) -> int:
    """Run the command to its end; returns its exit code (128 + n for signal n)."""
    parser = argparse.ArgumentParser(prog="python -m tunewright.databricks_node")
    parser.add_argument("--limit-s", type=float, help="how long this attempt may take")
    parser.add_argument("--secret", action="append", default=[], help="a variable to mask")
    given = parser.parse_args(argv)
    run, attempt, rank = _whose()
    _patiently(lambda: run.root.mkdir(parents=True, exist_ok=True))
    scratch = Path(tempfile.mkdtemp(prefix="tunewright-node-"))
    try:
        node = _specification(scratch, rank, given.limit_s, given.secret)
        code = _guarded(node)
        log, told = Path(node["log"]), read_json(Path(node["exit"]))
        _leave(log, run.node_log(attempt, rank))
        if told is not None:
            # Last: who finds it finds the log beside it whole.
            _patiently(lambda: write_json(run.node_exit(attempt, rank), told))
        return code
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _whose() -> tuple[RunDir, int, int]:
    """The run, the attempt and the node that this is."""
    try:
        rank = int(os.environ.get("NODE_RANK", "0"))
        return RunDir(Path(os.environ["TUNEWRIGHT_RUN_DIR"])), _attempt(), rank
    except (KeyError, ValueError) as error:
        raise UserError(f"this is no node of a run of Tunewright: {error}") from None


def _attempt() -> int:
    return int(os.environ["TUNEWRIGHT_ATTEMPT"])


def _specification(
    scratch: Path, rank: int, limit_s: float | None, secrets: list[str]
) -> dict[str, Any]:
    """What the guardian runs: the node's own environment, the secrets apart."""
    env = dict(os.environ)
    command = env.pop(COMMAND_VARIABLE, "")
    values = {name: env.pop(name) for name in secrets if name in env}
    env[GRACE_VARIABLE] = f"{GRACE_S:g}"
    if limit_s:
        env[DEADLINE_VARIABLE] = f"{time.time() + limit_s:.3f}"
    return {
        "argv": ["bash", "-c", f"set -euo pipefail\n{command}"],
        "env": env,
        "secrets": values,
        "cwd": os.getcwd(),
        "log": str(scratch / f"node-{rank}.log"),
        "exit": str(scratch / "exit.json"),
        "node": rank,
        "grace_s": GRACE_S,
    }


def _guarded(node: Mapping[str, Any]) -> int:
    """Start the guardian, pass on what it logs, end it in order when we are told to end."""
    guardian = subprocess.Popen(
        [sys.executable, "-P", "-m", "tunewright.node"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        # A signal to our group reaches the command through the guardian, in order.
        start_new_session=True,
        env={k: v for k, v in os.environ.items() if k not in {*node["secrets"], COMMAND_VARIABLE}},
    )
    assert guardian.stdin is not None
    guardian.stdin.write(json.dumps(node).encode() + b"\n")
    guardian.stdin.flush()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: guardian.terminate())
    shown, log = 0, Path(node["log"])
    while guardian.poll() is None:
        shown = _pass_on(log, shown)
        time.sleep(_POLL_S)
    _pass_on(log, shown)
    code = guardian.returncode
    return 128 - code if code < 0 else code


def _pass_on(log: Path, shown: int) -> int:
    """The log's bytes from `shown` on to stdout; returns how many are out now."""
    if not log.is_file():
        return shown
    with log.open("rb") as file:
        file.seek(shown)
        while chunk := file.read(_CHUNK):
            sys.stdout.buffer.write(chunk)
            shown += len(chunk)
    sys.stdout.flush()
    return shown


def _leave(log: Path, place: Path) -> None:
    def copy() -> None:
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(log, place)

    if log.is_file():
        _patiently(copy)


def _patiently(write: Any) -> None:
    """Write to the volume, again when it is away; without it the platform's word has to do."""
    error: OSError | None = None
    for pause in _COPY_PAUSES_S:
        time.sleep(pause)
        try:
            write()
            return
        except OSError as away:
            error = away
    print(f"the run's folder cannot be written: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    with reported():
        sys.exit(main())
