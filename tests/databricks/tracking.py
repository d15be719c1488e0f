"""MLflow behind the workspace: a real server, started when first asked for, and its artifacts.

Its artifact addresses are shown as the platform's (dbfs:/databricks/mlflow-tracking/…), and signed
URLs lead back to the real server's artifact store.
"""

from __future__ import annotations

import json
import re
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlencode

from tests.databricks.runs import Attempt
from tests.databricks.state import Rules, State
from tests.databricks.wire import Answer, ApiError, Request, Wire
from tests.mlflow_server import MlflowServer

REAL, SHOWN = "mlflow-artifacts:/", "dbfs:/databricks/mlflow-tracking/"
CHUNK_BYTES = 4 << 20


@dataclass
class RealServer:
    """A `mlflow server` of our own, started at the first `address`."""

    folder: Path
    given: str | None = None
    _own: MlflowServer | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def address(self) -> str:
        with self._lock:
            if self.given is None and self._own is None:
                self._own = MlflowServer(self.folder)
            return self.given or str(self._own and self._own.address)

    def stop(self) -> None:
        if self._own is not None:
            self._own.stop()


class MlflowTracking:
    """Routes that lead to the real server, and the platform's own MLflow run of each attempt."""

    def __init__(
        self, wire: Wire, server: RealServer, state: State, rules: Rules, token: str
    ) -> None:
        self.server, self.state, self.rules = server, state, rules
        self.url, self.token = "", token
        wire.route("POST", "/api/2.0/mlflow/artifacts/credentials-for-(?:read|write)", self._of_run)
        of_model = "/api/2.0/mlflow/logged-models/([^/]+)/artifacts/credentials-for-"
        wire.route("POST", f"{of_model}(?:upload|download)", self._of_model)
        wire.route("GET", r"/signed/artifact(/.+)", self._artifact)
        wire.route("PUT", r"/signed/artifact(/.+)", self._artifact)
        wire.route("*", r"/api/2.0/mlflow/(.+)", self._proxy)

    def _proxy(self, request: Request, rest: str) -> Answer:
        return self._forward(request, f"/api/2.0/mlflow/{quote(rest)}")

    def _forward(self, request: Request, path: str) -> Answer:
        query = f"?{urlencode(request.query)}" if request.query else ""
        kept = {k: v for k, v in request.headers.items() if k.lower() in ("content-type", "accept")}
        asked = urllib.request.Request(
            f"{self.server.address}{path}{query}", method=request.method, headers=kept,
            data=_real(request.raw) if request.raw else None,
        )  # fmt: skip
        try:
            with _direct.open(asked, timeout=120) as answer:
                status, data, kind = answer.status, answer.read(), answer.headers["Content-Type"]
        except urllib.error.HTTPError as error:
            status, data, kind = error.code, error.read(), error.headers["Content-Type"]
        if "json" in (kind or ""):
            data = _shown(data)
        return Answer(data, status, {"Content-Type": kind or "application/json"})

    def call(self, method: str, path: str, **fields: Any) -> dict[str, Any]:
        """One call of our own to the real server; raises ApiError."""
        headers = {"Content-Type": "application/json"}
        query = f"?{urlencode(fields)}" if method == "GET" else ""
        data = json.dumps(fields).encode() if method != "GET" else None
        asked = urllib.request.Request(
            f"{self.server.address}/api/2.0/mlflow/{path}{query}", data, headers, method=method
        )
        try:
            with _direct.open(asked, timeout=60) as answer:
                return dict(json.load(answer))
        except urllib.error.HTTPError as error:
            found = json.load(error)
            raise ApiError(error.code, found["error_code"], found["message"]) from None

    def begin(self, attempt: Attempt) -> None:
        """The platform's run of this attempt, in the experiment that the request names."""
        ai = attempt.run.task["ai_runtime_task"]
        folder = ai.get("mlflow_experiment_directory") or f"/Users/{self.state.user}"
        name = f"{folder.removeprefix('/Workspace')}/{ai['experiment']}"
        attempt.mlflow_experiment_id = self._experiment(name)
        run = self.call(
            "POST", "runs/create", experiment_id=attempt.mlflow_experiment_id,
            run_name=ai.get("mlflow_run") or attempt.run.payload.get("run_name"),
            start_time=attempt.started,
            tags=[{"key": "mlflow.user", "value": self.state.user},
                  {"key": "mlflow.databricks.jobRunID", "value": str(attempt.run.run_id)}],
        )["run"]  # fmt: skip
        attempt.mlflow_run_id = run["info"]["run_id"]

    def _experiment(self, name: str) -> str:
        try:
            found = self.call("GET", "experiments/get-by-name", experiment_name=name)
            return str(found["experiment"]["experiment_id"])
        except ApiError as error:
            if error.status != 404:
                raise
        return str(self.call("POST", "experiments/create", name=name)["experiment_id"])

    def finish(self, attempt: Attempt, result: str | None) -> None:
        """The MLflow run's last status, and the logs as artifacts; a cancelled run ships none."""
        words = {"SUCCESS": "FINISHED", "CANCELED": "KILLED"}
        status = words.get(result or "", "FAILED")
        self.call("POST", "runs/update", run_id=attempt.mlflow_run_id, status=status,
                  end_time=int(time.time() * 1000))  # fmt: skip
        if status == "KILLED" or not self.rules.artifact_logs:
            return
        for node in attempt.nodes:
            data = node.log.read_bytes() if node.log.exists() else b""
            for index, start in enumerate(range(0, len(data), CHUNK_BYTES)):
                name = f"logs/attempt_{attempt.number}/node_{node.rank}/logs-{index}.chunk.txt"
                self._store(attempt, name, data[start : start + CHUNK_BYTES])

    def _store(self, attempt: Attempt, name: str, data: bytes) -> None:
        place = f"{attempt.mlflow_experiment_id}/{attempt.mlflow_run_id}/artifacts/{name}"
        address = f"{self.server.address}/api/2.0/mlflow-artifacts/artifacts/{place}"
        headers = {"Content-Type": "application/octet-stream"}
        _direct.open(urllib.request.Request(address, data, headers, method="PUT")).close()

    def environment(self, attempt: Attempt) -> dict[str, str]:
        return node_environment(attempt, self.url, self.token)

    def _of_run(self, request: Request) -> dict[str, Any]:
        info = self.call("GET", "runs/get", run_id=request.need("run_id"))["run"]["info"]
        return {"credential_infos": self._signed(info["artifact_uri"], request.need("path"))}

    def _of_model(self, request: Request, model: str) -> dict[str, Any]:
        info = self.call("GET", f"logged-models/{model}")["model"]["info"]
        signed = self._signed(info["artifact_uri"], request.need("paths"))
        return {"credentials": [{"credential_info": each} for each in signed]}

    def _signed(self, root: str, paths: str | list[str]) -> list[dict[str, Any]]:
        """A signed address for each path below an artifact root."""
        place = root.removeprefix(REAL)
        return [
            {"path": path, "signed_uri": f"{self.url}/signed/artifact/{quote(f'{place}/{path}')}",
             "headers": [], "type": "AWS_PRESIGNED_URL"}
            for path in ([paths] if isinstance(paths, str) else paths)
        ]  # fmt: skip

    def _artifact(self, request: Request, path: str) -> Answer:
        request.headers["Content-Type"] = "application/octet-stream"
        return self._forward(request, f"/api/2.0/mlflow-artifacts/artifacts{quote(unquote(path))}")


class NoTracking:
    """Run ids that belong to no MLflow, for tests that need none."""

    def __init__(self, url: str, token: str) -> None:
        self.url, self.token = url, token

    def begin(self, attempt: Attempt) -> None:
        attempt.mlflow_experiment_id = "1"
        attempt.mlflow_run_id = f"{attempt.run_id:032x}"

    def finish(self, attempt: Attempt, result: str | None) -> None:
        """Nothing was tracked."""

    def environment(self, attempt: Attempt) -> dict[str, str]:
        return node_environment(attempt, self.url, self.token)


def node_environment(attempt: Attempt, url: str, token: str) -> dict[str, str]:
    """What a node's MLflow needs. The platform's managed auth shows no host and no token."""
    return {
        "MLFLOW_RUN_ID": str(attempt.mlflow_run_id),
        "MLFLOW_TRACKING_URI": "databricks",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DATABRICKS_HOST": url,
        "DATABRICKS_TOKEN": token,
    }


def _shown(data: bytes) -> bytes:
    """Artifact addresses as the platform writes them, folders of logged models included."""
    data = re.sub(rb"mlflow-artifacts:/(\d+)/models/", SHOWN.encode() + rb"\1/logged_models/", data)
    return data.replace(REAL.encode(), SHOWN.encode())


def _real(data: bytes) -> bytes:
    shown = SHOWN.encode()
    data = re.sub(shown + rb"(\d+)/logged_models/", REAL.encode() + rb"\1/models/", data)
    return data.replace(shown, REAL.encode())


_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
