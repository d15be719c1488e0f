"""The stand-in: who asks, workspace files, secrets."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from databricks.sdk import WorkspaceClient
from databricks.sdk.errors import (
    BadRequest,
    PermissionDenied,
    ResourceAlreadyExists,
    ResourceDoesNotExist,
    Unauthenticated,
)
from databricks.sdk.service.workspace import ImportFormat

from tests.databricks.submitting import HOME, raw
from tests.databricks_server import DatabricksServer


def test_the_token_decides_who_asks(server: DatabricksServer, client: WorkspaceClient) -> None:
    assert client.current_user.me().user_name == "ann@example.com"
    with pytest.raises(Unauthenticated):
        WorkspaceClient(host=server.url, token="wrong").current_user.me()


def test_workspace_files_come_back_as_they_went(
    server: DatabricksServer, client: WorkspaceClient
) -> None:
    client.workspace.mkdirs(f"{HOME}/a/b")
    data = bytes(range(256))
    client.workspace.upload(f"{HOME}/a/b/x.bin", data, format=ImportFormat.AUTO)
    assert client.workspace.download(f"{HOME}/a/b/x.bin").read() == data
    assert server.on_disk(f"{HOME}/a/b/x.bin").read_bytes() == data
    client.workspace.import_(
        f"{HOME}/a/y.sh", content=base64.b64encode(b"echo").decode(), format=ImportFormat.AUTO
    )
    exported = client.workspace.export(f"{HOME}/a/y.sh")
    assert base64.b64decode(exported.content or "") == b"echo"
    found = client.workspace.get_status(f"{HOME}/a/y.sh")
    assert (found.path, found.object_type.value if found.object_type else None, found.size) == (
        "/Users/ann@example.com/a/y.sh", "FILE", 4,
    )  # fmt: skip
    assert [entry.path for entry in client.workspace.list(f"{HOME}/a", recursive=True)] == [
        "/Users/ann@example.com/a/y.sh", "/Users/ann@example.com/a/b/x.bin",
    ]  # fmt: skip
    client.workspace.delete(f"{HOME}/a", recursive=True)
    assert not server.on_disk(f"{HOME}/a").exists()


def test_workspace_refusals(server: DatabricksServer, client: WorkspaceClient) -> None:
    def put(path: str, data: bytes = b"x", **more: Any) -> None:
        client.workspace.upload(path, data, format=ImportFormat.AUTO, **more)

    put(f"{HOME}/once")
    with pytest.raises(ResourceAlreadyExists):
        put(f"{HOME}/once")
    put(f"{HOME}/once", b"two", overwrite=True)
    assert server.on_disk(f"{HOME}/once").read_bytes() == b"two"
    with pytest.raises(ResourceDoesNotExist):
        put(f"{HOME}/nowhere/file")
    with pytest.raises(BadRequest) as refused:
        put(f"{HOME}/big", bytes((10 << 20) + 1))
    assert refused.value.error_code == "MAX_NOTEBOOK_SIZE_EXCEEDED"
    with pytest.raises(ResourceDoesNotExist):
        client.workspace.get_status(f"{HOME}/missing")
    with pytest.raises(BadRequest) as refused:
        client.workspace.delete("/Users")
    assert refused.value.error_code == "DIRECTORY_NOT_EMPTY"


def test_a_raw_import_takes_what_the_other_is_too_small_for(server: DatabricksServer) -> None:
    path = "/api/2.0/workspace-files/import-file/Users/ann@example.com/big.tar.gz"
    status, _, _ = raw(server, "POST", f"{path}?overwrite=true", bytes(11 << 20))
    assert status == 200
    assert server.on_disk(f"{HOME}/big.tar.gz").stat().st_size == 11 << 20


def test_secrets_are_listed_and_not_read(server: DatabricksServer, client: WorkspaceClient) -> None:
    server.state.secrets["team"] = {"token": "s3cret", "other": "x"}
    assert [entry.key for entry in client.secrets.list_secrets("team")] == ["token", "other"]
    with pytest.raises(ResourceDoesNotExist):
        list(client.secrets.list_secrets("nobody"))
    with pytest.raises(BadRequest) as refused:
        client.secrets.get_secret("team", "token")
    assert refused.value.error_code == "BAD_REQUEST"
    server.state.secrets_readable = True
    value = client.secrets.get_secret("team", "token").value or ""
    assert base64.b64decode(value) == b"s3cret"
    with pytest.raises(ResourceDoesNotExist):
        client.secrets.get_secret("team", "absent")
    server.state.unreadable_scopes.add("team")
    with pytest.raises(PermissionDenied):
        list(client.secrets.list_secrets("team"))
