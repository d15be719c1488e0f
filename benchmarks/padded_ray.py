"""What the public Ray Train script does with its GPUs; started by ray_step.py.

    python benchmarks/padded_ray.py MODEL_FOLDER LENGTHS WORKERS STEPS RESULT

Ray Train's TorchTrainer with one worker per GPU, the model in bf16 with DDP around it, four rows
padded to 1,024 tokens at a time, whose padding is computed with and learnt from; AdamW on bf16
weights, the loss of whole logits, a report to Ray in each step. Random weights and ids; rows have
the lengths in the file LENGTHS. Without GPUs it runs on the CPU.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

# Without a mode Ray may keep a token in the home folder and ask for it ever after. The first import
# of torch on a machine can take longer than Ray waits for its workers.
os.environ |= {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",
}

import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_data_loader, prepare_model
from torch.utils.data import DataLoader, Dataset
from transformers import AutoConfig, AutoModelForCausalLM

LENGTH, ROWS, WARM_UP = 1024, 4, 2


class Rows(Dataset):  # type: ignore[misc]
    """Padded rows, as the script's own mapping leaves them."""

    def __init__(self, lengths: list[int], count: int, vocabulary: int) -> None:
        draw = torch.Generator().manual_seed(0)
        known = torch.tensor(lengths)
        self.lengths = known[torch.randint(len(known), (count,), generator=draw)]
        self.ids = torch.randint(3, vocabulary, (count, LENGTH), generator=draw)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        mask = (torch.arange(LENGTH) < self.lengths[index]).long()
        return {"input_ids": self.ids[index], "attention_mask": mask, "labels": self.ids[index]}


def train(told: dict[str, Any]) -> None:
    """One worker."""
    warnings.filterwarnings("ignore")
    device = get_device()
    config = AutoConfig.from_pretrained(told["folder"])
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.config.use_cache = False
    model = prepare_model(model)
    workers = ray.train.get_context().get_world_size()
    count = ROWS * workers * (told["steps"] + WARM_UP)
    rows = Rows(told["lengths"], count, config.vocab_size)
    loader = DataLoader(rows, batch_size=ROWS, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    model.train()
    marks, real, reporting = [], [], []
    for step, batch in enumerate(prepare_data_loader(loader)):
        out = model(**batch)
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss = out.loss.item()
        begun = time.perf_counter()
        ray.train.report({"loss": loss, "step": step})
        marks.append(time.perf_counter())
        reporting.append(marks[-1] - begun)
        real.append(batch["attention_mask"].sum())
    whole = marks[-1] - marks[WARM_UP - 1]
    spent = [whole, whole - sum(reporting[WARM_UP:])]
    tokens = torch.stack(real[WARM_UP:]).sum().double().to(device)
    seconds = torch.tensor(spent, dtype=torch.float64, device=device)
    if workers > 1:
        dist.all_reduce(tokens)
        dist.all_reduce(seconds, op=dist.ReduceOp.MIN)  # in its favour
    if ray.train.get_context().get_world_rank() == 0:
        found = figures(float(tokens), seconds.tolist(), workers, len(marks) - WARM_UP)
        Path(told["result"]).write_text(json.dumps(found))


def figures(tokens: float, spent: list[float], workers: int, steps: int) -> dict[str, float]:
    """Of the steps after the warm-up; rates of one worker, `tokens` those of all.

    `spent`: seconds, and those without the reports to Ray. A report waits until Ray has fetched
    the one before, which it does every two seconds unless told otherwise: `as_is` has that in it,
    the other rates are those of a script that reports seldom.
    """
    on_gpu = torch.cuda.is_available()
    as_is, seconds = spent
    return {
        "tokens_per_second": tokens / seconds / workers,
        "tokens_per_second_as_is": tokens / as_is / workers,
        "positions_per_second": steps * ROWS * LENGTH / seconds,
        "step_seconds": seconds / steps,
        "step_seconds_as_is": as_is / steps,
        "steps": steps,
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0,
    }


def main(folder: str, lengths: str, workers: int, steps: int, result: str) -> None:
    gpus = torch.cuda.is_available()
    ray.init(
        "local",
        num_cpus=max(2, 2 * workers),
        num_gpus=workers if gpus else 0,
        object_store_memory=80_000_000,  # nearly the least Ray takes; no tensor travels through it
        include_dashboard=False,
        log_to_driver=False,
    )
    told = {
        "folder": folder, "result": result, "steps": steps,
        "lengths": [int(n) for n in Path(lengths).read_text().split()],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as storage:
        TorchTrainer(
            train,
            train_loop_config=told,
            scaling_config=ScalingConfig(num_workers=workers, use_gpu=gpus),
            run_config=RunConfig(storage_path=storage, name="padded"),
        ).fit()
    ray.shutdown()


if __name__ == "__main__":
    # Ray's workers import what they are to call; out of a program it would have to be copied.
    from padded_ray import main as imported

    imported(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
