"""The process that owns a run in MLflow, so that whoever starts it never imports mlflow:

    python -m tunewright.tracking

One JSON object a line on stdin, one reply a line on stdout. First `open`, then any number of `log`,
then `finish`:

    {"open": {"experiment", "run_name", "run_id", "tags", "params", "artifact_location"}}
        → {"run_id", "experiment_id", "tracking_uri", "artifact_uri"}
    {"log": {"params", "metrics", "history", "step", "tags", "artifacts"}}     → {"ok": true}
    {"finish": "FINISHED" | "FAILED" | "KILLED", "artifacts", …}    → {"ok": true}, and the end

What goes wrong is replied as {"error": one sentence, "class": its failure class}. When stdin ends
without `finish`, whoever started us was killed, and the run becomes KILLED. Signals do not end this
process: after Ctrl-C the other side still has a status to set.
"""

from __future__ import annotations

import gc
import getpass
import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tunewright import mlflow_store
from tunewright.contract.failures import TunewrightError, UserError, reported

if TYPE_CHECKING:
    from mlflow.entities import Run

_STATUSES = ("FINISHED", "FAILED", "KILLED")
_MAX_PARAM_CHARS = 6000
_MAX_TAG_CHARS = 5000
_BATCH = 100


class TrackedRun:
    """One run in MLflow, opened once, logged to, and finished once."""

    def __init__(self, wanted: Mapping[str, Any]) -> None:
        """Continue the run of `wanted["run_id"]`, or make one when there is none (any more)."""
        self._client = mlflow_store.connect()
        with mlflow_store.explained():
            run = self._continued(wanted.get("run_id")) or self._made(wanted)
        self.run_id: str = run.info.run_id
        self.info = {
            "run_id": self.run_id,
            "experiment_id": run.info.experiment_id,
            "tracking_uri": mlflow_store.tracking_uri(),
            "artifact_uri": run.info.artifact_uri,
        }
        self._params: dict[str, str] = dict(run.data.params)
        self.wanted_status: str | None = None
        self.finished = False
        self.log({"params": wanted.get("params"), "tags": wanted.get("tags")})

    def log(self, wanted: Mapping[str, Any]) -> None:
        """Log parameters, metrics (at `step`), tags, and files or folders as artifacts.

        `history` are metrics of another run: {name: [{"value", "step", "timestamp" in ms}]}.
        """
        from mlflow.entities import Metric, Param, RunTag

        now, step = int(time.time() * 1000), int(wanted.get("step") or 0)
        params = [Param(k, v) for k, v in self._new_params(wanted.get("params") or {}).items()]
        metrics = [Metric(k, float(v), now, step) for k, v in (wanted.get("metrics") or {}).items()]
        metrics += [
            Metric(name, float(each["value"]), int(each["timestamp"]), int(each["step"]))
            for name, values in (wanted.get("history") or {}).items()
            for each in values
        ]
        tags = [RunTag(k, str(v)[:_MAX_TAG_CHARS]) for k, v in (wanted.get("tags") or {}).items()]
        with mlflow_store.explained():
            for kind, found in (("params", params), ("metrics", metrics), ("tags", tags)):
                for start in range(0, len(found), _BATCH):
                    self._client.log_batch(self.run_id, **{kind: found[start : start + _BATCH]})
            self._attach(wanted.get("artifacts") or [])

    def finish(self, status: str, wanted: Mapping[str, Any] | None = None) -> None:
        """Log what is left, then set the final status, even when the logging fails."""
        if status not in _STATUSES:
            raise UserError(f"a run ends as one of {', '.join(_STATUSES)}, not as {status!r}")
        self.wanted_status = status
        try:
            self.log(wanted or {})
        finally:
            with mlflow_store.explained():
                self._client.set_terminated(self.run_id, status)
            self.finished = True

    def _continued(self, run_id: str | None) -> Run | None:
        from mlflow.exceptions import MlflowException

        if not run_id:
            return None
        try:
            run = self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                raise
            return None
        if run.info.lifecycle_stage != "active":
            return None
        self._client.update_run(run_id, status="RUNNING")
        return run

    def _made(self, wanted: Mapping[str, Any]) -> Run:
        tags = {"mlflow.user": _user(), "mlflow.source.name": "tunewright"}
        experiment = self._experiment(wanted["experiment"], wanted.get("artifact_location"))
        return self._client.create_run(experiment, tags=tags, run_name=wanted.get("run_name"))

    def _experiment(self, name: str, location: str | None) -> str:
        """The experiment's id; made when missing, brought back when it was deleted."""
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                location = location or mlflow_store.default_artifact_location(name)
                return str(self._client.create_experiment(name, artifact_location=location))
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                found = self._client.get_experiment_by_name(name)
        if found.lifecycle_stage != "active":
            print(f"the experiment {name} was deleted; restoring it", file=sys.stderr)
            self._client.restore_experiment(found.experiment_id)
        return str(found.experiment_id)

    def _new_params(self, params: Mapping[str, Any]) -> dict[str, str]:
        """Parameters not logged yet: MLflow refuses to change one, so the first value stays."""
        texts = {name: str(value)[:_MAX_PARAM_CHARS] for name, value in params.items()}
        new = {name: text for name, text in texts.items() if name not in self._params}
        for name in texts.keys() - new.keys():
            if self._params[name] != texts[name]:
                print(
                    f"MLflow keeps {name}={self._params[name]}, now {texts[name]}", file=sys.stderr
                )
        self._params |= new
        return new

    def _attach(self, paths: Iterable[str]) -> None:
        for path in map(Path, paths):
            if path.is_dir():
                self._client.log_artifacts(self.run_id, str(path), path.name)
            elif path.is_file():
                self._client.log_artifact(self.run_id, str(path))
            else:
                raise UserError(f"the artifact {path} does not exist")


def serve(requests: Iterable[str], replies: IO[str]) -> None:
    """Answer requests until `finish` or the end of the input."""
    run: TrackedRun | None = None
    for line in requests:
        try:
            request = _parsed(line)
            if "open" in request:
                run = TrackedRun(request["open"])
                _reply(replies, run.info)
                continue
            if run is None:
                raise UserError("the first request must be open")
            if "finish" in request:
                run.finish(request["finish"], request)
            else:
                run.log(request["log"])
            _reply(replies, {"ok": True})
        except TunewrightError as error:
            _reply(replies, {"error": str(error), "class": error.failure_class})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            _reply(replies, {"error": f"a malformed request: {error!r}", "class": "unknown"})
        if run is not None and run.finished:
            return
    if run is not None:
        _keep_stderr_writable()
        run.finish(run.wanted_status or "KILLED")


def _parsed(line: str) -> dict[str, Any]:
    request = json.loads(line)
    if not isinstance(request, dict) or not request.keys() & {"open", "log", "finish"}:
        raise UserError("a request is an object with one of open, log, finish")
    return request


def _reply(replies: IO[str], facts: Mapping[str, Any]) -> None:
    try:
        replies.write(json.dumps(facts) + "\n")
        replies.flush()
    except BrokenPipeError:
        # Nobody reads any more; the end of stdin follows and decides.
        print("a reply found no reader", file=sys.stderr)


def _keep_stderr_writable() -> None:
    """Our starter may have taken the reader of stderr with it; MLflow's prints must not end us."""
    try:
        os.write(2, b"the other side is gone without a final word\n")
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.dup2(2, 1)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return str(os.getuid())


def _private_stdout() -> IO[str]:
    """A file on what was stdout; from here on prints of libraries go to stderr."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


def main() -> None:
    replies = _private_stdout()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _import_quickly()
    serve(sys.stdin, replies)


def _import_quickly() -> None:
    """Take about 0.4 s of 1.9 off the start: rarer collections, and MLflow without pandas."""
    gc.set_threshold(200_000, 50, 50)
    # None is how Python says that a module is not there; MLflow needs pandas for nothing done here.
    sys.modules.setdefault("pandas", None)  # type: ignore[arg-type]


if __name__ == "__main__":
    with reported():
        main()
    sys.stderr.flush()
    # Taking the imported modules down costs 0.7 s, and everything is stored and replied.
    os._exit(0)
