"""The MLflow run that the platform makes for an attempt: its address, artifacts, tags, metrics."""

from __future__ import annotations

import http.client
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tasks.targets.databricks.api import Missing, Workspace, quoted
from tunewright.contract.failures import TunewrightError

OUTPUT = "/api/2.2/jobs/runs/get-output"
_MLFLOW = "/api/2.0/mlflow"
_TIMEOUT_S = 60.0
_PAGE = 25_000


@dataclass(frozen=True)
class PlatformRun:
    """One run in the workspace's MLflow."""

    workspace: Workspace
    experiment_id: str
    run_id: str

    @property
    def url(self) -> str:
        return f"{self.workspace.host}/ml/experiments/{self.experiment_id}/runs/{self.run_id}"

    @cached_property
    def artifact_uri(self) -> str:
        found = self.workspace.get(f"{_MLFLOW}/runs/get", {"run_id": self.run_id})
        return str(found["run"]["info"].get("artifact_uri") or "")

    def artifacts(self, folder: str) -> Iterator[tuple[str, int]]:
        """(path, bytes) of every file below a folder of the artifacts."""
        query: dict[str, Any] = {"run_id": self.run_id, "path": folder}
        while True:
            page = self.workspace.get(f"{_MLFLOW}/artifacts/list", query)
            for entry in page.get("files") or []:
                if entry.get("is_dir"):
                    yield from self.artifacts(entry["path"])
                else:
                    yield entry["path"], int(entry.get("file_size") or 0)
            if not page.get("next_page_token"):
                return
            query = {**query, "page_token": page["next_page_token"]}

    def artifact(self, path: str) -> bytes:
        """One small file: from the volume when artifacts lie there, else by a signed address."""
        root = self.artifact_uri.removeprefix("dbfs:").rstrip("/")
        if root.startswith("/Volumes/"):
            with closing(
                self.workspace.read("/api/2.0/fs/files" + quoted(f"{root}/{path}"))
            ) as file:
                return file.read()
        asked = {"run_id": self.run_id, "path": [path]}
        found = self.workspace.post(f"{_MLFLOW}/artifacts/credentials-for-read", asked)
        infos = found.get("credential_infos") or []
        if not infos:
            raise Missing(f"{self.workspace.host} gives no way to read the artifact {path}")
        return _signed(infos[0])

    def tag(self, tags: Mapping[str, str]) -> None:
        for key, value in tags.items():
            body = {"run_id": self.run_id, "key": key, "value": value}
            self.workspace.post(f"{_MLFLOW}/runs/set-tag", body)

    def metrics(self) -> dict[str, list[dict[str, Any]]]:
        """Every metric with its history: {name: [{"value", "step", "timestamp"}]}."""
        found = self.workspace.get(f"{_MLFLOW}/runs/get", {"run_id": self.run_id})
        names = [metric["key"] for metric in (found["run"].get("data") or {}).get("metrics") or []]
        return {name: list(self._history(name)) for name in names}

    def _history(self, name: str) -> Iterator[dict[str, Any]]:
        query = {"run_id": self.run_id, "metric_key": name, "max_results": _PAGE}
        while True:
            page = self.workspace.get(f"{_MLFLOW}/metrics/get-history", query)
            for metric in page.get("metrics") or []:
                yield {key: metric.get(key, 0) for key in ("value", "step", "timestamp")}
            if not page.get("next_page_token"):
                return
            query = {**query, "page_token": page["next_page_token"]}


def platform_run(workspace: Workspace, task_run_id: int) -> PlatformRun | None:
    """The MLflow run of a task, once the platform tells it."""
    found = workspace.get(OUTPUT, {"run_id": task_run_id}, patience_s=0)
    told = found.get("ai_runtime_task_output") or {}
    experiment, run = told.get("mlflow_experiment_id"), told.get("mlflow_run_id")
    return PlatformRun(workspace, str(experiment), str(run)) if experiment and run else None


def _signed(info: Mapping[str, Any]) -> bytes:
    """What a signed address holds; it carries its own right, so ours is not sent along."""
    headers = {head["name"]: head["value"] for head in info.get("headers") or []}
    request = urllib.request.Request(info["signed_uri"], headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            content: bytes = answer.read()
            return content
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise TunewrightError(f"a log of the platform cannot be read: {error}") from None
