"""The recipe as one process: what it computes, says, writes and refuses."""

from __future__ import annotations

import json
import math
import re
import resource
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from torch.distributed import HashStore
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from tunewright.contract import rundir
from tunewright.contract.failures import DataError, NonFinite, UserError, reported
from tunewright.contract.rundir import RunDir
from tunewright.contract.settings import FsdpSettings
from tunewright.training.base import find_base
from tunewright.training.batches import Loader
from tunewright.training.model import build
from tunewright.training.optimizer import adamw
from tunewright.training.plan import Plan
from tunewright.training.step import Trainer
from tunewright.training.timing import Clock
from tunewright.training.world import World

LLAMA = Path(__file__).parents[2] / "data" / "models" / "llama"

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The output folder of one run of 12 steps, made by the first test that asks."""
    return tmp_path_factory.mktemp("finished") / "out"


@pytest.fixture
def straight(finished, here, hyperparameters, tools):
    if not finished.exists():
        here(hyperparameters(), finished)
    return tools.read_events(finished / "events.jsonl")


def test_it_learns_and_says_so(straight):
    by_kind = {}
    for event in straight:
        by_kind.setdefault(event["event"], []).append(event)
    assert [e["step"] for e in by_kind["step"]] == list(range(1, 13))
    assert [e["step"] for e in by_kind["eval"]] == [0, 6, 12]
    assert by_kind["eval"][0]["loss"] == pytest.approx(math.log(64), abs=0.2)
    assert by_kind["eval"][2]["loss"] < 0.8 * by_kind["eval"][0]["loss"]
    assert [e["step"] for e in by_kind["checkpoint"]] == [4, 8, 12]
    assert straight[-1]["event"] == "end"


def test_the_start_says_what_runs_and_the_end_what_it_took(straight, store, model_folder):
    start, end, steps = straight[0], straight[-1], [e for e in straight if e["event"] == "step"]
    assert start["event"] == "start"
    assert (start["step"], start["steps"], start["world_size"]) == (0, 12, 1)
    assert start["fast_paths"] == {
        "attention": "sdpa mask",
        "loss": "chunked",
        "compile": False,
        "precision": "fp32",
        "recomputation": False,
        "tokens_per_device": 32,
        "weights_kept_whole": True,
    }
    assert start["global_batch_tokens"] == 256
    assert start["base_model"] == {"name": str(model_folder), "revision": None}
    assert start["data"] == {
        "fingerprint": "counting",
        "tokens": store.train.tokens,
        "supervised_tokens": store.train.supervised_tokens,
    }
    assert end["loss"] == steps[-1]["loss"]
    assert end["tokens"] == sum(e["tokens"] for e in steps)
    assert end["eval_loss"] == [e for e in straight if e["event"] == "eval"][-1]["loss"]
    assert end["tokens_per_second_per_gpu"] > 0
    assert end["model_tflops_per_gpu"] is None
    assert 0 < end["ceiling_share"] < 1
    phases = {"start_up", "warm_up", "data", "forward_backward", "optimizer", "checkpoint"}
    assert end["seconds_by_phase"].keys() == phases | {"evaluation", "other"}
    assert 0.05 < end["peak_memory_gib"] < 20
    assert {"lr", "grad_norm", "seconds", "supervised_tokens"} <= steps[0].keys()


def test_the_first_epoch_sees_every_token_once(straight, store):
    epoch = [e for e in straight if e["event"] == "step"][: math.ceil(len(store.train) / 8)]
    assert sum(e["tokens"] for e in epoch) == store.train.tokens
    assert sum(e["supervised_tokens"] for e in epoch) == store.train.supervised_tokens


def test_checkpoints_are_sealed_pruned_and_complete(straight, finished, model_folder):
    run = RunDir(finished)
    assert [step for step, _ in rundir.sealed_checkpoints(run.checkpoints)] == [8, 12]
    folder = run.checkpoint(12)
    facts = rundir.manifest(folder)
    assert not rundir.damage(folder, facts)
    assert facts["kind"] == "checkpoint"
    assert facts["finished"] is True
    assert rundir.manifest(run.checkpoint(8))["finished"] is False
    assert (facts["world_size"], facts["fingerprint"]) == (1, "counting")
    assert facts["save_dtype"] == "float32"
    assert facts["tied"] == {"lm_head.weight": "model.embed_tokens.weight"}
    assert facts["base_model"] == {"name": str(model_folder), "revision": None}
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (folder / "hf" / name).read_bytes() == (model_folder / name).read_bytes()
    assert json.loads((folder / "hf" / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_alone_makes_the_model(straight, finished, store):
    """Its `model.` tensors and hf/ folder give transformers the loss that was measured."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = RunDir(finished).checkpoint(12)
    tensors = FileSystemReader(folder).read_metadata().state_dict_metadata
    names = [key.removeprefix("model.") for key in tensors if key.startswith("model.")]
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "hf"))
    assert set(names) == dict(model.named_parameters()).keys()
    weights = {f"model.{name}": model.get_parameter(name).detach() for name in names}
    load(weights, checkpoint_id=folder, no_dist=True)
    model.requires_grad_(False)

    total, count = 0.0, 0
    for pack in store.eval:
        for ids, labels in documents_of(pack):
            logits = model(ids[None]).logits[0, :-1][labels[1:]]
            total += torch.nn.functional.cross_entropy(logits, ids[1:][labels[1:]], reduction="sum")
            count += int(labels.sum())
    assert float(total) / count == pytest.approx(straight[-1]["eval_loss"], rel=1e-6)


def documents_of(pack):
    lengths = pack.lengths.tolist()
    ids = torch.from_numpy(pack.input_ids).split(lengths)
    return zip(ids, torch.from_numpy(pack.supervised).split(lengths), strict=True)


def test_stdout_has_a_line_for_each_step(here, hyperparameters, tmp_path, capsys):
    here(hyperparameters(max_steps=3, logging_steps=2), tmp_path / "out")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "attempt 1 starts at step 0: no sealed checkpoint"
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == ["2/3", "3/3"]
    figures = ("loss", "lr", "grad", "tokens/s", "% of ceiling", "GiB", "left")
    assert all(figure in line for line in steps for figure in figures)
    assert any(line.startswith("where time went") for line in lines)


def test_steps_are_traced_on_request_and_left_out_of_the_speed(here, hyperparameters, tmp_path):
    events = here(hyperparameters(max_steps=4, profile_steps="2-2"), tmp_path / "out")
    assert (tmp_path / "out" / "trace-steps-2-2.json.gz").is_file()
    assert [e["counts"] for e in events if e["event"] == "step"] == [False, False, True, True]


@pytest.mark.parametrize("packs", [2, 4, 8])
def test_micro_batches_change_neither_loss_nor_gradient(
    packs, straight, here, hyperparameters, tmp_path, tools
):
    found = here(hyperparameters(tokens_per_device=packs * 32), tmp_path / "out")
    for (step, loss, norm), expected in zip(
        tools.losses(found), tools.losses(straight), strict=True
    ):
        assert (step, loss, norm) == pytest.approx(expected, rel=1e-5)


def test_a_finished_run_has_nothing_to_train(straight, finished, here, hyperparameters, capsys):
    before = rundir.manifest(RunDir(finished).checkpoint(12))
    events = here(hyperparameters(), finished)[len(straight) :]
    assert [e["event"] for e in events] == ["start", "end"]
    assert (events[0]["step"], events[1]["step"]) == (12, 12)
    assert events[1]["eval_loss"] == straight[-1]["eval_loss"]
    assert "nothing to train after step 12" in capsys.readouterr().out
    assert rundir.manifest(RunDir(finished).checkpoint(12)) == before
    (finished / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in straight))


@pytest.fixture
def interrupted(straight, finished, tmp_path):
    """A copy of the finished run as it was before its last checkpoint was written."""
    run = RunDir(tmp_path / "interrupted")
    shutil.copytree(RunDir(finished).checkpoint(8), run.checkpoint(8))
    return run


def test_a_resumed_run_equals_the_straight_one_bit_for_bit(
    interrupted, straight, here, hyperparameters, tools, capsys
):
    events = here(hyperparameters(), interrupted.root)
    assert tools.losses(events) == tools.losses(straight)[8:]
    assert events[-1]["eval_loss"] == straight[-1]["eval_loss"]
    assert events[-1]["tokens"] == straight[-1]["tokens"]
    said = capsys.readouterr().out
    assert f"attempt 1 resumes from step 8 ({interrupted.checkpoint(8)})" in said


@pytest.mark.parametrize("harm", ["unsealed", "torn", "changed"])
def test_a_checkpoint_that_cannot_be_trusted_is_passed_over(
    harm, interrupted, finished, straight, here, hyperparameters, tools, capsys
):
    newest = interrupted.checkpoint(12)
    shutil.copytree(RunDir(finished).checkpoint(12), newest)
    weights = newest / "__0_0.distcp"
    if harm == "unsealed":
        (newest / rundir.MANIFEST).unlink()
    elif harm == "torn":
        weights.write_bytes(weights.read_bytes()[:-100])
    else:
        weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    events = here(hyperparameters(), interrupted.root)
    assert tools.losses(events) == tools.losses(straight)[8:]
    assert not rundir.damage(newest, rundir.manifest(newest))
    said = capsys.readouterr().out
    assert ("skipped a damaged checkpoint" in said) == (harm == "changed")


def test_a_checkpoint_of_other_settings_is_refused(interrupted, here, hyperparameters):
    with pytest.raises(UserError, match=r"learning_rate was 0\.01 and is 0\.02"):
        here(hyperparameters(learning_rate=0.02), interrupted.root)
    assert interrupted.checkpoint(8).is_dir()


def test_a_checkpoint_of_other_data_is_refused(interrupted, here, hyperparameters, tools, tmp_path):
    other = tools.make_store(tmp_path / "tokens", "other")
    with pytest.raises(UserError, match="data was 'counting' and is 'other'"):
        here(hyperparameters(tokens_path=str(other.path)), interrupted.root)


def test_settings_that_leave_the_model_alone_may_change(interrupted, here, hyperparameters):
    changed = hyperparameters(save_steps=1, eval_steps=1, logging_steps=5, save_total_limit=1)
    here(changed, interrupted.root)
    assert [s for s, _ in rundir.sealed_checkpoints(interrupted.checkpoints)] == [12]


def test_a_gradient_that_is_no_number_ends_the_run(here, hyperparameters, tmp_path, monkeypatch):
    out, failures = tmp_path / "out", tmp_path / "failures"
    failures.mkdir()
    monkeypatch.setenv("TUNEWRIGHT_FAILURE_DIR", str(failures))
    wild = hyperparameters(learning_rate=1e30, save_steps=1, warmup_steps=0, eval_steps=100)
    with pytest.raises(SystemExit, match="1"), reported():
        here(wild, out)
    failure = json.loads((failures / "rank-0.json").read_text())
    assert failure["class"] == "nonfinite"
    assert re.match(r"step 2: loss .*, gradient norm nan; .* Rows \d+, ", failure["message"])
    assert [s for s, _ in rundir.sealed_checkpoints(RunDir(out).checkpoints)] == [1]


def test_what_is_no_number_does_not_touch_the_weights(store, model_folder):
    settings = FsdpSettings(
        model_name=str(model_folder), dataset_name="unused", init="random", weight_decay=0.1
    )
    world = World(0, 1, CPU, HashStore())
    with world.group():
        model = build(find_base(settings), settings, world)
        plan = Plan(packs=len(store.train), packs_per_step=2, steps=9, seed=0)
        loader = Loader(store.train, plan, 1, world, None)
        trainer = Trainer(model, adamw(model.parameters, settings), loader, Clock(CPU), 1.0)
        broken = model.parameters["model.norm.weight"].detach().to_local()
        torch.nn.init.constant_(broken, math.nan)
        before = {name: p.full_tensor().clone() for name, p in model.parameters.items()}
        with loader, pytest.raises(NonFinite, match="step 3: loss nan") as stopped:
            trainer.take(3, rate=0.1)
        after = {name: p.full_tensor() for name, p in model.parameters.items()}
    assert all(torch.equal(before[n], after[n]) or n == "model.norm.weight" for n in before)
    first = min(plan.packs_of(3))
    assert f"Rows {store.train.source_rows(first)[0]}, " in str(stopped.value)


def test_a_step_without_labels_changes_nothing(here, hyperparameters, tools, tmp_path, capsys):
    unsupervised = tools.make_store(tmp_path / "tokens", "silent", supervise=False)
    chosen = hyperparameters(tokens_path=str(unsupervised.path), max_steps=2)
    events = here(chosen, tmp_path / "out")
    steps = [e for e in events if e["event"] == "step"]
    assert [(e["loss"], e["supervised_tokens"]) for e in steps] == [(None, 0)] * 2
    first, last = [e["loss"] for e in events if e["event"] == "eval"]
    assert first == last
    assert "step 2/2  no supervised tokens, skipped" in capsys.readouterr().out


@pytest.fixture
def small_files():
    """Files above 200 kB cannot be written, as on a volume that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_checkpoint_that_does_not_fit_is_explained_and_not_trusted(
    here, hyperparameters, tmp_path, small_files
):
    with pytest.raises(UserError, match=r"cannot write the checkpoint .*free some space"):
        here(hyperparameters(), tmp_path / "out")
    assert rundir.sealed_checkpoints(RunDir(tmp_path / "out").checkpoints) == []


def test_a_place_that_cannot_be_written_is_explained(here, hyperparameters, tmp_path):
    (tmp_path / "out").write_text("a file")
    with pytest.raises(UserError, match="set output_dir to a folder that can be written"):
        here(hyperparameters(), tmp_path / "out")


def test_packs_of_another_size_are_refused(here, hyperparameters, tmp_path):
    other = hyperparameters(pack_tokens=64, global_batch_tokens=256)
    with pytest.raises(UserError, match=r"pack_tokens is 64, but the packs .* made with 32"):
        here(other, tmp_path / "out")


def test_tokens_that_are_not_sealed_are_refused(here, hyperparameters, tmp_path):
    with pytest.raises(DataError, match="not a sealed token store"):
        here(hyperparameters(tokens_path=str(tmp_path)), tmp_path / "out")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "is not YAML"),
        ("- a", "must hold a mapping"),
        ("model_name: ./m\ndataset_name: d\nlearning_rat: 1\n", "did you mean learning_rate"),
    ],
)
def test_bad_hyperparameters_are_explained(text, message, tmp_path):
    from tunewright.recipes import fsdp

    path = tmp_path / "h.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        fsdp.main([str(path)])


def test_without_hyperparameters_both_ways_are_named(monkeypatch):
    from tunewright.recipes import fsdp

    monkeypatch.delenv("HYPERPARAMETERS_PATH", raising=False)
    with pytest.raises(UserError, match="name a YAML file, or set HYPERPARAMETERS_PATH"):
        fsdp.main([])


def test_without_tokens_it_tokenizes_first(here, tmp_path):
    rows = [{"instruction": f"Say it {n} times", "output": "one " * n} for n in range(1, 30)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    parameters = tmp_path / "h.yaml"
    parameters.write_text(
        yaml.safe_dump(
            {
                "model_name": str(LLAMA),
                "init": "random",
                "dataset_name": str(tmp_path / "rows.json"),
                "pack_tokens": 128,
                "max_length": 128,
                "global_batch_tokens": 256,
                "max_steps": 1,
            }
        )
    )
    events = here(parameters, tmp_path / "out")
    assert events[-1]["step"] == 1
    stores = [p.name for p in (tmp_path / "out" / "tokens").glob("[!.]*")]
    assert stores == [events[0]["data"]["fingerprint"]]
