"""The stand-in: what a node's command sees, and what cannot be launched."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile

import pytest
from databricks.sdk import WorkspaceClient

from tests.databricks.submitting import VOLUME, get, launch, lines, words
from tests.databricks_server import DatabricksServer


def test_a_node_sees_what_is_promised(server: DatabricksServer, client: WorkspaceClient) -> None:
    server.state.secrets["team"] = {"token": "s3cret"}
    server.rules.procs_per_node = 4
    files = {
        "env_vars.json": json.dumps([{"name": "COLOUR", "value": "blue"}]),
        "secret_env_vars.json": json.dumps(
            [{"name": "HF_TOKEN", "secret_scope": "team", "secret_key": "token"}]
        ),
        "hyperparameters.yaml": "lr: 1.0\n",
    }
    launch(client, "env | sort\ncat $HYPERPARAMETERS_PATH", nodes=2, files=files)
    server.await_runs()
    run = server.runs[0]
    seen = [
        dict(line.split("=", 1) for line in lines(server, rank) if "=" in line) for rank in (0, 1)
    ]
    assert lines(server, 1)[-1] == "lr: 1.0"
    promised = {
        "NUM_NODES": "2", "LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8", "LOCAL_ADDR": "127.0.0.1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": seen[0]["MASTER_PORT"],
        "MLFLOW_RUN_ID": run.attempts[0].mlflow_run_id, "MLFLOW_TRACKING_URI": "databricks",
        "COLOUR": "blue", "HF_TOKEN": "s3cret", "PYTHONUNBUFFERED": "1", "NCCL_DEBUG": "INFO",
    }  # fmt: skip
    for rank, found in enumerate(seen):
        mine = {"NODE_RANK": str(rank), "POD_RANK": str(rank)}
        assert {name: found[name] for name in promised} == promised
        assert {name: found[name] for name in mine} == mine
        assert not {"RANK", "LOCAL_RANK", "CODE_SOURCE_PATH", "PYTEST_CURRENT_TEST"} & set(found)


def test_a_command_is_strict(server: DatabricksServer, client: WorkspaceClient) -> None:
    launch(client, "false | true\necho unreached")
    server.await_runs()
    assert lines(server) == []
    assert server.runs[0].nodes[0].exit_code == 1


def test_a_volume_on_a_node(server: DatabricksServer, client: WorkspaceClient) -> None:
    program = f"""
import os
open("{VOLUME}/whole", "w").write("fine")
open("{VOLUME}/whole", "w").write("fine too")
for name, act in {{
    "append": lambda: open("{VOLUME}/whole", "a"),
    "inside": lambda: open("{VOLUME}/whole", "r+"),
    "rename": lambda: os.replace("{VOLUME}/whole", "{VOLUME}/other"),
    "link": lambda: os.symlink("{VOLUME}/whole", "{VOLUME}/other"),
}}.items():
    try:
        act()
        print(name, "went")
    except OSError as error:
        print(name, error.errno)
os.replace("here", "there") if open("here", "a").write("x") else None
"""
    server.on_disk(f"{VOLUME}/given").write_text("from the client\n")
    launch(client, f"cat {VOLUME}/given\npython - <<'EOF'\n{program}\nEOF")
    server.await_runs()
    assert lines(server) == ["from the client", "append 95", "inside 95", "rename 95", "link 95"]
    assert server.on_disk(f"{VOLUME}/whole").read_text() == "fine too"
    assert server.runs[0].nodes[0].exit_code == 0


def test_without_mounts_paths_are_rewritten(
    server: DatabricksServer, client: WorkspaceClient
) -> None:
    server.places.mounts = False
    server.on_disk(f"{VOLUME}/given").write_text("found\n")
    files = {"hyperparameters.yaml": f"output_dir: {VOLUME}/out\n"}
    command = f"cat {VOLUME}/given\ncat $HYPERPARAMETERS_PATH\necho $TUNEWRIGHT_WHOLE_FILES"
    launch(client, command, files=files)
    server.await_runs()
    volumes = server.on_disk("/Volumes/")
    assert lines(server) == ["found", f"output_dir: {volumes}/main/default/runs/out", str(volumes)]


def tarball(*names: str) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for name in names:
            entry = tarfile.TarInfo(name)
            entry.size = 5
            archive.addfile(entry, io.BytesIO(b"hello"))
    return made.getvalue()


def test_the_snapshot_is_unpacked(server: DatabricksServer, client: WorkspaceClient) -> None:
    client.files.upload(f"{VOLUME}/code.tar.gz", io.BytesIO(tarball("mine/a.txt", "mine/b.txt")))
    source = f"{VOLUME}/code.tar.gz"
    launch(client, 'cd "$CODE_SOURCE_PATH"\ncat a.txt\necho\nls', source=source)
    server.await_runs()
    assert lines(server) == ["hello", "a.txt", "b.txt"]
    if server.mounts:
        launch(client, "echo $CODE_SOURCE_PATH", source=source)
        server.await_runs()
        assert lines(server) == ["/databricks/code_source/mine"]


def test_wheels_named_by_path_are_there(server: DatabricksServer, client: WorkspaceClient) -> None:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as wheel:
        wheel.writestr("greeting.py", "WORD = 'hello'")
    client.files.upload(f"{VOLUME}/greeting-1-py3-none-any.whl", io.BytesIO(made.getvalue()))
    requirements = f"version: '5'\ndependencies: [{VOLUME}/greeting-1-py3-none-any.whl, torch]\n"
    files = {"requirements.yaml": requirements}
    launch(client, "python -c 'import greeting; print(greeting.WORD)'", files=files)
    server.await_runs()
    assert lines(server) == ["hello"]


@pytest.mark.parametrize(
    ("files", "source", "code", "message"),
    [
        ({}, f"{VOLUME}/two.tar.gz", "INVALID_RUN_CONFIGURATION",
         "could not determine top level component from tarball"),
        ({}, f"{VOLUME}/none.tar.gz", "RESOURCE_NOT_FOUND",
         f"code_source_path {VOLUME}/none.tar.gz does not exist"),
        ({"requirements.yaml": f"dependencies: [{VOLUME}/no.whl]"}, None,
         "LIBRARY_INSTALLATION_ERROR", "Library installation failed: no.whl was not found"),
        ({"secret_env_vars.json": '[{"name": "A", "secret_scope": "s", "secret_key": "k"}]'}, None,
         "RESOURCE_NOT_FOUND", "Secret s/k does not exist"),
    ],
)  # fmt: skip
def test_what_cannot_be_launched(
    server: DatabricksServer, client: WorkspaceClient, files: dict[str, str], source: str | None,
    code: str, message: str,
) -> None:  # fmt: skip
    client.files.upload(f"{VOLUME}/two.tar.gz", io.BytesIO(tarball("a/x", "b/x")))
    run_id = launch(client, "echo never", files=files, source=source)
    server.await_runs()
    task = get(client, run_id)["tasks"][0]
    assert words(task) == ("INTERNAL_ERROR", "FAILED", "TERMINATED")
    assert task["state"]["state_message"] == message
    assert task["status"]["termination_details"]["code"] == code
    assert [line for node in server.runs[0].nodes for line in node.lines] == []
