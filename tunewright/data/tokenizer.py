"""The tokenizer of a model folder or Hub model, read straight from its files.

transformers takes seconds to import and is only asked when a model ships no tokenizer.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from tokenizers import Encoding, Tokenizer
from tokenizers.processors import TemplateProcessing

from tunewright.contract.failures import TunewrightError, UserError
from tunewright.contract.settings import is_path
from tunewright.data.hub import hub_error

TOKENIZER_JSON = "tokenizer.json"
_FILES = (
    TOKENIZER_JSON,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "config.json",
)
_SLOW_FILES = ("*.model", "vocab.json", "vocab.txt", "merges.txt", "*.tiktoken")


@dataclass(frozen=True)
class TextTokenizer:
    """Text to ids and back. Special tokens in the text become their ids; none are added.

    special_tokens: their text by name ("eos_token", ...), as a chat template sees them.
    adds_bos: whether the tokenizer by itself puts its BOS before a text.
    """

    name: str
    backend: Tokenizer
    special_tokens: Mapping[str, str]
    chat_template: str | None
    adds_bos: bool
    vocabulary: int
    digest: str

    def id_of(self, special: str) -> int | None:
        """The id of a special token by name, None where the tokenizer has none."""
        text = self.special_tokens.get(special)
        found: int | None = None if text is None else self.backend.token_to_id(text)
        return found

    @property
    def eos(self) -> str:
        """The text of the end token; raises UserError where there is none."""
        if self.id_of("eos_token") is None:
            raise UserError(
                f"the tokenizer of {self.name} has no eos_token, so an answer could have no end; "
                "add it to tokenizer_config.json"
            )
        return self.special_tokens["eos_token"]

    def encode(self, texts: Sequence[str]) -> list[Encoding]:
        encodings: list[Encoding] = self.backend.encode_batch(list(texts), add_special_tokens=False)
        return encodings

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        text: str = self.backend.decode(list(ids), skip_special_tokens=False)
        return text


def load_tokenizer(model_name: str, revision: str | None = None) -> TextTokenizer:
    """Read the tokenizer of a model.

    Raises UserError when the model or its tokenizer is not there or cannot be read, and
    TunewrightError when the Hub does not answer.
    """
    folder = _folder(model_name, revision)
    config = _json(folder / "tokenizer_config.json")
    backend, text = _backend(model_name, folder)
    specials = _special_tokens(folder, config, backend)
    adds_bos = _adds_bos(backend, config, specials.get("bos_token"))
    # Without a post-processor that trims spaces, the offsets of the tokens cover the whole text.
    backend.post_processor = TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    backend.no_truncation()
    backend.no_padding()
    facts = json.dumps([sorted(specials.items()), adds_bos])
    return TextTokenizer(
        name=model_name,
        backend=backend,
        special_tokens=specials,
        chat_template=_chat_template(folder, config),
        adds_bos=adds_bos,
        vocabulary=max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
        digest=xxhash.xxh3_128_hexdigest(text + facts.encode()),
    )


def _folder(model_name: str, revision: str | None) -> Path:
    if not is_path(model_name):
        return _download(model_name, revision)
    folder = Path(model_name).expanduser()
    if not folder.is_dir():
        raise UserError(f"model {folder} does not exist; name a folder with config and tokenizer")
    return folder


def _download(model_name: str, revision: str | None) -> Path:
    import huggingface_hub
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    try:
        fetched = huggingface_hub.snapshot_download(
            model_name, revision=revision, allow_patterns=[*_FILES, *_SLOW_FILES]
        )
    except Exception as error:  # whatever the library raises becomes one sentence
        raise hub_error(f"model {model_name}", error) from error
    return Path(fetched)


def _backend(model_name: str, folder: Path) -> tuple[Tokenizer, bytes]:
    """The tokenizer and the bytes that define it."""
    path = folder / TOKENIZER_JSON
    if not path.is_file():
        return _converted(model_name, folder)
    text = path.read_bytes()
    try:
        return Tokenizer.from_buffer(text), text
    except Exception as error:  # tokenizers raises bare Exception
        raise UserError(f"{path} is not a tokenizer: {_line(error)}") from error


def _converted(model_name: str, folder: Path) -> tuple[Tokenizer, bytes]:
    try:
        from transformers import AutoTokenizer

        backend = AutoTokenizer.from_pretrained(folder).backend_tokenizer
    except ModuleNotFoundError as error:
        raise UserError(
            f"model {model_name} has no {TOKENIZER_JSON}, and converting its tokenizer needs "
            "transformers: pip install 'tunewright[train]'"
        ) from error
    except Exception as error:  # transformers raises anything from OSError to AttributeError
        raise UserError(
            f"model {model_name} has no tokenizer that can be read ({TOKENIZER_JSON} is missing): "
            f"{_line(error)}"
        ) from error
    return backend, backend.to_str().encode()


def _special_tokens(folder: Path, config: Mapping[str, Any], backend: Tokenizer) -> dict[str, str]:
    """Special tokens by name; the ids in config.json stand in where the tokenizer names none."""
    found: dict[str, str] = {}
    for source in (_json(folder / "special_tokens_map.json"), config):
        for name, token in source.items():
            text = token.get("content") if isinstance(token, dict) else token
            if name.endswith("_token") and isinstance(text, str):
                found[name] = text
    model = _json(folder / "config.json")
    for name in ("bos_token", "eos_token"):
        token_id = model.get(f"{name}_id")
        token_id = token_id[0] if isinstance(token_id, list) and token_id else token_id
        text = backend.id_to_token(token_id) if isinstance(token_id, int) else None
        if text is not None:
            found.setdefault(name, text)
    return found


def _adds_bos(backend: Tokenizer, config: Mapping[str, Any], bos: str | None) -> bool:
    """As transformers decides it: add_bos_token where it is said, else the post-processor."""
    if bos is None:
        return False
    if "add_bos_token" in config or "add_eos_token" in config:
        return bool(config.get("add_bos_token"))
    ids = backend.encode("a").ids
    return bool(ids) and ids[0] == backend.token_to_id(bos)


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}.get("default")
    return found if isinstance(found, str) else None


def _json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the model; empty when there is no such file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {_line(error)}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} must hold one JSON object")
    return found


def _line(error: Exception) -> str:
    if isinstance(error, TunewrightError):
        return str(error)
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
