"""What a usual fine-tuning script does with its GPUs; started by gpu_step.py.

    torchrun … benchmarks/padded_fsdp1.py MODEL_FOLDER LENGTHS STEPS RESULT

Every row is padded to 1,024 tokens and the padding is computed with; 4 rows at a time, 2 such
micro-batches a step; FSDP1 with every decoder layer wrapped, weights and AdamW's states in bf16,
activations recomputed, transformers' own loss over whole logits. Random weights.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import AutoConfig, AutoModelForCausalLM

LENGTH, ROWS, ACCUMULATED, WARM_UP = 1024, 4, 2, 2


def main(folder: str, lengths: str, steps: int, result: str) -> None:
    warnings.filterwarnings("ignore")
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    known = torch.tensor([int(n) for n in Path(lengths).read_text().split()])
    model = sharded(folder, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    draw = torch.Generator().manual_seed(rank)
    marks, real = [], []
    for step in range(steps + WARM_UP):
        real.append(0)
        for _ in range(ACCUMULATED):
            chosen = known[torch.randint(len(known), (ROWS,), generator=draw)]
            real[step] += int(chosen.sum())
            ids = torch.randint(3, 100_000, (ROWS, LENGTH), generator=draw).to(device)
            mask = (torch.arange(LENGTH)[None] < chosen[:, None]).long().to(device)
            loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss
            (loss / ACCUMULATED).backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # the usual script prints it
        marks.append(time.perf_counter())
    seconds = torch.tensor(marks[-1] - marks[WARM_UP - 1], device=device)
    tokens = torch.tensor(float(sum(real[WARM_UP:])), device=device)
    dist.all_reduce(tokens)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    if rank == 0:
        rate = float(tokens / seconds) / dist.get_world_size()
        positions = steps * ROWS * ACCUMULATED * LENGTH / float(seconds)
        Path(result).write_text(
            json.dumps({"tokens_per_second": rate, "positions_per_second": positions})
        )
    dist.destroy_process_group()


def sharded(folder: str, device: torch.device) -> FullyShardedDataParallel:
    config = AutoConfig.from_pretrained(folder)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.config.use_cache = False
    model.gradient_checkpointing_enable()
    policy = functools.partial(
        transformer_auto_wrap_policy, transformer_layer_cls={type(model.model.layers[0])}
    )
    kind = torch.bfloat16
    return FullyShardedDataParallel(
        model.train(),
        auto_wrap_policy=policy,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        mixed_precision=MixedPrecision(param_dtype=kind, reduce_dtype=kind, buffer_dtype=kind),
        device_id=device,
        use_orig_params=True,
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
