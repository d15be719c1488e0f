"""Ask a chat model a question: how a fine-tuned model answers, beside the one it came from.

    python deployments/answer.py ~/.tunewright/models/SmolLM2-135M-Instruct
    python deployments/answer.py models:/smollm2/latest

A model is a Hugging Face folder, or a version in the MLflow registry of this machine. The answer is
the likeliest one, token by token, so that it is the same each time.
"""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path
from typing import Any

from tunewright.contract.failures import UserError, reported

# Of the kind that demo.jsonl asks, but none of its rows.
QUESTION = "What does `math.sqrt` do?"
_REGISTERED = re.compile(r"models:/([^/]+)/(latest|\d+)")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python deployments/answer.py", description="Ask a chat model a question."
    )
    parser.add_argument("model", help="a model folder, or models:/NAME/latest or models:/NAME/3")
    parser.add_argument("--question", default=QUESTION, help="by default: %(default)s")
    parser.add_argument("--tokens", type=int, default=40, help="stop after as many (%(default)s)")
    given = parser.parse_args(argv)
    folder = folder_of(given.model)
    started = time.monotonic()
    text, ended = answer(folder, given.question, given.tokens)
    print(f"  model       {given.model}")
    print(f"  question    {given.question}")
    print(f"  answer      {text}{'' if ended else ' …'}")
    print(f"  time        {time.monotonic() - started:.1f} s with loading")


def folder_of(model: str) -> Path:
    """The folder that a path or a registered version means; raises UserError when none is there."""
    registered = _REGISTERED.fullmatch(model)
    folder = _registered(*registered.groups()) if registered else Path(model).expanduser()
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is not a model folder: it has no config.json")
    return folder


def answer(folder: Path, question: str, tokens: int = 40) -> tuple[str, bool]:
    """The greedy answer in at most `tokens` tokens, and whether the model ended it by itself."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    turns = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    written = model.generate(**prompt, max_new_tokens=tokens, do_sample=False)
    new = written[0, prompt["input_ids"].shape[1] :]
    ended = new[-1].item() == tokenizer.eos_token_id
    text = tokenizer.decode(new, skip_special_tokens=True)
    return " ".join(text.split()), ended


def _registered(name: str, version: str) -> Path:
    from tunewright import mlflow_store

    client = mlflow_store.connect()
    found = {int(v.version): v for v in client.search_model_versions(f"name='{name}'")}
    number = max(found, default=0) if version == "latest" else int(version)
    if number not in found:
        raise UserError(
            f"{mlflow_store.registry_uri()} has no version {version} of a model {name}; "
            "is TUNEWRIGHT_HOME the home that it was trained with?"
        )
    return Path(found[number].source)


if __name__ == "__main__":
    with reported():
        main()
