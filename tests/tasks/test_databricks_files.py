"""Folders through the Files API: whole, resumable, marker last; and what check finds missing."""

from __future__ import annotations

import os
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tasks.targets.databricks import api as databricks_api
from tasks.targets.databricks import check as databricks_check
from tasks.targets.databricks import files as databricks_files
from tasks.targets.databricks import inputs as databricks_inputs
from tasks.targets.databricks import secret_values as databricks_secret_values
from tasks.targets.databricks.api import Missing, Workspace, connect
from tasks.targets.databricks.files import Transfer
from tests.databricks_server import DatabricksServer
from tunewright.contract.failures import UserError
from tunewright.contract.rundir import MANIFEST, is_sealed, seal
from tunewright.contract.workload import Workload

pytestmark = pytest.mark.skipif(
    find_spec("databricks") is None, reason="needs tunewright[databricks]"
)

TARGET = "/Volumes/main/default/runs/tokens/0123"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sealed folder with an empty file, a name to be quoted, and a few MB."""
    place = tmp_path / "tokens"
    (place / "inner one").mkdir(parents=True)
    (place / "empty").touch()
    (place / "inner one" / "a b%?#.bin").write_bytes(os.urandom(3 << 20))
    for index in range(12):
        (place / f"part-{index}.bin").write_bytes(os.urandom(200_000 + index))
    seal(place)
    return place


def test_a_folder_goes_there_and_comes_back(
    server: DatabricksServer, workspace: Workspace, folder: Path, tmp_path: Path
) -> None:
    databricks_files.upload(workspace, folder, TARGET)
    assert is_sealed(server.on_disk(TARGET))
    databricks_files.download(workspace, TARGET, tmp_path / "back")
    for path in (p for p in folder.rglob("*") if p.is_file()):
        assert (tmp_path / "back" / path.relative_to(folder)).read_bytes() == path.read_bytes()


def test_the_marker_comes_last_and_what_is_there_is_not_sent_again(
    server: DatabricksServer, workspace: Workspace, folder: Path
) -> None:
    server.fault(f"PUT */fs/files{TARGET}/part-7.bin", "403", times=1)
    with pytest.raises(UserError):
        databricks_files.upload(workspace, folder, TARGET)
    assert not (server.on_disk(TARGET) / MANIFEST).exists()
    sent = len(server.calls("PUT */fs/files/*"))
    databricks_files.upload(workspace, folder, TARGET)
    again = [request.path for request in server.calls("PUT */fs/files/*")][sent:]
    assert again[-1].endswith(MANIFEST)
    assert any("part-7.bin" in path for path in again)
    assert len(again) < 14
    assert is_sealed(server.on_disk(TARGET))
    before = len(server.calls("PUT *"))
    databricks_files.upload(workspace, folder, TARGET)
    assert len(server.calls("PUT *")) == before


@pytest.mark.parametrize("kind", ["429", "500", "503", "cut", "lost"])
def test_faults_on_the_way_there_are_survived(
    server: DatabricksServer, workspace: Workspace, folder: Path, kind: str
) -> None:
    server.fault("*/fs/*", kind, times=6, seconds=0)
    databricks_files.upload(workspace, folder, TARGET)
    assert is_sealed(server.on_disk(TARGET))


@pytest.mark.parametrize("kind", ["429", "500", "503", "cut", "lost", "torn"])
def test_faults_on_the_way_back_are_survived(
    server: DatabricksServer, workspace: Workspace, folder: Path, tmp_path: Path, kind: str
) -> None:
    databricks_files.upload(workspace, folder, TARGET)
    server.fault("GET */fs/files/*", kind, times=6, after=1, seconds=0)
    databricks_files.download(workspace, TARGET, tmp_path / "back")
    assert is_sealed(tmp_path / "back")


def test_a_torn_download_goes_on_where_it_stopped(
    server: DatabricksServer, workspace: Workspace, folder: Path, tmp_path: Path
) -> None:
    databricks_files.upload(workspace, folder, TARGET)
    name = "inner one/a b%?#.bin"
    (tmp_path / ".file.part").write_bytes((folder / name).read_bytes()[: 1 << 20])
    databricks_files.fetch(workspace, f"{TARGET}/{name}", tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == (folder / name).read_bytes()
    (got,) = [r for r in server.calls("GET */fs/files/*") if r.path.endswith(".bin")]
    assert got.headers.get("Range") == "bytes=1048576-"
    assert not (tmp_path / ".file.part").exists()


def test_a_file_that_changed_since_it_was_sealed_is_not_sent(
    server: DatabricksServer, workspace: Workspace, folder: Path
) -> None:
    content = (folder / "part-3.bin").read_bytes()
    (folder / "part-3.bin").write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(Transfer, match=r"part-3\.bin changed after it was sealed"):
        databricks_files.upload(workspace, folder, TARGET)
    assert not (server.on_disk(TARGET) / MANIFEST).exists()


def test_a_file_with_another_hash_is_not_taken(
    server: DatabricksServer, workspace: Workspace, folder: Path, tmp_path: Path
) -> None:
    databricks_files.upload(workspace, folder, TARGET)
    place = server.on_disk(TARGET) / "part-3.bin"
    content = place.read_bytes()
    place.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(Transfer, match=r"part-3\.bin does not come whole"):
        databricks_files.download(workspace, TARGET, tmp_path / "back")
    assert not (tmp_path / "back" / MANIFEST).exists()


def test_what_is_not_sealed_there_is_not_fetched(
    server: DatabricksServer, workspace: Workspace, tmp_path: Path
) -> None:
    server.on_disk(TARGET).mkdir(parents=True)
    (server.on_disk(TARGET) / "part").write_text("x")
    with pytest.raises(Missing, match="is not sealed"):
        databricks_files.download(workspace, TARGET, tmp_path / "back")


def test_several_files_are_on_their_way_at_once(
    server: DatabricksServer, workspace: Workspace, folder: Path
) -> None:
    server.fault("PUT */fs/files/*", "slow", times=14, seconds=0.3)
    seen, done = [], threading.Event()

    def look() -> None:
        while not done.wait(0.05):
            seen.append(sum(1 for r in server.calls("PUT */fs/files/*") if r.ended is None))

    watcher = threading.Thread(target=look)
    watcher.start()
    databricks_files.upload(workspace, folder, TARGET)
    done.set()
    watcher.join()
    assert 2 <= max(seen) <= databricks_files.AT_ONCE


def workload(**more: Any) -> Workload:
    return Workload.load(
        {
            "experiment_name": "tiny",
            "command": "true",
            "compute": {"num_accelerators": 1, "accelerator_type": "GPU_1xH100"},
            "parameters": {"output_dir": "/Volumes/main/default/runs/out"},
            **more,
        }
    )


def missing(workspace: Workspace, found: Workload, register_as: str | None = None) -> list[str]:
    told = databricks_check.findings(workspace, found, register_as)
    return [f"{each['what']}: {each['message']}" for each in told if each["state"] == "missing"]


ALL = {"READ_VOLUME", "WRITE_VOLUME"}


def test_check_says_who_and_where_and_that_nothing_is_missing(
    server: DatabricksServer, workspace: Workspace
) -> None:
    server.state.grants["main.default.runs"] = {"account users": ALL}
    server.state.grants["main"] = {server.state.user: {"USE_CATALOG"}}
    server.state.grants["main.default"] = {server.state.user: {"USE_SCHEMA", "CREATE_MODEL"}}
    server.state.secrets["scope"] = {"key": "value"}
    found = databricks_check.look(workload(secrets={"A": "scope/key"}), "main.default.model")
    assert (found["user"], found["auth"]) == (server.state.user, "pat")
    assert found["host"] == server.url
    assert {each["state"] for each in found["findings"]} == {"ok"}


def test_check_names_all_that_is_missing(server: DatabricksServer, workspace: Workspace) -> None:
    server.state.grants["main.default.runs"] = {server.state.user: {"READ_VOLUME"}}
    server.state.secrets["scope"] = {}
    asked = workload(secrets={"A": "scope/key", "B": "nowhere/key"})
    told = "\n".join(missing(workspace, asked, "main.nowhere.model"))
    assert "privileges on volume main.default.runs: not granted: WRITE_VOLUME" in told
    assert "schema main.nowhere: it is not there" in told
    assert "secret A: the scope scope has no key key" in told
    assert "secret B: there is no scope nowhere" in told


@pytest.mark.parametrize(
    ("lacking", "level", "line"),
    [
        ("USE_CATALOG", "main", "GRANT USE CATALOG ON CATALOG `main` TO `ann@example.com`"),
        ("USE_SCHEMA", "main.default",
         "GRANT USE SCHEMA ON SCHEMA `main`.`default` TO `ann@example.com`"),
        ("WRITE_VOLUME", "main.default.runs",
         "GRANT WRITE VOLUME ON VOLUME `main`.`default`.`runs` TO `ann@example.com`"),
    ],
)  # fmt: skip
def test_check_looks_at_each_level_and_says_what_helps(
    server: DatabricksServer, workspace: Workspace, lacking: str, level: str, line: str
) -> None:
    """Without a name to register, too: who may not use the catalog reaches no volume in it."""
    every = {"USE_CATALOG", "USE_SCHEMA", *ALL}
    server.state.grants["main"] = {server.state.user: every - {lacking}}
    (told,) = missing(workspace, workload())
    kind = ("catalog", "schema", "volume")[level.count(".")]
    assert told.startswith(f"privileges on {kind} {level}: not granted: {lacking}; ")
    assert told.endswith(line)
    # All privileges of a level count there, and on what is in it, but not around it.
    server.state.grants["main.default"] = {"account users": {"ALL_PRIVILEGES"}}
    assert bool(missing(workspace, workload())) == (lacking == "USE_CATALOG")
    server.state.grants["main"] = {"account users": {"ALL PRIVILEGES"}}
    assert missing(workspace, workload(), "main.default.model") == []


def test_check_asks_for_the_models_catalog_beside_the_volumes(
    server: DatabricksServer, workspace: Workspace
) -> None:
    server.state.grants["main"] = {server.state.user: {"ALL_PRIVILEGES"}}
    server.state.catalogs.add("other")
    server.state.schemas.add("other.models")
    told = missing(workspace, workload(), "other.models.tiny")
    assert [each.partition(":")[0] for each in told] == [
        "privileges on catalog other",
        "privileges on schema other.models",
    ]
    assert "not granted: USE_SCHEMA, CREATE_MODEL or CREATE_FUNCTION" in told[1]
    assert "GRANT USE SCHEMA, CREATE MODEL ON SCHEMA `other`.`models`" in told[1]
    (hidden,) = [t for t in missing(workspace, workload(), "away.models.tiny") if "catalog" in t]
    assert "you may not see it; if it is there, ask for GRANT USE CATALOG" in hidden


def test_check_says_how_a_volume_is_made(server: DatabricksServer, workspace: Workspace) -> None:
    asked = workload(parameters={"output_dir": "/Volumes/main/default/none/x"})
    server.state.grants["main"] = {"account users": {"ALL_PRIVILEGES"}}
    (told,) = missing(workspace, asked)
    assert "databricks volumes create main default none MANAGED" in told


def test_no_secrets_value_is_ever_read(server: DatabricksServer, workspace: Workspace) -> None:
    server.state.secrets["scope"] = {"key": "value"}
    databricks_check.require_secrets(workspace, {"A": "scope/key"})
    assert server.calls("*/secrets/get") == []
    with pytest.raises(UserError, match=r"B \(scope/none\): the scope scope has no key none"):
        databricks_check.require_secrets(workspace, {"B": "scope/none"})


def test_a_value_is_read_only_for_targets_that_need_it_here(
    server: DatabricksServer, workspace: Workspace
) -> None:
    server.state.secrets["scope"] = {"key": "välue"}
    with pytest.raises(UserError, match=r"does not give it .*only allowed from a notebook"):
        databricks_secret_values.value_of("scope/key")
    server.state.secrets_readable = True
    assert databricks_secret_values.value_of("scope/key") == "välue"
    with pytest.raises(UserError, match=r"does not give it .*No secret with key none"):
        databricks_secret_values.value_of("scope/none")


def test_without_a_workspace_the_way_to_one_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in os.environ if name.startswith("DATABRICKS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UserError, match="databricks auth login"):
        connect()
    with pytest.raises(UserError, match="no Databricks workspace is configured"):
        databricks_secret_values.value_of("scope/key")


def test_a_refused_login_is_a_sentence(
    server: DatabricksServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABRICKS_TOKEN", "dapi-wrong")
    with pytest.raises(UserError, match="refused"):
        _ = connect().me


@pytest.mark.parametrize("token", ["dapi-s3cr3t\r", "dapi-s3cr3t…"])
def test_a_token_that_no_header_takes_is_told_and_not_shown(
    server: DatabricksServer, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    """As a file with Windows line ends leaves it: the libraries' own words hold the token."""
    monkeypatch.setenv("DATABRICKS_TOKEN", token)
    with pytest.raises(UserError, match="holds a line end, a blank or another") as caught:
        _ = connect().me
    assert "s3cr3t" not in str(caught.value)


def test_a_login_that_is_wrong_is_told_at_once(
    server: DatabricksServer, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*words: Any, **rest: Any) -> Any:
        raise ValueError("invalid_client: Client authentication failed")

    monkeypatch.setattr(Workspace, "_do", wrong)
    with pytest.raises(UserError, match="refused the login: invalid_client"):
        _ = workspace.me


def test_a_host_that_is_none_is_told_at_once(
    server: DatabricksServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(databricks_api, "PATIENCE_S", 2.0)
    monkeypatch.setenv("DATABRICKS_HOST", "not a host")
    with pytest.raises(UserError, match=r"DATABRICKS_HOST is no address: .*invalid character"):
        _ = connect().me


def test_a_refusal_does_not_list_the_configuration(
    server: DatabricksServer, workspace: Workspace
) -> None:
    server.fault("GET */scim/v2/Me", "403")
    with pytest.raises(UserError) as caught:
        _ = workspace.me
    assert str(caught.value) == (
        f"{server.url} refused: The caller does not have permission (PERMISSION_DENIED)"
    )


def test_a_torn_file_of_profiles_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in os.environ if name.startswith("DATABRICKS_")]:
        monkeypatch.delenv(name)
    (tmp_path / "profiles").write_text("host = https://a.example.com\n")
    monkeypatch.setenv("DATABRICKS_CONFIG_FILE", str(tmp_path / "profiles"))
    with pytest.raises(UserError, match=r"File contains no section headers; .*auth login"):
        connect()


INPUTS = "/Volumes/main/default/runs/inputs"
RECIPE = "torchrun -m tunewright.recipes.fsdp"


def bring(home: Path, **parameters: Any) -> list[str]:
    """What there is on this machine after bringing a recipe's inputs."""
    named = {"model_name": "org/model", "output_dir": "/Volumes/main/default/runs/out"}
    found = Workload.load({
        "experiment_name": "tiny", "command": RECIPE, "parameters": {**named, **parameters},
        "compute": {"num_accelerators": 1, "accelerator_type": "GPU_1xH100"},
    })  # fmt: skip
    databricks_inputs.bring(found, lambda line: None)
    root = home / INPUTS.lstrip("/")
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


@pytest.fixture
def rows(server: DatabricksServer) -> Path:
    """A folder on the volume with rows of two kinds."""
    place = server.on_disk(INPUTS)
    (place / "inner").mkdir(parents=True)
    for name in ("a.jsonl", "b.jsonl", "c.csv", "inner/d.jsonl"):
        (place / name).write_text(f"{name}\n")
    return place


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("a.jsonl", ["a.jsonl"]),
        ("a.jsonl:train[:10%]", ["a.jsonl"]),
        ("a.jsonl[-5:]", ["a.jsonl"]),
        ("[ab].jsonl", ["a.jsonl", "b.jsonl"]),
        ("**/*.jsonl", ["a.jsonl", "b.jsonl", "inner/d.jsonl"]),
        ("inner", ["inner/d.jsonl"]),
    ],
)
def test_rows_on_a_volume_are_named_as_everywhere(
    rows: Path, home: Path, name: str, files: list[str]
) -> None:
    assert bring(home, dataset_name=f"{INPUTS}/{name}") == files


def test_rows_that_changed_on_the_volume_come_again(
    server: DatabricksServer, rows: Path, home: Path
) -> None:
    """Also when they are as long as before."""
    os.utime(rows / "a.jsonl", (1_000_000_000, 1_000_000_000))
    bring(home, dataset_name=INPUTS)
    asked = len(server.calls("GET */fs/files/*"))
    bring(home, dataset_name=INPUTS)
    assert len(server.calls("GET */fs/files/*")) == asked
    (rows / "a.jsonl").write_text("A.jsonl\n")
    os.utime(rows / "a.jsonl", (1_100_000_000, 1_100_000_000))
    for name in (f"{INPUTS}/a.jsonl", INPUTS):
        bring(home, dataset_name=name)
        assert (home / INPUTS.lstrip("/") / "a.jsonl").read_text() == "A.jsonl\n"
    assert len(server.calls("GET */fs/files/*")) == asked + 1


def test_the_beginning_of_an_older_file_is_not_gone_on_with(rows: Path, home: Path) -> None:
    place = home / INPUTS.lstrip("/") / "a.jsonl"
    place.parent.mkdir(parents=True)
    part = databricks_files.part_of(place)
    part.write_text("old")
    os.utime(part, (1, 1))
    bring(home, dataset_name=f"{INPUTS}/a.jsonl")
    assert place.read_text() == "a.jsonl\n"


def test_rows_that_are_gone_from_the_volume_are_not_read_from_a_copy(
    rows: Path, home: Path
) -> None:
    bring(home, dataset_name=INPUTS)
    (rows / "b.jsonl").unlink()
    for name in (INPUTS, f"{INPUTS}/*.jsonl"):
        with pytest.raises(UserError, match=r"b\.jsonl is not on its volume any more.*remove"):
            bring(home, dataset_name=name)
    with pytest.raises(UserError, match=r"dataset_name: .*/b\.jsonl is not on its volume"):
        bring(home, dataset_name=f"{INPUTS}/b.jsonl")
    assert "a.jsonl" in bring(home, dataset_name=f"{INPUTS}/a.jsonl")


def test_a_listing_that_lags_makes_no_file_gone(
    server: DatabricksServer, rows: Path, home: Path
) -> None:
    bring(home, dataset_name=INPUTS)
    (rows / "a.jsonl").write_text("A.jsonl\n")
    os.utime(rows / "a.jsonl", (2_000_000_000, 2_000_000_000))  # which the listing hides
    bring(home, dataset_name=INPUTS)
    assert (home / INPUTS.lstrip("/") / "a.jsonl").read_text() == "A.jsonl\n"


def test_of_a_model_its_weights_stay_there(rows: Path, home: Path) -> None:
    (rows / "model.safetensors").write_bytes(b"large")
    found = bring(home, model_name=INPUTS, dataset_name="org/rows")
    assert "c.csv" in found
    assert "model.safetensors" not in found
    weights = home / INPUTS.lstrip("/") / "old.safetensors"
    weights.write_bytes(b"of a run on this machine")
    bring(home, model_name=INPUTS, dataset_name="org/rows")
    assert weights.is_file()
