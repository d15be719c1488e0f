"""axolotl: `base_model`, `datasets` with a `type` each, `adapter`, and keys of the trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flows.importing import axolotl_rows, trainer
from flows.importing.draft import Draft, required
from flows.importing.rows import (
    write,
)
from flows.importing.rules import (
    Rule,
    apply,
    is_off,
    left,
    mappings,
    number,
    read,
    refuse,
    same,
    text,
    to,
    whole,
    words,
)

TOOL = "axolotl"
_PREFERENCES = "training on preferences or rewards is not here"
_PARTS = "training a part of the weights is not here"
_LOSS = "another loss is not here"
_QUANTIZED = "training for quantized weights is not here"

REFUSED: Mapping[str, str | Mapping[Any, str]] = {
    "rl": _PREFERENCES,
    "reward_model": _PREFERENCES,
    "process_reward_model": _PREFERENCES,
    "num_labels": "classification is not here",
    "model_type": {
        "AutoModelForSequenceClassification": "classification is not here",
        "AutoModelForTokenClassification": "classification is not here",
    },
    "pretraining_dataset": "pretraining is not here",
    "processor_type": "images and sound are not here",
    "adapter": {"llama-adapter": "of adapters, LoRA is here", "ia3": "of adapters, LoRA is here"},
    "relora": _PARTS,
    "lisa_n_layers": _PARTS,
    "unfrozen_parameters": _PARTS,
    "qat": _QUANTIZED,
    "gptq": _QUANTIZED,
    "use_eaft": _LOSS,
    "use_dynamic_finetuning": _LOSS,
    "diffusion": "diffusion models are not here",
    "llmcompressor": "sparse weights are not here",
    "kd_trainer": "distillation is not here",
}

TABLE: Mapping[str, Rule] = {
    "revision_of_model": to("model_revision", str),
    "optimizer": trainer.optimizer,
    "adam_eps": to("adam_epsilon", number),
    "max_steps": trainer.steps,
    "save_steps": trainer.steps,
    "eval_steps": trainer.steps,
    "saves_per_epoch": left("how many steps an epoch has is not known here; set save_steps"),
    "evals_per_epoch": left("how many steps an epoch has is not known here; set eval_steps"),
    "save_strategy": left("checkpoints come every save_steps", off=("steps",)),
    "eval*_strategy": left("evaluation comes every eval_steps", off=("steps", "no")),
    "eval_batch_size": left("evaluation takes the packs of training", off=()),
    "eval_table_size": left("sample answers are not made in training"),
    "eval_max_new_tokens": left("sample answers are not made in training", off=()),
    "eval_causal_lm_metrics": left("the loss is the measure"),
    "do_causal_lm_eval": left("the loss is the measure"),
    "gradient_checkpointing": trainer.checkpointing,
    "activation_offloading": left(trainer.NOT_SETTABLE),
    "excess_length_strategy": lambda draft, key, value: draft.carry(
        key, "on_too_long", "fail" if value == "raise" else value, key
    ),
    "sample_packing": lambda draft, key, value: (
        draft.same(key, "rows are always packed, each sees only itself")
        if value
        else draft.differs(key, "rows are always packed, each sees only itself")
    ),
    "eval_sample_packing": same("rows are always packed, each sees only itself"),
    "sample_packing_*": left("packs are made once, as full as they get", off=()),
    "pad_to_sequence_len": same("packs need no padding"),
    "shuffle_merged_datasets": same("packs are shuffled by the seed"),
    "dataset_exact_deduplication": left("duplicates are counted in the data audit, not removed"),
    "dataset_prepared_path": left(trainer.TOKENS_KEPT),
    "dataset_processes": left(trainer.LOADER),
    "dataset_keep_in_memory": left(trainer.LOADER),
    "streaming*": left("a dataset larger than memory is streamed by itself"),
    "skip_prepare_dataset": left("rows always become tokens before the run"),
    "special_tokens.pad_token": same("packs need no padding"),
    "special_tokens.*": left(trainer.TOKENIZER),
    "tokens": left(trainer.TOKENIZER),
    "tokens.*": left(trainer.TOKENIZER),
    "tokenizer_*": left(trainer.TOKENIZER),
    "resize_token_embeddings_to_32x": left(trainer.TOKENIZER),
    "eot_tokens": same("the answer ends with what the chat template ends it with"),
    "attn_implementation": left(trainer.ATTENTION, off=()),
    "*_attention": left(trainer.ATTENTION),
    "flash_*": left(trainer.ATTENTION),
    "flex_*": left(trainer.ATTENTION, off=()),
    "flash_optimum": left(trainer.ATTENTION),
    "liger_*": left(trainer.KERNELS),
    "lora_*_kernel": left(trainer.KERNELS),
    "cut_cross_entropy*": left(trainer.KERNELS),
    "unsloth_*": left(trainer.KERNELS),
    "use_kernels": left(trainer.KERNELS),
    "plugins": left("plug-ins of that tool", off=()),
    "strict": same("only keys that are known are read"),
    "model_type": same("the model's own class is taken"),
    "is_*_derived_model": same("the model's own class is taken"),
    "low_cpu_mem_usage": same("weights are read without a second copy"),
    "device_map*": left(trainer.SHARDS),
    "*_parallel_size": left(trainer.SHARDS, off=(1,)),
    "dp_*_size": left(trainer.SHARDS, off=()),
    "lora_target_linear": same("lora_target_modules says it"),
    "load_in_4bit": left("without an adapter, weights are trained in full"),
    "quantize_moe_experts": left("only linear layers are quantized"),
    "*scattermoe*": left(trainer.KERNELS),
    "use_sonicmoe": left(trainer.KERNELS),
    "experts_implementation": left(trainer.KERNELS, off=()),
    "fused_*": left(trainer.KERNELS),
    "load_in_8bit": left("8-bit base weights are not here; they are loaded in bf16"),
    "lora_model_dir": left("adapters start anew"),
    "lora_fan_in_fan_out": left(trainer.LORA_VARIANT),
    "lora_modules_to_save": left(trainer.LORA_VARIANT),
    "peft*": left(trainer.LORA_VARIANT),
    "lr_quadratic_warmup": left("the warm-up rises in equal parts"),
    "cosine_*": left("the schedule goes to zero"),
    "lr_scheduler_kwargs": left("the schedule goes to zero"),
    "lr_scheduler_kwargs.*": left("the schedule goes to zero"),
    "auto_resume_from_checkpoints": same("an unfinished run is continued by itself"),
    "loss_watchdog_*": left("a loss that is no number stops the run"),
    "gptq_*": left("only of use with gptq"),
    "torchdistx_path": left(trainer.NOT_SETTABLE),
    "trackio_*": left(trainer.MLFLOW),
    "use_mlflow": same("runs are tracked with MLflow"),
    "mlflow_*": left("MLflow is told by MLFLOW_TRACKING_URI and the workload's mlflow_ fields"),
    "hf_mlflow_*": left(trainer.MLFLOW),
    "use_wandb": left(trainer.MLFLOW),
    "use_tensorboard": left(trainer.MLFLOW),
    "debug": left(trainer.NOT_SETTABLE),
    "hf_use_auth_token": left("name it under secrets, HF_TOKEN: scope/key"),
    "val_set_size": trainer.eval_share,
    **axolotl_rows.TABLE,
    **trainer.TRAINER,
}

_TARGETS = ("lora_target_modules", "lora_target_linear", "lora_target_parameters")
_ADAPTER = {"rank": "lora_r", "alpha": "lora_alpha", "dropout": "lora_dropout"}


def fill(draft: Draft) -> None:
    """Write the workload of an axolotl file into the draft.

    Raises UserError for what is not here.
    """
    refuse(draft, TOOL, REFUSED)
    trainer.model(draft, "base_model")
    if not is_off(draft.get("reinit_weights", False)):
        draft.carry("reinit_weights", "init", "random", "reinit_weights: true")
    _method(draft)
    _data(draft)
    packed = bool(draft.get("sample_packing"))
    trainer.batch(draft, "micro_batch_size", "sequence_len", packed, (1, 512))
    _total_batch(draft)
    trainer.epochs(draft, "num_epochs", 1)
    trainer.schedule(draft, "lr_scheduler", "cosine")
    trainer.precision(draft, "auto", "bf16 where the GPU has it is the default there")
    trainer.experiment(draft, ("mlflow_experiment_name", "wandb_project"))
    trainer.run_name(draft, ("mlflow_run_name", "wandb_name"))
    apply(draft, TABLE)
    draft.assume("on_too_long", "drop", "the default there")
    draft.assume("adam_beta2", 0.999, "the default there")


def _method(draft: Draft) -> None:
    """Full fine-tuning, LoRA or QLoRA; the keys of adapters mean nothing without one."""
    adapter = read(draft, "adapter", text)
    if adapter is None:
        for key in (*_ADAPTER.values(), *_TARGETS):
            if draft.get(key) is not None:
                draft.same(key, "of no use without adapter")
        return
    draft.same("adapter", "the recipe lora")
    trainer.lora(draft, _ADAPTER)
    _targets(draft)
    if adapter == "qlora" or draft.get("load_in_4bit"):
        key = "load_in_4bit" if draft.get("load_in_4bit") else "adapter"
        draft.carry(key, trainer.LORA["four_bit"], True, "4-bit base weights (QLoRA)")


def _targets(draft: Draft) -> None:
    """The layers with adapters: all linear ones, or those that are named."""
    field, named = trainer.LORA["targets"], draft.get("lora_target_modules")
    if draft.get("lora_target_linear"):
        draft.carry("lora_target_linear", field, trainer.EVERY_LINEAR, "every linear layer")
        if named:
            draft.same("lora_target_modules", "linear layers, all of which have adapters")
    elif named:
        draft.carry("lora_target_modules", field, named)
    if experts := read(draft, "lora_target_parameters", words):
        draft.carry("lora_target_parameters", trainer.LORA["experts"], experts)
        if rank := draft.parameters.get(trainer.LORA["rank"]):
            draft.assume(trainer.LORA["experts_rank"], rank, "lora_r holds for experts there")


def _total_batch(draft: Draft) -> None:
    """The old `batch_size`: micro-batches times accumulation."""
    total, micro = read(draft, "batch_size", whole), read(draft, "micro_batch_size", whole, 1)
    if total is None:
        return
    if draft.get("gradient_accumulation_steps") is not None or total % micro:
        draft.leave("batch_size", "micro_batch_size and gradient_accumulation_steps count")
    else:
        draft.carry("batch_size", "gradient_accumulation_steps", total // micro, "batch_size there")


def _data(draft: Draft) -> None:
    required(draft, "datasets", "name the rows there")
    given = read(draft, "datasets", mappings)
    sources = [
        rows
        for index in range(len(given))
        for rows in axolotl_rows.sources(draft, f"datasets.{index}")
    ]
    write(draft, sources)
    _template(draft)
    if draft.get("train_on_inputs") is not None:
        value = "all" if draft.get("train_on_inputs") else "responses"
        draft.carry("train_on_inputs", "train_on", value, "train_on_inputs there")
    if (tests := read(draft, "test_datasets", mappings)) is not None:
        _evaluation(draft, tests)


def _evaluation(draft: Draft, tests: list[Any]) -> None:
    (first, *_) = axolotl_rows.sources(draft, "test_datasets.0")
    draft.approximate(
        "test_datasets.0.path", "eval_dataset", first.full_name, "rows shaped as those of training"
    )
    for index in range(1, len(tests)):
        draft.leave(f"test_datasets.{index}", "evaluation rows come from one place")


def _template(draft: Draft) -> None:
    name = read(draft, "chat_template", text)
    if (given := read(draft, "chat_template_jinja", text)) is not None:
        draft.carry("chat_template_jinja", "chat_template", given)
    if name is None:
        return
    if name == "jinja" or name.startswith("tokenizer_default"):
        draft.same("chat_template", "the chat template of the tokenizer, or the given one")
    else:
        draft.differs("chat_template", f"{name}: the chat template of the model's tokenizer")
