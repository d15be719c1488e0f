"""What pre-tokenization reads from volumes, brought to a machine on which they are not mounted."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from tasks.targets.databricks import files
from tasks.targets.databricks.api import Missing, Workspace, connect
from tasks.targets.databricks.files import Facts
from tunewright.contract.datanames import parse
from tunewright.contract.failures import UserError
from tunewright.contract.mirror import VOLUMES, here, is_mirrored, on_volume
from tunewright.contract.workload import PATH_PARAMETERS, Workload

_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}

_ROWS = ("dataset_name", "eval_dataset")


def bring(workload: Workload, say: Callable[[str], None]) -> None:
    """Files of a recipe's parameters into the mirror, as they are now; of a model without its
    weights.

    Raises UserError for one that is not on its volume, and for one that is there no more.
    """
    wanted = [(name, path) for name, path in _named(workload) if is_mirrored(here(path))]
    if not wanted:
        return
    workspace = connect()
    for name, path in wanted:
        found = {
            source: facts
            for source, facts in _there(workspace, path).items()
            if not (name == "model_name" and Path(source).suffix in _WEIGHTS)
        }
        if not found:
            raise UserError(f"parameters.{name}: {path} is not on its volume")
        _refuse_gone(workspace, name, path, found)
        for source, facts in found.items():
            _fetch(workspace, source, facts)
        say(f"fetched {len(found)} file(s) of {path}")


def _named(workload: Workload) -> Iterator[tuple[str, str]]:
    """(parameter, path) of what lies on a volume."""
    return (found for found in paths_of(workload) if found[1].startswith(VOLUMES))


def paths_of(workload: Workload) -> Iterator[tuple[str, str]]:
    """(parameter, name) of all that a recipe reads, paths or not; rows without split and part."""
    parameters: dict[str, Any] = workload.parameters
    for name in PATH_PARAMETERS:
        if isinstance(given := parameters.get(name), str):
            yield name, parse(given).base if name in _ROWS else given
    for index, source in enumerate(parameters.get("datasets") or []):
        if isinstance(source, dict) and isinstance(given := source.get("name"), str):
            yield f"datasets.{index}.name", parse(given).base


def _there(workspace: Workspace, path: str) -> dict[str, Facts]:
    """The file, those of the folder, or those that the pattern means; empty without any."""
    try:
        return {path: files.facts_of(workspace, path)}
    except Missing:
        root = _root(path)
        below = files.listed(workspace, root)
        every = {f"{root}/{name}": facts for name, facts in below.items()}
        return {source: facts for source, facts in every.items() if _is_meant(path, source)}


def _root(path: str) -> str:
    """The folder itself, or the last one before a pattern's first wildcard."""
    place = PurePosixPath(path)
    return str(next(p for p in (place, *place.parents) if not glob.has_magic(str(p))))


def _is_meant(path: str, source: str) -> bool:
    """Whether a file below the root may be one of a pattern's; of a folder's all are.

    A few more than the pattern means do no harm.
    """
    return not glob.has_magic(path) or fnmatchcase(source, path.replace("**/", "*"))


def _refuse_gone(workspace: Workspace, name: str, path: str, found: dict[str, Facts]) -> None:
    """Raise UserError for a copy from earlier whose file is not on the volume any more: it would
    be read with the others. One that only the listing lacked is added.
    """
    root = here(_root(path))
    for place in sorted(root.rglob("*")) if root.is_dir() else ():
        source = on_volume(place)
        is_hidden = any(part.startswith(".") for part in place.relative_to(root).parts)
        if is_hidden or not place.is_file() or source in found or not _is_meant(path, source):
            continue
        if name == "model_name" and place.suffix in _WEIGHTS:
            continue
        try:
            found[source] = files.facts_of(workspace, source)
        except Missing:
            raise UserError(
                f"parameters.{name}: {source} is not on its volume any more, but this machine has "
                f"a copy of it; remove {place}"
            ) from None


def _fetch(workspace: Workspace, source: str, facts: Facts) -> None:
    """One file, unless the copy that is here is of the same time and size."""
    place = here(source)
    if place.is_file() and (place.stat().st_size, int(place.stat().st_mtime)) == facts:
        return
    part = files.part_of(place)
    if part.is_file() and part.stat().st_mtime < facts.changed:
        # The beginning of another file.
        part.unlink()
    files.fetch(workspace, source, place)
    os.utime(place, (facts.changed, facts.changed))
