import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from tunewright.contract.datasettings import DataSettings
from tunewright.data.tokenizer import TextTokenizer, load_tokenizer

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "deployments" / "model"
LLAMA = ROOT / "tests" / "data" / "models" / "llama"
TEMPLATES = ROOT / "tests" / "data" / "templates"
SPECIAL = re.compile(
    r"<\|\w+\|>|<\w+_of_turn>|</?(?:think|tool_call|s)>|\[/?[A-Z_]+\]|\[gMASK\]|<sop>"
)


@pytest.fixture(scope="session")
def demo() -> TextTokenizer:
    """A tokenizer that adds no BOS, whose answers end with <|end|>."""
    return load_tokenizer(str(DEMO))


@pytest.fixture(scope="session")
def llama() -> TextTokenizer:
    """A tokenizer that adds a BOS and trims spaces from its offsets, as Llama 3 does."""
    return load_tokenizer(str(LLAMA))


@pytest.fixture(scope="session")
def stand_in(demo):
    """A tokenizer with a stand-in for the chat template of a family, by name, and its tokens."""

    def make(family: str) -> TextTokenizer:
        source = (TEMPLATES / f"{family}.jinja").read_text()
        backend = Tokenizer.from_str(demo.backend.to_str())
        # Llama's and ChatML's headings hold a role; the tokens are what stands around it.
        found = {"<s>", "</s>", "<|user|>", "<|assistant|>", *SPECIAL.findall(source)}
        backend.add_special_tokens([AddedToken(token, special=True) for token in sorted(found)])
        backend.post_processor = demo.backend.post_processor
        specials = {"bos_token": "<s>", "eos_token": "</s>"}
        return replace(
            demo, name=family, backend=backend, special_tokens=specials, chat_template=source
        )

    return make


@pytest.fixture
def write_rows(tmp_path):
    def write(rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


@pytest.fixture
def settings(tmp_path):
    """DataSettings of small packs for a file of rows, everything else as wanted."""

    def make(dataset: Path, **others) -> DataSettings:
        defaults = {"model_name": str(DEMO), "max_length": 96, "pack_tokens": 128}
        return DataSettings(dataset_name=str(dataset), **{**defaults, **others})

    return make


@pytest.fixture
def real_data() -> Path:
    folder = os.environ.get("TUNEWRIGHT_TEST_DATA")
    if not folder:
        pytest.skip("TUNEWRIGHT_TEST_DATA is not set: the folder with real rows")
    return Path(folder)
