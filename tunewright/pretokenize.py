"""Rows to a sealed token store.

    python -m tunewright.pretokenize --settings hyperparameters.yaml --tokens-root DIR --result FILE

The settings file holds a recipe's parameters; those of the data are taken. The store lies in
DIR/<fingerprint>; when it is there already, nothing is tokenized. The result file gets the facts.
How far the work is, what the data is like and where the tokens lie is said on stderr.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from tunewright.contract import rundir
from tunewright.contract.datasettings import DataSettings
from tunewright.contract.failures import UserError, reported
from tunewright.contract.problems import problems_of
from tunewright.data.auditpage import markdown, narration
from tunewright.data.prepare import Prepared, prepare


def pretokenize(
    settings: DataSettings, tokens_root: Path, page: Path | None = None
) -> dict[str, Any]:
    """Make or find the tokens of these settings; returns the facts of the result file.

    Keys: path, fingerprint, rows (read), dropped ({reason: rows}), truncated, tokens and
    supervised_tokens (training), eval_rows, packs, cache (why they were made or found).
    `page` gets the audit as Markdown, also when the audit stops the run.
    Raises UserError and DataError; nothing half-written is left.
    """

    def audited(audit: Mapping[str, Any], problems: Sequence[str]) -> None:
        if page is not None:
            rundir.write_text(page, markdown(audit, problems))
        _say(narration(audit))

    prepared = prepare(settings, tokens_root, audited)
    _say([f"tokens: {prepared.cache}", f"sealed: {prepared.store.path}"])
    return _result(prepared)


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
    parser.add_argument("--page", type=Path, help="Markdown file for the audit of the data")
    arguments = parser.parse_args(argv)
    settings = load_data_settings(arguments.settings)
    result = pretokenize(settings, arguments.tokens_root.absolute(), arguments.page)
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


def _say(lines: Sequence[str]) -> None:
    for line in lines:
        print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    with reported():
        main()
