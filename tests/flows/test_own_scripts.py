"""Scripts of users, unchanged: what they leave is checked, sealed and registered."""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path

import pytest

from tests.flows.cli import ROOT

pytestmark = pytest.mark.flow

COMMAND = """cd $CODE_SOURCE_PATH
torchrun --nnodes="$NUM_NODES" --node_rank="$NODE_RANK" \
  --nproc_per_node="${LOCAL_WORLD_SIZE:-8}" \
  --master_addr="$MASTER_ADDR" --master_port="$MASTER_PORT" train.py
"""


@pytest.fixture
def project(tmp_path, write) -> Path:
    """A user's folder: the script, and a model and rows under the names they have on the Hub."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copy(ROOT / "tests/data/scripts/train.py", tmp_path)
    twin = ROOT / "tests/data/models/llama"
    model = tmp_path / "some-lab/small-llama"
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(twin)).save_pretrained(model)
    for file in twin.glob("*token*"):
        shutil.copy(file, model)
    rows = tmp_path / "some-lab/answers"
    rows.mkdir()
    shutil.copy(ROOT / "deployments/demo.jsonl", rows / "train.jsonl")
    return write(
        COMMAND,
        name="own-script",
        compute={"num_accelerators": 16, "accelerator_type": "GPU_8xH100"},
        code_source={"type": "snapshot", "snapshot": {"root_path": "."}},
        env_variables={"NCCL_SOCKET_IFNAME": "eth0", "HF_HOME": str(tmp_path / "hf")},
        parameters={
            "model_name": "some-lab/small-llama",
            "dataset_name": "some-lab/answers",
            "learning_rate": 2e-3,
            "max_steps": 4,
            "output_dir": "/Volumes/main/default/checkpoints/own-script",
        },
    )


def test_a_script_of_a_user_goes_the_whole_way(home, project) -> None:
    found = home.run(project)
    assert found.code == 0, found.narration
    assert found.facts["state"] == "Completed"
    assert found.facts["registered"] == {"name": "own-script", "version": 1, "alias": None}
    assert (found.facts["nodes"], found.facts["world_size"]) == (2, 2)
    (run,) = (home.path / "Volumes/main/default/checkpoints/own-script").glob("own-script-*")
    manifest = json.loads((run / "model/manifest.json").read_text())
    assert manifest["source"] == "the command"
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= manifest["files"].keys()
    assert "step=4 loss=" in (run / "logs/attempt-1/node-0.log").read_text()
    # Its metrics are in the flow's run, which it closed itself; the flow has the last word.
    store = sqlite3.connect(home.path / "mlflow.db")
    ((uuid, status),) = store.execute("select run_uuid, status from runs").fetchall()
    steps = store.execute("select step from metrics where key = 'train_loss'").fetchall()
    store.close()
    assert (uuid, status) == (found.facts["mlflow"]["run_id"], "FINISHED")
    assert sorted(step for (step,) in steps) == [1, 2, 3, 4]


def test_a_script_that_saves_nothing_completes_without_a_version(home, project) -> None:
    found = home.run(project, sets={"parameters.save": False})
    assert found.code == 0, found.narration
    assert (found.facts["state"], found.facts["registered"]) == ("Completed", None)
    assert "left no checkpoint and no model" in found.facts["reason"]


def test_asked_for_a_version_it_fails_for_want_of_a_model(home, project) -> None:
    found = home.run(project, "--register", "wanted", sets={"parameters.save": False})
    assert found.code == 1
    assert found.facts["state"] == "Failed"


def test_the_error_of_a_script_is_told_and_not_torchruns(home, project) -> None:
    script = "import os\nif os.environ['RANK'] == '1':\n    raise ValueError('my own trouble')\n"
    (project.parent / "train.py").write_text(script)
    found = home.run(project, sets={"max_retries": 0})
    assert found.code == 1
    (attempt,) = found.facts["attempts"]
    assert attempt["failure"] == {
        "class": "unknown", "node": 1, "rank": 1,
        "message": "the command exited with 1: ValueError: my own trouble",
    }  # fmt: skip
    evidence = found.narration.partition("the end of")[2]
    assert "raise ValueError" in evidence
    assert "ChildFailedError" not in evidence
