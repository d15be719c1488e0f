"""The JSON schema for editors: committed, current, and true for the files that users have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from tunewright.contract.schema import workload_schema

ROOT = Path(__file__).parents[3]
COMMITTED = ROOT / "deployments" / "workload.schema.json"
SCHEMA = workload_schema()
BASE = {
    "experiment_name": "tiny",
    "command": "python train.py",
    "compute": {"num_accelerators": 8, "accelerator_type": "GPU_8xH100"},
}
OURS = {"command": "torchrun -m tunewright.recipes.fsdp"}
ROWS = {"model_name": "a/b", "dataset_name": "c/d"}


def workload_files() -> list[Path]:
    own = [p for p in (ROOT / "deployments").glob("*.yaml") if p.name != "prefect.yaml"]
    data = os.environ.get("TUNEWRIGHT_TEST_DATA")
    return sorted([*own, *(Path(data).parent.glob("examples/*/*.yaml") if data else ())])


def problems(document: dict) -> list[str]:
    found = jsonschema.Draft202012Validator(SCHEMA).iter_errors(document)
    return [error.json_path for error in found]


def test_the_committed_schema_is_current():
    assert json.loads(COMMITTED.read_text()) == SCHEMA, (
        "run: python -m tunewright.contract.schema > deployments/workload.schema.json"
    )


def test_the_program_prints_it():
    command = [sys.executable, "-m", "tunewright.contract.schema"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert shown.stdout == COMMITTED.read_text()


def test_it_is_a_schema():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize(
    "path", workload_files(), ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_it_holds_for_the_workloads_there_are(path):
    assert problems(yaml.safe_load(path.read_text())) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"code_source": {"root_path": ".", "include_paths": ["a"]}},
        {
            "code_source": {
                "type": "snapshot",
                "snapshot": {"root_path": ".", "git": {"branch": "m"}},
            }
        },
        {"environment": {"version": 4, "dependencies": ["a"]}},
        {"environment": {"version": "AI5", "dependencies": "deps.yaml"}},
        {"parameters": {"anything": 1}},
        {**OURS, "parameters": {**ROWS, "learning_rate": "2e-5", "max_seq_len": 8}},
        {**OURS, "parameters": {**ROWS, "max_steps": None, "per_device_batch_size": 4}},
    ],
    ids=str,
)
def test_it_takes_both_dialects(fields):
    assert problems({**BASE, **fields}) == []


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"max_retry": 1}, "$"),
        ({"experiment_name": "a b"}, "$.experiment_name"),
        ({"compute": {"num_accelerators": "8", "accelerator_type": "x"}},
         "$.compute.num_accelerators"),
        ({"env_variables": {"RANK": "1"}}, "$.env_variables"),
        ({"env_variables": {"A": 1}}, "$.env_variables.A"),
        ({"secrets": {"A": "value"}}, "$.secrets.A"),
        ({"code_source": {"snapshot": {}}}, "$.code_source"),
        ({**OURS, "parameters": {**ROWS, "learnig_rate": 1}}, "$.parameters"),
        ({**OURS, "parameters": {**ROWS, "init": "x"}}, "$.parameters.init"),
        ({**OURS, "parameters": {}}, "$.parameters"),
    ],
    ids=str,
)  # fmt: skip
def test_it_tells_what_is_wrong(fields, path):
    assert path in problems({**BASE, **fields})
