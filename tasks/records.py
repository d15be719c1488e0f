"""Runs started on this machine, found by the small files in TUNEWRIGHT_HOME/runs.

Enough for `get`, `logs` and `cancel` without a server and without Prefect.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tasks import attempts
from tasks.targets.guardian import Follower
from tunewright.contract.failures import UserError
from tunewright.contract.lock import holder
from tunewright.contract.problems import nearest
from tunewright.contract.receipt import FINISHED
from tunewright.contract.rundir import RunDir, home, read_json, write_json

_FOLLOW_S = 0.2


def known() -> list[str]:
    """Names of the runs started on this machine, newest first."""
    folder = home() / "runs"
    found = [path for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []
    # A run whose folder was deleted is no run any more.
    found = [path for path in found if not path.name.startswith(".") and _has_folder(path)]
    return [path.name for path in sorted(found, key=lambda p: p.stat().st_mtime, reverse=True)]


def _has_folder(path: Path) -> bool:
    folder = (read_json(path) or {}).get("folder")
    return isinstance(folder, str) and Path(folder).is_dir()


def entry(name: str) -> dict[str, Any]:
    """{"folder", "flow_run_id"} of a run; raises UserError for an unknown one."""
    found = read_json(home() / "runs" / name) if name in known() else None
    if found is None:
        raise UserError(f"there is no run {name!r} on this machine; {nearest(name, known()[:20])}")
    return found


def run_dir(name: str) -> RunDir:
    return RunDir(Path(entry(name)["folder"]))


def receipt(name: str) -> dict[str, Any]:
    """The receipt of a run; for one without, what its folder tells so far."""
    run = run_dir(name)
    who = holder(run.lock)
    written = read_json(run.receipt)
    if written is not None and (who is None or written.get("state") in FINISHED):
        return written
    tried, facts = attempts.of_run(run, running=who is not None)
    state = "Running" if who else "Crashed"
    return {"run": name, "state": state, "folder": str(run.root), **facts, "attempts": tried}


def log_files(name: str, node: int | None, attempt: int | None) -> list[Path]:
    """The logs of a run's steps and nodes; by default of the last attempt."""
    run = run_dir(name)
    numbers = run.attempts()
    if attempt is not None and attempt not in numbers:
        raise UserError(f"run {name} has no attempt {attempt}; it has {numbers or 'none'}")
    nodes = run.attempt_logs(attempt or max(numbers, default=0)).glob("node-*.log")
    chosen = sorted(nodes, key=lambda path: int(path.stem.removeprefix("node-")))
    if node is not None:
        chosen = [path for path in chosen if path.stem == f"node-{node}"]
        if not chosen:
            raise UserError(f"run {name} has no log of node {node}")
        return chosen
    steps = [run.step_log("pretokenize"), run.step_log("consolidate"), run.step_log("register")]
    found = [steps[0], *chosen, *steps[1:]]
    return [path for path in found if path.exists()]


def follow(name: str, node: int | None, attempt: int | None) -> Iterator[tuple[Path, str]]:
    """Lines of a run's logs as they come, until nobody holds the run."""
    followers: dict[Path, Follower] = {}
    while True:
        running = holder(run_dir(name).lock) is not None
        for path in log_files(name, node, attempt) if node is None else _maybe(name, node, attempt):
            follower = followers.setdefault(path, Follower(path, start=0))
            yield from ((path, line) for line in follower.lines(ended=not running))
        if not running:
            return
        time.sleep(_FOLLOW_S)


def request_cancel(name: str) -> bool:
    """Leave the request to end a run; False when nobody holds it."""
    run = run_dir(name)
    if holder(run.lock) is None:
        return False
    write_json(run.cancel_request, {"requested": time.time()})
    return True


def _maybe(name: str, node: int, attempt: int | None) -> list[Path]:
    """The same while a run is young and the node's log may not be there yet."""
    run = run_dir(name)
    last = attempt or max(run.attempts(), default=0)
    path = run.node_log(last, node)
    return [path] if path.exists() else []
