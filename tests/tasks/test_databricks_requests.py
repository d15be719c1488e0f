"""What is sent to the platform, whole, as values: one recorded file per workload."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.targets.databricks import archives as databricks_archives
from tasks.targets.databricks import bundle as databricks_bundle
from tasks.targets.databricks import request as databricks_request
from tasks.targets.databricks import target as databricks
from tasks.targets.job import Job
from tunewright.contract.failures import UserError
from tunewright.contract.rundir import RunDir
from tunewright.contract.workload import Workload

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests" / "data" / "databricks"
OUTPUT = "/Volumes/main/default/runs"
COMPUTE = {"num_accelerators": 16, "accelerator_type": "GPU_8xH100"}
EVERYTHING: dict[str, Any] = {
    "experiment_name": "everything",
    "command": "cd $CODE_SOURCE_PATH\npython train.py 'it''s' \"$X\"\n",
    "compute": {**COMPUTE, "provisioned_capacity_id": "cap-1", "priority_class": "NORMAL"},
    "environment": {"version": "AI5", "dependencies": ["fsspec>=2024.6.1"]},
    "env_variables": {"NCCL_SOCKET_IFNAME": "eth0"},
    "secrets": {"HF_TOKEN": "my_scope/hf_token"},
    "parameters": {"output_dir": OUTPUT, "learning_rate": 2e-5},
    "max_retries": 3,
    "timeout_minutes": 90,
    "idempotency_token": "mine",
    "mlflow_run_name": "night",
    "mlflow_experiment_directory": "/Workspace/Shared/experiments",
    "mlflow_artifact_location": "/Volumes/main/default/artifacts",
    "permissions": [
        {"level": "CAN_VIEW", "group_name": "team"},
        {"level": "CAN_MANAGE", "user_name": "ann@example.com"},
    ],
    "usage_policy_id": "00000000-0000-0000-0000-000000000001",
}
IMAGE = {
    "experiment_name": "image",
    "command": "python train.py",
    "compute": {"num_accelerators": 2, "accelerator_type": "GPU_1xA10"},
    "environment": {"docker_image": {"url": "org/image:1"}},
    "parameters": {"output_dir": OUTPUT},
}
WORKLOADS: dict[str, Any] = {
    **{name: ROOT / "deployments" / f"{name}.yaml" for name in ("llama", "gpt-oss", "qwen")},
    "everything": EVERYTHING,
    "image": IMAGE,
}


def job(workload: Workload, home: Path, **more: Any) -> Job:
    run = RunDir(home / OUTPUT.lstrip("/") / f"{workload.experiment_name}-0a1b2c3d")
    minutes = workload.timeout_minutes
    return Job(
        run=run,
        attempt=1,
        command=workload.command,
        nodes=workload.nodes,
        procs_per_node=workload.compute.gpus_per_node,
        env_variables=workload.env_variables,
        has_parameters=bool(workload.parameters),
        deadline_s=minutes * 60 if minutes else None,
        **more,
    )


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_requests_are_the_recorded_ones(name: str, home: Path) -> None:
    """To record them anew delete the file, run this, and read what changed."""
    workload = Workload.load(WORKLOADS[name])
    found = databricks.dry_requests(job(workload, home), workload)
    # The wheel's hash is that of our own code.
    text = re.sub(r"(\+|%2B)[0-9a-f]{12}-py3", r"\1HASH-py3", json.dumps(found, indent=1))
    place = RECORDED / f"{name}.json"
    if not place.exists():
        place.write_text(text + "\n")
        pytest.fail(f"recorded {place}")
    assert json.loads(text) == json.loads(place.read_text())


def body(workload: dict[str, Any], home: Path) -> dict[str, Any]:
    loaded = Workload.load(workload)
    return dict(databricks.dry_requests(job(loaded, home), loaded)[-1]["body"])


@pytest.mark.parametrize(
    ("version", "spec"),
    [
        ("4", {"environment_version": "4"}),
        ("AI5", {"base_environment": "workspace-base-environments/databricks_ai_v5"}),
        ("databricks_ai_v6", {"base_environment": "workspace-base-environments/databricks_ai_v6"}),
    ],
)
def test_both_forms_of_an_environment(version: str, spec: dict[str, str], home: Path) -> None:
    sent = body({**EVERYTHING, "environment": {"version": version}}, home)
    found = sent["environments"][0]["spec"]
    assert {key: value for key, value in found.items() if key != "dependencies"} == spec
    (wheel,) = found["dependencies"]
    assert wheel.endswith("-py3-none-any.whl")
    assert " " not in wheel


def test_one_task_which_only_we_retry(home: Path) -> None:
    sent = body(EVERYTHING, home)
    (task,) = sent["tasks"]
    assert (task["max_retries"], task["retry_on_timeout"]) == (0, False)
    assert task["timeout_seconds"] == 5400
    assert sent["timeout_seconds"] == 0
    assert len(task["ai_runtime_task"]["deployments"]) == 1
    assert "HF_TOKEN" not in json.dumps(sent)


def test_the_token_is_that_of_the_run_or_of_the_user_and_of_the_attempt(home: Path) -> None:
    own, users = (Workload.load({**EVERYTHING, **m}) for m in ({"idempotency_token": None}, {}))
    first = job(own, home)
    other = Job(**{**vars(first), "run": RunDir(home / "everything-ffffffff")})
    second = Job(**{**vars(first), "attempt": 2})
    tokens = [
        databricks_request.token(j, w) for j, w in ((first, own), (other, own), (second, own))
    ]
    assert len(set(tokens)) == 3
    assert databricks_request.token(first, users) == databricks_request.token(other, users)


TRICKY = [
    "echo 'a'\necho \"$X\" \\\n  `echo b`",
    "cat <<'EOF'\n$HOME\nEOF",
    "true # it's",
    "x=1\n\n",
]


@pytest.mark.parametrize("command", TRICKY)
def test_the_command_arrives_as_it_was_written(command: str, home: Path, tmp_path: Path) -> None:
    workload = Workload.load({**IMAGE, "command": command})
    script = databricks_request.command(job(workload, home), workload)
    probe = script.partition("export TUNEWRIGHT_COMMAND\n")[0] + 'printf %s "$TUNEWRIGHT_COMMAND"'
    (tmp_path / "probe.sh").write_text(probe)
    ran = subprocess.run(
        ["bash", "-euo", "pipefail", tmp_path / "probe.sh"], capture_output=True, text=True
    )
    assert ran.stdout == command.rstrip() + "\n"


def test_the_wheel_is_named_by_its_content_and_can_be_imported(tmp_path: Path) -> None:
    first, again = databricks_archives.wheel(), databricks_archives.wheel()
    assert (first.name, first.content) == (again.name, again.content)
    assert isinstance(first.content, bytes)
    with zipfile.ZipFile(BytesIO(first.content)) as archive:
        archive.extractall(tmp_path)
    code = "import tunewright.databricks_node as n; print(n.__file__)"
    found = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert found.stdout.startswith(str(tmp_path)), found.stderr


def test_a_snapshot_has_one_folder_at_the_top_and_is_packed_once(
    home: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "0123456789ab" / "project"
    (folder / "inner").mkdir(parents=True)
    (folder / "train.py").write_text("print()")
    (folder / "inner" / "link").symlink_to("../train.py")
    packed = databricks_archives.snapshot(folder)
    assert packed.name == "project_0123456789ab.tar.gz"
    assert isinstance(packed.content, Path)
    with tarfile.open(packed.content) as tar:
        names = tar.getnames()
        assert {name.partition("/")[0] for name in names} == {"project"}
        assert "project/train.py" in names
        assert tar.getmember("project/inner/link").issym()
        assert {member.mtime for member in tar} == {0}
    first = packed.content.read_bytes()
    packed.content.unlink()
    again = databricks_archives.snapshot(folder)
    assert isinstance(again.content, Path)
    assert again.content.read_bytes() == first


@pytest.mark.parametrize("is_packable", [True, False])
def test_a_dry_run_shows_where_the_snapshot_goes(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_packable: bool
) -> None:
    """By its size when it is packed, for which nothing is written."""
    monkeypatch.setattr(databricks_archives, "WORKSPACE_LIMIT", 100_000)
    folder = tmp_path / "0123456789ab" / "project"
    folder.mkdir(parents=True)
    (folder / "data").write_bytes(bytes(200_000) if is_packable else os.urandom(200_000))
    workload = Workload.load(EVERYTHING)
    found = databricks.dry_requests(job(workload, home, code=folder), workload)
    name = "project_0123456789ab.tar.gz"
    place = "/Workspace/Users/<you>/.tunewright" if is_packable else OUTPUT
    sent = found[-1]["body"]["tasks"][0]["ai_runtime_task"]["code_source_path"]
    assert sent == f"{place}/snapshots/{name}"
    (upload,) = [r for r in found if r.get("content") == f"<{name}>"]
    assert upload["path"].startswith("/api/2.0/workspace-files" if is_packable else "/api/2.0/fs/")
    assert not (home / "cache").exists()
    built = databricks_archives.snapshot(folder)
    where = databricks_request.places(job(workload, home), workload, "<you>", None, built)
    assert where.snapshot == sent


def test_a_large_snapshot_goes_to_a_volume(home: Path) -> None:
    workload = Workload.load(EVERYTHING)
    large = databricks_archives.Archive("project_0123456789ab.tar.gz", None, 600 << 20)
    found = databricks_request.places(job(workload, home), workload, "ann", None, large)
    assert found.snapshot == f"{OUTPUT}/snapshots/project_0123456789ab.tar.gz"
    small = databricks_archives.Archive("project_0123456789ab.tar.gz", None, 1)
    found = databricks_request.places(job(workload, home), workload, "ann", None, small)
    assert str(found.snapshot).startswith("/Workspace/Users/ann/.tunewright/snapshots/")


def test_a_bundle_holds_the_workload_for_the_platform_alone(tmp_path: Path) -> None:
    workload = Workload.load(ROOT / "deployments" / "llama.yaml")
    names = databricks_bundle.write(workload, tmp_path / "bundle", None)
    assert {"databricks.yml", "launch/command.sh", "launch/secret_env_vars.json"} < set(names)
    document = yaml.safe_load((tmp_path / "bundle" / "databricks.yml").read_text())
    job = document["resources"]["jobs"]["llama"]
    (task,) = job["tasks"]
    assert (task["max_retries"], task["retry_on_timeout"], task["timeout_seconds"]) == (
        1,
        True,
        7200,
    )
    (deployment,) = task["ai_runtime_task"]["deployments"]
    command = tmp_path / "bundle" / deployment["command_path"]
    assert command.read_text() == workload.command
    wheel = job["environments"][0]["spec"]["dependencies"][-1]
    assert (tmp_path / "bundle" / wheel).is_file()
    parameters = yaml.safe_load((tmp_path / "bundle" / "launch/hyperparameters.yaml").read_text())
    assert parameters == workload.parameters
    with pytest.raises(UserError, match="is not empty"):
        databricks_bundle.write(workload, tmp_path / "bundle", None)


def test_a_bundle_with_rows_of_this_machine_is_refused(tmp_path: Path) -> None:
    sets = {"parameters.dataset_name": f"{tmp_path}/rows.jsonl:train[:10]"}
    workload = Workload.load(ROOT / "deployments" / "llama.yaml", sets)
    with pytest.raises(UserError, match=r"dataset_name is .*rows\.jsonl, which no node"):
        databricks_bundle.write(workload, tmp_path / "bundle", None)


def test_a_bundle_that_is_written_again_keeps_nothing_for_the_launcher(tmp_path: Path) -> None:
    """A secret or parameter that the workload has no more would still reach the command."""
    place = tmp_path / "bundle"
    databricks_bundle.write(Workload.load(EVERYTHING), place, None)
    (place / "dist").mkdir()
    (place / "dist" / "tunewright-0.0.1-py3-none-any.whl").touch()
    (place / "README.md").write_text("mine")
    bare = {key: EVERYTHING[key] for key in ("experiment_name", "command", "compute")}
    names = databricks_bundle.write(Workload.load(bare), place, None, force=True)
    assert names == [
        "README.md", "databricks.yml", "launch/command.sh", "launch/env_vars.json",
        "launch/requirements.yaml", "launch/training_config.yaml",
    ]  # fmt: skip
