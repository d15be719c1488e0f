"""A program of tunewright as a process of its own, guarded like a node's command."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tasks import ui
from tasks.run import Run
from tasks.targets import local
from tasks.targets.guardian import Guardian, Node, marked, watch
from tunewright.contract.failures import DataError, TunewrightError, UserError
from tunewright.contract.processes import GRACE_S
from tunewright.contract.rundir import read_json

_CLASSES = {"user": UserError, "data": DataError}


class ProgramFailed(TunewrightError):
    """A program ended badly; its class says whether another attempt may help."""


def run_program(
    run: Run,
    name: str,
    args: list[str],
    secrets: Mapping[str, str],
    heard: Callable[[str], None] = ui.say,
) -> dict[str, Any]:
    """Run `python -m tunewright.<name>` and return the result it wrote; `heard` gets its lines.

    Raises UserError or DataError with the program's own sentence, else ProgramFailed with its
    class and the end of its log.
    """
    with tempfile.TemporaryDirectory(prefix=f"tunewright-{name}-") as scratch:
        result = Path(scratch, "result.json")
        own = run.workload.secrets
        inherited = {k: v for k, v in local.inherited_environment().items() if k not in own}
        env = {**inherited, **run.workload.env_variables, **run.mlflow_if_open()}
        node = Node(
            argv=[sys.executable, "-m", f"tunewright.{name}", *args, "--result", str(result)],
            env=marked(env, run.dir.root, name),
            cwd=Path(scratch),
            log=run.dir.step_log(name),
            exit=Path(scratch, "exit.json"),
        )
        outcome = watch(
            [Guardian(node, secrets, GRACE_S, without=own)],
            lambda _, line: heard(line),
            run.reason_to_stop,
            run.lock.guarded_by,
        )[0]
        found = read_json(result)
    if outcome["exit_code"] == 0 and found is not None:
        return found
    run.raise_if_cancelled()
    raise _error_of(name, outcome, run.dir.step_log(name))


def _error_of(name: str, outcome: Mapping[str, Any], log: Path) -> TunewrightError:
    failure = outcome["failure"] or {"class": "unknown", "message": "it wrote no result"}
    kind = _CLASSES.get(failure["class"])
    if kind is not None:
        return kind(failure["message"])
    error = ProgramFailed(f"{name}: {failure['message']}\nthe whole log is {log}")
    error.failure_class = failure["class"]
    return error
