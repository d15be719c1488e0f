"""Large files to a volume: in parts, so that what fails costs a part, and memory has its bound."""

from __future__ import annotations

import os
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest

from tasks.targets.databricks import api as databricks_api
from tasks.targets.databricks import files as databricks_files
from tasks.targets.databricks.api import NotOffered, Workspace, WorkspaceAway, connect
from tasks.targets.databricks.files import Transfer
from tests.databricks_server import DatabricksServer
from tunewright.contract.rundir import MANIFEST, is_sealed, seal

pytestmark = pytest.mark.skipif(
    find_spec("databricks") is None, reason="needs tunewright[databricks]"
)

TARGET = "/Volumes/main/default/runs/models/0123"
PART = 5 << 20
SIZE = 52 << 20
"""Eleven parts, the last of them smaller."""
PUTS = "PUT /signed/part/*"
COMPLETE = "POST */fs/files/*"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sealed folder with one large file and a small one."""
    place = tmp_path / "model"
    place.mkdir()
    (place / "large").write_bytes(os.urandom(SIZE))
    (place / "small").write_bytes(b"small")
    seal(place)
    return place


def bytes_of(server: DatabricksServer, pattern: str) -> list[int]:
    """What each request of a kind carried to its end."""
    return [r.body["bytes"] for r in server.calls(pattern) if r.body and "bytes" in r.body]


def actions(server: DatabricksServer) -> list[str]:
    return [r.query["action"] for r in server.calls(COMPLETE)]


def is_there(server: DatabricksServer, folder: Path) -> bool:
    """Whether the folder is sealed there, its bytes the same, and nothing else beside them."""
    place = server.on_disk(TARGET)
    assert sorted(path.name for path in place.iterdir()) == ["large", MANIFEST, "small"]
    same = all((place / n).read_bytes() == (folder / n).read_bytes() for n in ("large", "small"))
    return same and is_sealed(place)


def test_a_large_file_goes_in_parts(
    server: DatabricksServer, workspace: Workspace, folder: Path
) -> None:
    databricks_files.upload(workspace, folder, TARGET)
    assert is_there(server, folder)
    assert sorted(bytes_of(server, PUTS)) == [SIZE - 10 * PART, *[PART] * 10]
    assert actions(server) == ["initiate-upload", "complete-upload"]
    assert [r.path for r in server.calls("PUT */fs/files/*") if r.path.endswith("large")] == []


@pytest.mark.parametrize(("kind", "times"), [("429", 1), ("503", 3), ("cut", 3)])
def test_what_fails_costs_a_part(
    server: DatabricksServer, workspace: Workspace, folder: Path, kind: str, times: int
) -> None:
    """Also three times over, after which the SDK by itself would give the whole file up."""
    server.fault("PUT /signed/part/*/4", kind, times=times, seconds=1)
    databricks_files.upload(workspace, folder, TARGET)
    assert is_there(server, folder)
    fourth = [r for r in server.calls(PUTS) if r.path.endswith("/4")]
    assert [r.fault for r in fourth] == [*[kind] * times, None]
    # Only what was not disturbed was counted: the file, once.
    assert sum(r.body["bytes"] for r in server.calls(PUTS) if not r.fault) == SIZE
    assert actions(server) == ["initiate-upload", "complete-upload"]


def test_a_part_whose_answer_is_lost_is_sent_again_alone(
    server: DatabricksServer, workspace: Workspace, folder: Path
) -> None:
    server.fault("PUT /signed/part/*/4", "lost")
    databricks_files.upload(workspace, folder, TARGET)
    assert is_there(server, folder)
    assert sum(bytes_of(server, PUTS)) == SIZE + PART


def test_an_error_that_the_sdk_does_not_repeat_costs_the_file_once(
    server: DatabricksServer, workspace: Workspace, folder: Path
) -> None:
    server.fault("PUT /signed/part/*/4", "500")
    databricks_files.upload(workspace, folder, TARGET)
    assert is_there(server, folder)
    assert actions(server) == ["initiate-upload", "abort-upload",
                               "initiate-upload", "complete-upload"]  # fmt: skip


@pytest.mark.parametrize("kind", ["429", "500", "503", "cut", "lost"])
def test_the_last_answer_may_be_lost(
    server: DatabricksServer, workspace: Workspace, folder: Path, kind: str
) -> None:
    """A lost one leaves nothing to be completed again; the file is there, and is not sent again."""
    server.fault(COMPLETE, kind, after=1, seconds=1)
    databricks_files.upload(workspace, folder, TARGET)
    assert is_there(server, folder)
    sent = sum(bytes_of(server, PUTS))
    assert sent == (2 * SIZE if kind == "500" else SIZE)


def test_an_older_file_of_the_same_size_is_not_taken_for_the_new_one(
    server: DatabricksServer, workspace: Workspace, tmp_path: Path
) -> None:
    (tmp_path / "large").write_bytes(os.urandom(SIZE))
    place = server.on_disk(f"{TARGET}/large")
    place.parent.mkdir(parents=True)
    place.write_bytes(bytes(SIZE))
    os.utime(place, (1_000_000_000, 1_000_000_000))
    server.fault("PUT /signed/part/*/4", "500")
    databricks_files.put(workspace, tmp_path / "large", f"{TARGET}/large")
    assert place.read_bytes() == (tmp_path / "large").read_bytes()


@pytest.mark.parametrize("kind", ["403", "404"])
def test_a_workspace_without_parts_gets_the_file_whole(
    server: DatabricksServer, workspace: Workspace, folder: Path, kind: str
) -> None:
    """As do storages behind a firewall that takes no signed addresses."""
    if kind == "404":
        server.rules.multipart = False
    else:
        server.fault(PUTS, "403", times=99)
    databricks_files.upload(workspace, folder, TARGET)
    assert is_there(server, folder)
    assert SIZE in bytes_of(server, "PUT */fs/files/*")


def test_a_file_that_one_request_cannot_carry_needs_parts(
    server: DatabricksServer, workspace: Workspace, tmp_path: Path
) -> None:
    server.rules.multipart = False
    with (tmp_path / "huge").open("wb") as file:
        file.truncate((5 << 30) + 1)
    server.on_disk(TARGET).mkdir(parents=True)
    with pytest.raises(NotOffered, match="Multipart uploads are not enabled"):
        databricks_files.put(workspace, tmp_path / "huge", f"{TARGET}/huge")


@pytest.mark.parametrize(
    ("pattern", "kind", "error"),
    [
        ("PUT /signed/part/*/4", "cut", WorkspaceAway),
        ("PUT /signed/part/*/4", "503", WorkspaceAway),
        ("PUT /signed/part/*/4", "500", WorkspaceAway),
        ("PUT /signed/part/*/4", "404", Transfer),
        ("POST */create-upload-part-urls", "404", Transfer),
    ],
)
def test_what_does_not_pass_is_told_and_leaves_no_folder_that_looks_whole(
    server: DatabricksServer,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    pattern: str,
    kind: str,
    error: type[Exception],
) -> None:
    monkeypatch.setattr(databricks_api, "PATIENCE_S", 3.0)
    server.fault(pattern, kind, times=999, after=0 if "PUT" in pattern else 2)
    with pytest.raises(error) as caught:
        databricks_files.upload(connect(), folder, TARGET)
    assert "logging in" not in str(caught.value)
    assert sorted(path.name for path in server.on_disk(TARGET).iterdir()) == ["small"]
    assert actions(server)[-1] == "abort-upload"


def test_no_more_parts_are_on_their_way_than_memory_has_room_for(
    server: DatabricksServer, workspace: Workspace, tmp_path: Path
) -> None:
    place = tmp_path / "model"
    place.mkdir()
    for number in range(4):
        with (place / f"large-{number}").open("wb") as file:
            file.truncate(SIZE + number)
    seal(place)
    server.fault(PUTS, "slow", times=99, seconds=0.3)
    seen, done = [0], threading.Event()

    def look() -> None:
        while not done.wait(0.02):
            seen.append(sum(1 for r in server.calls(PUTS) if r.ended is None))

    watcher = threading.Thread(target=look)
    watcher.start()
    databricks_files.upload(workspace, place, TARGET)
    done.set()
    watcher.join()
    assert is_sealed(server.on_disk(TARGET))
    assert databricks_files.PARTS_AT_ONCE // 2 < max(seen) <= databricks_files.PARTS_AT_ONCE
