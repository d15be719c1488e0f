"""The run's metrics in MLflow, from rank 0, without holding up a step.

The run belongs to the flow, which names it in MLFLOW_RUN_ID and sets its status. A thread imports
MLflow (that takes seconds) and sends what has gathered; a store that does not answer costs the
metrics, never the training. The same thread samples the machine of rank 0 with MLflow's own
monitors, under the names that its page of system metrics knows (GPUs need `nvidia-ml-py`).
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import import_module
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
        self._step = 0
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
            self._step = step
            now = _now()
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
        machine = Machine()
        while True:
            last = self._ended.is_set()
            unsent.extend(self._drained())
            try:
                # By the training step, so that its curves lie below those of the loss.
                unsent.extend((n, v, _now(), self._step) for n, v in machine.sampled(last))
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


class Machine:
    """What MLflow calls system metrics: use of CPU, memory, disk, network and GPUs here.

    MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING=false turns them off, and
    MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL sets the seconds between samples, as in MLflow. Its own
    SystemMetricsMonitor is not used: it asks the server before each sample, gives up for good when
    that fails once, and its end waits for the server without a limit.
    """

    def __init__(self) -> None:
        self._on = os.environ.get("MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", "").lower() != "false"
        self._every_s = float(os.environ.get("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL") or 10)
        self._monitors: list[Any] | None = None
        self._sampled = 0.0

    def sampled(self, last: bool) -> Iterator[tuple[str, float]]:
        """Names and values when a sample is due, and at the end; nothing otherwise."""
        if not self._on:
            return
        now = time.monotonic()
        if self._monitors is None:
            self._monitors, self._sampled = list(_monitors()), now
        elif last or now - self._sampled >= self._every_s:
            self._sampled = now
            for monitor in self._monitors:
                # A machine that does not tell costs these figures, not those of the training.
                with suppress(Exception):
                    monitor.collect_metrics()
                    yield from ((f"system/{n}", v) for n, v in monitor.aggregate_metrics().items())
                    monitor.clear_metrics()


def _monitors() -> Iterator[Any]:
    """Those of MLflow's monitors that work here; without a GPU or pynvml there is none for it."""
    for kind in ("CPU", "Disk", "Network", "GPU"):
        with suppress(Exception):
            module = import_module(f"mlflow.system_metrics.metrics.{kind.lower()}_monitor")
            monitor = getattr(module, f"{kind}Monitor")()
            # Some tell what was since they were last asked, and nothing at first.
            monitor.collect_metrics()
            monitor.clear_metrics()
            yield monitor


def _now() -> int:
    """Milliseconds since 1970."""
    return int(time.time() * 1000)
