"""What the tools have in common: batch, schedule, optimizer, precision, names and LoRA.

axolotl and LLaMA-Factory hand most of their keys on to Hugging Face's trainer, whose names ours
are; what they call otherwise comes in as the names of their keys.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from flows.importing.draft import Draft, Note, required, shown
from flows.importing.rows import as_path
from flows.importing.rules import Rule, is_off, left, number, read, same, text, to, whole
from tunewright.contract.settings import is_path

LORA = {
    "rank": "lora_r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "targets": "lora_target_modules",
    "experts": "lora_target_parameters",
    "experts_rank": "lora_experts_r",
    "four_bit": "load_in_4bit",
}
"""What the settings of the recipe lora are called: the one place that knows."""
EVERY_LINEAR = "all-linear"

MLFLOW = "runs are tracked with MLflow, under experiment_name"
SHARDS = "the recipe shards the model by itself (FSDP2)"
ATTENTION = "the recipe takes the fastest attention that is there"
KERNELS = "kernels of that tool; the recipe takes its own"
TOKENS_KEPT = "tokens are kept below output_dir and found again by their fingerprint"
LOADER = "rows become tokens before the run; how many processes do it is found"
TOKENIZER = "the tokenizer is the model folder's; change it there"
RESUMES = "an unfinished run is continued by itself; other tools' checkpoints cannot be read"
NOT_SETTABLE = "the recipe has no such setting"
HUB = "models are registered, not pushed to the Hub"
LORA_VARIANT = "the recipe trains plain LoRA adapters"
NO_REMOTE_CODE = "code that comes with a model is not run"

_EXACT_ADAMW = {
    "adamw", "adamw_hf", "adamw_torch", "adamw_torch_fused", "adamw_apex_fused",
    "torch.optim.AdamW",
}  # fmt: skip
_SCHEDULERS = {
    "cosine": ("cosine", ""),
    "linear": ("linear", ""),
    "constant": ("constant", ""),
    "constant_with_warmup": ("constant", "with the warm-up"),
    "polynomial": ("linear", "approximated: {} is not here"),
}


def optimizer(draft: Draft, key: str, value: Any) -> None:
    """AdamW for every kind; 8-bit and other variants are said."""
    name = str(value)
    if name in _EXACT_ADAMW:
        draft.same(key, "the recipes train with AdamW")
    elif "adamw" in name.lower():
        draft.differs(key, f"{name} becomes AdamW with full 32-bit moments, which need more memory")
    else:
        draft.differs(key, f"{name} becomes AdamW: look at the learning rate and betas again")


def schedule(draft: Draft, kind: str, default: str) -> None:
    """Scheduler and warm-up; Hugging Face's `constant` has no warm-up."""
    name: str = read(draft, kind, text, default)
    ours, why = _SCHEDULERS.get(name, ("cosine", "approximated: {} is not here"))
    why = why.format(name)
    if draft.get(kind) is None:
        draft.assume("lr_scheduler_type", ours, "the default there")
    elif why.startswith("approximated"):
        draft.approximate(kind, "lr_scheduler_type", ours, f"{name} is not here")
    else:
        draft.carry(kind, "lr_scheduler_type", ours, why)
    steps, ratio = read(draft, "warmup_steps", number), read(draft, "warmup_ratio", number)
    if name == "constant":
        for key in ("warmup_steps", "warmup_ratio"):
            if draft.get(key) is not None:
                draft.leave(key, "the scheduler constant has no warm-up there")
        draft.assume("warmup_steps", 0, "constant has no warm-up there")
        return
    _warmup(draft, steps, ratio)


def _warmup(draft: Draft, steps: float | None, ratio: float | None) -> None:
    """Steps, which may be a share of all, come before a share; 0 steps leave it to the share."""
    if steps is not None and (steps or ratio is None):
        if 0 < steps < 1:
            draft.carry("warmup_steps", "warmup_ratio", steps, "a share of the steps there")
        else:
            draft.carry("warmup_steps", "warmup_steps", round(steps))
        if ratio is not None:
            draft.leave("warmup_ratio", "warmup_steps counts")
    elif ratio is not None:
        draft.carry("warmup_ratio", "warmup_ratio", ratio)
        if steps is not None:
            draft.same("warmup_steps", "warmup_ratio counts")


def batch(draft: Draft, micro: str, length: str, packed: bool, defaults: tuple[int, int]) -> None:
    """Rows of a micro-batch and the longest row, by their keys; defaults in the same order.

    The recipe turns rows x accumulation x accelerators x max_length into tokens of a step, so the
    batch follows `compute.num_accelerators` as it does there.
    """
    names = ((micro, "per_device_batch_size"), (length, "max_length"))
    for (key, ours), default in zip(names, defaults, strict=True):
        if draft.get(key) is None:
            draft.assume(ours, default, "the default there")
        elif key == micro and not packed:
            draft.approximate(
                key, ours, read(draft, key, whole),
                "counts as rows of max_length tokens; shorter rows are packed, so a step holds "
                "more of them and there are fewer steps",
            )  # fmt: skip
        else:
            draft.carry(key, ours, read(draft, key, whole), f"{key} there")
    key = "gradient_accumulation_steps"
    if draft.get(key) is not None:
        draft.carry(key, key, read(draft, key, whole))


def epochs(draft: Draft, key: str, default: int) -> None:
    """Whole passes; a part of one is rounded up."""
    if draft.get(key) is None:
        if read(draft, "max_steps", number, 0) < 1:
            draft.assume("num_train_epochs", default, "the default there")
        return
    found: float = read(draft, key, number)
    rounded = max(1, math.ceil(found))
    if found == rounded:
        draft.carry(key, "num_train_epochs", rounded, "" if key == "num_train_epochs" else key)
    else:
        draft.approximate(key, "num_train_epochs", rounded, f"{found:g}: only whole epochs here")


def steps(draft: Draft, key: str, value: Any) -> None:
    """save_steps, eval_steps, max_steps: whole numbers; -1 and 0 mean unset, below 1 a share."""
    if number(value) in (-1, 0):
        draft.same(key, "unset")
    elif 0 < number(value) < 1:
        draft.leave(key, f"{value} is a share of all steps; {key} is a number of steps here")
    else:
        draft.carry(key, key, whole(value))


def precision(draft: Draft, default: str, why: str) -> None:
    """bf16, fp16 and their full variants; the parameters stay 32-bit here."""
    given = [key for key in _TYPES if draft.get(key) is not None]
    used = [key for key in given if not is_off(draft.get(key))]
    for key in given:
        if key != (used or given)[0]:
            draft.same(key, "precision says it")
    if not given:
        draft.assume("precision", default, why)
    elif not used:
        draft.carry(given[0], "precision", "fp32", f"{given[0]}: false")
    elif "16" in used[0] and not used[0].startswith(("bf", "pure")):
        why = f"there is no {used[0]}; bf16 where the GPU has it"
        draft.approximate(used[0], "precision", "auto", why)
    elif used[0] == "pure_bf16" or draft.get(used[0]) == "full":
        draft.approximate(used[0], "precision", "bf16", "parameters stay 32-bit, with more memory")
    else:
        value = draft.get(used[0])
        ours = "auto" if value == "auto" else "bf16"
        draft.carry(used[0], "precision", ours, f"{used[0]}: {shown(value)}")


_TYPES = ("bf16", "bfloat16", "pure_bf16", "fp16", "float16")
"""The first that is on counts."""


def checkpointing(draft: Draft, key: str, value: Any) -> None:
    """True, false, or where activations are put meanwhile."""
    if isinstance(value, bool):
        draft.carry(key, "gradient_checkpointing", value)
    else:
        draft.approximate(
            key, "gradient_checkpointing", not is_off(value), f"{value}: recomputed, not offloaded"
        )


def lora(draft: Draft, keys: Mapping[str, str]) -> None:
    """Rank, alpha and dropout of adapters, by the tool's names for them."""
    draft.recipe = "lora"
    for part, key in keys.items():
        convert = number if part == "dropout" else whole
        if draft.get(key) is not None:
            to(LORA[part])(draft, key, read(draft, key, convert))


def eval_share(draft: Draft, key: str, _: Any) -> None:
    """A share of rows held out, by content instead of by chance; a number of rows is left."""
    value: float = read(draft, key, number)
    if value == 0:
        draft.same(key, "nothing is held out")
    elif value < 1:
        draft.approximate(
            key, "eval_fraction", value, "held out by the hash of each row's content, not by chance"
        )
    else:
        draft.leave(key, f"{value:g} rows; say it as a share: eval_fraction")


def output_dir(draft: Draft, key: str, value: Any) -> None:
    draft.carry(key, "output_dir", str(value), "the root of all runs; a model is in <run>/model")


def model(draft: Draft, key: str) -> None:
    """The base model: a Hub name, or a path, relative to the workload's folder."""
    required(draft, key, "name the model there")
    name: str = read(draft, key, text)
    ours = as_path(name) if name.count("/") > 1 and not is_path(name) else name
    moved = is_path(ours) and not ours.startswith(("/", "~"))
    draft.carry(key, "model_name", ours, "relative to this file's folder" if moved else "")


def run_name(draft: Draft, keys: tuple[str, ...]) -> None:
    """The name of the run in MLflow, from the first of these keys that says one."""
    _named(draft, keys, "mlflow_run_name")


def experiment(draft: Draft, keys: tuple[str, ...]) -> None:
    """The experiment's name: a project's name of the source, else the name of its file."""
    if not _named(draft, keys, "experiment_name"):
        draft.fields["experiment_name"] = run_word(PurePath(draft.name).stem)


def _named(draft: Draft, keys: tuple[str, ...], to: str) -> bool:
    key = next((key for key in keys if draft.get(key) is not None), None)
    if key is None:
        return False
    given: str = read(draft, key, text)
    draft.fields[to] = name = run_word(given)
    same = given == name
    why = "" if same else "only ASCII letters, digits, - and _"
    draft.notes.append(Note(key, "carried" if same else "approximated", to, why))
    return True


def run_word(given: str) -> str:
    """A text in the characters that a run's name may have."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", given).strip("-")[:100] or "imported"


TRAINER: Mapping[str, Rule] = {
    "learning_rate": to("learning_rate", number),
    "weight_decay": to("weight_decay", number),
    "adam_beta1": to("adam_beta1", number),
    "adam_beta2": to("adam_beta2", number),
    "adam_epsilon": to("adam_epsilon", number),
    "max_grad_norm": to("max_grad_norm", number),
    "seed": to("seed", whole),
    "logging_steps": to("logging_steps", whole),
    "save_total_limit": to("save_total_limit", whole),
    "output_dir": output_dir,
    "save_only_model": left("checkpoints are for resuming; the model is exported beside them"),
    "save_safetensors": same("models are safetensors"),
    "resume_from_checkpoint": left(RESUMES),
    "deepspeed*": left(SHARDS),
    "fsdp*": left(SHARDS),
    "ddp*": left(SHARDS),
    "local_rank": left("torchrun sets it"),
    "wandb_*": left(MLFLOW),
    "swanlab_*": left(MLFLOW),
    "use_swanlab": left(MLFLOW),
    "report_to": left(MLFLOW, off=()),
    "hub_*": left(HUB),
    "push_to_hub*": left(HUB),
    "dataloader_*": left(LOADER, off=()),
    "torch_compile*": left("the recipe decides by itself what it compiles"),
    "tf32": left(NOT_SETTABLE),
    "group_by_length": left("rows are packed by length, packs are shuffled"),
    "neftune_noise_alpha": left("noise on embeddings is not here"),
    "gradient_checkpointing_kwargs.*": left("how activations are recomputed is not settable", ()),
    "trust_remote_code": left(NO_REMOTE_CODE),
    "remove_unused_columns": same("columns that mean nothing are not read"),
    "load_best_model_at_end": left("the last model is registered"),
    "greater_is_better": left("the last model is registered"),
    "metric_for_best_model": left("the last model is registered"),
    "early_stopping_patience": left("the run goes to its end"),
    "data_seed": left("seed is the one for everything"),
    "include_tokens_per_second": same("tokens per second are always measured"),
    "include_num_input_tokens_seen": same("tokens are always counted"),
    "per_device_eval_batch_size": left("evaluation takes the packs of training"),
}
"""Keys of Hugging Face's trainer, and those that both tools add to them."""
