import errno
import os
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from tunewright.contract.failures import DataError, UserError
from tunewright.data import store as stores
from tunewright.data.store import SplitArrays, TokenStore, token_dtype, write_store

FACTS = {"pack_tokens": 8, "counts": {"train": {"rows": 4}}}
ARRAYS = SplitArrays(
    tokens=np.array([1, 2, 3, 4, 5, 6, 7, 8, 9], dtype=np.uint16),
    documents=np.array([0, 3, 7, 9], dtype=np.int64),
    rows=np.array([4, 1, 2], dtype=np.int64),
    spans=np.array([[1, 3], [1, 2], [3, 4], [1, 2]], dtype=np.uint32),
    span_offsets=np.array([0, 1, 3, 4], dtype=np.int64),
    packs=np.array([0, 2, 3], dtype=np.int64),
)
WRITER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_store import ARRAYS, FACTS
from tunewright.data import store
{patch}
store.write_store(Path(sys.argv[1]), "abc", {{"train": ARRAYS}}, FACTS)
"""


def writer(root, patch=""):
    code = WRITER.format(patch=textwrap.dedent(patch))
    return subprocess.Popen([sys.executable, "-c", code, str(root), os.path.dirname(__file__)])


def test_packs_come_back_as_they_were_written(tmp_path):
    store = write_store(tmp_path, "abc", {"train": ARRAYS}, FACTS)
    assert (len(store.train), store.train.documents, store.train.tokens) == (2, 3, 9)
    assert (store.train.rows, store.train.supervised_tokens) == (4, 5)
    assert store.eval is None
    first, last = store.train
    assert first.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert first.input_ids.dtype == np.int64
    assert first.supervised.astype(int).tolist() == [0, 1, 1, 0, 1, 0, 1]
    assert first.lengths.tolist() == [3, 4]
    assert last.input_ids.tolist() == [8, 9]
    assert store.train[-1].supervised.tolist() == [False, True]
    assert store.train.source_rows(0).tolist() == [4, 1]
    with pytest.raises(IndexError, match="pack 2 of 2"):
        store.train[2]


def test_the_manifest_is_a_contract(tmp_path):
    store = write_store(
        tmp_path,
        "abc",
        {"train": ARRAYS, "eval": ARRAYS},
        {
            "pack_tokens": 8,
            "counts": {"train": {"rows": 4}, "eval": {"rows": 3}},
        },
    )
    counts = {"documents": 3, "tokens": 9, "supervised_tokens": 5, "packs": 2, "longest": 4}
    assert store.facts["counts"] == {"train": {"rows": 4, **counts}, "eval": {"rows": 3, **counts}}
    assert (store.facts["kind"], store.facts["version"]) == ("tokens", 1)
    names = ("tokens", "documents", "rows", "spans", "span_offsets", "packs")
    assert set(store.facts["files"]) == {f"{s}/{n}.npy" for s in ("train", "eval") for n in names}
    assert store.eval is not None
    assert store.eval[1].input_ids.tolist() == [8, 9]


def test_ids_take_two_bytes_where_the_vocabulary_fits():
    assert token_dtype(65536) is np.uint16
    assert token_dtype(65537) is np.uint32


@pytest.mark.parametrize("harm", ["missing", "unsealed", "shorter", "flipped", "newer"])
def test_a_damaged_store_is_refused_in_one_sentence(tmp_path, harm):
    path = write_store(tmp_path, "abc", {"train": ARRAYS}, FACTS).path
    tokens = path / "train" / "tokens.npy"
    manifest = path / "manifest.json"
    if harm == "missing":
        path = tmp_path / "other"
    elif harm == "unsealed":
        manifest.unlink()
    elif harm == "shorter":
        tokens.write_bytes(tokens.read_bytes()[:-1])
    elif harm == "flipped":
        tokens.write_bytes(tokens.read_bytes()[:-1] + b"\xff")
    else:
        manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(DataError, match=r"tokenize again|run tunewright.pretokenize") as caught:
        TokenStore.open(path, verify=True)
    assert len(str(caught.value).splitlines()) == 1


def test_a_killed_writer_leaves_nothing_that_is_trusted_and_the_next_one_cleans_up(tmp_path):
    process = writer(tmp_path, "store.rundir.seal = lambda *a, **k: time.sleep(60)")
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob(".abc.*/train/packs.npy")) and time.monotonic() < deadline:
        time.sleep(0.02)
    stores.remove_leftovers(tmp_path)
    assert list(tmp_path.glob(".abc.*.tmp")), "a living writer's folder must stay"
    process.kill()
    process.wait()
    assert stores.sealed_stores(tmp_path) == []
    write_store(tmp_path, "abc", {"train": ARRAYS}, FACTS)
    assert [p.name for p in tmp_path.iterdir()] == ["abc"]


def test_a_draft_of_another_host_is_left_alone_until_it_is_old(tmp_path):
    draft = tmp_path / ".abc.elsewhere.1.ff.tmp"
    draft.mkdir()
    stores.remove_leftovers(tmp_path)
    assert draft.exists()
    os.utime(draft, (time.time() - 90_000,) * 2)
    stores.remove_leftovers(tmp_path)
    assert not draft.exists()


def test_two_writers_at_once_end_with_one_store(tmp_path):
    meet = """
        original = store._publish
        def publish(draft, final):
            (final.parent / f"ready-{draft.name}").touch()
            while len(list(final.parent.glob("ready-*"))) < 2:
                time.sleep(0.01)
            original(draft, final)
        store._publish = publish
    """
    both = [writer(tmp_path, meet) for _ in range(2)]
    assert [process.wait(60) for process in both] == [0, 0]
    assert [p.name for p in tmp_path.iterdir() if not p.name.startswith("ready-")] == ["abc"]
    assert TokenStore.open(tmp_path / "abc", verify=True).train.tokens == 9


def test_an_unsealed_folder_in_the_way_is_replaced(tmp_path):
    (tmp_path / "abc" / "train").mkdir(parents=True)
    (tmp_path / "abc" / "train" / "tokens.npy").write_bytes(b"half")
    assert write_store(tmp_path, "abc", {"train": ARRAYS}, FACTS).train.tokens == 9
    assert [p.name for p in tmp_path.iterdir()] == ["abc"]


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write tokens below .*: Not a directory; free"):
        write_store(tmp_path / "file" / "tokens", "abc", {"train": ARRAYS}, FACTS)


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(stores.os, "fsync", full)
    with pytest.raises(UserError, match="No space left on device; free some space there"):
        write_store(tmp_path, "abc", {"train": ARRAYS}, FACTS)
    assert list(tmp_path.iterdir()) == []
