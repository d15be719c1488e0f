"""A world of one process, and folders of small random models of many architectures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import HashStore

from tunewright.contract.settings import FsdpSettings
from tunewright.data.store import Pack
from tunewright.training.world import World

VOCABULARY = 64
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}

ModelFolder = Callable[..., Path]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These models are too small for more, and on a busy machine threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def alone() -> Iterator[World]:
    """The only rank, with its process group."""
    gpu = torch.cuda.is_available()
    world = World(0, 1, torch.device("cuda", 0) if gpu else torch.device("cpu"), HashStore())
    with world.group():
        yield world


@pytest.fixture
def model_folder(tmp_path: Path) -> ModelFolder:
    """Write a folder with the config of a small model."""

    def write(kind: str = "llama", **more: Any) -> Path:
        from transformers import AutoConfig

        folder = tmp_path / kind
        AutoConfig.for_model(kind, **{**SMALL, **more}).save_pretrained(folder)
        return folder

    return write


@pytest.fixture
def packs() -> list[Pack]:
    """Two packs of documents of 1 to 11 tokens; about two thirds of the tokens are labels."""
    draw = np.random.default_rng(3)
    return [_pack(draw, lengths) for lengths in ([7, 1, 11, 2], [5, 9])]


def _pack(draw: np.random.Generator, lengths: list[int]) -> Pack:
    ids = draw.integers(3, VOCABULARY, sum(lengths))
    supervised = draw.random(sum(lengths)) < 0.7
    supervised[np.cumsum([0, *lengths[:-1]])] = False
    return Pack(ids, supervised, np.array(lengths))


@pytest.fixture
def settings() -> Callable[..., FsdpSettings]:
    """Settings for a small model with random weights."""

    def make(**more: Any) -> FsdpSettings:
        small = {"init": "random", "dataset_name": "unused", "pack_tokens": 32, "max_length": 16}
        return FsdpSettings(**{**small, "global_batch_tokens": 64, **more})

    return make
