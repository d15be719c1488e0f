"""The run's metrics in MLflow, from rank 0, without holding up a step.

The run belongs to the flow, which names it in MLFLOW_RUN_ID and sets its status. A thread imports
MLflow (that takes seconds) and sends what has gathered; a store that does not answer costs the
metrics, never the training.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

_FLUSH_SECONDS = 3.0
_BATCH = 500
"""MLflow takes at most 1,000 metrics in one request."""

Point = tuple[str, float, int, int]
"""Name, value, milliseconds since 1970, step."""


class Tracking:
    """Metrics and parameters of one MLflow run; without a run it does nothing."""

    def __init__(self, run_id: str | None) -> None:
        self._run_id = run_id
        self._points: queue.SimpleQueue[Point] = queue.SimpleQueue()
        self._parameters: dict[str, Any] = {}
        self._warned = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)

    @classmethod
    def of(cls, main: bool) -> Tracking:
        """The tracking of the run named in MLFLOW_RUN_ID, on rank 0."""
        return cls(os.environ.get("MLFLOW_RUN_ID") if main else None)

    def start(self, parameters: Mapping[str, Any]) -> None:
        """Begin sending; `parameters` are logged once."""
        if self._run_id:
            self._parameters = dict(parameters)
            # Left alone, a server that is away is asked for minutes.
            os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
            os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
            self._thread.start()

    def log(self, step: int, **metrics: float | None) -> None:
        """Queue metrics of a step; those that are None are left out."""
        if self._run_id:
            now = int(time.time() * 1000)
            for name, value in metrics.items():
                if value is not None:
                    self._points.put((name, value, now, step))

    def end(self, within_s: float) -> None:
        """Send what is left; waits for it no longer than `within_s`."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(within_s)

    def _work(self) -> None:
        unsent: list[Point] = []
        while True:
            last = self._ended.is_set()
            unsent.extend(self._drained())
            try:
                self._send(unsent)
            except Exception as error:
                self._warn(error)
            if last:
                return
            self._ended.wait(_FLUSH_SECONDS)

    def _send(self, unsent: list[Point]) -> None:
        """Send parameters, then metrics; what was sent leaves the list."""
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        client = MlflowClient()
        if self._parameters:
            named, self._parameters = self._parameters, {}
            client.log_batch(self._run_id, params=[Param(k, str(v)) for k, v in named.items()])
        while unsent:
            some = unsent[:_BATCH]
            client.log_batch(self._run_id, metrics=[Metric(n, v, t, s) for n, v, t, s in some])
            del unsent[: len(some)]

    def _drained(self) -> list[Point]:
        found = []
        while not self._points.empty():
            found.append(self._points.get_nowait())
        return found

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            print(f"MLflow does not take the metrics, training goes on: {error}", file=sys.stderr)
