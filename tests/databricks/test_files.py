"""The stand-in: the Files API, through the SDK's own transfers."""

from __future__ import annotations

import http.client
import io
import os
from pathlib import Path

import pytest
from databricks.sdk import WorkspaceClient
from databricks.sdk.config import Config
from databricks.sdk.errors import (
    AlreadyExists,
    BadRequest,
    InvalidParameterValue,
    NotFound,
    PermissionDenied,
)

from tests.databricks.submitting import VOLUME, until
from tests.databricks_server import DatabricksServer


def small_parts(server: DatabricksServer) -> WorkspaceClient:
    """A client that sends and fetches in parts from 64 KiB on."""
    server.rules.min_part_bytes = 0
    config = Config(host=server.url, token=server.token)
    config.files_ext_multipart_upload_min_stream_size = 1 << 16
    config.files_ext_multipart_upload_part_size_options = [1 << 16]
    config.files_ext_parallel_download_min_file_size = 1 << 16
    config.files_ext_parallel_download_default_part_size = 1 << 16
    return WorkspaceClient(config=config)


def test_a_file_on_a_volume(server: DatabricksServer, client: WorkspaceClient) -> None:
    path = f"{VOLUME}/deep/ä b.txt"
    client.files.upload(path, io.BytesIO(b"0123456789"))
    assert server.on_disk(path).read_bytes() == b"0123456789"
    assert client.files.get_metadata(path).content_length == 10
    contents = client.files.download(path).contents
    assert contents is not None
    assert contents.read() == b"0123456789"
    client.files.upload(path, io.BytesIO(b"new"))
    assert server.on_disk(path).read_bytes() == b"new"
    with pytest.raises(AlreadyExists):
        client.files.upload(path, io.BytesIO(b"newer"), overwrite=False)
    client.files.delete(path)
    with pytest.raises(NotFound):
        client.files.get_metadata(path)


@pytest.mark.parametrize(
    ("asked", "status", "body"),
    [("bytes=2-4", 206, b"234"), ("bytes=7-", 206, b"789"), ("bytes=-2", 206, b"89"),
     ("bytes=5-99", 206, b"56789"), (None, 200, b"0123456789")],
)  # fmt: skip
def test_ranges_of_a_file(
    server: DatabricksServer, asked: str | None, status: int, body: bytes
) -> None:
    server.on_disk(f"{VOLUME}/digits").write_bytes(b"0123456789")
    connection = http.client.HTTPConnection("127.0.0.1", int(server.url.rpartition(":")[2]), 10)
    headers = {"Authorization": f"Bearer {server.token}", **({"Range": asked} if asked else {})}
    connection.request("GET", f"/api/2.0/fs/files{VOLUME}/digits", headers=headers)
    answer = connection.getresponse()
    assert (answer.status, answer.read()) == (status, body)
    connection.close()


def test_a_range_behind_the_end_is_refused(server: DatabricksServer) -> None:
    server.on_disk(f"{VOLUME}/digits").write_bytes(b"0123456789")
    connection = http.client.HTTPConnection("127.0.0.1", int(server.url.rpartition(":")[2]), 10)
    headers = {"Authorization": f"Bearer {server.token}", "Range": "bytes=10-"}
    connection.request("GET", f"/api/2.0/fs/files{VOLUME}/digits", headers=headers)
    assert connection.getresponse().status == 416
    connection.close()


def test_large_files_go_and_come_in_parts(server: DatabricksServer, tmp_path: Path) -> None:
    client, data = small_parts(server), os.urandom(300_000)
    client.files.upload(f"{VOLUME}/large", io.BytesIO(data))
    assert server.on_disk(f"{VOLUME}/large").read_bytes() == data
    assert len(server.calls("PUT /signed/part/*")) == 5
    client.files.download_to(f"{VOLUME}/large", str(tmp_path / "back"), use_parallel=True)
    assert (tmp_path / "back").read_bytes() == data
    assert len(server.calls("GET /signed/file/*")) == 5


def test_expired_addresses_are_refused(server: DatabricksServer) -> None:
    client, data = small_parts(server), os.urandom(100_000)
    server.rules.signed_url_s = -1
    client.files.upload(f"{VOLUME}/large", io.BytesIO(data))
    # The SDK asks for new addresses a few times, then takes the way without them.
    assert {call.status for call in server.calls("PUT /signed/part/*")} == {403}
    assert len(server.calls("POST */create-upload-part-urls")) > 1
    assert [call.status for call in server.calls("PUT /api/2.0/fs/files/*")] == [204]
    assert server.on_disk(f"{VOLUME}/large").read_bytes() == data


def test_small_parts_are_refused_except_the_last(server: DatabricksServer) -> None:
    client = small_parts(server)
    server.rules.min_part_bytes = 1 << 17
    with pytest.raises(InvalidParameterValue, match="smaller than the allowed minimum"):
        client.files.upload(f"{VOLUME}/large", io.BytesIO(bytes(200_000)))
    assert not server.on_disk(f"{VOLUME}/large").exists()


def test_a_single_upload_has_a_limit(server: DatabricksServer, client: WorkspaceClient) -> None:
    server.rules.max_put_bytes = 10
    client.files.upload(f"{VOLUME}/fits", io.BytesIO(bytes(10)))
    with pytest.raises(InvalidParameterValue):
        client.files.upload(f"{VOLUME}/large", io.BytesIO(bytes(11)))
    assert not server.on_disk(f"{VOLUME}/large").exists()


def test_folders_and_their_pages(server: DatabricksServer, client: WorkspaceClient) -> None:
    client.files.create_directory(f"{VOLUME}/many/empty")
    for index in range(5):
        server.on_disk(f"{VOLUME}/many/{index}").write_bytes(bytes(index))
    server.rules.page_size = 2
    found = list(client.files.list_directory_contents(f"{VOLUME}/many"))
    assert [(entry.name, entry.is_directory, entry.file_size) for entry in found] == [
        ("0", False, 0), ("1", False, 1), ("2", False, 2), ("3", False, 3), ("4", False, 4),
        ("empty", True, None),
    ]  # fmt: skip
    assert len(server.calls("GET */fs/directories/*")) == 3
    assert list(client.files.list_directory_contents(f"{VOLUME}/many/empty")) == []
    client.files.get_directory_metadata(f"{VOLUME}/many")
    with pytest.raises(BadRequest):
        client.files.delete_directory(f"{VOLUME}/many")
    client.files.delete_directory(f"{VOLUME}/many/empty")
    with pytest.raises(NotFound):
        client.files.get_directory_metadata(f"{VOLUME}/many/empty")


def test_listings_can_lag(server: DatabricksServer, client: WorkspaceClient) -> None:
    server.rules.listing_lag_s = 1.5
    client.files.upload(f"{VOLUME}/x/late", io.BytesIO(b"1"))
    assert list(client.files.list_directory_contents(f"{VOLUME}/x")) == []
    until(lambda: list(client.files.list_directory_contents(f"{VOLUME}/x")))


def test_volumes_that_are_missing_or_denied(
    server: DatabricksServer, client: WorkspaceClient
) -> None:
    with pytest.raises(NotFound):
        client.files.upload("/Volumes/main/default/absent/x", io.BytesIO(b"1"))
    server.state.denied.add(("WRITE_VOLUME", "main.default.runs"))
    with pytest.raises(PermissionDenied):
        client.files.upload(f"{VOLUME}/x", io.BytesIO(b"1"))
    assert list(client.files.list_directory_contents(VOLUME)) == []
    server.state.denied.add(("READ_VOLUME", "main.default.runs"))
    with pytest.raises(PermissionDenied):
        list(client.files.list_directory_contents(VOLUME))
