"""Files of axolotl, LLaMA-Factory and torchtune become workloads: `tunewright import`.

Each tool has a module with a table of its keys. Nothing is read but the file itself (and, for
LLaMA-Factory, its dataset_info.json), nothing is asked of the network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flows.importing import axolotl, llama_factory, page, torchtune
from flows.importing.draft import Draft, Note
from tunewright.contract import document
from tunewright.contract.failures import UserError, WorkloadError
from tunewright.contract.settings import RECIPES
from tunewright.contract.workload import Workload

TOOLS = ("axolotl", "llama-factory", "torchtune")
COMMAND = """\
torchrun \\
  --nnodes="$NUM_NODES" --node-rank="$NODE_RANK" --nproc-per-node="$LOCAL_WORLD_SIZE" \\
  --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" \\
  -m tunewright.recipes.{recipe}
"""
_GPUS_OF_A_NODE = 8
_KEYS_OF_TOOLS = (
    "axolotl has base_model and datasets, LLaMA-Factory model_name_or_path, torchtune blocks with "
    f"_component_; name the tool with --from, one of {', '.join(TOOLS)}"
)
_NOT_READ = {
    "model_class": "the keys of LLaMA-Factory's v1 trainer are not read; write those of its first",
    "compute_environment": "an accelerate configuration says how processes start, which a workload "
    "says under compute; import the file that names the model",
}
"""Files beside those that are read, told by a key."""


@dataclass(frozen=True)
class Imported:
    """A workload made of another tool's file.

    notes: what became of each key of the source; needs: what the workload lacks before it runs.
    """

    tool: str
    workload: dict[str, Any]
    text: str
    notes: list[Note]
    needs: list[str] = field(default_factory=list)

    def narration(self) -> list[str]:
        return [*page.narration(self.notes, self.needs)]

    def document(self) -> dict[str, Any]:
        """All of it as one JSON document."""
        return {
            "from": self.tool,
            "workload": self.workload,
            "yaml": self.text,
            "keys": [note._asdict() for note in self.notes],
            "needs": self.needs,
        }


def convert(path: Path, tool: str | None = None, gpus: int = 1) -> Imported:
    """The workload of a file of another tool, for `gpus` GPUs in all.

    Raises UserError for a file that cannot be read, of no known tool, or of a method that is not
    here.
    """
    return imported(document.read(path), path, tool, gpus)


def imported(
    source: dict[str, Any], path: Path, tool: str | None = None, gpus: int = 1
) -> Imported:
    """The same for a file that has been read; `path` is where it lies."""
    tool = tool or recognised(source, str(path))
    draft = Draft(torchtune.resolved(source) if tool == "torchtune" else source, path.name)
    if tool == "axolotl":
        axolotl.fill(draft)
    elif tool == "llama-factory":
        llama_factory.fill(draft, path.parent)
    else:
        torchtune.fill(draft)
    draft.finish()
    workload = _workload(draft, gpus)
    head = [f"Made from {path.name} of {tool} by `tunewright import`."]
    text = page.yaml_text(workload, draft.comments, head)
    return Imported(tool, workload, text, draft.notes, _needs(workload))


def recognised(source: Mapping[str, Any], name: str) -> str:
    """The tool whose keys a file has; raises UserError when it is none of them."""
    if {"experiment_name", "command"} <= source.keys():
        raise UserError(f"{name} is a workload already; tunewright check reads it")
    if any(isinstance(part, Mapping) and "_component_" in part for part in source.values()):
        return "torchtune"
    if "model_name_or_path" in source:
        return "llama-factory"
    if "base_model" in source and {"datasets", "sequence_len", "adapter"} & source.keys():
        return "axolotl"
    hint = next((why for key, why in _NOT_READ.items() if key in source), _KEYS_OF_TOOLS)
    raise UserError(f"{name} is of no tool that is known here: {hint}")


def _workload(draft: Draft, gpus: int) -> dict[str, Any]:
    """The document, with the parameters in the order of the recipe's settings."""
    recipe = RECIPES[draft.recipe]
    _only_known(draft, {*recipe.model_fields, *recipe.also_known})
    whole_nodes = gpus % _GPUS_OF_A_NODE == 0
    draft.comments.setdefault("compute.num_accelerators", "not said there; the batch grows with it")
    return {
        **draft.fields,
        "compute": {
            "num_accelerators": gpus,
            "accelerator_type": "GPU_8xH100" if whole_nodes else "GPU_1xH100",
        },
        "command": COMMAND.format(recipe=draft.recipe),
        "max_retries": 1,
        "parameters": _ordered(draft.parameters),
    }


def _only_known(draft: Draft, known: set[str]) -> None:
    """Take back what the recipe has no setting for, and say so."""
    for name in [name for name in draft.parameters if name not in known]:
        del draft.parameters[name]
        draft.notes[:] = [
            Note(note.key, "left", None, f"the recipe {draft.recipe} has no {name}")
            if note.to == f"parameters.{name}" else note
            for note in draft.notes
        ]  # fmt: skip


def _ordered(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """As the settings are listed: model, rows, training; a recipe's own last."""
    order = [*RECIPES["fsdp"].model_fields]
    order.insert(order.index("max_length") + 1, "per_device_batch_size")
    order.insert(order.index("max_length") + 2, "gradient_accumulation_steps")
    rank = {name: place for place, name in enumerate(order)}
    return dict(sorted(parameters.items(), key=lambda item: rank.get(item[0], len(rank))))


def _needs(workload: Mapping[str, Any]) -> list[str]:
    """What stands between the workload and a run."""
    try:
        Workload.load(workload)
    except WorkloadError as error:
        return [f"{place}: {message}" for place, message in error.problems]
    return []
