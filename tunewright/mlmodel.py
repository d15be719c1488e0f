"""The files that make a Hugging Face folder an MLflow model as it stands.

Written by hand, since MLflow's own writer loads the model and copies its weights. The folder itself
is the model binary; only the small tokenizer files are there twice, because MLflow looks for them
in a folder of their own.

A folder with an adapter refers to its base model, which MLflow loads first: on the Hub at the
revision that was trained on, tokenizer included, or the folder where it lay then (another may be
given as `base_model_path` of mlflow.transformers.load_model).
"""

from __future__ import annotations

import json
import platform
import shutil
import uuid
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from tunewright.contract.rundir import write_json, write_text
from tunewright.modelfolder import (
    ADAPTER_CONFIG,
    CONFIG,
    TOKENIZER_PATTERNS,
    has_tokenizer,
    read_object,
)

MLMODEL = "MLmodel"
_EXAMPLE = "What is a fine-tuned model?"
_TOKENIZER_FOLDER = "components/tokenizer"


def make_mlflow_model(folder: Path, dtype: str, base_model: str | None) -> str | None:
    """Add what MLflow needs to load the folder; returns why not, when it cannot be loaded so.

    `dtype` is torch's name of the weights' type. A folder that already has an MLmodel file keeps
    it; the file is written last, so one that exists is complete.
    """
    if (folder / MLMODEL).is_file():
        return None
    adapter = read_object(folder / ADAPTER_CONFIG) if (folder / ADAPTER_CONFIG).is_file() else None
    architecture = _architecture(folder, adapter)
    if adapter is not None and not architecture:
        return "nothing here names the class of the adapter's base model; save its config.json too"
    if not architecture.endswith("ForCausalLM"):
        return f"the architecture {architecture or 'is not named'} does not generate text"
    if not has_tokenizer(folder):
        return "the folder has no tokenizer"
    _copy_tokenizer(folder)
    versions = _versions(adapter is not None)
    _write_environment(folder, versions)
    _write_example(folder)
    weights = _whole(base_model) if adapter is None else _added(adapter)
    described = _mlmodel(architecture, dtype, weights, versions)
    write_text(folder / MLMODEL, yaml.safe_dump(described, sort_keys=False))
    return None


def _architecture(folder: Path, adapter: dict[str, Any] | None) -> str:
    """The class of the model, or of the one below an adapter; empty when nothing here says it."""
    places = [folder, Path((adapter or {}).get("base_model_name_or_path") or folder)]
    config = next((place / CONFIG for place in places if (place / CONFIG).is_file()), None)
    named = read_object(config).get("architectures") if config else None
    return str(named[0]) if named else ""


def _whole(base_model: str | None) -> dict[str, Any]:
    """Where MLflow finds the weights: in the folder itself."""
    return {"source_model_name": base_model or "", "model_binary": "."}


def _added(adapter: dict[str, Any]) -> dict[str, Any]:
    """Where MLflow finds the weights: those of the base model, and the folder's on top."""
    base, revision = str(adapter["base_model_name_or_path"]), adapter.get("revision")
    found = {"source_model_name": base, "peft_adaptor": "."}
    if revision is None:
        return {**found, "local_base_model_path": base}
    pinned = {"source_model_revision": revision, "tokenizer_revision": revision}
    return {**found, **pinned, "tokenizer_name": base}


def _copy_tokenizer(folder: Path) -> None:
    # AutoTokenizer needs the configuration for the few models whose tokenizer is chosen by type.
    for pattern in (*TOKENIZER_PATTERNS, CONFIG):
        for path in folder.glob(pattern):
            target = folder / _TOKENIZER_FOLDER / path.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


def _write_environment(folder: Path, versions: dict[str, str]) -> None:
    python = platform.python_version()
    pins = [f"{name}=={version}" for name, version in versions.items()]
    write_text(folder / "requirements.txt", "\n".join(pins) + "\n")
    env = {"python": python, "build_dependencies": ["pip"], "dependencies": ["-r requirements.txt"]}
    write_text(folder / "python_env.yaml", yaml.safe_dump(env, sort_keys=False))
    conda = {
        "name": "mlflow-env",
        "channels": ["conda-forge"],
        "dependencies": [f"python={python}", "pip", {"pip": pins}],
    }
    write_text(folder / "conda.yaml", yaml.safe_dump(conda, sort_keys=False))


def _versions(with_peft: bool) -> dict[str, str]:
    """What is installed here, without the local part: 2.13.0+cpu is on no index."""
    found = {}
    for wanted, installed in (
        ("mlflow", ("mlflow", "mlflow-skinny")),
        ("torch", ("torch",)),
        ("transformers", ("transformers",)),
        *([("peft", ("peft",))] if with_peft else []),
    ):
        version = next(filter(None, map(_version, installed)), None)
        if version:
            found[wanted] = version.split("+")[0]
    return found


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _write_example(folder: Path) -> None:
    write_text(folder / "input_example.json", json.dumps(_EXAMPLE))
    write_json(folder / "serving_input_example.json", {"inputs": _EXAMPLE})


def _mlmodel(
    architecture: str, dtype: str, weights: dict[str, Any], versions: dict[str, str]
) -> dict[str, Any]:
    text = json.dumps([{"type": "string", "required": True}])
    return {
        "flavors": {
            "python_function": {
                "loader_module": "mlflow.transformers",
                "python_version": platform.python_version(),
                "env": {"conda": "conda.yaml", "virtualenv": "python_env.yaml"},
            },
            "transformers": {
                "transformers_version": versions.get("transformers"),
                "code": None,
                "task": "text-generation",
                "instance_type": "TextGenerationPipeline",
                "pipeline_model_type": architecture,
                **weights,
                "torch_dtype": f"torch.{dtype}",
                "components": ["tokenizer"],
                "tokenizer_type": "AutoTokenizer",
            },
        },
        "mlflow_version": versions.get("mlflow"),
        "model_uuid": uuid.uuid4().hex,
        "utc_time_created": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S.%f"),
        "saved_input_example_info": {
            "artifact_path": "input_example.json",
            "serving_input_path": "serving_input_example.json",
            "type": "json_object",
        },
        "signature": {"inputs": text, "outputs": text, "params": None},
    }
