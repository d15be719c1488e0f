"""A stand-in for a Databricks workspace: a real HTTP server on loopback.

    with DatabricksServer(tmp_path) as server:
        client = WorkspaceClient(host=server.url, token=server.token)   # or server.environment
        server.add_volume("main.default.runs")
        server.state.secrets["scope"] = {"key": "value"}
        server.fault("POST */jobs/runs/submit", "lost")
        server.plan(ending="TIMEDOUT", after_s=2)
        ...
        assert [request.value for request in server.calls("*/jobs/runs/submit")] == [...]

What a test uses:

- `url`, `token`, `environment` (DATABRICKS_HOST and DATABRICKS_TOKEN).
- `state` (tests/databricks/state.py): user, secrets, schemas, volumes, grants, what is denied.
- `rules` (same file): limits, delays, how a failing command shows, how nodes are run.
- `fault(pattern, kind, times=1, after=0, seconds=1)` disturbs requests whose path, or
  `METHOD path`, matches the shell pattern: the first `after` pass, the next `times` are hit.
  `origin` limits it as in `calls`; `then` is called before a connection ends.
  Kinds: `429` (with Retry-After of `seconds`), `500`, `503`, `403`, `404`, `slow` (by `seconds`),
  `cut` (the connection ends before anything is done), `lost` (it is done, the answer never comes),
  `torn` (half of the answer's body comes). `clear_faults()` ends them all.
- `plan(**fields)` says what happens to the next submitted run (`Plan` in state.py: waits, words of
  unknown states, endings, nodes that never start or are killed). Plans queue up.
- `requests`, `calls(pattern, origin)`: every request with its answer's status; `.value` is method,
  path, query and body, to be compared whole; `origin` is "client" or "node", by the token it bore.
  `busiest(pattern, seconds)`: the most of them within any such window.
- `runs`: the submitted runs with payload, `phase`, `attempts`, each with nodes (`exit_code`, `log`,
  `lines`). `await_runs()` waits until all have ended.
- `registry.models`: registered models with versions, aliases and tags.
- `on_disk("/Volumes/…")`, `on_disk("/Workspace/…")`: the real file behind a path.
- `mlflow`: True starts a real `mlflow server` when first needed (about 5 s), an address uses one
  that runs, False gives run ids without a store. `python`: the interpreter of the nodes.

Commands really run, once per node, with what docs and public sources say a node sees. Where the
machine allows it (`server.mounts`) each node has mounts of its own, and finds /Volumes, /Workspace
and /databricks/code_source at their real paths; elsewhere those paths are rewritten in the sidecar
files to the folders behind them, and TUNEWRIGHT_WHOLE_FILES names the volumes. Python code on a
node gets "operation not supported" for append, in-place writes, rename and links on volumes;
compiled code is not watched.

On leaving, runs that still go are ended and no process is left. An error of the stand-in itself is
raised then.

Not verified on a live workspace, and only as good as its sources: the termination codes of
time-outs and skips; how a non-zero exit shows (`rules.failed_as`); whether the time-outs of task
and run count the wait for capacity (here they do); that every attempt is listed below `tasks`; what
runs/cancel and runs/get say about a task's id; the shape of the live log endpoint and whether its
run id is the run's; the number in `logs/attempt_N` (here from 0); that an upload makes missing
folders; the error codes of the Files API; that finalizing asks for an MLmodel, and that a version
is READY some time after it (MLflow's client takes it for READY at once; `rules.ready_after_s`); the
wording of every message; that other nodes are ended once one fails; the signals and the grace with
which nodes are ended. Known differences: nodes get host and token (the platform's auth shows none),
run under this machine's Python with packages taken for installed (wheels named by path are
unpacked), start in a folder that is not /mnt/work, and LOCAL_WORLD_SIZE is `rules.procs_per_node`.
"""

from __future__ import annotations

import fnmatch
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.databricks.catalog import Catalog
from tests.databricks.connection import HttpServer
from tests.databricks.files import Files
from tests.databricks.jobs import Jobs
from tests.databricks.nodes import Places
from tests.databricks.registry import Registry
from tests.databricks.runs import Driver, Run
from tests.databricks.state import Plan, Rules, State
from tests.databricks.tracking import MlflowTracking, NoTracking, RealServer
from tests.databricks.wire import KINDS, Fault, Request, Wire
from tests.databricks.workspace import Workspace


class DatabricksServer:
    """One workspace; everything it keeps is below `folder`."""

    def __init__(
        self, folder: Path, *, mlflow: str | bool = True, rules: Rules | None = None,
        python: Path | None = None,
    ) -> None:  # fmt: skip
        self.folder = folder / "databricks"
        self.token = f"dapi{secrets.token_hex(16)}"
        self.state, self.rules = State(), rules or Rules()
        self._node_token = f"dapi{secrets.token_hex(16)}"
        self._wire = Wire({self.token: "client", self._node_token: "node"})
        self._volumes, self._models = self.folder / "Volumes", self.folder / "Models"
        self._volumes.mkdir(parents=True)
        self._models.mkdir()
        self.places = Places(self._volumes, self.folder / "Workspace")
        self._workspace = Workspace(self._wire, self.state, self.places.workspace)
        self._files = Files(self._wire, self.state, self.rules, self._volumes, self._models)
        self._catalog = Catalog(self._wire, self.state, self._volumes)
        self.registry = Registry(self._wire, self.state, self.rules, self._models)
        self._mlflow = self._tracking(mlflow)
        driver = Driver(
            self.state, self.rules, self.places, self.folder / "nodes", self._mlflow,
            errors=self._wire.errors, **({"python": python} if python else {}),
        )  # fmt: skip
        self._jobs = Jobs(self._wire, self.state, self.rules, driver)

    def _tracking(self, mlflow: str | bool) -> MlflowTracking | NoTracking:
        self._real = RealServer(self.folder / "mlflow", mlflow if isinstance(mlflow, str) else None)
        if mlflow is False:
            return NoTracking("", self._node_token)
        return MlflowTracking(self._wire, self._real, self.state, self.rules, self._node_token)

    def __enter__(self) -> DatabricksServer:
        self._http = HttpServer(self._wire)
        self._files.url = self._mlflow.url = self.url
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        for run in self.runs:
            run.cancelled.set()
        self.rules.grace_s = 0
        self.await_runs()
        self._http.stop()
        self._real.stop()
        if self._wire.errors and error is None:
            raise self._wire.errors[0]

    @property
    def url(self) -> str:
        return self._http.url

    @property
    def environment(self) -> dict[str, str]:
        """What points databricks-sdk and MLflow here."""
        return {"DATABRICKS_HOST": self.url, "DATABRICKS_TOKEN": self.token}

    @property
    def mounts(self) -> bool:
        """Whether nodes see /Volumes and /Workspace at their real paths."""
        return self.places.mounts

    @property
    def runs(self) -> list[Run]:
        """What was submitted, oldest first."""
        return self._jobs.runs

    @property
    def requests(self) -> list[Request]:
        """What came in, in order; requests that still go have no `ended`."""
        return self._wire.requests

    def calls(self, pattern: str = "*", origin: str | None = None) -> list[Request]:
        """The requests whose path, or `METHOD path`, matches a shell pattern; of one origin."""
        return [
            request for request in list(self.requests)
            if _matches(request, pattern) and origin in (None, request.origin)
        ]  # fmt: skip

    def busiest(self, pattern: str = "*", seconds: float = 1.0) -> int:
        """The most requests of a kind that came within any window of so many seconds."""
        times = sorted(request.started for request in self.calls(pattern))
        first, most = 0, 0
        for last, at in enumerate(times):
            while at - times[first] >= seconds:
                first += 1
            most = max(most, last - first + 1)
        return most

    def fault(
        self, pattern: str, kind: str, times: int = 1, after: int = 0, seconds: float = 1.0,
        origin: str | None = None, then: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Disturb requests; see the module. The first fault that matches a request hits it."""
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is none of {', '.join(KINDS)}")
        with self._wire.lock:
            self._wire.faults.append(Fault(pattern, kind, times, after, seconds, origin, then))

    def clear_faults(self) -> None:
        with self._wire.lock:
            self._wire.faults.clear()

    def plan(self, times: int = 1, **fields: Any) -> None:
        """What happens to the next runs that are submitted; fields as in `Plan`."""
        self._jobs.plans += [replace(Plan(), **fields) for _ in range(times)]

    def add_volume(self, name: str) -> Path:
        """Make `catalog.schema.volume`, with its catalog and schema; its real folder."""
        return self._catalog.add_volume(name)

    def on_disk(self, name: str) -> Path:
        """The real file behind /Volumes/…, /Workspace/… or /Users/…."""
        return self.places.real(name)

    def await_runs(self, timeout_s: float = 120.0) -> None:
        """Until every run has ended; raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        for run in list(self.runs):
            if run.thread is not None:
                run.thread.join(max(0, deadline - time.monotonic()))
                if run.thread.is_alive():
                    raise TimeoutError(f"run {run.run_id} is {run.phase.life} after {timeout_s} s")


def _matches(request: Request, pattern: str) -> bool:
    subject = f"{request.method} {request.path}" if " " in pattern else request.path
    return fnmatch.fnmatchcase(subject, pattern)
