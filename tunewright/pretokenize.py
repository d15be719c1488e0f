"""Rows to a sealed token store.

    python -m tunewright.pretokenize --settings hyperparameters.yaml --tokens-root DIR --result FILE

The settings file holds a recipe's parameters; those of the data are taken. The store lies in
DIR/<fingerprint>; when it is there already, nothing is tokenized. The result file gets the facts.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from tunewright.contract import rundir
from tunewright.contract.failures import UserError, reported
from tunewright.contract.problems import problems_of
from tunewright.contract.settings import DataSettings
from tunewright.data.prepare import Prepared, prepare

_SHOWN_CHARACTERS = 400


def pretokenize(settings: DataSettings, tokens_root: Path) -> dict[str, Any]:
    """Make or find the tokens of these settings; returns the facts of the result file.

    Keys: path, fingerprint, rows (read), dropped ({reason: rows}), truncated, tokens and
    supervised_tokens (training), eval_rows, packs, cache (why they were made or found).
    Raises UserError and DataError; nothing half-written is left.
    """
    prepared = prepare(settings, tokens_root)
    result = _result(prepared)
    for line in _narration(prepared, result):
        print(line, file=sys.stderr, flush=True)
    return result


def load_data_settings(path: Path) -> DataSettings:
    """The data settings among a recipe's parameters; raises UserError with every problem."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} must be a mapping of names to values")
    if "max_seq_len" in found:
        found.setdefault("max_length", found["max_seq_len"])
    known = {name: value for name, value in found.items() if name in DataSettings.model_fields}
    try:
        return DataSettings.model_validate(known)
    except ValidationError as error:
        problems = problems_of(error, DataSettings)
        raise UserError("; ".join(f"{path}: {at}: {why}" for at, why in problems)) from error


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tunewright.pretokenize",
        description="Rows to a sealed, memory-mapped token store.",
    )
    parser.add_argument("--settings", type=Path, required=True, help="YAML with the parameters")
    parser.add_argument("--tokens-root", type=Path, required=True, help="folder of the stores")
    parser.add_argument("--result", type=Path, required=True, help="JSON file for the facts")
    arguments = parser.parse_args(argv)
    settings = load_data_settings(arguments.settings)
    result = pretokenize(settings, arguments.tokens_root.absolute())
    rundir.write_json(arguments.result, result)


def _result(prepared: Prepared) -> dict[str, Any]:
    store = prepared.store
    return {
        "path": str(store.path),
        "fingerprint": store.fingerprint,
        "rows": store.facts["rows"],
        "dropped": store.facts["dropped"],
        "truncated": store.facts["truncated"],
        "tokens": store.train.tokens,
        "supervised_tokens": store.train.supervised_tokens,
        "eval_rows": store.eval.rows if store.eval else 0,
        "packs": len(store.train),
        "cache": prepared.cache,
    }


def _narration(prepared: Prepared, result: dict[str, Any]) -> list[str]:
    """What happened, in plain lines with numbers."""
    store = prepared.store
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in result["dropped"].items())
    share = store.train.supervised_tokens / store.train.tokens
    full = store.train.tokens / (len(store.train) * store.pack_tokens)
    lines = [
        f"tokens: {prepared.cache}",
        f"rows: {result['rows']:,} read, {dropped or 'none'} dropped, "
        f"{result['truncated']:,} truncated to {store.facts['max_length']:,} tokens",
        f"training: {store.train.documents:,} documents, {store.train.tokens:,} tokens, "
        f"{store.train.supervised_tokens:,} supervised ({share:.1%})",
        f"packs: {len(store.train):,} of {store.pack_tokens:,} tokens, {full:.1%} full",
    ]
    if store.eval is not None:
        lines.append(
            f"evaluation: {store.eval.documents:,} documents, "
            f"{store.eval.supervised_tokens:,} supervised tokens"
        )
    return [*lines, f"sample, trained part in «»: {_sample(prepared)}", f"sealed: {store.path}"]


def _sample(prepared: Prepared) -> str:
    """The last document of the last pack, decoded, with what is supervised marked."""
    pack = prepared.store.train[-1]
    start = len(pack.input_ids) - int(pack.lengths[-1])
    ids, supervised = pack.input_ids[start:].tolist(), pack.supervised[start:].tolist()
    edges = [i for i in range(1, len(ids)) if supervised[i] != supervised[i - 1]]
    pieces = []
    for first, last in zip([0, *edges], [*edges, len(ids)], strict=True):
        text = _shortened(prepared.tokenizer.decode(ids[first:last]))
        pieces.append(f"«{text}»" if supervised[first] else text)
    return repr("".join(pieces))[1:-1]


def _shortened(text: str) -> str:
    half = _SHOWN_CHARACTERS // 2
    return text if len(text) <= 2 * half else f"{text[:half]} … {text[-half:]}"


if __name__ == "__main__":
    with reported():
        main()
