"""What the public gpt-oss example does with its GPUs; started by lora_step.py.

    python benchmarks/example_lora.py MODEL_FOLDER TOKENS STEPS RESULT
    torchrun --nproc-per-node=N benchmarks/example_lora.py MODEL_FOLDER TOKENS STEPS RESULT

TRL's SFTTrainer with the example's arguments on the rows of TOKENS, in random order: eager
attention, one row of its own length at a time on each GPU, four of them a step; PEFT's adapters of
rank 32 on all linear layers and of rank 8 on the experts' tensors; weights and adapters in bf16,
activations recomputed, AdamW. Under torchrun everything is sharded as the example has it, with
accelerate's FSDP2; by itself, on one GPU, nothing is. Random weights, made on the device. What
differs from the example: the rows are tokens already, and TRL is the version that is installed.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import Any

# With more GPUs in sight Trainer would spread the row over them by itself.
os.environ |= (
    {}
    if "RANK" in os.environ
    else {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
)

import numpy as np
import torch
import torch.distributed as dist
from accelerate import DistributedType, init_empty_weights
from accelerate.state import AcceleratorState
from accelerate.utils import fsdp_utils
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    PrinterCallback,
    TrainerCallback,
)
from trl import SFTConfig, SFTTrainer

MAX_LENGTH, ROWS, WARM_UP = 2048, 4, 2
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
RECOMPUTE = next(
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if name in {field.name for field in fields(SFTConfig)}
)


class Meter(TrainerCallback):  # type: ignore[misc]
    """Counts the tokens that go into the model, and marks the time at the end of each step."""

    def __init__(self, embedding: torch.nn.Module) -> None:
        self.tokens = 0
        self.marks: list[tuple[float, int]] = []
        embedding.register_forward_pre_hook(self._count)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.marks.append((time.perf_counter(), self.tokens))
        print(f"step {len(self.marks)}: {self.tokens} tokens", flush=True)

    def _count(self, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self.tokens += inputs[0].numel()

    def figures(self) -> dict[str, float]:
        """Of the steps after the warm-up; the tokens of all ranks, the rate of each."""
        (begun, before), (ended, after) = self.marks[WARM_UP - 1], self.marks[-1]
        steps, tokens, seconds = len(self.marks) - WARM_UP, float(after - before), ended - begun
        if RANKS > 1:
            found: list[Any] = [None] * RANKS
            dist.all_gather_object(found, (tokens, seconds))
            tokens, seconds = sum(t for t, _ in found), max(s for _, s in found)
        return {
            "tokens_per_second": tokens / seconds / RANKS,
            "step_seconds": seconds / steps,
            "tokens_per_step": tokens / steps,
            "steps": steps,
            "peak_memory_gib": peak_gib(),
        }


def main(folder: str, tokens: str, steps: int, result: str) -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    model = adapted(folder)
    meter = Meter(model.get_input_embeddings())
    if RANKS > 1:
        fsdp_utils.fsdp2_load_full_state_dict = filled
        if not torch.cuda.is_available():
            AcceleratorState.__init__ = shards_on_cpus(AcceleratorState.__init__)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = SFTTrainer(
            model=model,
            args=arguments(scratch, steps + WARM_UP, model),
            train_dataset=rows(tokens, RANKS * ROWS * (steps + WARM_UP)),
            processing_class=no_tokenizer(),
            callbacks=[meter],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    paths = {
        "recomputation": recomputes(model),
        "sharded": sorted({type(p).__name__ for p in model.parameters()}),
        "attention": model.config._attn_implementation,
        "experts": getattr(model.config, "_experts_implementation", None),
        "types": sorted({str(p.dtype) for p in model.parameters()}),
    }
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    found = {**meter.figures(), "adapter_parameters": adapters, "paths": paths}
    if RANK == 0:
        Path(result).write_text(json.dumps(found))
    if RANKS > 1:
        dist.destroy_process_group()


def adapted(folder: str) -> Any:
    """With adapters, in bf16; on several ranks without weights: those are made sharded."""
    config = AutoConfig.from_pretrained(folder)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with init_empty_weights(include_buffers=False) if RANKS > 1 else device:
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="eager"
        )
        return with_adapters(model)


def with_adapters(model: Any) -> Any:
    model.config.use_cache = False
    # In its own words, but the ranks of the experts' tensors; PEFT says that it does not find them
    # among the layers, and does use them.
    lora = LoraConfig(
        r=32,
        lora_alpha=32,
        target_modules="all-linear",
        rank_pattern=dict.fromkeys(EXPERTS, 8),
        target_parameters=EXPERTS,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, lora).to(torch.bfloat16)


def filled(accelerator: Any, model: Any, *_: Any, **__: Any) -> None:
    """In place of the weights that accelerate sends from rank 0: each rank draws its own shards.

    Trainer has seeded all ranks alike: from that seed every shard would be the same, experts copies
    of others, and the router could not tell these apart.
    """
    model.to_empty(device=accelerator.device)
    draw = torch.Generator(accelerator.device).manual_seed(RANK)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter.to_local(), std=0.02, generator=draw)


def shards_on_cpus(init: Callable[..., None]) -> Callable[..., None]:
    """accelerate shards on GPUs only, and makes DDP of the same arguments elsewhere."""

    @wraps(init)
    def patched(self: Any, *args: Any, fsdp_plugin: Any = None, **more: Any) -> None:
        init(self, *args, fsdp_plugin=fsdp_plugin, **more)
        if fsdp_plugin is not None:
            fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

    return patched


def recomputes(model: Any) -> bool:
    """Whether every decoder layer does, in transformers' way or in FSDP's."""
    layers = [(name, part) for name, part in model.named_modules() if is_layer(part)]
    return bool(layers) and all(
        part.gradient_checkpointing or "_checkpoint_wrapped_module" in name for name, part in layers
    )


def is_layer(part: torch.nn.Module) -> bool:
    return type(part).__name__.removeprefix("FSDP").endswith("DecoderLayer")


def arguments(folder: str, steps: int, model: Any) -> SFTConfig:
    recompute: dict[str, Any] = {RECOMPUTE: True}
    if RANKS > 1:
        layers = sorted({type(part).__name__ for part in model.modules() if is_layer(part)})
        recompute = {
            RECOMPUTE: False,
            "fsdp": "full_shard auto_wrap",
            "fsdp_config": {
                "version": 2, "fsdp_transformer_layer_cls_to_wrap": layers,
                "reshard_after_forward": True, "activation_checkpointing": True, "xla": False,
                "limit_all_gathers": True,
                # So that accelerate shards before there are weights; see `filled`.
                "cpu_ram_efficient_loading": True,
            },
        }  # fmt: skip
    return SFTConfig(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=ROWS,
        learning_rate=1.5e-4,
        lr_scheduler_type="cosine",
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        logging_steps=5,
        save_strategy="no",
        report_to="none",
        max_length=MAX_LENGTH,
        # The example's version of TRL has no such loss where the model does not ask for it.
        router_aux_loss_coef=0.0,
        dataset_kwargs={"skip_prepare_dataset": True},
        disable_tqdm=True,
        **recompute,
    )


def rows(tokens: str, count: int) -> Dataset:
    """So many documents of a token store; everything is learnt from."""
    ids, ends = (
        np.load(Path(tokens, "train", f"{name}.npy"), mmap_mode="r")
        for name in ("tokens", "documents")
    )
    ends = ends.astype(np.int64)
    chosen = np.random.default_rng(0).permutation(len(ends) - 1)[:count]
    found = [ids[ends[i] : ends[i + 1]][:MAX_LENGTH].astype(np.int64).tolist() for i in chosen]
    return Dataset.from_dict({"input_ids": found, "labels": found})


def no_tokenizer() -> PreTrainedTokenizerFast:
    """TRL asks for one, and for its padding, of which a row by itself has none."""
    words = Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<pad>")


def peak_gib() -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
    # Not by Python's own end: at times a rank aborts in it, all its work done, and torchrun calls
    # the run failed. gloo's threads may still hold tensors then (pytorch's PR 179291).
    sys.stdout.flush()
    os._exit(0)
