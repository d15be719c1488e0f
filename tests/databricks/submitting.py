"""What the tests of the stand-in share: submitting a command, and looking at its run."""

from __future__ import annotations

import http.client
import time
from typing import Any

from databricks.sdk import WorkspaceClient
from databricks.sdk.service.workspace import ImportFormat

from tests.databricks_server import DatabricksServer

HOME = "/Workspace/Users/ann@example.com"
VOLUME = "/Volumes/main/default/runs"


def launch(
    client: WorkspaceClient, command: str, *, nodes: int = 1, files: dict[str, str] | None = None,
    source: str | None = None, **fields: Any,
) -> int:  # fmt: skip
    """Submit a command with its sidecar files; `fields` go into the task, `token` to the top."""
    folder = f"{HOME}/.air/{time.monotonic_ns()}"
    client.workspace.mkdirs(folder)
    for name, content in {"command.sh": command, **(files or {})}.items():
        data = content.encode()
        client.workspace.upload(f"{folder}/{name}", data, format=ImportFormat.AUTO)
    top = {name: fields.pop(name) for name in ("idempotency_token",) if name in fields}
    compute = {"accelerator_type": "GPU_1xA10", "accelerator_count": nodes}
    deployment = {"command_path": f"{folder}/command.sh", "compute": compute}
    work = {"experiment": "tiny", "deployments": [deployment], "code_source_path": source}
    task = {"task_key": "tiny", "ai_runtime_task": work, **fields}
    return submit(client, {"run_name": "tiny", "tasks": [task], **top})


def submit(client: WorkspaceClient, body: dict[str, Any]) -> int:
    answer = client.api_client.do("POST", "/api/2.2/jobs/runs/submit", body=body)
    assert isinstance(answer, dict)
    return int(answer["run_id"])


def get(client: WorkspaceClient, run_id: int) -> dict[str, Any]:
    found = client.api_client.do("GET", "/api/2.2/jobs/runs/get", query={"run_id": run_id})
    assert isinstance(found, dict)
    return found


def words(run: dict[str, Any]) -> tuple[str, str | None, str]:
    """Both forms of a state, in three words."""
    state = run["state"]
    return state["life_cycle_state"], state.get("result_state"), run["status"]["state"]


def lines(server: DatabricksServer, rank: int = 0) -> list[str]:
    return [line.text for line in server.runs[-1].nodes[rank].lines]


def until(condition: Any, timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)


def raw(server: DatabricksServer, method: str, path: str, body: bytes | None = None) -> Any:
    """One request without a client that retries: status, headers, body."""
    connection = http.client.HTTPConnection("127.0.0.1", int(server.url.rpartition(":")[2]), 10)
    try:
        connection.request(method, path, body, {"Authorization": f"Bearer {server.token}"})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()
