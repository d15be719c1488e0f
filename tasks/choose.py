"""Which folder a start belongs to: the unfinished run that it continues, or a new one."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tunewright
from tunewright.contract.failures import UserError
from tunewright.contract.lock import Lock, holder, is_waiting_for_guardians
from tunewright.contract.receipt import FINISHED
from tunewright.contract.rundir import RunDir, read_json, write_json


@dataclass(frozen=True)
class Chosen:
    """A run's folder, held by our lock."""

    dir: RunDir
    lock: Lock
    note: str


def choose(
    root: Path,
    experiment: str,
    identity: Mapping[str, Any],
    *,
    fresh: bool = False,
    resume: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Chosen:
    """Continue the newest unfinished run with this identity that nobody holds, else begin one.

    `identity` is what makes two starts the same thing: workload hash and code. Raises UserError
    for a run that cannot be resumed or an output_dir that cannot be written.
    """
    if fresh and resume:
        raise UserError("fresh and resume are both given; keep one")
    if resume:
        return _named(root, resume, identity, say)
    if not fresh:
        for run in _unfinished(root, experiment, identity):
            lock = Lock(run.lock)
            if _take(lock, say):
                return Chosen(run, lock, f"continuing unfinished run {run.name}")
    return _new(root, experiment, identity)


def code_of_tunewright() -> str:
    """sha256 of the package's own source files: another version starts another run."""
    package = Path(tunewright.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _new(root: Path, experiment: str, identity: Mapping[str, Any]) -> Chosen:
    run = RunDir(root / f"{experiment}-{secrets.token_hex(4)}")
    try:
        run.state.mkdir(parents=True)
        lock = Lock(run.lock)
        lock.take()
        # Last: without an identity nobody else takes the folder for an unfinished run.
        write_json(run.identity, {"run": run.name, "created": time.time(), **identity})
    except OSError as error:
        raise UserError(
            f"the run's folder {run.root} cannot be written: {error.strerror}; "
            "set parameters.output_dir (or TUNEWRIGHT_HOME) to a folder that can"
        ) from None
    return Chosen(run, lock, f"new run {run.name}")


def _named(
    root: Path, name: str, identity: Mapping[str, Any], say: Callable[[str], None]
) -> Chosen:
    run = RunDir(root / name)
    if Path(name).name != name or read_json(run.identity) is None:
        known = sorted(path.parent.parent.name for path in root.glob("*/state/run.json"))
        raise UserError(
            f"resume: there is no run {name!r} in {root}; known: {', '.join(known) or 'none'}"
        )
    state = (read_json(run.receipt) or {}).get("state")
    if state in FINISHED:
        raise UserError(f"resume: run {name} is {state}; use fresh to start over")
    lock = Lock(run.lock)
    if not _take(lock, say):
        raise UserError(
            f"resume: run {name} is held by {holder(run.lock)}; wait for it or cancel it"
        )
    facts = read_json(run.identity) or {}
    changed = sorted(key for key, value in identity.items() if facts.get(key) != value)
    since = f", although since it began these have changed: {', '.join(changed)}" if changed else ""
    return Chosen(run, lock, f"resuming run {name}{since}")


def _unfinished(root: Path, experiment: str, identity: Mapping[str, Any]) -> list[RunDir]:
    """Runs with this identity whose receipt is missing or not final, newest first."""
    found = []
    for path in root.glob(f"{experiment}-{'[0-9a-f]' * 8}"):
        run = RunDir(path)
        facts = read_json(run.identity)
        if facts is None or any(facts.get(key) != value for key, value in identity.items()):
            continue
        if (read_json(run.receipt) or {}).get("state") not in FINISHED:
            found.append((facts["created"], run))
    return [run for _, run in sorted(found, key=lambda pair: pair[0], reverse=True)]


def _take(lock: Lock, say: Callable[[str], None]) -> bool:
    """Take a lock, waiting where waiting ends: for a dead flow's guardians, or a silent host."""
    first = _heartbeat(lock)
    while not lock.take():
        who = holder(lock.path)
        if who is None:
            continue
        elsewhere = who.startswith("a flow on host")
        if not (elsewhere or is_waiting_for_guardians(lock.path)):
            return False
        if elsewhere and _heartbeat(lock) != first:
            return False
        say(f"waiting for {lock.path.parent.parent.name}: held by {who}")
        time.sleep(1)
    return True


def _heartbeat(lock: Lock) -> Any:
    return (read_json(lock.path) or {}).get("heartbeat")
