"""What pre-tokenization reads from volumes, brought to a machine on which they are not mounted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tasks.targets import databricks_files as files
from tasks.targets.databricks_api import Missing, Workspace, connect
from tunewright.contract.failures import UserError
from tunewright.contract.mirror import VOLUMES, here, is_mirrored
from tunewright.contract.workload import PATH_PARAMETERS, Workload

_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}


def bring(workload: Workload, say: Callable[[str], None]) -> None:
    """Files of a recipe's parameters into the mirror; of a model without its weights.

    Raises UserError for one that is not on its volume.
    """
    wanted = [(name, path) for name, path in _named(workload) if is_mirrored(here(path))]
    if not wanted:
        return
    workspace = connect()
    for name, path in wanted:
        count = _bring(workspace, path, with_weights=name != "model_name")
        if count is None:
            raise UserError(f"parameters.{name}: {path} is not on its volume")
        say(f"fetched {count} file(s) of {path}")


def _named(workload: Workload) -> Iterator[tuple[str, str]]:
    """(parameter, path) of what lies on a volume."""
    parameters: dict[str, Any] = workload.parameters
    for name in PATH_PARAMETERS:
        if _on_volume(parameters.get(name)):
            yield name, parameters[name]
    for index, source in enumerate(parameters.get("datasets") or []):
        if isinstance(source, dict) and _on_volume(source.get("name")):
            yield f"datasets.{index}.name", source["name"]


def _on_volume(value: Any) -> bool:
    return isinstance(value, str) and value.startswith(VOLUMES)


def _bring(workspace: Workspace, path: str, *, with_weights: bool) -> int | None:
    """How many files came; None when there is neither a file nor a folder."""
    try:
        total = files.size(workspace, path)
    except Missing:
        found = {
            f"{path.rstrip('/')}/{name}": size
            for name, size in files.sizes(workspace, path).items()
            if with_weights or Path(name).suffix not in _WEIGHTS
        }
    else:
        found = {path: total}
    for source, size in found.items():
        place = here(source)
        if not place.is_file() or place.stat().st_size != size:
            files.fetch(workspace, source, place)
    return len(found) or None
