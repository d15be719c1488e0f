"""The plan that `check` shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasks import plan
from tunewright.contract.workload import Workload

ROOT = Path(__file__).parents[2]
OURS = "torchrun -m tunewright.recipes.fsdp"


def workload(**fields) -> Workload:
    compute = {"num_accelerators": 16, "accelerator_type": "GPU_8xH100"}
    return Workload.load(
        {"experiment_name": "llama", "command": "python train.py", "compute": compute, **fields}
    )


def test_the_plan_of_a_user_s_own_command(home):
    found = plan.plan(
        workload(
            secrets={"HF_TOKEN": "scope/key"},
            env_variables={"B": "2", "A": "1"},
            max_retries=1,
            timeout_minutes=120,
            parameters={"output_dir": "/Volumes/c/s/v/runs"},
        )
    )
    root = home / "Volumes/c/s/v/runs"
    assert json.loads(json.dumps(found)) == found
    assert {key: found[key] for key in found if key not in ("workload_sha256", "warnings")} == {
        "valid": True, "name": "llama", "nodes": 2, "gpus_per_node": 8,
        "accelerator_type": "GPU_8xH100", "recipe": None, "command": "python train.py",
        "attempts": 2, "timeout_minutes": 120, "env_variables": ["A", "B"],
        "secrets": {"HF_TOKEN": "scope/key"}, "dependencies": [], "code": None, "batch": None,
        "paths": {
            "output_dir": str(root), "tokens": None, "run": f"{root}/llama-<8 hex>",
            "checkpoints": None, "model": f"{root}/llama-<8 hex>/model",
        },
    }  # fmt: skip
    shown = "\n".join(plan.text(found))
    assert "2 x 8 GPUs on 2 nodes (GPU_8xH100)" in shown
    assert "retries=1 (at most 2 launches), deadline 120 minutes per attempt" in shown
    assert "HF_TOKEN from scope/key" in shown
    assert "note: /Volumes is not mounted here" in shown
    assert "resolve_secret → launch → consolidate → register" in shown


@pytest.mark.parametrize(
    ("names", "derived"),
    [
        ({"per_device_batch_size": 4, "gradient_accumulation_steps": 2},
         "131,072 tokens a step: 32 packs of 4,096 "
         "(from per_device_batch_size, gradient_accumulation_steps and 16 accelerators)"),
        ({"per_device_train_batch_size": 8},
         "131,072 tokens a step: 32 packs of 4,096 "
         "(from per_device_train_batch_size and 16 accelerators)"),
        ({"global_batch_tokens": 8192}, "8,192 tokens a step: 2 packs of 4,096"),
        ({}, "65,536 tokens a step: 16 packs of 4,096"),
    ],
)  # fmt: skip
def test_the_batch_and_where_it_comes_from(home, names, derived):
    parameters = {"model_name": "a/b", "dataset_name": "c/d", "max_seq_len": 1024, **names}
    shown = [*plan.text(plan.plan(workload(command=OURS, parameters=parameters)))]
    assert f"  batch         {derived}" in shown
    assert any("→ pretokenize →" in line for line in shown)


def test_the_plan_of_every_deployment(home):
    for path in (ROOT / "deployments").glob("*.yaml"):
        if path.name != "prefect.yaml":
            assert list(plan.text(plan.plan(Workload.load(path))))


def test_the_plans_of_the_users_files(home):
    import os

    data = os.environ.get("TUNEWRIGHT_TEST_DATA")
    files = sorted(Path(data).parent.glob("examples/*/*.yaml")) if data else []
    if not files:
        pytest.skip("TUNEWRIGHT_TEST_DATA is not set, or has no examples beside it")
    plans = {path.parent.name: plan.plan(Workload.load(path)) for path in files}
    assert {name: (p["nodes"], p["gpus_per_node"]) for name, p in plans.items()} == {
        "multinode_llm_sft": (2, 8),
        "ray_train_distributed": (1, 8),
    }
