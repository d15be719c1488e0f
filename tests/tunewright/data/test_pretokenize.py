import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import yaml

from tunewright.contract.failures import DataError, UserError
from tunewright.data.prepare import prepare
from tunewright.data.store import TokenStore
from tunewright.pretokenize import load_data_settings, pretokenize


def alpaca(number):
    return {"instruction": f"Count to {number}.", "output": " ".join(map(str, range(number)))}


HIT = "hit: same rows, evaluation rows, tokenizer files, template, options, code version"
ROWS = [alpaca(number) for number in range(1, 21)]


def program(tmp_path, **parameters):
    """Run the program as the flow does; returns (exit code, result or None, stderr)."""
    (tmp_path / "parameters.yaml").write_text(yaml.safe_dump(parameters))
    result = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, "-m", "tunewright.pretokenize", "--settings",
         str(tmp_path / "parameters.yaml"), "--tokens-root", str(tmp_path / "tokens"),
         "--result", str(result)],
        env={**os.environ, "TUNEWRIGHT_FAILURE_DIR": str(tmp_path)},
        capture_output=True, text=True,
    )  # fmt: skip
    found = json.loads(result.read_text()) if result.exists() else None
    return done.returncode, found, done.stderr


@pytest.mark.parametrize(
    ("name", "rows"), [("alpaca_en_demo.json", 999), ("v1_sft_demo.jsonl", 500)]
)
def test_real_rows_go_through_with_default_settings(real_data, tmp_path, demo, name, rows):
    code, result, narration = program(
        tmp_path, model_name=demo.name, dataset_name=str(real_data / name), learning_rate="1e-3"
    )
    assert code == 0, narration
    assert (result["rows"], result["dropped"], result["cache"]) == (rows, {}, "miss: no tokens yet")
    assert 0 < result["supervised_tokens"] < result["tokens"]
    store = TokenStore.open(result["path"], verify=True)
    assert sum(len(pack.input_ids) for pack in store.train) == result["tokens"]
    assert sum(int(pack.supervised.sum()) for pack in store.train) == result["supervised_tokens"]
    assert all(len(pack.input_ids) <= store.pack_tokens for pack in store.train)
    assert re.search(rf"rows read +{rows:,}\n  dropped +0\n", narration)
    assert "«" in narration


def test_the_result_file_of_a_small_set(tmp_path, write_rows, demo):
    parameters = {"model_name": demo.name, "dataset_name": str(write_rows(ROWS)), "max_steps": 3}
    parameters["max_leakage"] = 1
    code, result, narration = program(tmp_path, **parameters, eval_fraction=0.2)
    assert code == 0, narration
    assert set(result) == {
        "path", "fingerprint", "rows", "dropped", "truncated", "tokens", "supervised_tokens",
        "eval_rows", "packs", "cache",
    }  # fmt: skip
    assert result["eval_rows"] > 0
    assert result["path"] == str(tmp_path / "tokens" / result["fingerprint"])
    again = program(tmp_path, **parameters, eval_fraction=0.2)[1]
    assert again == {**result, "cache": HIT}


def test_bad_rows_end_the_program_with_one_sentence(tmp_path, write_rows, demo):
    rows = [*ROWS[:2], {"instruction": "Add."}, *ROWS[2:], *[{"output": "x"}] * 9]
    path = write_rows(rows)
    code, result, narration = program(tmp_path, model_name=demo.name, dataset_name=str(path))
    assert (code, result) == (1, None)
    assert narration.startswith(
        f"error: 10 of 30 rows cannot be trained on: {path} row 3: no answer"
    )
    assert "and 5 more; mend them, or leave them out with on_bad_row: drop" in narration
    assert json.loads((tmp_path / "rank-0.json").read_text())["class"] == "data"
    assert not (tmp_path / "tokens").exists()
    wanted = {"model_name": demo.name, "dataset_name": str(path), "on_bad_row": "drop"}
    code, result, narration = program(tmp_path, **wanted)
    assert (code, result) == (1, None)
    assert "error: 10 of 30 rows would be dropped, more than max_dropped=0.1 allows" in narration
    assert not list((tmp_path / "tokens").glob("[!.]*"))
    code, result, _ = program(tmp_path, **wanted, max_dropped=0.4)
    assert code == 0
    assert sum(result["dropped"].values()) == 10
    assert result["dropped"]["no answer"] == 1


def test_nothing_heavy_is_imported():
    heavy = "{'torch', 'transformers', 'datasets', 'pyarrow', 'mlflow', 'huggingface_hub'}"
    code = f"import sys, tunewright.pretokenize; print({heavy} & set(sys.modules) or '')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_documents_are_the_rows_each_once(settings, write_rows, tmp_path, demo):
    store = prepare(settings(write_rows(ROWS)), tmp_path / "tokens").store
    seen = {}
    for index, pack in enumerate(store.train):
        ends = pack.lengths.cumsum().tolist()
        numbers = store.train.source_rows(index).tolist()
        for number, start, end in zip(numbers, [0, *ends[:-1]], ends, strict=True):
            seen[number] = demo.decode(pack.input_ids[start:end].tolist())
    assert seen == {
        number: f"### Instruction:\nCount to {number}.\n\n### Response:\n"
        f"{ROWS[number - 1]['output']}<|end|>"
        for number in range(1, 21)
    }


def test_another_path_or_file_format_with_the_same_content_is_a_hit(
    settings, write_rows, tmp_path, demo
):
    root = tmp_path / "tokens"
    first = pretokenize(settings(write_rows(ROWS)), root)
    moved = tmp_path / "moved.json"
    moved.write_text(json.dumps([{**row, "input": None, "id": 7} for row in ROWS]))
    model = shutil.copytree(demo.name, tmp_path / "renamed")
    second = pretokenize(settings(moved, model_name=str(model)), root)
    assert second == {**first, "cache": HIT}


def test_a_chat_template_that_no_row_uses_changes_nothing(settings, write_rows, tmp_path, demo):
    root, model = tmp_path / "tokens", shutil.copytree(demo.name, tmp_path / "model")
    wanted = settings(write_rows(ROWS), model_name=str(model))
    pretokenize(wanted, root)
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert pretokenize(wanted, root)["cache"] == HIT


def test_damaged_tokens_are_made_again(settings, write_rows, tmp_path):
    root, wanted = tmp_path / "tokens", settings(write_rows(ROWS))
    first = pretokenize(wanted, root)
    tokens = root / first["fingerprint"] / "train" / "tokens.npy"
    tokens.write_bytes(tokens.read_bytes()[:-2] + b"\0\0")
    assert pretokenize(wanted, root) == {**first, "cache": "miss: the tokens were damaged"}
    TokenStore.open(first["path"], verify=True)


def test_rows_of_an_evaluation_dataset(settings, write_rows, tmp_path):
    held = write_rows(ROWS[:3], "held.jsonl")
    wanted = settings(write_rows(ROWS), eval_dataset=str(held), max_leakage=1)
    result = pretokenize(wanted, tmp_path / "tokens")
    assert (result["rows"], result["eval_rows"]) == (20, 3)


@pytest.mark.parametrize(
    ("policy", "dropped", "truncated"),
    [("truncate", {}, 1), ("drop", {"too long": 1}, 0), ("split", {}, 0)],
)
def test_rows_that_are_too_long(settings, write_rows, tmp_path, policy, dropped, truncated):
    path = write_rows([*ROWS, alpaca(200)])
    result = pretokenize(settings(path, on_too_long=policy), tmp_path / "tokens")
    assert (result["dropped"], result["truncated"]) == (dropped, truncated)
    assert TokenStore.open(result["path"]).facts["counts"]["train"]["longest"] <= 96


def test_rows_that_are_too_long_can_fail(settings, write_rows, tmp_path):
    path = write_rows([*ROWS, alpaca(200)])
    with pytest.raises(
        DataError, match=r"1 of 21 rows have more than max_length=96 .* row 21 \(\d+ tokens\);"
    ):
        pretokenize(settings(path, on_too_long="fail"), tmp_path / "tokens")


def test_no_usable_row_at_all(settings, write_rows, tmp_path):
    path = write_rows([{"instruction": "Add."}] * 2)
    wanted = settings(path, on_bad_row="drop", max_dropped=1)
    with pytest.raises(DataError, match="no token of any row is supervised"):
        pretokenize(wanted, tmp_path / "tokens")


def test_a_fraction_that_holds_out_no_row(settings, write_rows, tmp_path):
    with pytest.raises(DataError, match=r"holds out none of the 3 rows of .*; a row's content"):
        pretokenize(settings(write_rows(ROWS[:3]), eval_fraction=1e-9), tmp_path / "tokens")


@pytest.mark.parametrize("harm", ["no folder", "no tokenizer", "not a tokenizer", "no eos"])
def test_a_model_that_cannot_be_used(settings, write_rows, tmp_path, demo, harm):
    model = shutil.copytree(demo.name, tmp_path / "model")
    words = {
        "no folder": "model .* does not exist; name a folder",
        "no tokenizer": "has no tokenizer that can be read",
        "not a tokenizer": "tokenizer.json is not a tokenizer",
        "no eos": "has no eos_token",
    }
    if harm == "no folder":
        shutil.rmtree(model)
    if harm == "no tokenizer":
        shutil.rmtree(model)
        model.mkdir()
    if harm == "not a tokenizer":
        (model / "tokenizer.json").write_text("{}")
    if harm == "no eos":
        (model / "tokenizer_config.json").write_text("{}")
        (model / "config.json").write_text("{}")
    with pytest.raises(UserError, match=words[harm]) as caught:
        pretokenize(settings(write_rows(ROWS), model_name=str(model)), tmp_path / "tokens")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot read"),
        ("a: [", "is not YAML"),
        ("- a", "must be a mapping"),
        ("model_name: ./m", "dataset_name: is required"),
        ("{model_name: ./m, dataset_name: ./d, max_length: x}", "max_length: must be a whole"),
        ("{model_name: ./m, dataset_name: ./d, max_length: 9000}", "raise pack_tokens or lower"),
    ],
)
def test_settings_that_cannot_be_used(tmp_path, text, words):
    path = tmp_path / "settings.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError) as caught:
        load_data_settings(path)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_only_the_settings_of_the_data_are_taken(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text(
        "{model_name: ./m, dataset_name: ./d, max_seq_len: 512, learning_rate: 2e-5, lora_rank: 8}"
    )
    assert load_data_settings(path).max_length == 512
