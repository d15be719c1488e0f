"""The speed of one large bf16 matrix product on every rank at once; started by gpu_step.py.

torchrun … benchmarks/matmul.py RESULT
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

SIZE = 8192
TIMES = 60
"""About as long as the GPU needs to reach the clock that it keeps under load."""


def main(result: str) -> None:
    rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
        flops = on_gpu(SIZE, TIMES)
    else:
        dist.init_process_group("gloo")
        flops = 1.0
    total = torch.tensor(flops, dtype=torch.float64)
    total = total.cuda() if torch.cuda.is_available() else total
    dist.all_reduce(total)
    if rank == 0:
        Path(result).write_text(json.dumps({"flops": float(total) / dist.get_world_size()}))
    dist.destroy_process_group()


def on_gpu(size: int, times: int) -> float:
    """FLOP/s; random numbers, since a GPU is faster on zeros than it ever is in training."""
    left, right, out = (
        torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(3)
    )
    for _ in range(10):
        torch.mm(left, right, out=out)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.barrier()
    start.record()
    for _ in range(times):
        torch.mm(left, right, out=out)
    end.record()
    torch.cuda.synchronize()
    return 2 * size**3 * times / (start.elapsed_time(end) / 1000)


if __name__ == "__main__":
    main(sys.argv[1])
