"""A base model with random weights, written once: without it an adapter would mean nothing."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from tunewright.contract import rundir
from tunewright.contract.failures import UserError
from tunewright.contract.rundir import RunDir
from tunewright.training.base import BaseModel
from tunewright.training.hf_folder import CONFIG, write_hf_folder
from tunewright.training.lora.model import AdaptedModel
from tunewright.training.tensorfiles import INDEX, SINGLE
from tunewright.training.weights import saved_tensors
from tunewright.training.world import World

KIND = "base"
FILE_BYTES = 2 * 10**9
"""Of one file of weights; rank 0 holds as much of them in its memory."""


def kept(base: BaseModel, run: RunDir) -> BaseModel | None:
    """The random base that an earlier attempt left in the run, if one did."""
    return replace(base, folder=run.base) if rundir.manifest(run.base) else None


def seal(model: AdaptedModel, base: BaseModel, run: RunDir, world: World) -> BaseModel:
    """Write the frozen weights of all ranks to the run and seal them; for all ranks together."""
    tensors = saved_tensors(model.module)
    parts = list(_files(tensors, FILE_BYTES))
    names = [SINGLE] if len(parts) == 1 else [_numbered(i, len(parts)) for i in range(len(parts))]
    dtype = str(model.dtype).removeprefix("torch.")
    world.on_main(partial(_explained, run, partial(_prepare, model, base, run, dtype)))
    for part, file in zip(parts, names, strict=True):
        whole = {name: _whole(tensors[name], world) for name in part}
        world.on_main(partial(_explained, run, partial(_save, whole, run.base / file)))
    where = {name: file for part, file in zip(parts, names, strict=True) for name in part}
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    world.on_main(partial(_explained, run, partial(_finish, run, where, total)))
    return replace(base, folder=run.base)


def _prepare(model: AdaptedModel, base: BaseModel, run: RunDir, dtype: str) -> None:
    shutil.rmtree(run.base, ignore_errors=True)
    write_hf_folder(run.base, base.folder, model.module, dtype)
    config = rundir.read_json(run.base / CONFIG) or {}
    if config.pop("quantization_config", None):  # of weights that are not these
        rundir.write_json(run.base / CONFIG, config)


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    save_file(tensors, path, {"format": "pt"})


def _finish(run: RunDir, where: dict[str, str], total: int) -> None:
    if len(set(where.values())) > 1:
        facts = {"metadata": {"total_size": total}, "weight_map": where}
        rundir.write_json(run.base / INDEX, facts)
    rundir.seal(run.base, {"kind": KIND})


def _explained(run: RunDir, work: Callable[[], object]) -> None:
    try:
        work()
    except OSError as error:
        raise UserError(
            f"cannot write the random base model to {run.base}: {error.strerror}; free some space "
            "there, or set output_dir to a folder that can be written"
        ) from error


def _files(tensors: dict[str, torch.Tensor], most: int) -> Iterator[list[str]]:
    """Names in files of at most so many bytes; a larger tensor has its own."""
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        of_this = math.prod(tensor.shape) * tensor.element_size()
        if names and size + of_this > most:
            yield names
            names, size = [], 0
        names.append(name)
        size += of_this
    yield names


def _whole(tensor: torch.Tensor, world: World) -> torch.Tensor:
    """The whole tensor in rank 0's memory, nothing elsewhere; every rank takes part."""
    full = tensor.detach()
    full = full.full_tensor() if isinstance(full, DTensor) else full
    return full.cpu().contiguous() if world.main else torch.empty(0)


def _numbered(place: int, count: int) -> str:
    return f"model-{place + 1:05d}-of-{count:05d}.safetensors"
