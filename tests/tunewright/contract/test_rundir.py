"""Folders that are finished, folders that are not, and folders that were hurt."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
import xxhash

from tunewright.contract import rundir
from tunewright.contract.rundir import RunDir


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "model"
    (place / "sub").mkdir(parents=True)
    (place / "a.bin").write_bytes(b"a" * 1000)
    (place / "sub" / "b é.bin").write_bytes(b"")
    (place / "sub" / "manifest.json").write_text("of another tool")
    return place


def test_the_seal_lists_every_file_with_size_and_hash(folder):
    sealed = rundir.seal(folder, {"step": 5})
    assert sealed == {
        "step": 5,
        "files": {
            "a.bin": {"size": 1000, "xxh3_128": xxhash.xxh3_128(b"a" * 1000).hexdigest()},
            "sub/b é.bin": {"size": 0, "xxh3_128": xxhash.xxh3_128(b"").hexdigest()},
            "sub/manifest.json": {
                "size": 15,
                "xxh3_128": xxhash.xxh3_128(b"of another tool").hexdigest(),
            },
        },
    }
    assert rundir.manifest(folder) == sealed
    assert rundir.is_sealed(folder)
    assert rundir.damage(folder, sealed) == []
    assert not list(folder.glob(".manifest*"))


def test_hashes_that_are_known_are_not_computed_again(folder):
    known = {"a.bin": {"size": 1000, "xxh3_128": "known", "more": 1}}
    assert rundir.seal(folder, hashes=known)["files"]["a.bin"] == known["a.bin"]


@pytest.mark.parametrize(
    ("hurt", "words", "sealed"),
    [
        (lambda f: (f / "a.bin").unlink(), "a.bin is missing", False),
        (lambda f: (f / "a.bin").write_bytes(b"a" * 999), "999 bytes, the seal says 1000", False),
        (lambda f: (f / "a.bin").write_bytes(b"b" * 1000), "not have the sealed hash", True),
        (lambda f: ((f / "a.bin").unlink(), (f / "a.bin").mkdir()), "a.bin is missing", False),
    ],
)
def test_damage_is_found(folder, hurt, words, sealed):
    rundir.seal(folder)
    hurt(folder)
    (found,) = rundir.damage(folder, rundir.manifest(folder))
    assert words in found
    assert rundir.is_sealed(folder) == sealed, "sizes only: quick, for choosing"


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b'{"files": {"a.bin": {"size": 10', b"null", b"[]", b"{}", b'{"files": []}',
     b'{"files": {"a.bin": 1}}', b'{"files": {"a.bin": {"size": 1000}}}', b"\xff", b"[" * 100_000],
    ids=lambda c: c[:30],
)  # fmt: skip
def test_a_torn_or_foreign_manifest_seals_nothing(folder, content):
    (folder / "manifest.json").write_bytes(content)
    assert rundir.manifest(folder) is None
    assert not rundir.is_sealed(folder)


def test_no_folder_is_not_sealed(tmp_path):
    assert not rundir.is_sealed(tmp_path / "none")
    (tmp_path / "manifest.json").mkdir()
    assert not rundir.is_sealed(tmp_path)


def test_only_sealed_checkpoints_count_in_the_order_of_their_steps(tmp_path):
    for step in (200, 5, 100):
        place = tmp_path / f"step-{step:08d}"
        place.mkdir()
        (place / "x").write_text(str(step))
        rundir.seal(place)
    (tmp_path / "step-00000300").mkdir()
    (tmp_path / "step-9").mkdir()
    (tmp_path / "step-00000100" / "x").unlink()
    assert [step for step, _ in rundir.sealed_checkpoints(tmp_path)] == [5, 200]
    assert rundir.sealed_checkpoints(tmp_path / "none") == []


def test_a_small_file_is_never_seen_half(tmp_path):
    path, torn = tmp_path / "deep" / "f.json", []
    rundir.write_json(path, {"n": -1})
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            facts = json.loads(path.read_text())
            if facts["n"] >= 0 and facts["x"] != "y" * 10_000:
                torn.append(facts)

    reader = threading.Thread(target=read)
    reader.start()
    for n in range(50):
        rundir.write_json(path, {"n": n, "x": "y" * 10_000})
    done.set()
    reader.join()
    assert torn == []
    assert os.listdir(path.parent) == ["f.json"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "f.json"
    rundir.write_json(path, {"n": 1})
    with pytest.raises(UnicodeEncodeError):
        rundir.write_text(path, "half a character \ud800")
    assert rundir.read_json(path) == {"n": 1}
    assert os.listdir(tmp_path) == ["f.json"]


def test_attempts_are_numbered_and_other_files_are_none(tmp_path):
    run = RunDir(tmp_path)
    assert run.attempts() == []
    for name in ("attempt-2", "attempt-10", "attempt-1", "attempt-x", "attempt-", "lock.json"):
        (run.state / name).mkdir(parents=True)
    assert run.attempts() == [1, 2, 10]


def test_the_layout_of_a_run(tmp_path):
    run = RunDir(tmp_path / "llama-7f3a91c2")
    places = [
        run.workload, run.lock, run.node_log(1, 0), run.checkpoint(200), run.model, run.receipt,
        run.node_exit(2, 1), run.events(1), run.step_log("register"),
    ]  # fmt: skip
    assert [str(place.relative_to(run.root)) for place in places] == [
        "workload.yaml", "state/lock.json", "logs/attempt-1/node-0.log",
        "checkpoints/step-00000200", "model", "receipt.json", "state/attempt-2/node-1.json",
        "logs/attempt-1/events.jsonl", "logs/register.log",
    ]  # fmt: skip


def test_home(monkeypatch, tmp_path):
    monkeypatch.setenv("TUNEWRIGHT_HOME", str(tmp_path))
    assert rundir.home() == tmp_path
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TUNEWRIGHT_HOME", "here")
    assert rundir.home() == tmp_path / "here"
    monkeypatch.setenv("TUNEWRIGHT_HOME", "")
    monkeypatch.setenv("HOME", "/home/me")
    assert rundir.home() == Path("/home/me/.tunewright")
