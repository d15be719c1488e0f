"""The flow's side of `tunewright.tracking`: the process that owns the MLflow run.

It is started early, so that importing MLflow overlaps with other work, and sets KILLED by itself
when the flow is gone without a word.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from tunewright.contract.failures import TunewrightError

_LAST_WORD_S = 60.0


class TrackingFailed(TunewrightError):
    """MLflow did not do what was asked; another attempt may help."""

    failure_class = "infrastructure"


class Tracker:
    """One MLflow run: opened at once, answered later, finished by us whatever the script did."""

    def __init__(self, opening: Mapping[str, Any], without: Iterable[str] = ()) -> None:
        """Open a run; variables named in `without` (the workload's secrets) are not passed on."""
        env = {name: value for name, value in os.environ.items() if name not in set(without)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tunewright.tracking"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
            env={
                **env,
                "MLFLOW_DISABLE_TELEMETRY": "true",
                "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
            },
        )
        self.opened: dict[str, Any] | None = None
        self._finished = False
        self._send({"open": dict(opening)})

    @property
    def run(self) -> dict[str, Any]:
        """{"run_id", "experiment_id", "tracking_uri", "artifact_uri"}; waits for the answer."""
        if self.opened is None:
            self.opened = self._answer()
        return self.opened

    def log(self, **parts: Any) -> None:
        """Add params, metrics, tags or artifacts (paths) to the run."""
        _ = self.run
        self._send({"log": parts})
        self._answer()

    def finish(self, status: str, **parts: Any) -> None:
        """Write the final status (FINISHED, FAILED, KILLED) last, and end the process."""
        if self._finished:
            return
        self._finished = True
        try:
            _ = self.run
            self._send({"finish": status, **parts})
            self._answer()
        finally:
            self._end()

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        # A process that is gone is told by its missing answer.
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message, default=str) + "\n")
            self._process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise TrackingFailed("the process that owns the MLflow run ended without an answer")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise TrackingFailed(f"MLflow: {answer['error']}")
        return answer

    def _end(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_LAST_WORD_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
