"""Files of other tools: what becomes of every key, and of files that cannot be imported."""

from __future__ import annotations

import json
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from flows import importing
from flows.__main__ import cli, main
from flows.importing.draft import NOT_KNOWN, leaves
from flows.importing.trainer import LORA
from tunewright.contract import document
from tunewright.contract.failures import UserError
from tunewright.contract.workload import Workload

FOLDER = Path(__file__).parents[1] / "data" / "imports"
FULL = ("axolotl_full.yml", "llama_factory_full.yaml", "torchtune_full.yaml")
ADAPTERS = ("axolotl_qlora.yml", "llama_factory_lora.yaml", "torchtune_qlora.yaml")
SAMPLES = [FOLDER / name for name in (*FULL, *ADAPTERS)]
SOURCES = {path.name: document.read(path) for path in SAMPLES}

each_sample = pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)


def call(monkeypatch: pytest.MonkeyPatch, *words: str | Path) -> int:
    """The command line in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", ["tunewright", *map(str, words)])
    return main()


def imported(tmp_path: Path, source: str | dict[str, Any], **options: Any) -> importing.Imported:
    path = tmp_path / "their.yaml"
    path.write_text(source if isinstance(source, str) else yaml.safe_dump(source))
    return importing.convert(path, **options)


def notes_of(found: importing.Imported, key: str) -> list[tuple[str, str | None, str]]:
    return [(note.outcome, note.to, note.why) for note in found.notes if note.key == key]


def sample(name: str, **changed: Any) -> dict[str, Any]:
    """A sample with other values; None leaves a key out."""
    source = {**deepcopy(SOURCES[name]), **changed}
    return {key: value for key, value in source.items() if value is not None}


@each_sample
def test_every_key_is_carried_approximated_or_listed(path: Path) -> None:
    found = importing.convert(path)
    spoken = {note.key for note in found.notes}
    for key, value in leaves(SOURCES[path.name]):
        above = [key.rsplit(".", dots)[0] for dots in range(key.count(".") + 1)]
        assert spoken & {*above}, f"{key}: {value} is dropped silently"
    assert [note.key for note in found.notes if note.why == NOT_KNOWN] == []
    for note in found.notes:
        assert note.outcome == "carried" or note.why, note


@each_sample
def test_every_note_is_told(path: Path) -> None:
    found = importing.convert(path)
    told = "\n".join(found.narration())
    for note in found.notes:
        if note.outcome in ("approximated", "left"):
            assert note.key in told
            assert note.why in told
    assert {*found.document()["keys"][0]} == {"key", "outcome", "to", "why"}


@each_sample
def test_what_is_carried_stands_in_the_workload(path: Path) -> None:
    found = importing.convert(path)
    for note in found.notes:
        if note.to is not None:
            block, _, name = note.to.rpartition(".")
            place = found.workload[block] if block else found.workload
            # The shape and columns of several sources stand in each of them.
            assert name in place or "datasets" in place, note


@each_sample
def test_an_unknown_key_is_listed_without_its_value(path: Path, tmp_path: Path) -> None:
    found = imported(tmp_path, sample(path.name, surprise={"token": "hf_secret"}, empty=""))
    assert notes_of(found, "surprise.token") == [("left", None, NOT_KNOWN)]
    assert "hf_secret" not in json.dumps(found.document())


@pytest.mark.parametrize("name", FULL)
def test_full_fine_tuning_passes_check(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "workload.yaml"
    assert call(monkeypatch, "import", FOLDER / name, "-o", page, "--gpus", "16") == 0
    assert capsys.readouterr().out == ""
    assert call(monkeypatch, "check", page, "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["recipe"], plan["nodes"], plan["gpus_per_node"]) == ("fsdp", 2, 8)


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_pass_check(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "workload.yaml"
    assert call(monkeypatch, "import", FOLDER / name, "-o", page) == 0
    assert call(monkeypatch, "check", page) == 0
    assert Workload.load(page).recipe == "lora"


def test_what_the_recipe_has_no_setting_for_is_listed() -> None:
    found = importing.convert(FOLDER / "axolotl_qlora.yml")
    assert LORA["four_bit"] not in found.workload["parameters"]
    assert ("left", None, "the recipe lora has no load_in_4bit") in notes_of(found, "load_in_4bit")


def test_axolotl() -> None:
    found = importing.convert(FOLDER / "axolotl_full.yml")
    assert found.workload["experiment_name"] == "helpdesk"
    assert found.workload["mlflow_run_name"] == "first-try"
    assert found.workload["parameters"] == {
        "model_name": "example-org/small-llama",
        "model_revision": "v2",
        "datasets": [
            {
                "name": "example-org/dialogues:train[:20%]",
                "revision": "4f1c2d3",
                "format": "sharegpt",
            },
            {"name": "./rows/help.jsonl", "format": "messages"},
        ],
        "template": "chat",
        "train_on": "all",
        "on_too_long": "truncate",
        "max_length": 4096,
        "per_device_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "eval_fraction": 0.05,
        "precision": "auto",
        "learning_rate": 2e-5,
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "adam_epsilon": 1e-8,
        "max_grad_norm": 0.5,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 20,
        "num_train_epochs": 3,
        "gradient_checkpointing": True,
        "save_steps": 100,
        "save_total_limit": 3,
        "eval_steps": 50,
        "logging_steps": 5,
        "seed": 7,
        "output_dir": "./outputs/dialogues",
    }


def test_llama_factory() -> None:
    found = importing.convert(FOLDER / "llama_factory_full.yaml")
    assert found.workload["experiment_name"] == "llama_factory_full"
    assert found.workload["mlflow_run_name"] == "support-1"
    assert found.workload["parameters"] == {
        "model_name": "example-org/small-qwen",
        "datasets": [
            {
                "name": f"{FOLDER}/data/support.json[:200]",
                "format": "alpaca",
                "columns": {"instruction": "question", "output": "reply", "system": "tone"},
            },
            {
                "name": "example-org/orders:sft[:1000]",
                "format": "messages",
                "columns": {"messages": "turns", "tools": "functions"},
            },
        ],
        "template": "chat",
        "train_on": "last_response",
        "max_length": 2048,
        "per_device_batch_size": 1,
        "gradient_accumulation_steps": 8,
        "eval_dataset": f"{FOLDER}/data/held_out.jsonl",
        "precision": "bf16",
        "learning_rate": 1e-5,
        "adam_beta2": 0.999,
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.1,
        "num_train_epochs": 3,
        "gradient_checkpointing": True,
        "save_steps": 500,
        "eval_steps": 500,
        "logging_steps": 10,
        "output_dir": "saves/support/full",
    }


def test_torchtune() -> None:
    found = importing.convert(FOLDER / "torchtune_full.yaml")
    assert found.workload["experiment_name"] == "small-tunes"
    assert found.workload["parameters"] == {
        "model_name": "/tmp/small-llama",
        "dataset_name": "example-org/dialogues:train[:95%]",
        "format": "messages",
        "columns": {"messages": "dialogue"},
        "template": "chat",
        "max_length": 4096,
        "per_device_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "eval_dataset": "example-org/dialogues:train[95%:]",
        "precision": "bf16",
        "learning_rate": 2e-5,
        "weight_decay": 0.01,
        "adam_beta2": 0.999,
        "max_grad_norm": 1e9,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 30,
        "max_steps": 200,
        "num_train_epochs": 2,
        "gradient_checkpointing": True,
        "save_total_limit": 2,
        "eval_steps": 50,
        "logging_steps": 1,
        "seed": 11,
        "output_dir": "/tmp/tuned/small",
    }


@pytest.mark.parametrize(
    ("name", "adapters"),
    [
        (ADAPTERS[0], (16, 32, 0.05, "all-linear")),
        (ADAPTERS[1], (8, 16, None, ["q_proj", "v_proj"])),
        (
            ADAPTERS[2],
            (8, 16, 0.0, ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
        ),
    ],
)
def test_adapters(name: str, adapters: tuple[Any, ...]) -> None:
    parameters = importing.convert(FOLDER / name).workload["parameters"]
    names = [LORA[part] for part in ("rank", "alpha", "dropout", "targets")]
    assert tuple(parameters.get(name) for name in names) == adapters


def test_adapters_on_experts(tmp_path: Path) -> None:
    source = """
        base_model: example-org/m
        datasets: [{path: example-org/rows, type: alpaca}]
        adapter: lora
        lora_r: 12
        lora_target_modules: [q_proj]
        lora_target_parameters: [mlp.experts.gate_up_proj, mlp.experts.down_proj]
    """
    found = imported(tmp_path, source)
    assert not found.needs
    parameters = found.workload["parameters"]
    assert parameters["lora_target_parameters"] == [
        "mlp.experts.gate_up_proj",
        "mlp.experts.down_proj",
    ]
    assert parameters["lora_experts_r"] == 12


def test_one_page_as_it_is_written(tmp_path: Path) -> None:
    source = """
        base_model: example-org/m
        datasets: [{path: example-org/rows, type: alpaca}]
        sequence_len: 1024
        sample_packing: true
        optimizer: adamw_torch
        learning_rate: 1e-4
        output_dir: out
    """
    assert imported(tmp_path, source).text == PAGE


PAGE = """\
# Made from their.yaml of axolotl by `tunewright import`.
experiment_name: their

compute:
  num_accelerators: 1  # not said there; the batch grows with it
  accelerator_type: GPU_1xH100

command: |
  torchrun \\
    --nnodes="$NUM_NODES" --node-rank="$NODE_RANK" --nproc-per-node="$LOCAL_WORLD_SIZE" \\
    --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" \\
    -m tunewright.recipes.fsdp

max_retries: 1

parameters:
  model_name: example-org/m
  dataset_name: example-org/rows
  format: alpaca
  template: alpaca  # the Alpaca text around each row, as there
  on_too_long: drop  # the default there
  max_length: 1024  # sequence_len there
  per_device_batch_size: 1  # the default there
  precision: auto  # bf16 where the GPU has it is the default there
  learning_rate: 0.0001
  adam_beta2: 0.999  # the default there
  lr_scheduler_type: cosine  # the default there
  num_train_epochs: 1  # the default there
  output_dir: out  # the root of all runs; a model is in <run>/model
"""


@pytest.mark.parametrize(
    ("changed", "parameters"),
    [
        ({"warmup_steps": 0.1}, {"warmup_ratio": 0.1}),
        ({"warmup_steps": 0, "warmup_ratio": 0.2}, {"warmup_ratio": 0.2}),
        ({"lr_scheduler": "constant"}, {"lr_scheduler_type": "constant", "warmup_steps": 0}),
        ({"lr_scheduler": "constant_with_warmup"}, {"warmup_steps": 20}),
        ({"lr_scheduler": "polynomial"}, {"lr_scheduler_type": "linear"}),
        ({"bf16": False}, {"precision": "fp32"}),
        ({"bf16": "full"}, {"precision": "bf16"}),
        ({"bf16": False, "fp16": True}, {"precision": "auto"}),
        ({"excess_length_strategy": "raise"}, {"on_too_long": "fail"}),
        ({"train_on_inputs": False}, {"train_on": "responses"}),
        ({"reinit_weights": True}, {"init": "random"}),
        ({"max_steps": 12}, {"max_steps": 12}),
        ({"base_model": "models/mine/v1"}, {"model_name": "./models/mine/v1"}),
        ({"chat_template_jinja": "{{ a }}\n\n b"}, {"chat_template": "{{ a }}\n\n b"}),
    ],
    ids=str,
)  # fmt: skip
def test_values_of_the_trainer(
    tmp_path: Path, changed: dict[str, Any], parameters: dict[str, Any]
) -> None:
    found = imported(tmp_path, sample("axolotl_full.yml", **changed))
    assert found.needs == []
    assert parameters.items() <= found.workload["parameters"].items()


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ({"type": "completion", "field": "body"}, {"format": "text", "columns": {"text": "body"}}),
        ({"type": "sharegpt"}, {"format": "sharegpt"}),
        (
            {"type": "chat_template", "field_messages": "turns",
             "message_property_mappings": {"role": "who", "content": "what"}},
            {"format": "messages",
             "columns": {"messages": "turns", "role": "who", "content": "what"}},
        ),
        (
            {"type": {"field_instruction": "q", "field_output": "a", "format": "Q: {instruction}"}},
            {"format": "alpaca", "columns": {"instruction": "q", "output": "a"}},
        ),
        ({"type": "context_qa.load_v2"}, {}),
    ],
    ids=str,
)  # fmt: skip
def test_shapes_of_axolotl(tmp_path: Path, kind: dict[str, Any], rows: dict[str, Any]) -> None:
    found = imported(
        tmp_path, sample("axolotl_full.yml", datasets=[{"path": "example-org/rows", **kind}])
    )
    assert found.needs == []
    parameters = found.workload["parameters"]
    assert parameters["dataset_name"] == "example-org/rows"
    assert {key: parameters[key] for key in ("format", "columns") if key in parameters} == rows


@pytest.mark.parametrize(
    ("block", "rows"),
    [
        ({"_component_": "torchtune.datasets.alpaca_dataset", "split": "train[:10]"},
         {"dataset_name": "tatsu-lab/alpaca:train[:10]", "template": "alpaca", "train_on": "all"}),
        ({"_component_": "torchtune.datasets.alpaca_dataset", "train_on_input": False},
         {"train_on": "responses"}),
        ({"_component_": "torchtune.datasets.samsum_dataset"},
         {"dataset_name": "Samsung/samsum", "format": "prompt_completion",
          "columns": {"prompt": "dialogue", "completion": "summary"}}),
        ({"_component_": "torchtune.datasets.text_completion_dataset", "source": "text",
          "data_files": "a.txt", "column": "line"},
         {"dataset_name": "./a.txt", "format": "text", "columns": {"text": "line"}}),
        ({"_component_": "torchtune.datasets.chat_dataset", "source": "o/r",
          "conversation_column": "c", "conversation_style": "sharegpt"},
         {"format": "sharegpt", "columns": {"conversations": "c"}}),
    ],
    ids=str,
)  # fmt: skip
def test_datasets_of_torchtune(tmp_path: Path, block: dict[str, Any], rows: dict[str, Any]) -> None:
    found = imported(tmp_path, sample("torchtune_full.yaml", dataset=block, dataset_val=None))
    assert found.needs == []
    assert rows.items() <= found.workload["parameters"].items()


def test_rows_are_counted_as_full_where_they_were_not_packed(tmp_path: Path) -> None:
    packed, padded = (
        imported(tmp_path, sample("axolotl_full.yml", sample_packing=on)) for on in (True, False)
    )
    assert [note[0] for note in notes_of(packed, "micro_batch_size")] == ["carried"]
    ((outcome, _, why),) = notes_of(padded, "micro_batch_size")
    assert outcome == "approximated"
    assert "fewer steps" in why


def test_without_dataset_info_the_guess_is_said(tmp_path: Path) -> None:
    found = imported(tmp_path, sample("llama_factory_full.yaml", dataset="support"))
    assert found.workload["parameters"]["dataset_name"] == "./data/support.json[:1000]"
    outcomes = {note[0] for note in notes_of(found, "dataset")}
    assert outcomes == {"approximated"}


REFUSALS = [
    ("axolotl_full.yml", {"rl": "dpo"}, "axolotl's rl: dpo"),
    ("axolotl_full.yml", {"reward_model": True}, "axolotl's reward_model: true"),
    ("axolotl_full.yml", {"processor_type": "AutoProcessor"}, "processor_type: AutoProcessor"),
    ("axolotl_full.yml", {"pretraining_dataset": [{"path": "a/b"}]}, "pretraining_dataset"),
    (
        "axolotl_full.yml",
        {"datasets": [{"path": "a/b", "type": "input_output"}]},
        "datasets.0.type: input_output",
    ),
    ("llama_factory_full.yaml", {"stage": "dpo"}, "LLaMA-Factory's stage: dpo"),
    ("llama_factory_full.yaml", {"stage": "pt"}, "LLaMA-Factory's stage: pt"),
    ("llama_factory_full.yaml", {"finetuning_type": "freeze"}, "finetuning_type: freeze"),
    ("llama_factory_full.yaml", {"export_dir": "merged"}, "export_dir: merged"),
    (
        "torchtune_full.yaml",
        {"loss": {"_component_": "torchtune.rlhf.loss.DPOLoss"}},
        "torchtune's loss._component_: torchtune.rlhf.loss.DPOLoss",
    ),
    (
        "torchtune_full.yaml",
        {"quantizer": {"_component_": "torchtune.training.Quantizer"}},
        "torchtune's quantizer: torchtune.training.Quantizer",
    ),
    (
        "torchtune_full.yaml",
        {"model": {"_component_": "torchtune.models.llama3_2_vision.llama3_2_vision_11b"}},
        "model._component_",
    ),
    ("torchtune_full.yaml", {"optimizer": None}, "no optimizer and dataset"),
]


@pytest.mark.parametrize(("name", "changed", "words"), REFUSALS, ids=lambda part: str(part)[:40])
def test_methods_that_are_not_here_are_refused_by_name(
    tmp_path: Path, name: str, changed: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError) as caught:
        imported(tmp_path, sample(name, **changed))
    message = str(caught.value)
    assert message.startswith("their.yaml cannot be imported: ")
    assert words in message
    assert "\n" not in message


@pytest.mark.parametrize(("name", "why"), [("pictures", "images"), ("better", "chosen, rejected")])
def test_rows_that_are_not_here_are_refused(name: str, why: str) -> None:
    source = sample("llama_factory_full.yaml", dataset=name)
    with pytest.raises(UserError, match=f"dataset: {name} .rows with {why} are not here"):
        importing.imported(source, FOLDER / "their.yaml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1", "--from"),
        ("experiment_name: x\ncommand: y", "a workload already"),
        ("model: a/b\nmodel_class: llm", "v1 trainer"),
        ("compute_environment: LOCAL_MACHINE", "accelerate configuration"),
        ("base_model: [", "not valid YAML"),
        ("base_model: a/b\ndatasets: rows", "datasets: rows is not a list of mappings"),
        (
            "base_model: a/b\ndatasets: [{path: a/b}]\nsequence_len: long",
            "sequence_len: long is not a number",
        ),
        ("base_model: a/b\nadapter: lora", "datasets is not set"),
        (
            "model: {_component_: a.b}\noutput_dir: ${oc.env:OUT}/run",
            "output_dir: ${oc.env:OUT}/run cannot be",
        ),
        ("model: {_component_: a.b}\nx: ${y}\ny: ${x}", "x: ${x} cannot be"),
        ("model: {_component_: a.b, files: [a, '${b}']}", "model.files: ['a', '${b}'] cannot be"),
    ],
)
def test_bad_files_end_with_one_message_and_exit_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    text: str, words: str,
) -> None:  # fmt: skip
    path = tmp_path / "their.yaml"
    path.write_text(text)
    assert call(monkeypatch, "import", path) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert words in err


def test_the_tools_are_those_of_the_command_line() -> None:
    (option,) = (part for part in cli.commands["import"].params if part.name == "tool")
    assert isinstance(option.type, click.Choice)
    assert tuple(option.type.choices) == importing.TOOLS


def test_from_names_the_tool(tmp_path: Path) -> None:
    source = {"base_model": "example-org/m", "test_datasets": [], "model_name_or_path": "o/r"}
    assert importing.recognised(source, "x") == "llama-factory"
    with pytest.raises(UserError, match="datasets is not set"):
        imported(tmp_path, source, tool="axolotl")


def test_a_file_that_is_there_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "workload.yaml"
    page.write_text("mine")
    assert call(monkeypatch, "import", SAMPLES[0], "-o", page) == 2
    assert f"{page} is there already; give --force" in capsys.readouterr().err
    assert page.read_text() == "mine"
    assert call(monkeypatch, "import", SAMPLES[0], "-o", page, "--force") == 0
    assert Workload.load(page).experiment_name == "helpdesk"
    nowhere = tmp_path / "none" / "workload.yaml"
    assert call(monkeypatch, "import", SAMPLES[0], "-o", nowhere) == 2


def test_json_is_one_document(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "import", SAMPLES[0], "--json", "--from", "axolotl") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["from"] == "axolotl"
    assert found["needs"] == []
    assert yaml.safe_load(found["yaml"]) == found["workload"]
    assert {
        key: part
        for note in found["keys"]
        if note["key"] == "deepspeed"
        for key, part in note.items()
        if key != "why"
    } == {"key": "deepspeed", "outcome": "left", "to": None}


def test_importing_is_light() -> None:
    code = (
        "import sys; from flows import importing; "
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"torch", "transformers", "prefect", "mlflow", "numpy", "datasets", "click"}
    assert not heavy & {*found.stdout.split()}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 10**6) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_value_is_imported_listed_or_refused_in_one_message(data: st.DataObject) -> None:
    """Whatever stands at a key: no crash, no lost key, and a page that says the workload."""
    name = data.draw(st.sampled_from(sorted(SOURCES)))
    source = deepcopy(SOURCES[name])
    path, _ = data.draw(st.sampled_from([*leaves(source)]))
    _put(source, path.split(".")[: data.draw(st.integers(1, 3))], data.draw(VALUES))
    try:
        found = importing.imported(source, FOLDER / name)
    except UserError:
        return
    assert yaml.safe_load(found.text) == found.workload
    spoken = {note.key for note in found.notes}
    for key, _ in leaves(source):
        assert any(key == known or key.startswith(f"{known}.") for known in spoken), key


def _put(source: dict[str, Any], path: list[str], value: Any) -> None:
    place: Any = source
    for part in path[:-1]:
        place = place[int(part) if isinstance(place, list) else part]
    place[int(path[-1]) if isinstance(place, list) else path[-1]] = value
