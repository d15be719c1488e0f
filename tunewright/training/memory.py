"""How many tokens a GPU takes at once, and whether activations must be recomputed for that.

Found by trying, once for a run: the model with its first two layers, then with its first three,
each on one pack and on two; with fewer, what is gathered ahead is not there yet. Everything a step
needs grows in straight lines from there, with layers and tokens, so four peaks give them all. What
is found changes the losses by no more than rounding: it says how a step is cut, not what is in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import psutil
import torch

from tunewright.contract import rundir
from tunewright.contract.rundir import RunDir
from tunewright.contract.settings import FsdpSettings
from tunewright.data.store import TokenStore
from tunewright.training.batches import Shape, full_batch
from tunewright.training.model import M, ShardedModel, keep_whole, only, recompute
from tunewright.training.step import loss_sum
from tunewright.training.world import World

USABLE = 0.97
"""Of what the process can have: the rest is for what does not grow in straight lines."""

WORTHWHILE_TOKENS = 8192
"""With fewer tokens at once moving the weights takes longer than recomputing activations."""


ROUND_COST = 0.2
"""What a micro-batch costs beside its packs, in packs: moving weights and gradients."""

OF_CPU = 0.06
"""Of the host's memory that gathered weights may take on a CPU."""


class Fit(NamedTuple):
    """packs: of one micro-batch. recompute: activations. whole: keep gathered weights in a step.
    found: in words, what was chosen; empty where nothing was to be chosen."""

    packs: int
    recompute: bool
    whole: bool
    found: str


class Peaks(NamedTuple):
    """Bytes of a step beside the weights and the optimizer: `fixed` + `growing` times the packs;
    for the rest of the model, and for each layer with its gradient."""

    rest: tuple[float, float]
    layer: tuple[float, float]


def fitted(
    settings: FsdpSettings, model: ShardedModel, store: TokenStore, run: RunDir, world: World
) -> Fit:
    """What this run uses: as set, as an earlier attempt on as many ranks found, or found now."""
    if world.device.type != "cuda":
        return agreed(world.gathered(_on_cpu(settings, model, world)))
    packs = settings.tokens_per_device
    if packs != "auto" and settings.gradient_checkpointing != "auto":
        # Nothing is left to be found: the small steps are not worth their time.
        size = min(packs // settings.pack_tokens, share_of(settings, world))
        return Fit(size, settings.gradient_checkpointing, whole=False, found="")
    kept = world.on_main(lambda: _kept(run, settings, model, world))
    if kept is not None:
        return kept
    chosen = agreed(world.gathered(_found(settings, model, store, world)))
    if world.main:
        facts = {**chosen._asdict(), **_circumstances(settings, model, world)}
        rundir.write_json(run.memory, facts)
    return chosen


def _found(settings: FsdpSettings, model: ShardedModel, store: TokenStore, world: World) -> Fit:
    """What fits this rank; the least where packs are so long that two layers do not take two."""
    try:
        return choose(_limit(world.device), _measured(model, store), model, settings, world)
    except torch.OutOfMemoryError:
        wanted = settings.gradient_checkpointing
        return Fit(1, wanted is not False, False, "one pack at a time: two did not fit two layers")


def share_of(settings: FsdpSettings, world: World) -> int:
    """The packs of a step that one rank gets at most: larger micro-batches would stay empty."""
    return -(-settings.packs_per_step // world.size)


def agreed(fits: list[Fit]) -> Fit:
    """The most careful of what each rank has found: GPUs are alike, what else is in them is not."""
    return min(fits, key=lambda fit: (fit.packs, not fit.recompute, fit.whole))


def adjusted(model: M, fit: Fit) -> M:
    """The model as it fits."""
    if fit.recompute:
        recompute(model)
    return keep_whole(model) if fit.whole and not model.whole else model


def bytes_of(packs: int, rest: tuple[float, float], layer: tuple[float, float], n: int) -> float:
    """What a step takes beside weights and optimizer; see Peaks. `n`: layers."""
    return rest[0] + packs * rest[1] + n * (layer[0] + packs * layer[1])


def even(most: int, needed: int) -> int:
    """The best size of micro-batches up to `most` packs, for ranks that take `needed` packs a step.

    Micro-batches are padded to their size, so one that does not divide computes on nothing.
    """

    def cost(size: int) -> float:
        return -(-needed // size) * (size + ROUND_COST)

    return min(range(1, max(1, most) + 1), key=lambda size: (cost(size), -size))


def _on_cpu(settings: FsdpSettings, model: ShardedModel, world: World) -> Fit:
    packs = settings.tokens_per_device
    gathered = model.count * model.dtype.itemsize
    return Fit(
        1 if packs == "auto" else min(packs // settings.pack_tokens, share_of(settings, world)),
        settings.gradient_checkpointing is True,
        model.whole or gathered <= OF_CPU * psutil.virtual_memory().total,
        "",
    )


def choose(
    limit: float, peaks: Peaks, model: ShardedModel, settings: FsdpSettings, world: World
) -> Fit:
    """The largest even micro-batches that fit `limit` bytes, recomputing only where that helps."""
    layers = len(model.layers)
    needed = share_of(settings, world)
    # Recomputing keeps each layer's input, and one layer's activations at a time.
    width = model.module.config.get_text_config().hidden_size * model.dtype.itemsize
    frugal_layer = (peaks.layer[0], float(width * settings.pack_tokens))
    frugal_rest = (peaks.rest[0], peaks.rest[1] + peaks.layer[1])

    def need(packs: int, recompute: bool) -> float:
        of = (frugal_rest, frugal_layer) if recompute else (peaks.rest, peaks.layer)
        return bytes_of(packs, *of, layers)

    def most(recompute: bool) -> int:
        sizes = range(1, needed + 1)
        return max((n for n in sizes if need(n, recompute) <= limit), default=0)

    set_packs = settings.tokens_per_device
    if set_packs == "auto":
        enough = min(needed, -(-WORTHWHILE_TOKENS // settings.pack_tokens))
    else:
        enough = min(needed, set_packs // settings.pack_tokens)
    wanted = settings.gradient_checkpointing
    recompute = wanted is True or (wanted == "auto" and most(False) < enough)
    packs = enough if set_packs != "auto" else even(most(recompute), needed)
    room = limit - need(packs, recompute)
    whole = model.whole or room >= model.count * model.dtype.itemsize
    return Fit(
        packs,
        recompute,
        whole,
        f"{packs * settings.pack_tokens:,} tokens at once "
        f"{'with' if recompute else 'without'} recomputation, the weights "
        f"{'kept whole' if whole else 'gathered anew'} in a step: {room / 2**30:.1f} GiB to spare",
    )


def _measured(model: ShardedModel, store: TokenStore) -> Peaks:
    """Peaks of tiny steps, whose gradients are thrown away."""

    def peak(layers: int, packs: int) -> float:
        batch = full_batch(Shape.of(store, packs)).to(torch.device("cuda"))
        with only(model.module, range(layers)):
            return _peak(model, lambda: loss_sum(model, batch))

    few = max(1, min(2, len(model.layers) - 1))
    fewer = {packs: peak(few, packs) for packs in (1, 2)}
    layer = {packs: peak(few + 1, packs) - fewer[packs] for packs in (1, 2)}
    rest = {packs: fewer[packs] - few * layer[packs] for packs in (1, 2)}
    return Peaks(_line(rest), _line(layer))


def _peak(model: ShardedModel, loss: Callable[[], torch.Tensor]) -> float:
    """Bytes that a later micro-batch of a step, with gradients there, takes at its peak."""
    parameters = list(model.parameters.values())
    for parameter in parameters:
        parameter.grad = None
    before = torch.cuda.memory_allocated()
    loss().backward()
    torch.cuda.reset_peak_memory_stats()
    loss().backward()
    found = torch.cuda.max_memory_allocated() - before
    for parameter in parameters:
        parameter.grad = None
    return float(found)


def _line(values: dict[int, float]) -> tuple[float, float]:
    """Values at 1 and 2 as (value at 0, growth)."""
    return 2 * values[1] - values[2], values[2] - values[1]


def _limit(device: torch.device) -> float:
    """Bytes this process may still take, with what its allocator holds unused."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return USABLE * (free + unused + torch.cuda.memory_allocated(device)) - (
        torch.cuda.memory_allocated(device)
    )


def _kept(run: RunDir, settings: FsdpSettings, model: ShardedModel, world: World) -> Fit | None:
    """What an earlier attempt found in the same circumstances."""
    facts = rundir.read_json(run.memory)
    now = _circumstances(settings, model, world)
    same = facts and all(facts.get(k) == v for k, v in now.items())
    return Fit(*(facts[name] for name in Fit._fields)) if facts and same else None


def _circumstances(settings: FsdpSettings, model: ShardedModel, world: World) -> dict[str, Any]:
    """What a choice depends on."""
    names = ("tokens_per_device", "gradient_checkpointing", "precision", "plain", "compile")
    return {
        "world_size": world.size,
        "device": torch.cuda.get_device_name(world.device),
        "memory": torch.cuda.mem_get_info(world.device)[1],
        "parameters": model.count,
        "layers": len(model.layers),
        "packs_per_step": settings.packs_per_step,
        "pack_tokens": settings.pack_tokens,
        **{name: getattr(settings, name) for name in names},
    }
