import subprocess
import sys

import pytest

from tunewright.data.prepare import prepare


def test_a_store_is_a_dataset_in_one_line(settings, write_rows, tmp_path, monkeypatch, demo):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"instruction": f"Double {n}.", "output": f"It is {2 * n}."} for n in range(50)]
    wanted = settings(write_rows(rows), eval_fraction=0.2, max_leakage=1)
    store = prepare(wanted, tmp_path / "tokens").store
    for split in (store.train, store.eval):
        found = split.to_dataset()
        assert isinstance(found, datasets.Dataset)
        assert found.column_names == ["input_ids", "labels", "position_ids", "seq_lengths"]
        assert len(found) == len(split)
        for row, pack in zip(found, split, strict=True):
            assert row["input_ids"] == pack.input_ids.tolist()
            assert row["seq_lengths"] == pack.lengths.tolist()
            assert row["position_ids"] == [i for n in row["seq_lengths"] for i in range(n)]
            assert row["labels"] == [
                token if learnt else -100
                for token, learnt in zip(row["input_ids"], pack.supervised.tolist(), strict=True)
            ]
    learnt = [token for token in store.train.to_dataset()[0]["labels"] if token != -100]
    assert "It is" in demo.decode(learnt)


def test_the_page_reads_the_files_with_numpy_alone(settings, write_rows, tmp_path):
    """What README.md says about the files is what is in them."""
    rows = [{"instruction": f"Double {n}.", "output": f"It is {2 * n}."} for n in range(50)]
    store = prepare(settings(write_rows(rows)), tmp_path / "tokens").store
    from tunewright.data import store as stores

    page = stores.__file__.replace("store.py", "README.md")
    with open(page) as file:
        text = file.read()
    code = text.split("```python")[-1].split("```")[0]
    names = ("tokens", "documents", "rows", "spans", "span_offsets", "packs")
    assert all(f"{name}.npy" in text for name in names)
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, str(store.path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        str(len(store.train)), str(store.train.tokens), str(store.train.supervised_tokens)
    ]  # fmt: skip
