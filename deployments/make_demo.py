"""Make the material of the demo and of the tests: rows, tokenizers and model folders.

    python deployments/make_demo.py

It writes, with the same bytes every time on the same Python:

    deployments/demo.jsonl      questions about the standard library, answered by its docstrings
    deployments/model/          config and tokenizer of a small Llama, to be trained from nothing
    tests/data/models/llama/    the same for a tiny twin of Llama 3.1, for tests
    tests/data/models/qwen/     and of Qwen 2.5

The answers are sentences of the docstrings that every Python installation brings
(Python Software Foundation License, version 2). Weights are not made: `init: random` does that.
"""

from __future__ import annotations

import importlib
import inspect
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

HERE = Path(__file__).resolve().parent
TEST_MODELS = HERE.parent / "tests" / "data" / "models"
ROWS = 480
MODULES = """
    argparse array ast base64 bisect calendar cmath codecs collections contextlib copy csv
    datetime decimal difflib dis fileinput fnmatch fractions functools getpass glob gzip
    hashlib heapq hmac html inspect io ipaddress itertools json keyword linecache locale
    logging math mimetypes numbers operator os pathlib pickle platform pprint queue random re
    sched secrets shelve shlex shutil signal socket statistics string struct subprocess
    tempfile textwrap threading time timeit tokenize traceback types typing unicodedata
    urllib.parse uuid warnings weakref zipfile zlib
"""

DEMO_TOKENS = ("<|pad|>", "<|start|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
DEMO_TEMPLATE = """\
{{ bos_token }}
{%- for message in messages %}
    {{- '<|' + message.role + '|>\\n' + message.content | trim + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\\n' }}
{%- endif %}
"""
LLAMA_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|finetune_right_pad_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)
LLAMA_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
    {{- message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
LLAMA_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
# It differs from Llama's in one thing: every digit is a word.
QWEN_PATTERN = LLAMA_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")


def main() -> None:
    rows = demo_rows()
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    (HERE / "demo.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    texts = ["\n".join(row.values()) for row in rows]
    write_demo_model(texts)
    write_llama(texts)
    write_qwen(texts)
    print(f"{len(rows)} rows in {HERE / 'demo.jsonl'}, models {HERE / 'model'}, {TEST_MODELS}/*")


def demo_rows() -> list[dict[str, str]]:
    """ROWS distinct Alpaca rows, in an order that mixes modules and kinds of question."""
    facts = {sentence: (name, kind) for name, kind, sentence in documented()}
    rows = [row for line, (name, kind) in facts.items() for row in questions(name, kind, line)]
    random.Random(7).shuffle(rows)
    return rows[:ROWS]


def documented() -> Iterator[tuple[str, str, str]]:
    """Public functions and classes as (dotted name, kind, first sentence of the docstring)."""
    for module_name in MODULES.split():
        module = importlib.import_module(module_name)
        for name, thing in sorted(vars(module).items()):
            kind = "class" if inspect.isclass(thing) else "function"
            if name.startswith("_") or not (inspect.isclass(thing) or inspect.isroutine(thing)):
                continue
            if getattr(thing, "__module__", module_name) in (module_name, "_" + module_name):
                sentence = first_sentence(inspect.cleandoc(own_docstring(thing)))
                if sentence:
                    yield f"{module_name}.{name}", kind, sentence


def own_docstring(thing: Any) -> str:
    """A class without a docstring would show its base's."""
    doc = vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__
    return doc if isinstance(doc, str) else ""


def first_sentence(doc: str) -> str:
    """The first sentence of a docstring; empty where it does not read like one."""
    paragraph = " ".join(doc.strip().split("\n\n")[0].split())
    paragraph = re.sub(r"``?([^`']+)(``|`|')", r"`\1`", paragraph)
    sentence = re.split(r"(?<=[a-z)`])\.(?:\s|$)", paragraph)[0].strip().rstrip(".:")
    readable = re.fullmatch(r"[A-Z][a-z]+ [A-Za-z0-9 ,;:'`\"()/_.*=+-]{14,158}", sentence)
    balanced = sentence.count("(") == sentence.count(")") and sentence.count("`") % 2 == 0
    whole = not sentence.endswith(("e.g", "i.e"))
    return sentence + "." if readable and balanced and whole else ""


def questions(name: str, kind: str, sentence: str) -> Iterator[dict[str, str]]:
    """What one can ask about a documented name."""
    module, _, short = name.rpartition(".")
    does = "What is" if kind == "class" else "What does"
    end = "" if kind == "class" else " do"
    yield row(f"{does} `{name}`{end}?", "", sentence)
    yield row(
        f"Which {kind} of the Python standard library fits this description?",
        sentence,
        f"The {kind} `{short}` of the module `{module}`.",
    )
    yield row(
        f"How do I import the {kind} `{short}`, and what is it for?",
        "",
        f"Write `from {module} import {short}`. {sentence}",
    )


def row(instruction: str, context: str, output: str) -> dict[str, str]:
    return {"instruction": instruction, "input": context, "output": output}


def write_demo_model(texts: list[str]) -> None:
    """A Llama of about a million parameters, tied embeddings, with plain role tokens."""
    tokenizer = byte_level_bpe(texts, 2048, DEMO_TOKENS, None)
    pad, bos, eos = "<|pad|>", "<|start|>", "<|end|>"
    write_model(
        HERE / "model",
        tokenizer,
        llama_config(
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=2048,
            rope_theta=10000.0,
            tie_word_embeddings=True,
        ),
        specials={"bos_token": bos, "eos_token": eos, "pad_token": pad},
        ends=[eos],
        template=DEMO_TEMPLATE,
    )


def write_llama(texts: list[str]) -> None:
    """Llama 3.1 with everything small: grouped queries, scaled rotary positions, untied."""
    tokenizer = byte_level_bpe(texts, 1024, LLAMA_TOKENS, LLAMA_PATTERN)
    bos = "<|begin_of_text|>"
    with_bos = processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos}:1 $B:1",
        special_tokens=[(bos, tokenizer.token_to_id(bos))],
    )
    trims = processors.ByteLevel(trim_offsets=True)
    tokenizer.post_processor = processors.Sequence([trims, with_bos])
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    }
    write_model(
        TEST_MODELS / "llama",
        tokenizer,
        llama_config(
            hidden_size=64,
            intermediate_size=224,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=2048,
            rope_theta=500000.0,
            rope_scaling=scaling,
            tie_word_embeddings=False,
        ),
        specials={
            "bos_token": bos,
            "eos_token": "<|eot_id|>",
            "pad_token": "<|finetune_right_pad_id|>",
        },
        ends=["<|end_of_text|>", "<|eot_id|>"],
        template=LLAMA_TEMPLATE,
    )


def write_qwen(texts: list[str]) -> None:
    """Qwen 2.5 with everything small: biases on queries, keys and values, tied, no start token."""
    write_model(
        TEST_MODELS / "qwen",
        byte_level_bpe(texts, 1024, QWEN_TOKENS, QWEN_PATTERN),
        {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "hidden_size": 64,
            "initializer_range": 0.02,
            "intermediate_size": 224,
            "max_position_embeddings": 2048,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": True,
            "torch_dtype": "float32",
            "use_cache": True,
            "use_sliding_window": False,
        },
        specials={"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        ends=["<|im_end|>", "<|endoftext|>"],
        template=QWEN_TEMPLATE,
    )


def byte_level_bpe(
    texts: list[str], size: int, specials: tuple[str, ...], pattern: str | None
) -> Tokenizer:
    """Byte-pair encoding over bytes, trained on the texts; `pattern` cuts text into words."""
    tokenizer = Tokenizer(models.BPE())
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    tokenizer.pre_tokenizer = bytes_only
    if pattern is not None:
        from tokenizers import Regex

        words = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_only])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[AddedToken(token, special=True) for token in specials],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def llama_config(**sizes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "mlp_bias": False,
        "rms_norm_eps": 1e-05,
        "torch_dtype": "float32",
        "use_cache": True,
        **sizes,
    }


def write_model(
    folder: Path,
    tokenizer: Tokenizer,
    config: dict[str, Any],
    specials: dict[str, str],
    ends: list[str],
    template: str,
) -> None:
    """A model folder without weights: config, generation config, tokenizer, chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = {name + "_id": tokenizer.token_to_id(token) for name, token in specials.items()}
    stops = [tokenizer.token_to_id(token) for token in ends]
    generation = {**ids, "eos_token_id": stops if len(stops) > 1 else stops[0]}
    write_json(
        folder / "config.json",
        {**config, **generation, "vocab_size": tokenizer.get_vocab_size(with_added_tokens=True)},
    )
    write_json(folder / "generation_config.json", generation)
    write_json(
        folder / "tokenizer_config.json",
        {
            **specials,
            "clean_up_tokenization_spaces": False,
            "model_input_names": ["input_ids", "attention_mask"],
            "model_max_length": config["max_position_embeddings"],
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
