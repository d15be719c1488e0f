"""Adapters as one process: what trains, what does not, what is saved and merged."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed import HashStore

from tunewright.consolidate import consolidate
from tunewright.contract import rundir
from tunewright.contract.failures import DEADLINE_VARIABLE, NonFinite, OutOfTime, UserError
from tunewright.contract.rundir import RunDir
from tunewright.contract.settings import FsdpSettings, LoraSettings
from tunewright.training import model as sharded
from tunewright.training.base import find_base
from tunewright.training.batches import Loader
from tunewright.training.lora import model as adapted
from tunewright.training.lora.adapters import adapters
from tunewright.training.optimizer import adamw
from tunewright.training.plan import Plan
from tunewright.training.step import Trainer
from tunewright.training.tensorfiles import open_folder
from tunewright.training.timing import Clock
from tunewright.training.weights import saved_tensors
from tunewright.training.world import World

TWIN = Path(__file__).parents[2] / "data" / "models" / "gpt-oss"
CPU = torch.device("cpu")
KINDS = ("llama", "qwen2", "gpt_oss")
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}


# What PEFT says when these tests load an adapter with it.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The following rank_pattern keys:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]


@pytest.fixture
def alone():
    world = World(0, 1, CPU, HashStore())
    with world.group():
        yield world


def folder_of(place: Path, kind: str) -> Path:
    from transformers import AutoConfig

    more = EXPERTS if kind == "gpt_oss" else {}
    AutoConfig.for_model(kind, **SMALL, **more).save_pretrained(place)
    return place


def settings_of(folder: Path, **more) -> LoraSettings:
    return LoraSettings(model_name=str(folder), dataset_name="unused", init="random", **more)


def taken(model, store, settings, world, steps=2):
    """The model after some steps at a rate that nothing withstands."""
    plan = Plan(packs=len(store.train), packs_per_step=8, steps=steps, seed=0)
    loader = Loader(store.train, plan, 1, world, None)
    trainer = Trainer(model, adamw(model.parameters, settings), loader, Clock(CPU), 1.0)
    with loader:
        for step in range(1, steps + 1):
            trainer.take(step, rate=0.01)


def whole(tensors):
    full = {n: getattr(t, "full_tensor", lambda t=t: t)() for n, t in tensors.items()}
    return {name: tensor.detach().clone() for name, tensor in full.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sharding", ["fsdp", "ddp"])
def test_every_linear_layer_trains_and_nothing_else(kind, sharding, alone, store, tmp_path):
    settings = settings_of(folder_of(tmp_path, kind), sharding=sharding, lora_r=4)
    model = adapted.build(find_base(settings), settings, alone, random=True)
    frozen, begun = whole(saved_tensors(model.module)), whole(model.parameters)
    taken(model, store, settings, alone)
    after = whole(saved_tensors(model.module))
    assert all(torch.equal(frozen[name], after[name]) for name in frozen)
    trained = whole(model.parameters)
    assert [name for name in begun if torch.equal(begun[name], trained[name])] == []
    plain = sharded.skeleton(sharded.read_config(find_base(settings)), None)
    linear = {f"{n}.weight" for n, m in plain.named_modules() if isinstance(m, nn.Linear)}
    stacked = {name for name, tensor in plain.named_parameters() if tensor.ndim == 3}
    assert bool(stacked) == (kind == "gpt_oss")
    found = {adapter.target for adapter in adapters(model.module)}
    assert found == (linear | stacked) - {"lm_head.weight"}


def test_layers_gathered_one_at_a_time_train_the_same(alone, store, tmp_path, monkeypatch):
    settings = settings_of(folder_of(tmp_path, "gpt_oss"), sharding="fsdp")

    def trained():
        model = adapted.build(find_base(settings), settings, alone, random=True)
        taken(model, store, settings, alone)
        return model, whole(model.parameters)

    ahead, expected = trained()
    monkeypatch.setattr(adapted, "_OF_DEVICE", 0.0)
    singly, found = trained()
    group = [m.layers[0]._get_fsdp_state()._fsdp_param_group for m in (ahead, singly)]
    assert [g.unshard_async_op for g in group] == [False, True]
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("kind", KINDS)
def test_random_weights_are_those_of_the_recipe_fsdp(kind, alone, tmp_path):
    settings = settings_of(folder_of(tmp_path, kind), sharding="fsdp")
    base = find_base(settings)
    ours = adapted.build(base, settings, alone, random=True)
    plain = FsdpSettings(model_name=str(tmp_path), dataset_name="unused", init="random")
    theirs = whole(saved_tensors(sharded.build(base, plain, alone).module))
    frozen = whole(saved_tensors(ours.module))
    assert frozen.keys() == theirs.keys()
    assert all(torch.equal(frozen[name], theirs[name]) for name in theirs)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The output folder of one run of 12 steps, made by the first test that asks."""
    return tmp_path_factory.mktemp("finished") / "out"


@pytest.fixture
def parameters(hyperparameters):
    def write(**more):
        return hyperparameters(**{"model_name": str(TWIN), "lora_r": 4} | more)

    return write


@pytest.fixture
def straight(finished, here, parameters, tools):
    if not finished.exists():
        here(parameters(), finished, "lora")
    return tools.read_events(finished / "events.jsonl")


def first_evaluation(events) -> float:
    return next(event["loss"] for event in events if event["event"] == "eval")


def test_the_first_loss_is_that_of_the_recipe_fsdp(
    straight, here, hyperparameters, tools, tmp_path
):
    plain = here(hyperparameters(model_name=str(TWIN), max_steps=1), tmp_path)
    firsts = [tools.losses(events)[0][1] for events in (straight, plain)]
    evals = [first_evaluation(events) for events in (straight, plain)]
    assert firsts[0] == pytest.approx(firsts[1], rel=1e-5)
    assert evals[0] == pytest.approx(evals[1], rel=1e-5)


def test_it_learns_and_says_what_it_did(straight, tools):
    steps = tools.losses(straight)
    assert [step for step, _, _ in steps] == list(range(1, 13))
    assert steps[-1][1] < steps[0][1] - 0.5
    start, end = straight[0], straight[-1]
    assert start["fast_paths"]["loss"] == "chunked"
    assert start["fast_paths"]["attention"] == "eager mask"
    assert 0 < start["adapter_parameters"] < start["parameters"]
    assert end["event"] == "end"
    assert end["eval_loss"] < first_evaluation(straight)


def test_a_resumed_run_equals_the_straight_one_bit_for_bit(
    straight, finished, here, parameters, tools, tmp_path, capsys
):
    run = RunDir(tmp_path / "interrupted")
    shutil.copytree(RunDir(finished).checkpoint(8), run.checkpoint(8))
    shutil.copytree(RunDir(finished).base, run.base)
    events = here(parameters(), run.root, "lora")
    assert tools.losses(events) == tools.losses(straight)[8:]
    assert events[-1]["eval_loss"] == straight[-1]["eval_loss"]
    assert f"attempt 1 resumes from step 8 ({run.checkpoint(8)})" in capsys.readouterr().out


def test_another_rank_is_another_training(straight, finished, here, parameters, tmp_path):
    run = RunDir(tmp_path / "other")
    shutil.copytree(RunDir(finished).checkpoint(8), run.checkpoint(8))
    with pytest.raises(UserError, match="lora_r was 4 and is 8"):
        here(parameters(lora_r=8), run.root, "lora")


def test_a_finished_run_has_nothing_left_to_train(straight, finished, here, parameters, tmp_path):
    run = RunDir(tmp_path / "done")
    shutil.copytree(finished, run.root)
    (run.root / "events.jsonl").unlink()
    events = here(parameters(), run.root, "lora")
    assert [event["event"] for event in events] == ["start", "end"]


def test_checkpoints_hold_adapters_alone(straight, finished):
    facts = rundir.manifest(RunDir(finished).checkpoint(12))
    weights = sum(f.stat().st_size for f in RunDir(finished).checkpoint(12).glob("*.distcp"))
    assert facts["adapter"]["parameters"] == straight[0]["adapter_parameters"]
    assert weights < 20 * facts["adapter"]["parameters"] + 200_000
    assert rundir.damage(RunDir(finished).base, rundir.manifest(RunDir(finished).base)) == []


@pytest.fixture
def exported(straight, finished, tmp_path):
    """The same run's model folder, as an adapter and merged."""

    def export(merge: bool) -> RunDir:
        run = RunDir(tmp_path / f"merge-{merge}")
        shutil.copytree(finished, run.root)
        newest = run.checkpoint(12)
        facts = rundir.manifest(newest)
        facts["adapter"]["merge"] = merge
        (newest / rundir.MANIFEST).unlink()
        described = newest / "hf" / "adapter_config.json"
        described.write_text(described.read_text().replace(str(finished), str(run.root)))
        rundir.seal(newest, {k: v for k, v in facts.items() if k != "files"})
        assert consolidate(run)["model"] == str(run.model)
        return run

    return export


def logits_of(model) -> torch.Tensor:
    ids = torch.arange(3, 51).reshape(2, 24)
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


def test_merged_is_base_and_adapter(exported):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run, merged = exported(False), exported(True)
    assert rundir.manifest(run.model)["kind"] == "adapter"
    base = AutoModelForCausalLM.from_pretrained(run.base, dtype=torch.float32)
    without = logits_of(base)
    expected = logits_of(PeftModel.from_pretrained(base, run.model))
    assert (expected - without).abs().max() > 0.1
    whole_model = AutoModelForCausalLM.from_pretrained(merged.model, dtype=torch.float32)
    assert torch.allclose(logits_of(whole_model), expected, atol=1e-5)
    facts = rundir.manifest(merged.model)
    assert facts["kind"] == "model"
    assert not (merged.model / "adapter_config.json").exists()
    out = whole_model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=4, do_sample=False)
    assert out.shape[1] > 3


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_merging_linear_layers_larger_than_a_piece(kind, here, parameters, tmp_path):
    from peft import PeftModel
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path / "base"
    changed = SMALL | {"intermediate_size": 40_000, "tie_word_embeddings": kind == "qwen2"}
    AutoConfig.for_model(kind, **changed).save_pretrained(folder)
    run = RunDir(tmp_path / "out")
    chosen = parameters(model_name=str(folder), max_steps=2, eval_steps=9, merge=True)
    here(chosen, run.root, "lora")
    consolidate(run)
    merged = logits_of(AutoModelForCausalLM.from_pretrained(run.model, dtype=torch.float32))
    base = AutoModelForCausalLM.from_pretrained(run.base, dtype=torch.float32)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    _save_adapter(run.checkpoint(2), adapter)
    assert torch.allclose(merged, logits_of(PeftModel.from_pretrained(base, adapter)), atol=1e-5)


def _save_adapter(checkpoint: Path, folder: Path) -> None:
    from tunewright.sharded import ShardedModel

    shutil.copyfile(checkpoint / "hf" / "adapter_config.json", folder / "adapter_config.json")
    with ShardedModel(checkpoint) as found:
        tensors = {entry.name: found.load(entry) for entry in found.entries(torch.float32)}
    save_file(tensors, folder / "adapter_model.safetensors")


def packed_twin(folder: Path) -> Path:
    """The twin with its experts packed as gpt-oss has them, and other weights from a seed."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(TWIN)
    torch.manual_seed(0)
    tensors = AutoModelForCausalLM.from_config(config, dtype=torch.float32).state_dict()
    for name in [name for name, tensor in tensors.items() if tensor.ndim == 3]:
        experts, width, rows = tensors.pop(name).shape
        shape = (experts, rows, width // 32, 16)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, shape, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(118, 124, shape[:-1], dtype=torch.uint8)
    shutil.copytree(TWIN, folder)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    return folder


def test_packed_experts_are_read_as_transformers_reads_them(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    folder = packed_twin(tmp_path / "packed")
    raw, found = load_file(folder / "model.safetensors"), open_folder(folder)
    names = [n.removesuffix("_blocks") for n in raw if n.endswith("_blocks")]
    assert len(names) == 4
    for name in names:
        expected = convert_moe_packed_tensors(raw[f"{name}_blocks"], raw[f"{name}_scales"])
        assert found.shapes()[name] == tuple(expected.shape)
        assert torch.equal(found.tensor(name), expected)
        assert torch.equal(found.rows(name, 1, 3), expected[1:3])


def test_packed_experts_train_and_merge(here, parameters, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = packed_twin(tmp_path / "packed")
    run = RunDir(tmp_path / "out")
    chosen = parameters(
        model_name=str(folder), init="pretrained", merge=True, max_steps=1, eval_steps=9,
        sharding="fsdp",
    )  # fmt: skip
    events = here(chosen, run.root, "lora")
    assert events[-1]["step"] == 1
    assert not run.base.exists()
    outcome = consolidate(run)
    assert outcome["parameters"] == events[0]["parameters"] - events[0]["adapter_parameters"]
    config = AutoConfig.from_pretrained(run.model)
    assert getattr(config, "quantization_config", None) is None
    merged = AutoModelForCausalLM.from_pretrained(run.model, dtype=torch.float32).state_dict()
    unpacked = open_folder(folder)
    assert torch.equal(merged["lm_head.weight"], unpacked.tensor("lm_head.weight"))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    change = (merged[name] - unpacked.tensor(name).float()).abs().max()
    assert 0 < change < 0.1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_dropout": 0.1}, r"lora_dropout: .*mlp.experts.* set it to 0"),
        ({"lora_target_modules": ["nowhere"]}, "lora_target_modules: .*nowhere"),
        ({"lora_target_modules": ["lm_head"]}, "the head cannot have an adapter"),
    ],
)
def test_adapters_that_cannot_be_are_explained(changes, message, here, parameters, tmp_path):
    with pytest.raises(UserError, match=message):
        here(parameters(**changes), tmp_path / "out", "lora")


def test_a_loss_that_is_no_number_ends_the_run(here, parameters, tmp_path):
    wild = parameters(learning_rate=1e30, warmup_steps=0, save_steps=1, eval_steps=100)
    with pytest.raises(NonFinite, match=r"step 2: loss .* Rows \d+, "):
        here(wild, tmp_path, "lora")
    assert [step for step, _ in rundir.sealed_checkpoints(RunDir(tmp_path).checkpoints)] == [1]


def test_near_the_deadline_it_saves_and_ends(here, parameters, tmp_path, monkeypatch):
    monkeypatch.setenv(DEADLINE_VARIABLE, str(time.time() + 1))
    with pytest.raises(OutOfTime, match=r"stopped after step 1, .* is sealed"):
        here(parameters(), tmp_path, "lora")
    assert [step for step, _ in rundir.sealed_checkpoints(RunDir(tmp_path).checkpoints)] == [1]


@pytest.mark.parametrize("sharding", ["fsdp", "ddp"])
def test_recomputing_changes_nothing(sharding, straight, here, parameters, tools, tmp_path):
    chosen = parameters(gradient_checkpointing=True, sharding=sharding)
    chosen_events = here(chosen, tmp_path, "lora")
    assert chosen_events[0]["fast_paths"]["recomputation"]
    assert tools.losses(chosen_events)[:3] == [
        pytest.approx(step, rel=1e-5) for step in tools.losses(straight)[:3]
    ]


def test_sixteen_bits_stay_near(straight, here, parameters, tools, tmp_path):
    events = here(parameters(precision="bf16", sharding="fsdp", max_steps=3), tmp_path, "lora")
    frozen = load_file(RunDir(tmp_path).base / "model.safetensors")
    assert {tensor.dtype for tensor in frozen.values()} == {torch.bfloat16}
    assert tools.losses(events)[0][1] == pytest.approx(tools.losses(straight)[0][1], rel=1e-3)


def test_a_step_without_labels_changes_nothing(here, parameters, tools, tmp_path, capsys):
    unsupervised = tools.make_store(tmp_path / "tokens", "silent", supervise=False)
    chosen = parameters(tokens_path=str(unsupervised.path), max_steps=2)
    events = here(chosen, tmp_path / "out", "lora")
    first, last = [e["loss"] for e in events if e["event"] == "eval"]
    assert first == last
    assert "step 2/2  no supervised tokens, skipped" in capsys.readouterr().out
