"""The three deployments for Databricks, whole, on the stand-in: two nodes, small models."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.databricks_server import DatabricksServer
from tests.flows.cli import ROOT, Home
from tests.flows.on_databricks import OUTPUT, ended, run, small

pytestmark = [
    pytest.mark.flow,
    pytest.mark.skipif(find_spec("databricks") is None, reason="needs tunewright[databricks]"),
]
RECORDED = ROOT / "tests" / "data" / "databricks"
_CHANGING = [
    (r"(\+|%2B)[0-9a-f]{12}-py3", r"\1HASH-py3"),
    (r'"bytes": \d+', '"bytes": 0'),
    (r"TUNEWRIGHT_[0-9a-f]{12}", "TUNEWRIGHT_END"),
    (r"--tags .*? --alias", "--tags TAGS --alias"),
    (r"(tokens/|--run-id )[0-9a-f]{32}", r"\1ID"),
    (r'"[0-9a-f]{64}"', '"SHA256"'),
]
"""What is another in every run, or with every change of our own code."""


@pytest.fixture
def server(tmp_path: Path, mlflow_server: str) -> Iterator[DatabricksServer]:
    """A workspace with one volume and a real MLflow server behind it."""
    with DatabricksServer(tmp_path, mlflow=mlflow_server) as found:
        found.add_volume("main.default.runs")
        found.state.secrets["my_scope"] = {"hf_token": "hf_of-the-platform"}
        yield found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["llama", "gpt-oss", "qwen"])
def test_a_deployment_goes_the_whole_route(home: Home, server: DatabricksServer, name: str) -> None:
    inputs = server.on_disk(f"{OUTPUT}/inputs")
    shutil.copytree(ROOT / "tests" / "data" / "models" / name, inputs / name)
    shutil.copy(ROOT / "deployments" / "demo.jsonl", inputs)
    model = f"main.default.{name}"
    words = [f"--set={key}={value}" for key, value in small(name).items()]
    file = ROOT / "deployments" / f"{name}.yaml"
    process = run(home, server, file, "--register", model, *words)
    facts, narration = ended(process, 500)
    assert process.returncode == 0, narration
    assert (facts["state"], facts["nodes"], facts["steps"]) == ("Completed", 2, 4)
    assert (facts["world_size"], len(facts["attempts"])) == (2, 1)
    assert facts["last_loss"] < facts["first_loss"]
    assert facts["registered"] == {"name": model, "version": 1, "alias": "candidate"}
    _check_registered(server, facts, model)
    _check_volume(server, facts, home)
    assert len(_history_of(facts["mlflow"], "train_loss")) == 4
    assert "/ml/experiments/" in _tag_of(facts["mlflow"], "tunewright.attempt_1.mlflow_run")
    assert "hf_of-the-platform" not in narration + json.dumps(facts)
    assert {path.exit_code for each in server.runs for path in each.nodes} == {0}
    _compare(name, server, facts)


def _check_registered(server: DatabricksServer, facts: dict[str, Any], name: str) -> None:
    model = server.registry.models[name]
    assert model.aliases == {"candidate": 1}
    assert model.versions[1].tags["tunewright.run"] == facts["run"]


def _check_volume(server: DatabricksServer, facts: dict[str, Any], home: Home) -> None:
    """What is large stays on the volume; what is small is there as well."""
    volume = server.on_disk(f"{OUTPUT}/{facts['run']}")
    assert {path.name for path in (volume / "checkpoints").glob("step-*")} == {
        "step-00000002", "step-00000004",
    }  # fmt: skip
    for folder in ("checkpoints/step-00000004", "model"):
        assert (volume / folder / "manifest.json").is_file()
    assert list((volume / "model").glob("*.safetensors"))
    assert not (home.path / OUTPUT.lstrip("/") / facts["run"] / "model").exists()
    assert json.loads((volume / "receipt.json").read_text())["state"] == "Completed"


def _compare(name: str, server: DatabricksServer, facts: dict[str, Any]) -> None:
    """Everything that started a job, with the recorded file.

    To record it anew delete the file, run the test, and read what changed.
    """
    assert len(server.runs) == 2
    kinds = ("POST */workspace/mkdirs", "POST */import-file/*", "POST */jobs/runs/submit")
    sent = [
        request.value
        for request in server.calls(origin="client")
        if any(request in server.calls(kind) for kind in kinds)
    ]
    text = json.dumps(sent, indent=1) + "\n"
    for pattern, word in _CHANGING:
        text = re.sub(pattern, word, text)
    text = text.replace(facts["run"], f"{name}-0a1b2c3d")
    place = RECORDED / f"route-{name}.json"
    if not place.exists():
        place.write_text(text)
        pytest.fail(f"recorded {place}")
    assert json.loads(text) == json.loads(place.read_text())


def _history_of(opened: dict[str, str], name: str) -> list[tuple[float]]:
    """A metric's values in the flow's own MLflow run, as the database has them."""
    return _rows(opened, "select value from metrics where run_uuid = ? and key = ?", name)


def _tag_of(opened: dict[str, str], name: str) -> str:
    ((value,),) = _rows(opened, "select value from tags where run_uuid = ? and key = ?", name)
    return str(value)


def _rows(opened: dict[str, str], query: str, name: str) -> list[Any]:
    path = opened["tracking_uri"].removeprefix("sqlite:///")
    with closing(sqlite3.connect(path)) as database:
        return database.execute(query, (opened["run_id"], name)).fetchall()
