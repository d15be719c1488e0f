"""A tiny model, checkpoints of it, and real MLflow stores, shared by the tests of this room."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tunewright.contract import rundir
from tunewright.contract.rundir import RunDir

TEXTS = ["hello world, how are you today", "a model is tuned and then it answers"] * 20
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>\n{% endfor %}"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Hugging Face folder of a random Llama with tied embeddings and a real tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
        bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.generation_config.max_new_tokens = 4
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(TEXTS, trainer)
    found = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    found.chat_template = TEMPLATE
    return found


@pytest.fixture(scope="session")
def tiny_weights(tiny_model: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(tiny_model / "model.safetensors")


MakeCheckpoint = Callable[..., Path]


@pytest.fixture
def make_checkpoint(tiny_model: Path, tiny_weights: dict[str, Any]) -> MakeCheckpoint:
    """Write a sealed checkpoint of one process below a run's folder."""

    def make(
        run: RunDir, step: int = 20, weights: dict[str, Any] | None = None, **facts: Any
    ) -> Path:
        import torch
        from torch.distributed import checkpoint as dcp

        folder = run.checkpoint(step)
        model = tiny_weights if weights is None else weights
        optimizer = {name: {"exp_avg": torch.ones_like(value)} for name, value in model.items()}
        with pytest.warns(UserWarning, match="torch.distributed is"):
            dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        describe_checkpoint(folder, tiny_model)
        rundir.seal(folder, checkpoint_facts(step, tiny_model) | facts)
        return folder

    return make


def describe_checkpoint(folder: Path, model: Path) -> None:
    shutil.copytree(model, folder / "hf", ignore=shutil.ignore_patterns("*.safetensors"))


def checkpoint_facts(step: int, base: Path) -> dict[str, Any]:
    return {
        "kind": "checkpoint",
        "step": step,
        "world_size": 1,
        "save_dtype": "bfloat16",
        "tied": {"lm_head.weight": "model.embed_tokens.weight"},
        "base_model": {"name": str(base), "revision": None},
        "identity": {"data": "fingerprint-of-rows"},
    }


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    root = tmp_path / "tiny-0a1b2c3d"
    root.mkdir()
    return RunDir(root)


@pytest.fixture(scope="session")
def sqlite_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A TUNEWRIGHT_HOME whose MLflow database exists, since making one takes seconds."""
    home = tmp_path_factory.mktemp("home")
    ran = subprocess.run(
        [sys.executable, "-m", "tunewright.tracking"],
        input='{"open": {"experiment": "warm"}}\n{"finish": "FINISHED"}\n',
        env=environment(TUNEWRIGHT_HOME=str(home)),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    return home


@pytest.fixture(scope="session")
def mlflow_imported() -> None:
    """MLflow in this process, once: importing it warns, and warnings are errors here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("mlflow.store.tracking.sqlalchemy_store")
        importlib.import_module("mlflow.store.model_registry.sqlalchemy_store")


@pytest.fixture
def local_store(mlflow_imported: None, sqlite_store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default store, for this process and the programs it starts."""
    _plain_mlflow(monkeypatch)
    monkeypatch.setenv("TUNEWRIGHT_HOME", str(sqlite_store))
    return sqlite_store


@pytest.fixture
def server_store(
    mlflow_imported: None, mlflow_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> str:
    """A store behind a server, for this process and the programs it starts."""
    _plain_mlflow(monkeypatch)
    monkeypatch.setenv("TUNEWRIGHT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server)
    return mlflow_server


def _plain_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


def environment(**more: str) -> dict[str, str]:
    """This environment without MLflow's variables, and with `more`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MLFLOW_")}
    return {**kept, "MLFLOW_DISABLE_TELEMETRY": "true", **more}
