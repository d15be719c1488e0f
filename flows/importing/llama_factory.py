"""LLaMA-Factory: `stage`, `finetuning_type`, datasets by the names of its dataset_info.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flows.importing import trainer
from flows.importing.dataset_info import FILE_NAME, DatasetInfo
from flows.importing.draft import Draft, required
from flows.importing.rows import Rows, write
from flows.importing.rules import (
    BadValue,
    Rule,
    apply,
    is_off,
    left,
    read,
    refusal,
    refuse,
    same,
    text,
    whole,
    words,
)

TOOL = "LLaMA-Factory"
_LOSS = "another loss is not here"
_NO_TRAINING = "nothing is trained by it"
_MEDIA = "images, video and sound are not here"
_PARTS = "training a part of the weights is not here"

REFUSED: Mapping[str, str | Mapping[Any, str]] = {
    "stage": {
        "pt": "pretraining is not here",
        "rm": "training on preferences or rewards is not here",
        "ppo": "training on preferences or rewards is not here",
        "dpo": "training on preferences or rewards is not here",
        "kto": "training on preferences or rewards is not here",
    },
    "finetuning_type": {"freeze": _PARTS, "oft": "of adapters, LoRA is here"},
    "export_dir": _NO_TRAINING,
    "infer_backend": _NO_TRAINING,
    "do_predict": _NO_TRAINING,
    "image_max_pixels": _MEDIA,
    "video_max_pixels": _MEDIA,
    "freeze_vision_tower": _MEDIA,
    "use_dft_loss": _LOSS,
    "use_asft_loss": _LOSS,
    "use_eaft_loss": _LOSS,
    "use_llama_pro": _PARTS,
    "mixture_of_depths": "changing the model's layers is not here",
}

_OPTIMIZER = "AdamW trains instead; look at the learning rate again"

TABLE: Mapping[str, Rule] = {
    "stage": same("supervised fine-tuning"),
    "do_train": same("a run trains"),
    "do_eval": same("evaluated where rows are held out"),
    "model_revision": lambda draft, key, value: draft.carry(key, key, str(value)),
    "optim": trainer.optimizer,
    "use_badam": left(_OPTIMIZER),
    "badam_*": left(_OPTIMIZER, off=()),
    "use_galore": left(_OPTIMIZER),
    "galore_*": left(_OPTIMIZER, off=()),
    "use_apollo": left(_OPTIMIZER),
    "apollo_*": left(_OPTIMIZER, off=()),
    "use_adam_mini": left(_OPTIMIZER),
    "use_muon": left(_OPTIMIZER),
    "max_steps": trainer.steps,
    "save_steps": trainer.steps,
    "eval_steps": trainer.steps,
    "save_strategy": left("checkpoints come every save_steps", off=("steps",)),
    "eval_strategy": left("evaluation comes every eval_steps", off=("steps", "no")),
    "packing": same("rows are always packed, each sees only itself"),
    "neat_packing": same("rows are always packed, each sees only itself"),
    "flash_attn": left(trainer.ATTENTION, off=()),
    "*_parallel_size": left(trainer.SHARDS, off=(1,)),
    "sequence_parallel": left(trainer.SHARDS),
    "enable_liger_kernel": left(trainer.KERNELS),
    "use_unsloth*": left(trainer.KERNELS),
    "use_v1_kernels": left(trainer.KERNELS),
    "overwrite_cache": left(trainer.TOKENS_KEPT),
    "tokenized_path": left(trainer.TOKENS_KEPT),
    "preprocessing_*": left(trainer.LOADER, off=()),
    "streaming": left("a dataset larger than memory is streamed by itself"),
    "buffer_size": left("packs are shuffled by the seed"),
    "mix_strategy": left("sources are mixed by the weight of each", off=("concat",)),
    "interleave_probs": left("sources are mixed by the weight of each", off=()),
    "overwrite_output_dir": same("each run has a folder of its own"),
    "plot_loss": left("MLflow and the receipt have the losses"),
    "logging_strategy": left("every logging_steps", off=("steps",)),
    "quantization_method": left("4-bit base weights are one kind here", off=("bnb",)),
    "double_quantization": left("4-bit base weights are one kind here"),
    "adapter_name_or_path": left("adapters start anew"),
    "additional_target": left(trainer.LORA_VARIANT),
    "loraplus_*": left(trainer.LORA_VARIANT),
    "pissa_*": left(trainer.LORA_VARIANT),
    "use_rslora": left(trainer.LORA_VARIANT),
    "use_dora": left(trainer.LORA_VARIANT),
    "fp8*": left("8-bit matrix products are not here; bf16 is"),
    "use_kt": left("weights stay on the GPUs"),
    "kt_*": left("weights stay on the GPUs", off=()),
    "use_reentrant_gc": left("how activations are recomputed is not settable", off=()),
    "use_fast_tokenizer": same("tokenizers are fast ones"),
    "resize_vocab": left(trainer.TOKENIZER),
    "new_special_tokens": left(trainer.TOKENIZER),
    "add_tokens": left(trainer.TOKENIZER),
    "default_system": left("give a column system, or put it into chat_template"),
    "enable_thinking": left("the model's own chat template says how thinking looks", off=()),
    "tool_format": left("the model's own chat template says how tools look", off=()),
    "rope_scaling": left("positions are those of the model's config"),
    "hf_hub_token": left("name it under secrets, HF_TOKEN: scope/key"),
    "ray_*": left("where a run goes is said with --target", off=()),
    "use_ray": left("where a run goes is said with --target"),
    "compute_accuracy": left("the loss is the measure"),
    "ignore_pad_token_for_loss": same("packs need no padding"),
    "val_size": trainer.eval_share,
    "train_on_prompt": lambda draft, key, value: _train_on(draft, key, "all"),
    "mask_history": lambda draft, key, value: _train_on(draft, key, "last_response"),
    **trainer.TRAINER,
}

_ADAPTER = {"rank": "lora_rank", "alpha": "lora_alpha", "dropout": "lora_dropout"}
_TEMPLATES = {"alpaca": "alpaca", "default": "builtin", "vanilla": "builtin", "empty": "builtin"}


def fill(draft: Draft, folder: Path) -> None:
    """Write the workload of a LLaMA-Factory file into the draft.

    `folder` is the file's; its dataset_info.json is looked for from there and from the working
    directory upwards. Raises UserError for what is not here.
    """
    refuse(draft, TOOL, REFUSED)
    trainer.model(draft, "model_name_or_path")
    _method(draft)
    _data(draft, folder)
    packed = bool(draft.get("packing") or draft.get("neat_packing"))
    trainer.batch(draft, "per_device_train_batch_size", "cutoff_len", packed, (8, 2048))
    trainer.epochs(draft, "num_train_epochs", 3)
    trainer.schedule(draft, "lr_scheduler_type", "linear")
    trainer.precision(draft, "fp32", "32-bit is the default there")
    trainer.experiment(draft, ())
    trainer.run_name(draft, ("run_name",))
    _checkpointing(draft)
    apply(draft, TABLE)
    for field, value in {"learning_rate": 5e-5, "adam_beta2": 0.999}.items():
        draft.assume(field, value, "the default there")
    if "warmup_steps" not in draft.parameters:
        draft.assume("warmup_ratio", 0.0, "no warm-up is the default there")


def _method(draft: Draft) -> None:
    kind = read(draft, "finetuning_type", text, "lora")
    if kind == "full":
        draft.same("finetuning_type", "the recipe fsdp")
        for key in (*_ADAPTER.values(), "lora_target"):
            if draft.get(key) is not None:
                draft.same(key, "of no use with finetuning_type: full")
        return
    if draft.get("finetuning_type") is not None:
        draft.same("finetuning_type", "the recipe lora")
    trainer.lora(draft, _ADAPTER)
    rank = read(draft, "lora_rank", whole, 8)
    draft.assume(trainer.LORA["rank"], rank, "the default there")
    draft.assume(trainer.LORA["alpha"], 2 * rank, "twice the rank is the default there")
    _targets(draft)
    if (bits := draft.get("quantization_bit")) is not None:
        if str(bits) == "4":
            draft.carry("quantization_bit", trainer.LORA["four_bit"], True, "quantization_bit: 4")
        else:
            draft.leave("quantization_bit", f"{bits}-bit base weights are not here; 4-bit are")


def _targets(draft: Draft) -> None:
    field, named = trainer.LORA["targets"], read(draft, "lora_target", words)
    if named is None:
        draft.assume(field, trainer.EVERY_LINEAR, "every linear layer is the default there")
    elif named == ["all"]:
        draft.carry("lora_target", field, trainer.EVERY_LINEAR, "every linear layer")
    else:
        draft.carry("lora_target", field, named)


def _checkpointing(draft: Draft) -> None:
    """There it is on unless it is switched off."""
    key = "disable_gradient_checkpointing"
    if draft.get(key) is not None:
        draft.carry(key, "gradient_checkpointing", not draft.get(key), f"{key} there")
    elif draft.get("gradient_checkpointing") is not None:
        trainer.checkpointing(draft, "gradient_checkpointing", draft.get("gradient_checkpointing"))
    else:
        draft.assume("gradient_checkpointing", True, "on by default there")


def _train_on(draft: Draft, key: str, ours: str) -> None:
    if is_off(draft.get(key)):
        draft.same(key, "answers are trained on")
    else:
        draft.carry(key, "train_on", ours, key)


def _data(draft: Draft, folder: Path) -> None:
    required(draft, "dataset", "name the rows there")
    limit = read(draft, "max_samples", whole)
    info = _info(draft, folder)
    sources = [_rows(draft, "dataset", name, info) for name in read(draft, "dataset", words)]
    if limit is not None:
        draft.into("max_samples", "dataset_name", "the first rows of each source")
    for rows in sources:
        rows.kind = "rows"
        if limit is not None and not rows.part:
            rows.part = f"[:{limit}]"
    write(draft, sources)
    _template(draft)
    if (held_out := read(draft, "eval_dataset", words)) is not None:
        _evaluation(draft, held_out, info)


def _info(draft: Draft, folder: Path) -> DatasetInfo | None:
    """The list of datasets; None where the names are those of the Hub."""
    named = read(draft, "dataset_dir", text, "data")
    if named == "ONLINE" or named.startswith("REMOTE:"):
        draft.leave("dataset_dir", "what the names mean there is not looked up; they are the Hub's")
        return None
    if draft.get("dataset_dir") is not None:
        draft.into("dataset_dir", "dataset_name", "paths begin there")
    return DatasetInfo.near(folder, named)


def _rows(draft: Draft, key: str, name: str, info: DatasetInfo | None) -> Rows:
    """What one name means; a guess, and said, where there is no entry for it."""
    if info is None:
        draft.into(key, "dataset_name", f"{name}: taken for a name of the Hub; look", True)
        return Rows(name)
    try:
        rows = info.rows(name)
    except BadValue as error:
        raise refusal(draft, TOOL, f"{key}: {name} ({error})") from None
    if rows is None:
        rows = info.guess(name)
        why = f"has no {name}" if info.found else "is not here"
        draft.into(key, "dataset_name", f"{FILE_NAME} {why}: taken for {rows.name}; look", True)
        return rows
    draft.into(key, "dataset_name", f"found in {FILE_NAME}")
    for doubt in info.doubts(name):
        draft.leave(key, f"{name}: {doubt}")
    return rows


def _template(draft: Draft) -> None:
    name = read(draft, "template", text)
    if name is None:
        draft.assume("template", "chat", "the chat template of the model's tokenizer")
    elif name in _TEMPLATES:
        draft.approximate("template", "template", _TEMPLATES[name], f"{name}: words may differ")
    else:
        why = f"{name}: the chat template of the model's tokenizer"
        draft.approximate("template", "template", "chat", why)


def _evaluation(draft: Draft, names: list[str], info: DatasetInfo | None) -> None:
    rows = _rows(draft, "eval_dataset", names[0], info)
    if len(names) == 1:
        draft.carry("eval_dataset", "eval_dataset", rows.full_name, "rows shaped as in training")
    else:
        why = f"{', '.join(names[1:])} left out, evaluation rows come from one place"
        draft.approximate("eval_dataset", "eval_dataset", rows.full_name, why)
