"""A token store, hyperparameters, and ways to run a recipe: in this process or by torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml

from tunewright.data.store import SplitArrays, TokenStore, write_store

PACK_TOKENS = 32
VOCABULARY = 64
ROOT = Path(__file__).parents[3]
OURS = ("TUNEWRIGHT_", "MLFLOW_", "HYPERPARAMETERS_PATH", "RANK", "WORLD_SIZE", "LOCAL_RANK")

Hyperparameters = Callable[..., Path]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These models are too small for more, and on a busy machine threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    """53 packs of short counting documents, and a few held out; each model of them learns fast."""
    return make_store(tmp_path_factory.mktemp("tokens"), "counting")


def make_store(folder: Path, fingerprint: str, supervise: bool = True) -> TokenStore:
    draw = np.random.default_rng(0)
    splits = {"train": _split(draw, 120, supervise), "eval": _split(draw, 10, True)}
    counts = {"train": {"rows": 120}, "eval": {"rows": 10}}
    facts = {"pack_tokens": PACK_TOKENS, "vocabulary": VOCABULARY, "counts": counts}
    return write_store(folder, fingerprint, splits, facts)


def _split(draw: np.random.Generator, count: int, supervise: bool) -> SplitArrays:
    """Documents that count up by threes from anywhere; the last two thirds are labels."""
    lengths = draw.integers(3, 20, count)
    starts = draw.integers(0, VOCABULARY, count)
    documents = [(s + 3 * np.arange(n)) % VOCABULARY for s, n in zip(starts, lengths, strict=True)]
    packs, used = [0], 0
    for place, length in enumerate(lengths):
        if used + length > PACK_TOKENS:
            packs, used = [*packs, place], 0
        used += length
    spans = np.stack([np.maximum(1, lengths // 3), lengths], axis=1).astype(np.uint32)
    return SplitArrays(
        tokens=np.concatenate(documents).astype(np.uint16),
        documents=np.cumsum([0, *lengths]).astype(np.int64),
        rows=np.arange(1, count + 1, dtype=np.int64),
        spans=spans if supervise else spans[:0],
        span_offsets=np.arange(count + 1) if supervise else np.zeros(count + 1, dtype=np.int64),
        packs=np.array([*packs, count], dtype=np.int64),
    )


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("model")
    LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=True,
    ).save_pretrained(folder)  # fmt: skip
    (folder / "tokenizer.json").write_text('{"a tokenizer": true}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.fixture(scope="session")
def hyperparameters(
    store: TokenStore, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Hyperparameters:
    """Write a hyperparameters file: 12 steps of 8 packs, a checkpoint every 4, unless changed."""

    def write(**more: Any) -> Path:
        path = tmp_path_factory.mktemp("parameters") / "hyperparameters.yaml"
        small = {
            "model_name": str(model_folder),
            "init": "random",
            "dataset_name": "unused",
            "tokens_path": str(store.path),
            "pack_tokens": PACK_TOKENS,
            "max_length": PACK_TOKENS,
            "global_batch_tokens": 8 * PACK_TOKENS,
            "learning_rate": 0.01,
            "weight_decay": 0.1,
            "max_steps": 12,
            "save_steps": 4,
            "eval_steps": 6,
            "save_dtype": "float32",
        }
        path.write_text(yaml.safe_dump(small | more))
        return path

    return write


def clean_environment(**more: str) -> dict[str, str]:
    """This environment without what a launcher sets, one thread a process, and with `more`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more}


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Run a recipe in this process, as the only rank; returns the events of all attempts."""
    for name in os.environ:
        if name.startswith(OURS):
            monkeypatch.delenv(name)

    def run(parameters: Path, output_dir: Path, recipe: str = "fsdp") -> list[dict[str, Any]]:
        changed = yaml.safe_load(parameters.read_text()) | {"output_dir": str(output_dir)}
        parameters.write_text(yaml.safe_dump(changed))
        try:
            import_module(f"tunewright.recipes.{recipe}").main([str(parameters)])
        finally:
            # A rank that failed leaves its group alone, since its process ends; this one goes on.
            if dist.is_initialized():
                dist.destroy_process_group()
        return read_events(output_dir / "events.jsonl")

    return run


def read_events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(events: list[dict[str, Any]]) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of every step, in the order of the events."""
    return [(e["step"], e["loss"], e["grad_norm"]) for e in events if e["event"] == "step"]


def torchrun(
    parameters: Path,
    run: Path,
    processes: int,
    *options: str,
    recipe: str = "fsdp",
    **environment: str,
) -> subprocess.Popen[str]:
    """Start a recipe on `processes` ranks; without options it is the only node."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
    command += options or ("--standalone",)
    return subprocess.Popen(
        [*command, "-m", f"tunewright.recipes.{recipe}", str(parameters)],
        env=clean_environment(TUNEWRIGHT_RUN_DIR=str(run), **environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="session")
def tools() -> Any:
    """The functions above, for the tests beside this file."""
    from types import SimpleNamespace

    return SimpleNamespace(
        torchrun=torchrun, losses=losses, read_events=read_events, make_store=make_store
    )
