"""Checkpoint → Hugging Face folder: the same weights, whole, sealed, or a clear refusal."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tunewright.consolidate import consolidate, main
from tunewright.contract import rundir
from tunewright.contract.failures import NonFinite, TunewrightError, UserError
from tunewright.contract.rundir import RunDir
from tunewright.modelfolder import check_tokens, compare_converted, expected_tensors, read_header

EMBEDDING = "model.embed_tokens.weight"
TWO_RANKS = """
import sys, torch, torch.distributed as dist
from pathlib import Path
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
weights, folder = load_file(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
model = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in weights.items()}
optimizer = {name: {"exp_avg": value} for name, value in model.items()}
dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
dist.barrier()  # a rank that leaves while another is at work takes it down
dist.destroy_process_group()
"""


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for path in folder.glob("*.safetensors") for n, t in load_file(path).items()}


def assert_cast(found: dict[str, Any], original: dict[str, Any], dtype: torch.dtype) -> None:
    assert found.keys() == original.keys()
    assert all(torch.equal(found[n], original[n].to(dtype)) for n in original)


@pytest.fixture
def folder_of_a_script(run: RunDir, tiny_model: Path) -> Path:
    shutil.copytree(tiny_model, run.model)
    return run.model


def test_a_checkpoint_becomes_a_sealed_model(run, make_checkpoint, tiny_model, tiny_weights):
    make_checkpoint(run, 10, {n: t * 0 for n, t in tiny_weights.items()})
    make_checkpoint(run, 20)
    outcome = consolidate(run)
    assert outcome == {
        "model": str(run.model),
        "reason": "built from checkpoint step 20",
        "source": "checkpoint step 20",
        "step": 20,
        "parameters": sum(t.numel() for t in tiny_weights.values()),
        "bytes": (run.model / "model.safetensors").stat().st_size,
        "dtype": "bfloat16",
        "shards": 1,
        "warnings": [],
    }
    assert_cast(weights_of(run.model), tiny_weights, torch.bfloat16)
    sealed = rundir.manifest(run.model)
    assert rundir.damage(run.model, sealed) == []
    assert sealed["checks"] == {
        "names_and_shapes": True,
        "finite": True,
        "tied": ["lm_head.weight"],
        "tokenizer": True,
    }
    assert sealed["data_fingerprint"] == "fingerprint-of-rows"
    for name in ("chat_template.jinja", "tokenizer.json", "generation_config.json"):
        assert (run.model / name).read_bytes() == (tiny_model / name).read_bytes()
    assert not list(run.root.glob(".model*"))


def test_transformers_loads_the_folder_and_generates(run, make_checkpoint, tiny_model):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    make_checkpoint(run, save_dtype="float32")
    consolidate(run)
    model = AutoModelForCausalLM.from_pretrained(run.model)
    original = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tokens = AutoTokenizer.from_pretrained(run.model)("hello world", return_tensors="pt")
    with torch.no_grad():
        assert torch.equal(model(**tokens).logits, original(**tokens).logits)
    assert model.generate(**tokens).shape[1] > tokens["input_ids"].shape[1]


def test_mlflow_loads_the_folder_and_predicts(run, make_checkpoint):
    make_checkpoint(run)
    consolidate(run)
    said = in_a_process(
        "import mlflow, sys\n"
        "path = sys.argv[1]\n"
        "pipeline = mlflow.transformers.load_model(path)\n"
        "model = mlflow.pyfunc.load_model(path)\n"
        "example = mlflow.models.Model.load(path).load_input_example(path)\n"
        "print(pipeline.model.dtype, model.metadata.signature.to_dict()['inputs'])\n"
        "print(len(model.predict([example])), pipeline(example)[0]['generated_text'][:4])\n",
        run.model,
    )
    assert said == ['torch.bfloat16 [{"type": "string", "required": true}]', "1 What"]


def in_a_process(code: str, *arguments: object) -> list[str]:
    """The lines a piece of Python prints; MLflow's own warnings stay out of this process."""
    ran = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"},
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


@pytest.mark.rank
def test_shards_of_two_processes_are_put_together(run, tiny_model, tiny_weights):
    from tests.tunewright.conftest import checkpoint_facts, describe_checkpoint

    folder = run.checkpoint(20)
    script = run.root / "two.py"
    script.write_text(TWO_RANKS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ran = subprocess.run(
        [*torchrun, str(script), str(tiny_model / "model.safetensors"), str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr
    assert len(list(folder.glob("*.distcp"))) == 2
    describe_checkpoint(folder, tiny_model)
    rundir.seal(folder, checkpoint_facts(20, tiny_model) | {"world_size": 2})
    outcome = consolidate(run, max_shard_bytes=20_000)
    assert_cast(weights_of(run.model), tiny_weights, torch.bfloat16)
    index = json.loads((run.model / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == outcome["shards"] >= 3
    assert index["metadata"]["total_size"] == 2 * outcome["parameters"]
    assert f"model-00001-of-{outcome['shards']:05d}.safetensors" in os.listdir(run.model)
    assert in_transformers(run.model).keys() >= tiny_weights.keys()


def in_transformers(folder: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    return model.state_dict()


def test_shards_stay_below_the_limit(run, make_checkpoint):
    make_checkpoint(run)
    consolidate(run, max_shard_bytes=8_000)
    # The embedding alone is larger: it has a file of its own.
    sizes = {p.name: p.stat().st_size for p in run.model.glob("*.safetensors")}
    large = [n for n, size in sizes.items() if size > 8_000 + 2_000]
    assert [list(load_file(run.model / n)) for n in large] == [[EMBEDDING]]


def test_a_second_start_verifies_and_a_newer_checkpoint_replaces(
    run, make_checkpoint, tiny_weights
):
    make_checkpoint(run, 10)
    consolidate(run)
    before = {p: p.stat().st_mtime_ns for p in run.model.rglob("*")}
    assert "was sealed before and is whole" in consolidate(run)["reason"]
    assert {p: p.stat().st_mtime_ns for p in run.model.rglob("*")} == before
    make_checkpoint(run, 20, {n: t + 1 for n, t in tiny_weights.items()})
    assert consolidate(run)["step"] == 20
    assert_cast(weights_of(run.model), {n: t + 1 for n, t in tiny_weights.items()}, torch.bfloat16)
    assert sorted(p.name for p in run.root.iterdir()) == ["checkpoints", "model"]


def test_a_damaged_model_folder_is_built_again(run, make_checkpoint, tiny_weights):
    make_checkpoint(run)
    consolidate(run)
    with (run.model / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")
    assert consolidate(run)["reason"] == "built from checkpoint step 20"
    assert_cast(weights_of(run.model), tiny_weights, torch.bfloat16)


def test_other_files_in_the_way_are_kept(run, make_checkpoint):
    make_checkpoint(run)
    run.model.mkdir()
    (run.model / "notes.txt").write_text("mine")
    consolidate(run)
    assert (run.root / "model-of-the-command" / "notes.txt").read_text() == "mine"
    assert rundir.is_sealed(run.model)


def test_tied_weights_stored_twice_are_written_once(run, make_checkpoint, tiny_weights):
    make_checkpoint(run, weights=tiny_weights | {"lm_head.weight": tiny_weights[EMBEDDING].clone()})
    consolidate(run)
    assert weights_of(run.model).keys() == tiny_weights.keys()


def test_tied_weights_that_differ_are_refused(run, make_checkpoint, tiny_weights):
    make_checkpoint(run, weights=tiny_weights | {"lm_head.weight": tiny_weights[EMBEDDING] + 1})
    refused(run, TunewrightError, "lm_head.weight and model.embed_tokens.weight are one tensor")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e5])
def test_a_value_that_is_not_finite_is_refused_by_name(run, make_checkpoint, tiny_weights, bad):
    name = "model.layers.1.mlp.up_proj.weight"
    broken = tiny_weights[name].clone()
    broken[3, 5] = bad
    # 1e5 is a number until it is cast to float16.
    make_checkpoint(run, weights=tiny_weights | {name: broken}, save_dtype="float16")
    refused(run, NonFinite, f"the tensor {name} has 1 values that are not finite")


def test_a_missing_tensor_is_refused_by_name(run, make_checkpoint, tiny_weights):
    name = "model.layers.0.mlp.up_proj.weight"
    make_checkpoint(run, weights={n: t for n, t in tiny_weights.items() if n != name})
    refused(run, TunewrightError, f"the tensor {name} is missing")


def test_a_wrong_shape_is_refused_with_both_shapes(run, make_checkpoint, tiny_weights):
    make_checkpoint(run, weights=tiny_weights | {"model.norm.weight": torch.ones(33)})
    refused(run, TunewrightError, r"model.norm.weight has shape \[33\], .* calls for \[32\]")


def test_a_tensor_of_no_layer_is_refused(run, make_checkpoint, tiny_weights):
    make_checkpoint(run, weights=tiny_weights | {"model.extra": torch.ones(3)})
    refused(run, TunewrightError, "nothing in the model of config.json is called model.extra")


def test_a_checkpoint_that_cannot_be_read_is_named(run, make_checkpoint):
    folder = make_checkpoint(run)
    (folder / ".metadata").write_bytes(b"x" * (folder / ".metadata").stat().st_size)
    refused(run, TunewrightError, "step-00000020 is not a readable checkpoint")


def test_a_padding_token_that_training_made_an_end_token_is_refused(run, make_checkpoint):
    folder = make_checkpoint(run)
    described = folder / "hf" / "generation_config.json"
    described.write_text(json.dumps({"eos_token_id": [1, 2], "pad_token_id": 2}))
    rundir.seal(folder, {k: v for k, v in rundir.manifest(folder).items() if k != "files"})
    refused(
        run, TunewrightError, r"the padding token <pad> \(id 2\) is among the end tokens \[1, 2\]"
    )


def refused(run: RunDir, kind: type[TunewrightError], words: str) -> None:
    with pytest.raises(kind, match=words):
        consolidate(run)
    assert not run.model.exists()
    assert not list(run.root.glob(".model*"))


def test_a_padding_token_that_ends_in_the_base_model_too_is_fine(tmp_path):
    for name in ("base", "tuned"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "generation_config.json").write_text(
            json.dumps({"eos_token_id": [7, 9], "pad_token_id": 9})
        )
    assert check_tokens(tmp_path / "tuned", tmp_path / "base") is None
    assert "is among the end tokens" in check_tokens(tmp_path / "tuned", None)


def test_a_single_end_token_that_pads_is_a_warning(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2, "pad_token_id": 2}))
    assert "harmless" in check_tokens(tmp_path, None)


def test_the_folder_of_a_script_is_checked_and_sealed(run, folder_of_a_script, tiny_weights):
    outcome = consolidate(run)
    assert (outcome["source"], outcome["dtype"], outcome["step"]) == (
        "the command",
        "float32",
        None,
    )
    assert outcome["parameters"] == sum(t.numel() for t in tiny_weights.values())
    sealed = rundir.manifest(run.model)
    assert sealed["kind"] == "model"
    assert {"MLmodel", "requirements.txt", "components/tokenizer/tokenizer.json"} <= sealed[
        "files"
    ].keys()
    assert "was sealed before" in consolidate(run)["reason"]


def test_a_sealed_folder_of_a_script_that_changed_is_refused(run, folder_of_a_script):
    consolidate(run)
    (run.model / "tokenizer.json").write_text("{}")
    with pytest.raises(TunewrightError, match=r"tokenizer\.json has 2 bytes"):
        consolidate(run)


def test_a_script_without_tokenizer_gets_a_warning(run, folder_of_a_script):
    for path in folder_of_a_script.glob("*tok*"):
        path.unlink()
    outcome = consolidate(run)
    assert any("no tokenizer" in warning for warning in outcome["warnings"])
    assert not (run.model / "MLmodel").exists()


def test_a_script_that_left_nan_is_refused(run, folder_of_a_script, tiny_weights):
    broken = tiny_weights | {"model.norm.weight": torch.full((32,), float("nan"))}
    save_file(broken, folder_of_a_script / "model.safetensors", {"format": "pt"})
    with pytest.raises(NonFinite, match=r"model.norm.weight has 32 values"):
        consolidate(run)
    assert not rundir.is_sealed(run.model)


def test_weights_cut_short_are_refused(run, folder_of_a_script):
    path = folder_of_a_script / "model.safetensors"
    os.truncate(path, path.stat().st_size - 10)
    with pytest.raises(TunewrightError, match="is not a whole safetensors file: it was cut short"):
        consolidate(run)


def test_pickled_weights_are_refused(run, folder_of_a_script, tiny_weights):
    (folder_of_a_script / "model.safetensors").unlink()
    torch.save(tiny_weights, folder_of_a_script / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model.bin: .*save_pretrained\(folder, safe_ser"):
        consolidate(run)


def test_names_that_loading_converts_are_accepted_by_their_count(folder_of_a_script, tiny_weights):
    expected = expected_tensors(folder_of_a_script)
    renamed = {n.replace("mlp", "experts"): t for n, t in tiny_weights.items()}
    save_file(renamed, folder_of_a_script / "model.safetensors", {"format": "pt"})
    assert compare_converted(read_header(folder_of_a_script), expected, folder_of_a_script) is False
    renamed.popitem()
    save_file(renamed, folder_of_a_script / "model.safetensors", {"format": "pt"})
    with pytest.raises(TunewrightError, match="is missing"):
        compare_converted(read_header(folder_of_a_script), expected, folder_of_a_script)


def test_an_adapter_is_sealed_as_it_is(run):
    run.model.mkdir()
    facts = {"base_model_name_or_path": "some/model", "peft_type": "LORA"}
    (run.model / "adapter_config.json").write_text(json.dumps(facts))
    save_file({"a.lora_A.weight": torch.ones(2, 4)}, run.model / "adapter_model.safetensors")
    outcome = consolidate(run)
    assert outcome["parameters"] == 8
    sealed = rundir.manifest(run.model)
    assert sealed["kind"] == "adapter"
    assert sealed["base_model"] == {"name": "some/model", "revision": None}


def test_a_folder_that_cannot_be_written_is_said(run, make_checkpoint):
    make_checkpoint(run)
    (run.root / ".model.draft").write_text("in the way")
    with pytest.raises(TunewrightError, match=r"model could not be written: File exists"):
        consolidate(run)
    assert not run.model.exists()


def test_nothing_left_is_a_reason_and_no_error(run, tmp_path):
    result = tmp_path / "result.json"
    main(["--run", str(run.root), "--result", str(result)])
    reason = f"the command left no checkpoint and no Hugging Face folder in {run.model}"
    assert json.loads(result.read_text()) == {"model": None, "reason": reason}
    (run.model / "checkpoint-5").mkdir(parents=True)
    (run.model / "checkpoint-5" / "config.json").write_text("{}")
    assert "there is one in checkpoint-5/ below it" in consolidate(run)["reason"]


def test_killed_while_building_it_can_be_started_again(
    run, make_checkpoint, tiny_weights, tmp_path
):
    """Kills the program as soon as the draft appears, and once more a little later."""
    make_checkpoint(run)
    draft = run.root / ".model.draft"
    command = [sys.executable, "-m", "tunewright.consolidate", "--run", str(run.root)]
    command += ["--result", str(tmp_path / "result.json")]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        while not draft.exists() and process.poll() is None:
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert draft.exists()
    assert not run.model.exists()
    consolidate(run)
    assert not draft.exists()
    assert_cast(weights_of(run.model), tiny_weights, torch.bfloat16)


def test_killed_between_the_two_moves_it_can_be_started_again(run, make_checkpoint, tiny_weights):
    make_checkpoint(run)
    consolidate(run)
    os.replace(run.model, run.root / ".model.replaced")
    assert consolidate(run)["reason"] == "built from checkpoint step 20"
    assert sorted(p.name for p in run.root.iterdir()) == ["checkpoints", "model"]


@pytest.fixture
def on_a_volume(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    """Turns the run's folder into a mount that refuses to move files and to write into their
    middle; returns the local disk's folder."""

    def turn() -> Path:
        local = tmp_path / "local"
        local.mkdir()
        monkeypatch.setenv("TUNEWRIGHT_WHOLE_FILES", str(run.root))
        monkeypatch.setattr(tempfile, "tempdir", str(local))
        for name in ("pwrite", "truncate", "ftruncate", "replace", "rename"):
            monkeypatch.setattr(os, name, refusing(getattr(os, name), run.root))
        return local

    return turn


def refusing(call: Any, volume: Path) -> Any:
    def refuse(target: Any, *rest: Any) -> Any:
        is_file = isinstance(target, int)
        paths = [os.readlink(f"/proc/self/fd/{target}")] if is_file else [target, *rest]
        if any(Path(p).is_relative_to(volume) for p in paths if isinstance(p, str | Path)):
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), paths[0])
        return call(target, *rest)

    return refuse


def test_a_volume_gets_whole_files_and_its_seal_last(
    on_a_volume, run, make_checkpoint, tiny_weights
):
    make_checkpoint(run)
    local = on_a_volume()
    outcome = consolidate(run, max_shard_bytes=20_000)
    assert outcome["model"] == str(run.model)
    assert outcome["shards"] >= 3
    assert_cast(weights_of(run.model), tiny_weights, torch.bfloat16)
    assert rundir.damage(run.model, rundir.manifest(run.model)) == []
    written = {p.name: p.stat().st_mtime_ns for p in run.model.rglob("*") if p.is_file()}
    assert max(written, key=lambda name: written[name]) == rundir.MANIFEST
    assert ".half-copied" not in written
    assert list(local.iterdir()) == []
    assert "was sealed before" in consolidate(run)["reason"]


def test_half_a_copy_on_a_volume_is_replaced_and_other_files_are_kept(
    on_a_volume, run, make_checkpoint
):
    make_checkpoint(run)
    on_a_volume()
    consolidate(run)
    (run.model / rundir.MANIFEST).unlink()
    (run.model / ".half-copied").touch()
    assert consolidate(run)["reason"] == "built from checkpoint step 20"
    assert sorted(p.name for p in run.root.iterdir()) == ["checkpoints", "model"]
    (run.model / rundir.MANIFEST).unlink()
    (run.model / "notes.txt").write_text("mine")
    consolidate(run)
    assert (run.root / "model-of-the-command" / "notes.txt").read_text() == "mine"
    assert not (run.model / "notes.txt").exists()


def test_a_folder_on_a_volume_is_sealed_without_moving(on_a_volume, run, folder_of_a_script):
    on_a_volume()
    assert consolidate(run)["source"] == "the command"
    assert rundir.is_sealed(run.model)


def test_which_places_take_whole_files_only(tmp_path, monkeypatch):
    assert not rundir.needs_staging(tmp_path / "run")
    monkeypatch.setenv("TUNEWRIGHT_WHOLE_FILES", os.pathsep.join(["/gcs", str(tmp_path / "a")]))
    assert rundir.needs_staging(tmp_path / "a" / "run")
    assert rundir.needs_staging(Path("/gcs/runs"))
    assert not rundir.needs_staging(tmp_path / "ab")
    # A folder of that name that nothing is mounted at, as on a laptop, is an ordinary place.
    assert not rundir.needs_staging(Path("/Volumes/no/such/volume/runs"))
