"""What a model folder needs beside its weights, taken along from the base model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tunewright.contract import rundir
from tunewright.modelfolder import TOKENIZER_PATTERNS

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
_COPIED = (GENERATION_CONFIG, *TOKENIZER_PATTERNS)


def write_hf_folder(
    folder: Path, base: Path, module: Any, save_dtype: str, chat_template: str | None = None
) -> None:
    """Write config and generation config; copy tokenizer and chat template byte for byte.

    The config is the base model's own file, with the dtype that the weights will be saved in.
    `chat_template` is what the rows were rendered with: it is written where the base has none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((base / CONFIG).read_text())
    config.pop("torch_dtype", None)  # the older name of dtype
    config["dtype"] = save_dtype
    config.setdefault("architectures", [_plain_name(module)])
    rundir.write_json(folder / CONFIG, config)
    for path in (path for pattern in _COPIED for path in base.glob(pattern)):
        target = folder / path.relative_to(base)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)
    if not (folder / GENERATION_CONFIG).is_file():
        _derived(module).save_pretrained(folder)
    if chat_template is not None and not _has_template(folder):
        (folder / CHAT_TEMPLATE).write_text(chat_template)


def _has_template(folder: Path) -> bool:
    tokenizer = rundir.read_json(folder / "tokenizer_config.json") or {}
    return (folder / CHAT_TEMPLATE).is_file() or bool(tokenizer.get("chat_template"))


def _plain_name(module: Any) -> str:
    """The model's class name; FSDP puts its own in front."""
    return type(module).__name__.removeprefix("FSDP")


def _derived(module: Any) -> Any:
    """A generation config from the model's: its special tokens, and no sampling options."""
    from transformers import GenerationConfig

    return GenerationConfig.from_model_config(module.config)
