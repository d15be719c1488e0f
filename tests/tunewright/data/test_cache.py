import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import yaml

from tunewright.data import fingerprint
from tunewright.data.prepare import prepare
from tunewright.data.store import TokenStore, sealed_stores

HIT = "hit: same rows, evaluation rows, tokenizer files, template, options, code version"
ROWS = [{"instruction": f"Double {n}.", "output": f"It is {2 * n}."} for n in range(1, 21)]


@pytest.fixture
def model(tmp_path, demo):
    return shutil.copytree(demo.name, tmp_path / "model")


@pytest.mark.parametrize(
    ("change", "cache"),
    [
        ("row", "miss: rows changed"),
        ("order", "miss: rows changed"),
        ("tokenizer", "miss: tokenizer files changed"),
        ("template", "miss: template changed"),
        ("max_length", "miss: max_length (96 → 95) changed"),
        ("train_on", "miss: train_on (responses → all) changed"),
        ("eval", "miss: evaluation rows changed"),
        ("code", "miss: code version changed"),
        ("several", "miss: rows, on_too_long (truncate → split), pack_tokens (128 → 256) changed"),
    ],
)
def test_a_miss_names_what_changed(
    settings, write_rows, tmp_path, model, monkeypatch, change, cache
):
    root, path = tmp_path / "tokens", write_rows(ROWS)
    before = settings(path, model_name=str(model), template="chat")
    assert prepare(before, root).cache == "miss: no tokens yet"
    after = before
    if change in ("row", "several"):
        write_rows([*ROWS[:-1], {"instruction": "Double 30.", "output": "It is 60."}])
    if change == "order":
        write_rows(ROWS[::-1])
    if change == "tokenizer":
        tokenizer = model / "tokenizer.json"
        tokenizer.write_text(tokenizer.read_text().replace('"version":"1.0"', '"version": "1.0"'))
    if change == "template":
        template = model / "chat_template.jinja"
        template.write_text(template.read_text().replace("| trim", ""))
    if change == "max_length":
        after = before.model_copy(update={"max_length": 95})
    if change == "train_on":
        after = before.model_copy(update={"train_on": "all"})
    if change == "several":
        after = before.model_copy(update={"on_too_long": "split", "pack_tokens": 256})
    if change == "code":
        monkeypatch.setattr(fingerprint, "code_version", lambda: "other")
    if change == "eval":
        held = write_rows([{"instruction": "Say no.", "output": "No."}], "held.jsonl")
        after = before.model_copy(update={"eval_dataset": str(held)})
    assert prepare(after, root).cache == cache
    assert len(sealed_stores(root)) == 2
    assert prepare(after, root).cache == HIT


def test_a_miss_is_told_against_the_most_similar_tokens(settings, write_rows, tmp_path):
    root, wanted = tmp_path / "tokens", settings(write_rows(ROWS))
    prepare(wanted, root)
    others = {"train_on": "all", "max_length": 50, "template": "chat"}
    prepare(wanted.model_copy(update=others), root)
    assert prepare(wanted.model_copy(update={"max_length": 90}), root).cache == (
        "miss: max_length (96 → 90) changed"
    )


def test_a_renamed_path_is_a_hit_and_a_changed_row_under_the_same_name_is_not(
    settings, write_rows, tmp_path, model
):
    root, path = tmp_path / "tokens", write_rows(ROWS)
    first = prepare(settings(path, model_name=str(model)), root)
    moved = path.rename(tmp_path / "renamed.jsonl")
    model = model.rename(tmp_path / "renamed")
    second = prepare(settings(moved, model_name=str(model)), root)
    assert (second.cache, second.store.path) == (HIT, first.store.path)
    write_rows([*ROWS[:-1], {"instruction": "Double 1.", "output": "2"}], "renamed.jsonl")
    third = prepare(settings(moved, model_name=str(model)), root)
    assert third.cache == "miss: rows changed"
    assert third.store.path != first.store.path


def test_thresholds_and_the_format_setting_change_no_token(settings, write_rows, tmp_path):
    root, wanted = tmp_path / "tokens", settings(write_rows(ROWS))
    prepare(wanted, root)
    same = {"max_dropped": 0.5, "max_leakage": 0.5, "format": "alpaca"}
    assert prepare(wanted.model_copy(update=same), root).cache == HIT


PROGRAM = """
import sys
from pathlib import Path
sys.argv = ["pretokenize", *sys.argv[1:]]
from tunewright.data import making
from tunewright import pretokenize
{patch}
pretokenize.main()
"""
SLOW = """
import time
original = making.write_store
def write_store(*arguments):
    Path(sys.argv[2]).with_name("writing").touch()
    time.sleep({seconds})
    return original(*arguments)
making.write_store = write_store
"""


def start(tmp_path, settings_file, name, patch):
    arguments = ["--settings", settings_file, "--tokens-root", tmp_path / "tokens"]
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(patch=patch), *map(str, arguments),
         "--result", str(tmp_path / f"{name}.json")],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.fixture
def settings_file(tmp_path, write_rows, demo):
    path = tmp_path / "settings.yaml"
    wanted = {"model_name": demo.name, "dataset_name": str(write_rows(ROWS))}
    path.write_text(yaml.safe_dump(wanted))
    return path


def wait_for(path, process):
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)


def test_two_runs_at_once_make_the_tokens_once(tmp_path, settings_file):
    first = start(tmp_path, settings_file, "first", SLOW.format(seconds=3))
    wait_for(tmp_path / "writing", first)
    second = start(tmp_path, settings_file, "second", "making.write_store = None")
    said = second.communicate(timeout=60)[1]
    assert (first.wait(60), second.returncode) == (0, 0), said
    first.stderr.close()
    assert f"process {first.pid} makes the same tokens; waiting for it" in said
    results = [json.loads((tmp_path / f"{n}.json").read_text()) for n in ("first", "second")]
    assert results[0]["cache"] == "miss: no tokens yet"
    assert results[1] == {**results[0], "cache": f"{HIT}, made just now by another run"}


def test_a_killed_run_leaves_nothing_that_looks_finished(tmp_path, settings_file):
    killed = start(tmp_path, settings_file, "killed", SLOW.format(seconds=60))
    wait_for(tmp_path / "writing", killed)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate(timeout=60)
    assert sealed_stores(tmp_path / "tokens") == []
    assert not list((tmp_path / "tokens").glob("[!.]*"))
    after = start(tmp_path, settings_file, "after", "")
    after.communicate(timeout=60)
    assert after.returncode == 0
    result = json.loads((tmp_path / "after.json").read_text())
    assert result["cache"] == "miss: no tokens yet"
    TokenStore.open(result["path"], verify=True)


def test_rows_that_change_while_they_are_read_are_noticed(settings, write_rows, tmp_path):
    from tunewright.contract.failures import DataError
    from tunewright.data import prepare as preparing

    path = write_rows(ROWS)
    real = preparing._existing

    def touched(found):
        write_rows(ROWS[1:])
        return real(found)

    preparing._existing = touched
    try:
        with pytest.raises(DataError, match="changed while it was read; start again"):
            prepare(settings(path), tmp_path / "tokens")
    finally:
        preparing._existing = real
    assert sealed_stores(tmp_path / "tokens") == []
