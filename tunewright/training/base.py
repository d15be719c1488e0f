"""The folder of a base model: found on this machine, or downloaded from the Hub."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunewright.contract.failures import UserError
from tunewright.contract.settings import FsdpSettings, is_path

WEIGHTS = ("*.safetensors", "*.bin")


@dataclass(frozen=True)
class BaseModel:
    """What training starts from: its name and revision as asked for and found, and its folder."""

    name: str
    revision: str | None
    folder: Path


def find_base(settings: FsdpSettings) -> BaseModel:
    """The folder of the base model; a Hub model is downloaded first. For rank 0 only.

    Raises UserError when there is no such model, or no weights where they are asked for.
    """
    name = settings.model_name
    base = _local(name) if is_path(name) else _from_hub(settings)
    if not (base.folder / "config.json").is_file():
        raise UserError(f"model_name: {name} has no config.json; name a Hugging Face model folder")
    if settings.init == "pretrained" and not any(_weights_in(base.folder)):
        raise UserError(
            f"model_name: {name} has no weights ({', '.join(WEIGHTS)}); "
            "set init: random to start from scratch, or name a folder with weights"
        )
    return base


def read_config(base: BaseModel) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(base.folder)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"model_name: {base.name} cannot be loaded: {error}") from error


def _local(name: str) -> BaseModel:
    folder = Path(name).expanduser().absolute()
    if not folder.is_dir():
        raise UserError(f"model_name: there is no folder {name}")
    return BaseModel(name, None, folder)


def _from_hub(settings: FsdpSettings) -> BaseModel:
    """Download what training and export need. The revision found is the commit."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name, revision = settings.model_name, settings.model_revision
    patterns = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
    if settings.init == "pretrained":
        patterns.append("*.safetensors")
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except GatedRepoError:
        raise UserError(
            f"model_name: {name} is gated; accept its licence on the Hub, then set HF_TOKEN"
        ) from None
    except RevisionNotFoundError:
        raise UserError(f"model_revision: {name} has no revision {revision}") from None
    except RepositoryNotFoundError:
        raise UserError(
            f"model_name: the Hub has no model {name}, or HF_TOKEN may not see it; "
            "a folder is written with ./, ../, / or ~ in front"
        ) from None
    return BaseModel(name, folder.name, folder)


def _weights_in(folder: Path) -> Iterator[Path]:
    return (path for pattern in WEIGHTS for path in folder.glob(pattern))
