"""`tunewright export --bundle DIR`: a workload as a declarative bundle, to be scheduled there.

    DIR/databricks.yml            one job with one AI Runtime task
    DIR/launch/command.sh …       the command with its sidecar files, as the launcher looks for them
    DIR/code/<folder>/            the snapshot, when there is a code_source
    DIR/dist/tunewright-….whl     when the command is one of ours

The platform then does alone what the flow does otherwise: it retries, and each attempt is a fresh
one that goes on from the newest checkpoint. Nothing is consolidated or registered.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import yaml

from tasks.targets.databricks.archives import wheel
from tasks.targets.databricks.inputs import paths_of
from tasks.targets.databricks.request import LAUNCH_FILES, Places, bundled_files, bundled_task
from tunewright.contract.failures import UserError
from tunewright.contract.mirror import VOLUMES
from tunewright.contract.workload import Workload

FILE = "databricks.yml"
LAUNCH, CODE, DIST = "launch", "code", "dist"


def write(workload: Workload, folder: Path, code: Path | None, *, force: bool = False) -> list[str]:
    """Write the bundle and return the names of its files.

    `code` is the unpacked snapshot. Raises UserError for a folder with something in it, unless
    `force`, and for what a bundle cannot say.
    """
    _refuse(workload, folder, force)
    _clear(folder)
    ours = wheel() if workload.recipe else None
    place = f"./{DIST}/{ours.name}" if ours else None
    source = f"./{CODE}/{code.name}" if code else None
    found = Places(f"./{LAUNCH}", place, source)
    for name, text in bundled_files(workload).items():
        _write(folder / LAUNCH / name, text)
    if ours is not None:
        assert isinstance(ours.content, bytes)
        _write(folder / DIST / ours.name, ours.content)
    if code is not None:
        shutil.copytree(code, folder / CODE / code.name, symlinks=True, dirs_exist_ok=True)
    _write(folder / FILE, yaml.safe_dump(document(workload, found), sort_keys=False))
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def document(workload: Workload, found: Places) -> dict[str, Any]:
    """databricks.yml as a value."""
    name = workload.experiment_name
    job: dict[str, Any] = {"name": name, "max_concurrent_runs": 1, "queue": {"enabled": True}}
    if workload.usage_policy_id:
        job["budget_policy_id"] = workload.usage_policy_id
    if workload.permissions:
        job["permissions"] = [p.model_dump(exclude_none=True) for p in workload.permissions]
    environments, task = bundled_task(workload, found)
    if environments:
        job["environments"] = environments
    job["tasks"] = [task]
    return {
        "bundle": {"name": name},
        "resources": {"jobs": {name: job}},
        "targets": {"dev": {"mode": "development", "default": True}},
    }


def _refuse(workload: Workload, folder: Path, force: bool) -> None:
    environment = workload.environment
    if environment and (environment.docker_image or environment.unity_catalog_image):
        raise UserError("environment: bundles are not known to take images; use a version instead")
    if workload.usage_policy_name:
        raise UserError("usage_policy_name: a bundle takes the policy's id; give usage_policy_id")
    for name, path in paths_of(workload) if workload.recipe else ():
        if path.startswith("/") and not path.startswith(VOLUMES):
            raise UserError(
                f"parameters.{name} is {path}, which no node of the platform sees; put it on a "
                "volume (/Volumes/…)"
            )
    if folder.exists() and any(folder.iterdir()) and not force:
        raise UserError(f"{folder} is not empty; give another one, or --force to write into it")


def _clear(folder: Path) -> None:
    """Take away what an earlier export left for the launcher, which looks for files by name."""
    for name in LAUNCH_FILES:
        (folder / LAUNCH / name).unlink(missing_ok=True)
    for old in (folder / DIST).glob("tunewright-*.whl"):
        old.unlink()


def _write(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
