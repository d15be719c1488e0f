"""The stand-in: injected faults, and the record of requests."""

from __future__ import annotations

import http.client
import io
import json
import time
from pathlib import Path

import pytest
from databricks.sdk import WorkspaceClient
from databricks.sdk.errors import (
    NotFound,
)
from databricks.sdk.service.workspace import ImportFormat

from tests.databricks.submitting import HOME, VOLUME, launch, raw, until
from tests.databricks_server import DatabricksServer


@pytest.mark.parametrize("kind", ["429", "500", "503", "403", "404"])
def test_refusals_do_nothing(server: DatabricksServer, kind: str) -> None:
    server.fault("PUT */fs/files/*", kind, seconds=7)
    status, headers, body = raw(server, "PUT", f"/api/2.0/fs/files{VOLUME}/x", b"1")
    assert status == int(kind)
    assert json.loads(body)["error_code"]
    assert headers.get("Retry-After") == ("7" if kind == "429" else None)
    assert not server.on_disk(f"{VOLUME}/x").exists()
    assert raw(server, "PUT", f"/api/2.0/fs/files{VOLUME}/x", b"1")[0] == 204
    assert [(each.fault, each.status) for each in server.calls()] == [
        (kind, int(kind)), (None, 204),
    ]  # fmt: skip


@pytest.mark.parametrize(("kind", "done"), [("cut", False), ("lost", True)])
def test_a_connection_ends_before_or_after_acting(
    server: DatabricksServer, kind: str, done: bool
) -> None:
    server.fault("*/fs/files/*", kind)
    with pytest.raises(ConnectionError):
        raw(server, "PUT", f"/api/2.0/fs/files{VOLUME}/x", b"1")
    until(lambda: server.requests[0].ended)
    assert server.on_disk(f"{VOLUME}/x").exists() is done
    assert server.requests[0].status is None


def test_a_torn_answer(server: DatabricksServer) -> None:
    server.on_disk(f"{VOLUME}/x").write_bytes(bytes(1000))
    server.fault("*/fs/files/*", "torn")
    with pytest.raises((ConnectionError, http.client.IncompleteRead)):
        raw(server, "GET", f"/api/2.0/fs/files{VOLUME}/x")
    assert raw(server, "GET", f"/api/2.0/fs/files{VOLUME}/x")[2] == bytes(1000)


def test_a_slow_answer_comes(server: DatabricksServer) -> None:
    server.fault("*/Me", "slow", seconds=0.3)
    begun = time.monotonic()
    assert raw(server, "GET", "/api/2.0/preview/scim/v2/Me")[0] == 200
    assert time.monotonic() - begun >= 0.3


def test_faults_are_counted_and_cleared(server: DatabricksServer) -> None:
    server.fault("*/Me", "500", times=2, after=1)
    me = "/api/2.0/preview/scim/v2/Me"
    assert [raw(server, "GET", me)[0] for _ in range(4)] == [200, 500, 500, 200]
    server.fault("*/Me", "500", times=9)
    server.clear_faults()
    assert raw(server, "GET", me)[0] == 200
    with pytest.raises(ValueError, match="none of"):
        server.fault("*", "418")


def test_the_sdk_waits_as_told_and_asks_again(
    server: DatabricksServer, client: WorkspaceClient
) -> None:
    server.fault("*/jobs/runs/list", "429", seconds=1)
    assert list(client.jobs.list_runs()) == []
    first, second = server.calls("*/jobs/runs/list")
    assert second.started - first.started >= 1


def test_requests_are_kept_as_values(server: DatabricksServer, client: WorkspaceClient) -> None:
    client.workspace.mkdirs(f"{HOME}/x")
    client.workspace.upload(f"{HOME}/x/a.sh", b"echo \xc3\xa4", format=ImportFormat.AUTO)
    client.files.upload(f"{VOLUME}/x", io.BytesIO(b"123"), overwrite=True)
    assert [request.value for request in server.calls("/api/*")] == [
        {"method": "POST", "path": "/api/2.0/workspace/mkdirs", "query": {},
         "body": {"path": f"{HOME}/x"}},
        {"method": "POST", "path": "/api/2.0/workspace/import", "query": {},
         "body": {"path": f"{HOME}/x/a.sh", "format": "AUTO", "content": "echo ä"}},
        {"method": "PUT", "path": f"/api/2.0/fs/files{VOLUME}/x", "query": {"overwrite": "true"},
         "body": {"bytes": 3}},
    ]  # fmt: skip
    assert {request.origin for request in server.calls("/api/*")} == {"client"}


def test_the_busiest_second(server: DatabricksServer) -> None:
    for pause in (0, 0, 0, 0.9):
        time.sleep(pause)
        raw(server, "GET", "/api/2.0/preview/scim/v2/Me")
    assert server.busiest("*/Me", 0.85) == 3
    assert server.busiest("*/Me", 5) == 4
    assert server.busiest("*/other") == 0


def test_what_is_not_served_is_said(client: WorkspaceClient) -> None:
    with pytest.raises(NotFound) as refused:
        client.clusters.get("x")
    assert refused.value.error_code == "ENDPOINT_NOT_FOUND"


def test_an_error_of_the_stand_in_is_no_answer_of_the_platform(tmp_path: Path) -> None:
    def broken_sidecar() -> None:
        with DatabricksServer(tmp_path, mlflow=False) as server:
            client = WorkspaceClient(host=server.url, token=server.token)
            launch(client, "true", files={"env_vars.json": "not JSON"})

    with pytest.raises(json.JSONDecodeError):
        broken_sidecar()
