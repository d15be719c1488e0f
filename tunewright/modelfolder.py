"""A Hugging Face folder: what its files say about its weights, and whether that is right.

Names, shapes and types come from the headers of the safetensors files. Only the check for finite
numbers reads the weights themselves, one tensor after the other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tunewright.contract.failures import NonFinite, TunewrightError, UserError

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
ADAPTER_CONFIG = "adapter_config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
TOKENIZER_PATTERNS = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.*", "merges.txt", "*.model", "*.tiktoken", "tekken.json", "chat_template.*",
    "additional_chat_templates/*",
)  # fmt: skip
_FLOATS = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"}
_TORCH_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Expected:
    """What the configuration calls for: shapes by name, and the names that share one tensor.

    `aliases` maps a tied name to the first name of its group; both are in `shapes`.
    """

    shapes: dict[str, tuple[int, ...]]
    aliases: dict[str, str]


@dataclass(frozen=True)
class Header:
    """What the safetensors files of a folder hold, without their bytes."""

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    files: dict[str, Path]

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in set(self.files.values()))

    @property
    def dtype(self) -> str:
        """The type of most numbers, in torch's words."""
        counts: dict[str, int] = {}
        for name, kind in self.dtypes.items():
            counts[kind] = counts.get(kind, 0) + math.prod(self.shapes[name])
        kind = max(counts, key=lambda k: counts[k])
        return _TORCH_NAMES.get(kind, kind)


@dataclass
class Findings:
    """The outcome of the checks of a folder: what holds, and what the user should know."""

    checks: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def expected_tensors(folder: Path) -> Expected | None:
    """What transformers would build from the folder's config.json, on the meta device.

    None when the architecture is not one of transformers' own: nothing to compare with then.
    """
    import transformers

    named = read_object(folder / CONFIG).get("architectures") or []
    model_class = (
        getattr(transformers, named[0], None) if named else transformers.AutoModelForCausalLM
    )
    if model_class is None:
        return None
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            build = getattr(model_class, "from_config", model_class)
            state = build(config).state_dict(keep_vars=True)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{folder / CONFIG} does not describe a model: {error}") from error
    first: dict[int, str] = {}
    groups = {name: first.setdefault(id(tensor), name) for name, tensor in state.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    return Expected(shapes, {name: to for name, to in groups.items() if name != to})


def compare(found: Mapping[str, tuple[int, ...]], expected: Expected, where: Path) -> None:
    """Raise for the first tensor that is missing, has another shape, or belongs to no layer.

    Of names that share one tensor, one is enough.
    """
    groups = {expected.aliases.get(name, name) for name in found}
    for name, shape in expected.shapes.items():
        if name in found and found[name] != shape:
            raise TunewrightError(
                f"{where}: {name} has shape {list(found[name])}, its config.json calls for "
                f"{list(shape)}; weights and configuration are of different models"
            )
        if expected.aliases.get(name, name) not in groups:
            raise TunewrightError(f"{where}: the tensor {name} is missing, {CONFIG} calls for it")
    if unknown := sorted(found.keys() - expected.shapes.keys()):
        raise TunewrightError(f"{where}: nothing in the model of {CONFIG} is called {unknown[0]}")


def compare_converted(found: Header, expected: Expected, where: Path) -> bool:
    """Like `compare`, for weights whose names transformers may convert while loading.

    Mixtures of experts are stored under other names than the model uses; then the number of
    parameters decides. Returns whether the names were the model's own.
    """
    own = found.shapes.keys() <= expected.shapes.keys()
    once = {n: s for n, s in expected.shapes.items() if n not in expected.aliases}
    if not own and found.parameters == sum(math.prod(s) for s in once.values()):
        return False
    compare(found.shapes, expected, where)
    return True


def read_header(folder: Path) -> Header | None:
    """The tensors of a folder by the headers of its files; None when it has no safetensors."""
    files = _weight_files(folder)
    if not files:
        return None
    header = Header({}, {}, {})
    for path in files:
        for name, entry in _entries(path).items():
            header.shapes[name] = tuple(entry["shape"])
            header.dtypes[name] = entry["dtype"]
            header.files[name] = path
    if (folder / INDEX).is_file():
        _compare_index(folder, header)
    return header


def check_finite(header: Header) -> None:
    """Read every floating-point tensor once; raise NonFinite with the first bad one's name."""
    for name, tensor in _tensors(header):
        require_finite(name, tensor)


def require_finite(name: str, tensor: torch.Tensor) -> None:
    """Raise NonFinite with the tensor's name and how many of its values are no finite numbers."""
    if not all_finite(tensor):
        raise not_finite(name, count_not_finite(tensor), tensor.dtype)


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether every value is a finite number."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    # The extremes carry NaN and infinities along, ten times as fast as a look at each value.
    low, high = torch.aminmax(tensor if tensor.itemsize > 1 else tensor.float())
    return math.isfinite(low) and math.isfinite(high)


def count_not_finite(tensor: torch.Tensor) -> int:
    return int((~torch.isfinite(tensor.float())).sum())


def not_finite(name: str, bad: int, dtype: torch.dtype) -> NonFinite:
    """The error for a tensor with `bad` values that are not finite."""
    return NonFinite(
        f"the tensor {name} has {bad} values that are not finite numbers ({dtype}); "
        "such a model is not exported"
    )


def check_tied(header: Header, expected: Expected) -> None:
    """Tied names that are both stored must hold the same bytes."""
    for name, first in expected.aliases.items():
        if name in header.files and first in header.files and not _equal(header, name, first):
            raise TunewrightError(
                f"{name} and {first} are one tensor in this model but differ: {header.files[name]}"
            )


def check_tokens(folder: Path, base: Path | None) -> str | None:
    """Refuse a padding token that training put among the end tokens; otherwise a warning or None.

    Some published models list their padding token as an end token and work; so what counts is
    whether the base model (`base`, when it lies on this machine) had it there. Without the base,
    a token whose name says that it only pads is refused.
    """
    pad, ends = _pad_and_ends(folder)
    if pad is None or pad not in ends:
        return None
    text = _token_text(folder, pad)
    words = f"the padding token {text or pad} (id {pad}) is among the end tokens {ends}"
    if base is not None and (known := _pad_and_ends(base))[0] == pad and pad in known[1]:
        return None
    if len(ends) > 1 and (base is not None or "pad" in (text or "").lower()):
        raise TunewrightError(
            f"{folder / GENERATION_CONFIG}: {words}, so generation would stop at padding; take it "
            "out of eos_token_id or name another pad_token_id"
        )
    return f"{words}; harmless unless training hid padding from the loss"


def has_tokenizer(folder: Path) -> bool:
    vocabularies = ("tokenizer.json", "tekken.json", "vocab.*", "*.model", "*.tiktoken")
    return any(True for pattern in vocabularies for _ in folder.glob(pattern))


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of the user's; raises UserError when it is not one."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} must hold a JSON object")
    return found


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        named = read_object(folder / INDEX).get("weight_map", {}).values()
        return [folder / name for name in sorted(set(named))]
    return [folder / name for name in (WEIGHTS, ADAPTER_WEIGHTS) if (folder / name).is_file()]


def _entries(path: Path) -> dict[str, Any]:
    """The header of one safetensors file; the bytes it speaks of must all be there."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > 100 << 20:
                raise ValueError("its header has an impossible length")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if path.stat().st_size != 8 + length + end:
            raise ValueError("it was cut short or has bytes too many")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TunewrightError(f"{path} is not a whole safetensors file: {error}") from error
    return dict(header)


def _compare_index(folder: Path, header: Header) -> None:
    listed = read_object(folder / INDEX)["weight_map"]
    for name, file in listed.items():
        if header.files.get(name) != folder / file:
            raise TunewrightError(
                f"{folder / INDEX} puts the tensor {name} in {file}, it is not there"
            )
    if extra := sorted(header.files.keys() - listed.keys()):
        raise TunewrightError(f"{folder / INDEX} does not list the tensor {extra[0]}")


def _tensors(header: Header) -> Iterator[tuple[str, torch.Tensor]]:
    for path in sorted(set(header.files.values())):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (not a dict)
                    if header.dtypes[name] in _FLOATS:
                        yield name, file.get_tensor(name)
        except SafetensorError as error:
            raise TunewrightError(f"{path} cannot be read: {error}") from error


def _equal(header: Header, one: str, other: str) -> bool:
    with safe_open(header.files[one], framework="pt") as file:
        left = file.get_tensor(one)
    with safe_open(header.files[other], framework="pt") as file:
        return torch.equal(left, file.get_tensor(other))


def _pad_and_ends(folder: Path) -> tuple[int | None, list[int]]:
    """Padding and end token ids, from the generation config or else the config."""
    found: dict[str, Any] = {}
    for name in (CONFIG, GENERATION_CONFIG):
        if (folder / name).is_file():
            facts = read_object(folder / name)
            found.update({k: v for k, v in facts.items() if v is not None})
    ends = found.get("eos_token_id", [])
    return found.get("pad_token_id"), ends if isinstance(ends, list) else [ends]


def _token_text(folder: Path, token: int) -> str | None:
    path = folder / "tokenizer.json"
    added = read_object(path).get("added_tokens", []) if path.is_file() else []
    return next((entry["content"] for entry in added if entry.get("id") == token), None)
