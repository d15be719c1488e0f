"""The flow's side of `tunewright.tracking`: the process that owns the MLflow run.

It is started early, so that importing MLflow overlaps with other work, and sets KILLED by itself
when the flow is gone without a word.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from tunewright.contract.failures import TunewrightError, UserError

_LAST_WORD_S = 60.0
_ANSWER_S = 180.0
"""More than the program itself waits for a server that is away."""


class TrackingFailed(TunewrightError):
    """MLflow did not do what was asked; another attempt may help."""

    failure_class = "infrastructure"


class Tracker:
    """One MLflow run: opened at once, answered later, finished by us whatever the script did."""

    def __init__(self, opening: Mapping[str, Any], without: Iterable[str] = ()) -> None:
        """Open a run; variables named in `without` (the workload's secrets) are not passed on."""
        self._opening = dict(opening)
        hidden = set(without)
        quiet = ("MLFLOW_DISABLE_TELEMETRY", "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT")
        kept = {name: value for name, value in os.environ.items() if name not in hidden}
        self._env = {**kept, **dict.fromkeys(quiet, "true")}
        self.opened: dict[str, Any] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    @property
    def run(self) -> dict[str, Any]:
        """{"run_id", "experiment_id", "tracking_uri", "artifact_uri"}; waits for the answer.

        Raises TrackingFailed or UserError when MLflow cannot open it; asked again, it tries again.
        """
        if self.opened is None:
            if self._process is None:
                self._start()
            try:
                self.opened = self._answer()
            except BaseException:
                self._end()
                raise
        return self.opened

    def log(self, **parts: Any) -> None:
        """Log tags, or metrics at a step; raises TrackingFailed when that cannot be done."""
        _ = self.run
        self._send({"log": parts})
        self._answer()

    def finish(self, status: str, **parts: Any) -> None:
        """Write the final status (FINISHED, FAILED, KILLED) last, and end the process.

        A run that could not be opened has no status to write.
        """
        if self._process is None:
            return
        try:
            _ = self.run
            self._send({"finish": status, **parts})
            self._answer()
        finally:
            self._end()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tunewright.tracking"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env=self._env,
        )
        self._send({"open": self._opening})

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        # A process that is gone is told by its missing answer.
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message, default=str).encode() + b"\n")
            self._process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], _ANSWER_S)
        if not ready:
            raise TrackingFailed(f"MLflow did not answer within {_ANSWER_S:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise TrackingFailed("the process that owns the MLflow run ended without an answer")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            kind = UserError if answer.get("class") == "user" else TrackingFailed
            raise kind(f"MLflow: {answer['error']}")
        return answer

    def _end(self) -> None:
        """Close the pipe, which ends the process; one that was never opened writes nothing."""
        if self._process is None:
            return
        process, self._process = self._process, None
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(_LAST_WORD_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
