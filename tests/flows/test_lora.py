"""Adapters from the deployment's own file to a registered model, with a small twin of its base."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.flows.cli import ROOT

pytestmark = [
    pytest.mark.flow,
    # What PEFT says when an adapter of it is loaded.
    pytest.mark.filterwarnings("ignore:The following rank_pattern keys:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]
SMALL = {
    "parameters.model_name": str(ROOT / "tests" / "data" / "models" / "gpt-oss"),
    "parameters.init": "random",
    "parameters.dataset_name": str(ROOT / "deployments" / "demo.jsonl"),
    "parameters.max_seq_len": 256,
    "parameters.max_steps": 4,
    "parameters.save_steps": 2,
    "parameters.eval_steps": 4,
    "parameters.learning_rate": 0.01,
    "parameters.save_dtype": "float32",
}


@pytest.mark.parametrize("merge", [True, False])
def test_gpt_oss_becomes_a_registered_model_that_generates(home, tmp_path, merge: bool) -> None:
    sets = {
        **SMALL,
        "parameters.merge": merge,
        "parameters.output_dir": str(tmp_path / "runs"),
    }
    found = home.run(ROOT / "deployments" / "gpt-oss.yaml", "--procs-per-node=2", sets=sets)
    assert found.code == 0, found.narration
    facts = found.facts
    assert (facts["state"], facts["world_size"], facts["steps"]) == ("Completed", 2, 4)
    assert facts["registered"] == {"name": "gpt-oss", "version": 1, "alias": None}
    assert facts["last_loss"] < facts["first_loss"]
    assert facts["eval_loss"] < facts["first_eval_loss"]
    (folder,) = (tmp_path / "runs").glob("gpt-oss-*/model")
    assert (folder / "MLmodel").exists()
    assert (folder / "adapter_config.json").exists() != merge
    generates(folder)


@pytest.mark.filterwarnings("ignore")
def generates(folder: Path) -> None:
    """As users load it: transformers looks for the base model of an adapter by itself."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer("### Instruction:\nWhat", return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=4, do_sample=False)
    assert out.shape[1] > ids["input_ids"].shape[1]
