"""What the hardware can do: the speed of one large matrix product, measured where a run starts.

A share of it says more than a data sheet's number: the same clock, power limit and libraries
that the run has. Memory-bound work and communication keep every training below it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from tunewright.training.world import World

SIZES = {"cuda": 8192, "cpu": 1024}
"""Side of the square matrices by kind of device: large enough that starting it does not count."""

_TIMES = 10
_BUDGET_S = 0.3
"""Of slow devices fewer products are timed, so that a start never waits for this."""


def measured(world: World, dtype: torch.dtype) -> float:
    """FLOP/s of one rank: the mean over all ranks, which measure at the same time.

    To be called by every rank, before the model is built. All at once, since the ranks of a node
    share its power, its heat and, on a CPU, its cores; the mean, since the model's FLOP/s that are
    compared with it are a mean over the ranks too.
    """
    world.gathered(None)
    (total,) = world.total(matmul_flops(world.device, dtype))
    if world.device.type == "cuda":
        # The matrices are no part of the memory that the run needs at its peak.
        torch.cuda.reset_peak_memory_stats(world.device)
    return total / world.size


def matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large square matrix product in `dtype` on this device.

    The matrices are random: a GPU draws less power over zeros and runs faster than it ever does in
    training. They are drawn from a generator of their own, so that no random number of the run
    moves. Takes 0.15 s on an H200 (fp32: 0.4 s), and under a second elsewhere. The device is still
    cool: after a second of such work an H200 falls from 800 to about 680 TFLOP/s in bf16, so that a
    share of the ceiling is rather told too low than too high.
    """
    size = SIZES[device.type]
    draw = torch.Generator(device).manual_seed(0)
    left, right, out = (
        torch.randn(size, size, generator=draw, device=device, dtype=dtype) for _ in range(3)
    )

    def product() -> None:
        torch.mm(left, right, out=out)

    timed = _on_gpu if device.type == "cuda" else _on_cpu
    with torch.no_grad():
        timed(product, 2)
        once = timed(product, 1)
        times = max(1, min(_TIMES, int(_BUDGET_S / once)))
        return 2 * size**3 * times / timed(product, times)


def _on_gpu(work: Callable[[], None], times: int) -> float:
    """Seconds on the GPU of `times` runs one after the other."""
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    for _ in range(times):
        work()
    ended.record()
    ended.synchronize()
    return float(begun.elapsed_time(ended)) / 1000


def _on_cpu(work: Callable[[], None], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        work()
    return time.perf_counter() - start
