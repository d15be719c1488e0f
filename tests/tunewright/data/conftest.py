import json
import os
from pathlib import Path

import pytest

from tunewright.contract.settings import DataSettings
from tunewright.data.tokenizer import TextTokenizer, load_tokenizer

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "deployments" / "model"
LLAMA = ROOT / "tests" / "data" / "models" / "llama"


@pytest.fixture(scope="session")
def demo() -> TextTokenizer:
    """A tokenizer that adds no BOS, whose answers end with <|end|>."""
    return load_tokenizer(str(DEMO))


@pytest.fixture(scope="session")
def llama() -> TextTokenizer:
    """A tokenizer that adds a BOS and trims spaces from its offsets, as Llama 3 does."""
    return load_tokenizer(str(LLAMA))


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
