"""torchtune: blocks with a `_component_`, the model named by its checkpoint's folder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from flows.importing import torchtune_rows, trainer
from flows.importing.draft import Draft, leaves, required, shown
from flows.importing.rows import as_path, write
from flows.importing.rules import (
    UNUSED,
    Rule,
    apply,
    is_off,
    left,
    number,
    read,
    refusal,
    refuse,
    same,
    text,
    to,
    whole,
    words,
)
from tunewright.contract.failures import UserError

TOOL = "torchtune"
_REWARDS = "training on preferences or rewards is not here"
_MADE_FOR = "datasets made for reward training are not here"
_NO_TRAINING = "nothing is trained by it"

REFUSED: Mapping[str, str | Mapping[Any, str]] = {
    "reward_functions": _REWARDS,
    "ref_checkpointer": _REWARDS,
    "policy_model": _REWARDS,
    "reward_and_value_model": _REWARDS,
    "ref_policy_checkpointer": _REWARDS,
    "orchestration": _REWARDS,
    "teacher_model": "distillation is not here",
    "kd_loss": "distillation is not here",
    "quantizer": "training for quantized weights is not here",
    "prompt": _NO_TRAINING,
    "tasks": _NO_TRAINING,
    "quantization": _NO_TRAINING,
}
_COMPONENTS: Mapping[str, Mapping[str, str]] = {
    "model": {
        "vision": "images are not here", "flamingo": "images are not here",
        "classifier": "classification is not here", "reward": _REWARDS,
    },
    "dataset": {
        "multimodal": "images are not here", "preference": _REWARDS, "hh_rlhf": _REWARDS,
        "stack_exchange": _REWARDS, "grpo": _MADE_FOR, "gsm8k": _MADE_FOR,
    },
    "loss": {"rlhf": _REWARDS, "grpo": _REWARDS, "dpo": _REWARDS, "KL": "distillation is not here"},
}  # fmt: skip
"""Words in a component's name that tell a method that is not here."""

TABLE: Mapping[str, Rule] = {
    "model.*": same("the model's config says it"),
    "tokenizer.max_seq_len": same("max_length"),
    "tokenizer.prompt_template*": left("the words around a prompt are the template's"),
    "tokenizer.*": same("the tokenizer is the model folder's"),
    "checkpointer.recipe_checkpoint": left(trainer.RESUMES),
    "checkpointer.adapter_checkpoint": left("adapters start anew"),
    "checkpointer.checkpoint_files*": same("all weights of the folder are read"),
    "checkpointer.output_dir": same("output_dir"),
    "checkpointer.keep_last_n_checkpoints": to("save_total_limit", whole),
    "checkpointer.*": same("the model's config says it"),
    "save_every_n_steps": to("save_steps", whole),
    "save_every_n_epochs": left("checkpoints come every save_steps", off=()),
    "save_adapter_weights_only": left("checkpoints are for resuming"),
    "resume_from_checkpoint": left(trainer.RESUMES),
    "optimizer.lr": to("learning_rate", number),
    "optimizer.weight_decay": to("weight_decay", number),
    "optimizer.eps": to("adam_epsilon", number),
    "optimizer._component_": trainer.optimizer,
    "optimizer.fused": same("the fastest AdamW that is there"),
    "optimizer_in_bwd": left("gradients are kept until the step; tokens_per_device saves memory"),
    "loss.*": same("cross entropy of the supervised tokens"),
    "compile": left("the recipe decides by itself what it compiles"),
    "enable_activation_checkpointing": to("gradient_checkpointing"),
    "enable_activation_offloading": left(trainer.NOT_SETTABLE),
    "ac_*": left("every layer is recomputed, or none", off=()),
    "shuffle": same("packs are shuffled by the seed"),
    "packed": same("rows are always packed, each sees only itself"),
    "collate_fn": same("packs need no padding"),
    "device": left("a run takes what is there", off=("cuda",)),
    "metric_logger*": left(trainer.MLFLOW, off=()),
    "log_level": left("narration is one size"),
    "log_every_n_steps": to("logging_steps", whole),
    "log_peak_memory_stats": same("peak memory is in the receipt"),
    "profiler*": lambda draft, key, value: (
        draft.leave(key, "there is no profiler")
        if draft.get("profiler.enabled")
        else draft.same(key, UNUSED)
    ),
    "seed": to("seed", whole),
    "output_dir": trainer.output_dir,
    "base_model_path": same("read where it is referred to"),
    "name": same("read where it is referred to"),
    "run_val_every_n_steps": to("eval_steps", whole),
    "batch_size_val": left("evaluation takes the packs of training", off=()),
    "custom_sharded_layers": left(trainer.SHARDS, off=()),
    "fsdp*": left(trainer.SHARDS),
    "memory_efficient_fsdp_wrap": left(trainer.SHARDS),
    "tensor_parallel*": left(trainer.SHARDS, off=(1,)),
    "data_parallel*": left(trainer.SHARDS, off=(1,)),
    "context_parallel*": left(trainer.SHARDS, off=(1,)),
    "use_distributed_state_dict": left(trainer.SHARDS),
    "low_cpu_ram": left(trainer.SHARDS),
    "use_flex": left(trainer.ATTENTION),
    "dataloader*": left(trainer.LOADER, off=()),
    "dataset*.new_system_prompt": left("give a column system, or put it into chat_template"),
    "dataset*.subset": left("a subset of a Hub dataset cannot be named; give its files as paths"),
    "dataset*.name": left("a subset of a Hub dataset cannot be named; give its files as paths"),
    "dataset*.add_eos": left("a text ends with the end token"),
    "dataset*.packed": same("rows are always packed, each sees only itself"),
    "dataset*.max_seq_len": same("max_length"),
}

_MODULES = {"output_proj": "o_proj"}
_MLP = ("gate_proj", "up_proj", "down_proj")
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def resolved(source: Mapping[str, Any]) -> dict[str, Any]:
    """The file with `${name}` replaced by what it refers to; what cannot be stays, for `fill`."""
    known = dict(leaves(source))

    def filled(value: Any, depth: int = 0) -> Any:
        if isinstance(value, Mapping):
            return {key: filled(part, depth) for key, part in value.items()}
        if isinstance(value, list):
            return [filled(part, depth) for part in value]
        if not isinstance(value, str) or depth > 10:
            return value
        if (whole := _REFERENCE.fullmatch(value)) and whole[1] in known:
            return filled(known[whole[1]], depth + 1)
        text = _REFERENCE.sub(lambda m: str(known.get(m[1], m[0])), value)
        return text if text == value else filled(text, depth + 1)

    return {key: filled(value) for key, value in source.items()}


def fill(draft: Draft) -> None:
    """Write the workload of a torchtune file into the draft.

    Raises UserError for what is not here.
    """
    _refuse_references(draft)
    refuse(draft, TOOL, REFUSED)
    _refuse_components(draft)
    if draft.get("optimizer") is None or draft.get("dataset") is None:
        raise refusal(draft, TOOL, f"file has no optimizer and dataset ({_NO_TRAINING})")
    _model(draft)
    _method(draft)
    _data(draft)
    _batch(draft)
    _length_of_the_run(draft)
    _schedule(draft)
    _precision(draft)
    trainer.experiment(draft, ("metric_logger.project",))
    apply(draft, TABLE)
    _clipping(draft)
    draft.assume("weight_decay", 0.01, "AdamW's default there")
    draft.assume("adam_beta2", 0.999, "AdamW's default there")


def _refuse_references(draft: Draft) -> None:
    """A path with `${…}` in it would be taken for the name of a folder."""
    for key, value in leaves(draft.source):
        if "${" in str(value):
            raise UserError(
                f"{draft.name}: {key}: {shown(value)} cannot be filled in from the file; "
                "write its value there"
            )


def _refuse_components(draft: Draft) -> None:
    for key, value in leaves(draft.source):
        block = key.partition(".")[0]
        for word, why in _COMPONENTS.get(block, {}).items():
            if key.endswith("_component_") and word in str(value):
                raise refusal(draft, TOOL, f"{key}: {value} ({why})")


def _model(draft: Draft) -> None:
    """The checkpoint's folder; Meta's own format lies in a sub-folder of the Hugging Face one."""
    key = "checkpointer.checkpoint_dir"
    required(draft, key, "name the model's folder there")
    folder = read(draft, key, text).rstrip("/") or "/"
    if str(draft.get("checkpointer._component_")).endswith("MetaCheckpointer"):
        ours = folder.removesuffix("/original")
        why = "Meta's format is not read: config and safetensors are taken from this folder"
        draft.approximate(key, "model_name", as_path(ours), why)
    else:
        draft.carry(key, "model_name", as_path(folder), "must hold config, tokenizer and weights")


def _method(draft: Draft) -> None:
    """LoRA and QLoRA are told by the model's component and its arguments."""
    component = str(draft.get("model._component_"))
    kind = component.rpartition(".")[2].partition("_")[0]
    if kind not in ("lora", "qlora"):
        draft.same("model._component_", "all weights are trained; the model is its folder's")
        return
    draft.same("model._component_", "the recipe lora; the model is its folder's")
    names = {
        "rank": "model.lora_rank",
        "alpha": "model.lora_alpha",
        "dropout": "model.lora_dropout",
    }
    trainer.lora(draft, names)
    _targets(draft, component)
    if not is_off(draft.get("model.use_dora", False)):
        draft.leave("model.use_dora", trainer.LORA_VARIANT)
    if kind == "qlora" or draft.get("model.quantize_base"):
        key = "model.quantize_base" if draft.get("model.quantize_base") else "model._component_"
        draft.carry(key, trainer.LORA["four_bit"], True, "4-bit base weights (QLoRA)")


def _targets(draft: Draft, component: str) -> None:
    """Names of layers as Hugging Face's models have them."""
    key = "model.lora_attn_modules"
    found = [_MODULES.get(name, name) for name in read(draft, key, words, [])]
    used = [key] if found else []
    for switch, names in (("apply_lora_to_mlp", _MLP), ("apply_lora_to_output", ("lm_head",))):
        if draft.get(f"model.{switch}") is not None:
            found += names if draft.get(f"model.{switch}") else ()
            used.append(f"model.{switch}")
    if not found:
        return
    draft.assume(trainer.LORA["targets"], found, "as Hugging Face's models name them")
    fused = "phi" in component
    why = "Phi's layers are fused: qkv_proj, gate_up_proj" if fused else ""
    for key in used:
        draft.into(key, trainer.LORA["targets"], why, changed=fused)


def _data(draft: Draft) -> None:
    block = draft.get("dataset")
    places = [f"dataset.{i}" for i in range(len(block))] if isinstance(block, list) else ["dataset"]
    write(draft, [torchtune_rows.source(draft, place) for place in places])
    _train_on(draft, places)
    if draft.get("dataset_val") is None:
        return
    if draft.get("run_val_every_n_steps") is None:
        draft.leave("dataset_val", "run_val_every_n_steps is unset: there is no evaluation there")
        return
    rows = torchtune_rows.source(draft, "dataset_val")
    draft.assume("eval_dataset", rows.full_name, "dataset_val")


def _train_on(draft: Draft, places: list[str]) -> None:
    """One setting for all rows; Alpaca rows are trained on whole unless the file says otherwise."""
    place = places[0]
    key = f"{place}.train_on_input"
    if draft.get(key) is not None:
        value = "all" if draft.get(key) else "responses"
        draft.carry(key, "train_on", value, "train_on_input there")
    elif "alpaca" in str(draft.get(f"{place}._component_")):
        draft.assume("train_on", "all", "Alpaca rows are trained on whole by default there")
    for other in places[1:]:
        if draft.get(f"{other}.train_on_input") is not None:
            draft.leave(f"{other}.train_on_input", "one train_on for all rows, the first one's")


def _batch(draft: Draft) -> None:
    packed = any(key.endswith(".packed") and value is True for key, value in leaves(draft.source))
    trainer.batch(draft, "batch_size", "tokenizer.max_seq_len", packed, (1, 2048))
    if draft.get("tokenizer.max_seq_len") is None:
        draft.comments["parameters.max_length"] = "no limit is set there; longer rows are cut here"


def _length_of_the_run(draft: Draft) -> None:
    trainer.epochs(draft, "epochs", 1)
    limit = read(draft, "max_steps_per_epoch", whole)
    if limit is not None:
        steps = limit * draft.parameters.get("num_train_epochs", 1)
        why = "epochs x max_steps_per_epoch; a shorter epoch is not noticed"
        draft.approximate("max_steps_per_epoch", "max_steps", steps, why)


def _schedule(draft: Draft) -> None:
    component = draft.get("lr_scheduler._component_")
    if component is None:
        draft.assume("lr_scheduler_type", "constant", "there is no scheduler there")
    elif "cosine" in str(component):
        draft.carry("lr_scheduler._component_", "lr_scheduler_type", "cosine")
    else:
        why = f"{shown(component)} is not here"
        draft.approximate("lr_scheduler._component_", "lr_scheduler_type", "cosine", why)
    if (steps := read(draft, "lr_scheduler.num_warmup_steps", whole)) is not None:
        draft.carry("lr_scheduler.num_warmup_steps", "warmup_steps", steps)
    draft.assume("warmup_steps", 0, "there is no warm-up there")


def _precision(draft: Draft) -> None:
    dtype = read(draft, "dtype", text)
    if dtype == "bf16":
        why = "parameters stay 32-bit, with more memory"
        draft.approximate("dtype", "precision", "bf16", why)
    elif dtype == "fp32":
        draft.carry("dtype", "precision", "fp32")
    elif dtype is not None:
        draft.approximate("dtype", "precision", "auto", f"{dtype}: bf16 where the GPU has it")


def _clipping(draft: Draft) -> None:
    value = read(draft, "clip_grad_norm", number)
    if value is None:
        draft.assume("max_grad_norm", 1.0e9, "gradients are not clipped there")
    else:
        draft.carry("clip_grad_norm", "max_grad_norm", value, "clip_grad_norm")
