"""Data sets that would waste GPUs: each must stop before anything is launched, naming its rows."""

import json
import shutil

import pytest

from tunewright.contract.failures import DataError, UserError
from tunewright.data.prepare import prepare

GOOD = [{"instruction": f"Name {n} birds.", "output": f"There are {n}."} for n in range(1, 21)]


@pytest.fixture
def model(tmp_path, demo):
    return shutil.copytree(demo.name, tmp_path / "model")


def edit(path, **changes):
    found = json.loads(path.read_text())
    path.write_text(json.dumps({**found, **changes}))


def stops(settings, tmp_path, *words):
    """The sentence with which these settings stop; nothing is sealed."""
    with pytest.raises(DataError) as caught:
        prepare(settings, tmp_path / "tokens")
    assert not list((tmp_path / "tokens").glob("[!.]*"))
    for word in words:
        assert word in str(caught.value)
    return str(caught.value)


def test_every_row_is_masked_after_truncation(settings, write_rows, tmp_path):
    path = write_rows([{"instruction": "word " * 200 + str(n), "output": "x"} for n in range(20)])
    stops(
        settings(path), tmp_path, "in 20 of 20 rows truncation to max_length=96",
        f"{path} row 1, {path} row 2,", "and 15 more", "raise max_length",
    )  # fmt: skip


def test_every_answer_loses_its_end_token_to_truncation(settings, write_rows, tmp_path):
    path = write_rows([{"instruction": "Go.", "output": f"word {n} " * 200} for n in range(20)])
    stops(
        settings(path), tmp_path, "no answer of 20 rows ends with a supervised end token",
        f"{path} row 1, ", "max_length must leave room",
    )  # fmt: skip


@pytest.mark.parametrize("pad", ["the end token", "none"])
def test_a_pad_that_is_the_end_token_or_is_missing_trains_the_end(
    settings, write_rows, tmp_path, model, demo, pad
):
    config = model / "tokenizer_config.json"
    edit(config, pad_token=demo.eos if pad == "the end token" else None)
    wanted = settings(write_rows(GOOD), model_name=str(model))
    found = prepare(wanted, tmp_path / "tokens").store
    assert found.facts["audit"]["end_token"]["count"] == len(GOOD)
    eos = demo.id_of("eos_token")
    trained = [i for pack in found.train for i in pack.input_ids[pack.supervised].tolist()]
    assert trained.count(eos) == len(GOOD)


def test_a_pad_that_is_the_end_token_stops_when_no_end_is_trained(
    settings, write_rows, tmp_path, model, demo
):
    edit(model / "tokenizer_config.json", pad_token=demo.eos)
    path = write_rows([{**row, "output": "word " * 200} for row in GOOD])
    wanted = settings(path, model_name=str(model))
    stops(wanted, tmp_path, "ends with a supervised end token", f"{path} row 1")


def test_a_tokenizer_without_an_end_token(settings, write_rows, tmp_path, model):
    (model / "tokenizer_config.json").write_text("{}")
    (model / "config.json").write_text("{}")
    with pytest.raises(UserError, match="has no eos_token, so an answer could have no end"):
        prepare(settings(write_rows(GOOD), model_name=str(model)), tmp_path / "tokens")
    assert not list((tmp_path / "tokens").glob("[!.]*"))


@pytest.mark.parametrize("between", ["", "<|start_header_id|>user<|end_header_id|>"])
def test_a_bos_that_is_there_twice(settings, write_rows, tmp_path, llama, between):
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    bos = llama.special_tokens["bos_token"]
    template = (
        "{{ bos_token }}" + between + "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    )
    twice = [{**turns[0], "content": f"{bos}Hi"}, turns[1]]
    path = write_rows([{"messages": turns}, {"messages": twice}, {"messages": turns}])
    wanted = settings(path, model_name=llama.name, chat_template=template)
    stops(wanted, tmp_path, f"1 rows have their BOS twice: {path} row 2")
    doubled = wanted.model_copy(update={"chat_template": "{{ bos_token }}" + template})
    stops(doubled, tmp_path, f"3 rows have their BOS twice: {path} row 1, {path} row 2,")


def test_training_rows_are_the_evaluation_rows(settings, write_rows, tmp_path):
    train, held = write_rows(GOOD), write_rows(GOOD, "held.jsonl")
    stops(
        settings(train, eval_dataset=str(held)), tmp_path,
        "20 of 20 evaluation rows are training rows too",
        f"{held} row 1 = {train} row 1 (the same row)", "and 15 more",
    )  # fmt: skip


def test_half_of_the_rows_are_empty(settings, write_rows, tmp_path):
    path = write_rows([row if n % 2 else {**row, "output": " "} for n, row in enumerate(GOOD)])
    stops(
        settings(path), tmp_path, "10 of 20 rows cannot be trained on", f"{path} row 1: no answer",
        f"{path} row 3: no answer", "and 5 more",
    )  # fmt: skip
    stops(
        settings(path, on_bad_row="drop"), tmp_path,
        "10 of 20 rows would be dropped, more than max_dropped=0.1 allows",
        f"10 no answer ({path} row 1, {path} row 3,",
    )  # fmt: skip


def test_no_answer_at_all_counts(settings, write_rows, tmp_path):
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
    silent = [turns[0], {**turns[1], "loss_weight": 0}]
    path = write_rows([{"messages": silent}] * 4)
    wanted = settings(path, on_bad_row="drop", max_dropped=1)
    stops(wanted, tmp_path, "no token of any row is supervised")


def test_several_faults_are_said_at_once(settings, write_rows, tmp_path):
    path = write_rows([*GOOD[:10], *[{"instruction": "x", "output": ""}] * 10])
    wanted = settings(path, on_bad_row="drop", eval_dataset=str(path))
    assert len(stops(wanted, tmp_path, "would be dropped", "training rows too").splitlines()) == 2
