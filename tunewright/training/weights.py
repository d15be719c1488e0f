"""Where a sharded model's first weights come from, without a whole copy of it on any rank.

A folder of safetensors that every rank can see: each rank reads its own rows from it. A folder
that only rank 0 has: rank 0 hands out one tensor at a time. Both need the model's own names in the
files (packed experts are unpacked on the way); a checkpoint that transformers converts while
loading is loaded by it on rank 0, whole (4 bytes a parameter of host memory there), and handed out.
Random weights are made unit by unit on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import xxhash
from safetensors import SafetensorError
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from tunewright.contract.failures import UserError
from tunewright.training.tensorfiles import open_folder
from tunewright.training.world import World

_PARTS, _PART = 8, 1 << 16
"""How many parts of a file are looked at, and the bytes of one."""


class Source(Protocol):
    """Whole tensors by the model's own parameter names, on the host."""

    def tensor(self, name: str) -> torch.Tensor: ...


class WholeModel:
    """A model that transformers loaded, whole, on this rank."""

    def __init__(self, model: Any) -> None:
        self._tensors = saved_tensors(model)

    def tensor(self, name: str) -> torch.Tensor:
        found: torch.Tensor = self._tensors[name].detach()
        return found


def load_pretrained(module: Any, name: str, folder: Path, world: World) -> None:
    """Fill the sharded parameters of `module` from the weights in `folder`.

    Raises UserError on every rank when the files are damaged or do not fit the model.
    """
    shapes = {n: tuple(tensor.shape) for n, tensor in saved_tensors(module).items()}
    fits = world.on_main(lambda: _fits(folder, shapes, name))
    if fits and _all_see(folder, world):
        _read_own_rows(module, folder, name, world)
        return
    held: list[Source] = []  # on rank 0

    def read() -> None:
        held.append(open_folder(folder) if fits else _load_whole(folder, name))

    world.on_main(read)
    hand_out(module, held.pop() if held else None, world)


def saved_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and those buffers that belong in a saved model, by name, tied ones once.

    Of a model with adapters: those of the model below, by the names they have without adapters.
    """
    saved = module.state_dict().keys()
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in saved}
    found = {**dict(module.named_parameters()), **buffers}
    return {n.replace(".base_layer", ""): t for n, t in found.items() if ".lora_" not in n}


def init_random(module: Any, unit: Iterable[nn.Module], seed: int, device: torch.device) -> None:
    """Give the modules of a unit memory on `device` and the model's own random weights.

    They follow from the seed and the kind of device alone, so every rank makes the same ones.
    """
    for part in module.modules():
        part._is_hf_initialized = True
    for part in unit:
        part.to_empty(device=device, recurse=False)
        part._is_hf_initialized = False  # type: ignore[assignment]
    torch.manual_seed(seed)
    module.initialize_weights()


def init_buffers(module: Any) -> None:
    """Fill the buffers that no file holds, such as rotary frequencies; parameters stay."""
    for part in module.modules():
        part._is_hf_initialized = False
    for parameter in module.parameters():
        parameter._is_hf_initialized = True
    module.initialize_weights()


@torch.no_grad()
def hand_out(module: nn.Module, source: Source | None, world: World) -> None:
    """Copy rank 0's parameters to every rank one by one, each rank keeping its shard.

    On rank 0 and on every device there is one whole tensor at a time.
    """
    for name, shard in saved_tensors(module).items():
        full = torch.empty(shard.shape, dtype=shard.dtype, device=world.device)
        if source is not None:
            full.copy_(source.tensor(name))
        if isinstance(shard, DTensor):
            shard.copy_(distribute_tensor(full, shard.device_mesh, shard.placements))
        else:
            dist.broadcast(full, src=0)
            shard.copy_(full)


@torch.no_grad()
def _read_own_rows(module: nn.Module, folder: Path, name: str, world: World) -> None:
    """Every rank its part, which lies in one piece since shards are cut along the first dimension.

    A damaged file is found by one rank alone: the error is shared before anyone goes on.
    """
    problem = None
    try:
        files = open_folder(folder)
        for key, tensor in saved_tensors(module).items():
            if not isinstance(tensor, DTensor):
                tensor.copy_(files.tensor(key))
                continue
            local = tensor.to_local()
            start = min(world.rank * -(-tensor.shape[0] // world.size), tensor.shape[0])
            local.copy_(files.rows(key, start, start + local.shape[0]))
    except (SafetensorError, OSError) as error:
        problem = f"model_name: {name} cannot be loaded: {error}"
    if problems := [p for p in world.gathered(problem) if p]:
        raise UserError(problems[0])


def _fits(folder: Path, shapes: Mapping[str, tuple[int, ...]], name: str) -> bool:
    """Whether the weight files hold every tensor under the model's own name."""
    try:
        files = open_folder(folder)
        found = files.shapes()
        numbers = all(files.is_number(key) for key in shapes)
    except FileNotFoundError:
        return False
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise UserError(f"model_name: {name} cannot be loaded: {error}") from error
    return numbers and all(found.get(key) == shape for key, shape in shapes.items())


def _all_see(folder: Path, world: World) -> bool:
    """Whether every rank finds the files that rank 0 finds; for all ranks together."""
    return len({*world.gathered(_seen(folder))}) == 1


def _seen(folder: Path) -> tuple[tuple[str, int, str], ...]:
    """Name, size and a hash of parts of each weight file this rank finds: enough to tell the models
    of other nodes from this one, without reading them whole."""
    return tuple(
        (path.name, path.stat().st_size, _hash_of_parts(path))
        for path in sorted(folder.glob("*.safetensors"))
    )


def _hash_of_parts(path: Path) -> str:
    digest = xxhash.xxh3_128()
    last = max(0, path.stat().st_size - _PART)
    with path.open("rb") as file:
        for place in range(_PARTS):
            file.seek(last * place // (_PARTS - 1))
            digest.update(file.read(_PART))
    return digest.hexdigest()


def _load_whole(folder: Path, name: str) -> Source:
    """The model as transformers loads it, fp32; raises UserError when it is not whole."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise UserError(f"model_name: {name} cannot be loaded: {error}") from error
    if missing := sorted(report["missing_keys"]):
        raise UserError(
            f"model_name: {name} has no weights for {', '.join(missing[:5])}"
            f"{' and more' if len(missing) > 5 else ''}; its files do not fit its config.json"
        )
    return WholeModel(model)


def units(module: Any, layers: Iterable[nn.Module]) -> Iterator[list[nn.Module]]:
    """The modules of each layer, then those outside of every layer."""
    inside: set[int] = set()
    for layer in layers:
        parts = list(layer.modules())
        inside.update(id(part) for part in parts)
        yield parts
    yield [part for part in module.modules() if id(part) not in inside]
