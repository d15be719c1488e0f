import json
import os
import subprocess
import sys

import pytest

from tunewright.contract.failures import DataError, TunewrightError, UserError
from tunewright.data.rows import read_rows

ROWS = [{"instruction": "Add.", "output": "3"}, {"instruction": "Sub.", "output": "1"}]


def test_json_jsonl_and_parquet_hold_the_same(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    (tmp_path / "b.jsonl").write_text("\ufeff" + "\n".join(map(json.dumps, ROWS)))
    (tmp_path / "c.json").write_text("\n".join(map(json.dumps, ROWS)) + "\n")
    parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "d.parquet")
    for name in ("a.json", "b.jsonl", "c.json", "d.parquet"):
        assert read_rows(str(tmp_path / name)).values == ROWS, name


def test_a_row_knows_its_file_and_line(write_rows, tmp_path):
    path = tmp_path / "set"
    path.mkdir()
    (path / "a.jsonl").write_text('{"n": 1}\n\n{"n": 2}\n')
    (path / "b.json").write_text('[{"n": 3}]')
    (path / "README.md").write_text("not rows")
    (path / ".hidden.json").write_text("[0]")
    rows = read_rows(str(path))
    assert [row["n"] for row in rows.values] == [1, 2, 3]
    assert [rows.place(i) for i in range(3)] == ["a.jsonl row 1", "a.jsonl row 3", "b.json row 1"]


@pytest.mark.parametrize(
    ("name", "content", "error", "words"),
    [
        ("none.json", None, UserError, "does not exist; name a file or folder of rows"),
        ("rows.csv", b"a,b", UserError, "is not a file of rows; known are .json"),
        ("empty.jsonl", b"\n\n", DataError, "holds no rows; a dataset needs at least one"),
        ("empty.json", b"[]", DataError, "holds no rows"),
        ("blank.json", b"", DataError, "is not JSON: Expecting value"),
        ("torn.jsonl", b'{"a": 1}\n{"a": ', DataError, "torn.jsonl line 2 is not JSON: Expecting"),
        ("torn.json", b'[{"a": 1},', DataError, "torn.json is not JSON: Expecting value: line 1"),
        ("number.json", b"3", DataError, "number.json must be a list of objects"),
        ("latin.jsonl", b'{"a": "\xe9"}', DataError, "is not UTF-8 text (byte 8)"),
        ("deep.json", b"[" * 100_000, DataError, "is not JSON: "),
        ("cut.parquet", b"PAR1....PAR1", DataError, "is not a whole Parquet file"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(tmp_path, name, content, error, words):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(error) as caught:
        read_rows(str(tmp_path / name))
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_folder_without_rows(tmp_path):
    with pytest.raises(UserError, match="has no file with rows"):
        read_rows(str(tmp_path))


def test_a_name_that_is_neither_path_nor_hub_name():
    with pytest.raises(UserError, match=r"is not a Hub name .*; a path starts with \./"):
        read_rows("data/my rows.json")


def test_a_hub_name_never_means_a_folder_that_happens_to_lie_here(tmp_path, monkeypatch):
    (tmp_path / "owner" / "rows").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"write \./owner/rows for it"):
        read_rows("owner/rows")


def offline(tmp_path, code):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("code", "what"),
    [
        (
            "from tunewright.data.rows import read_rows as f; name = 'owner/rows'",
            "dataset owner/rows",
        ),
        (
            "from tunewright.data.tokenizer import load_tokenizer as f; name = 'owner/model'",
            "model owner/model",
        ),
    ],
)
def test_a_hub_name_offline_is_one_clear_sentence(tmp_path, code, what):
    pytest.importorskip("datasets")
    body = f"{code}\nimport tunewright.contract.failures as e\ntry: f(name)\n"
    body += "except e.UserError as error: print(error)"
    assert offline(tmp_path, body) == (
        f"{what} is not in the local cache and HF_HUB_OFFLINE is set; "
        "unset it, or name a local folder (./, ../, / or ~)"
    )


def test_without_the_datasets_library_the_way_out_is_named(tmp_path):
    code = "import sys; sys.modules['datasets'] = None\n"
    code += "from tunewright.data.rows import read_rows\n"
    code += "try: read_rows('owner/rows')\nexcept Exception as error: print(error)"
    assert "pip install 'tunewright[hub]'" in offline(tmp_path, code)


def test_an_unreachable_hub_is_worth_another_attempt_and_an_unknown_name_is_not(monkeypatch):
    from tunewright.data.rows import hub_error

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    unreachable = hub_error("dataset a/b", ConnectionError("no route"))
    assert type(unreachable) is TunewrightError
    unknown = hub_error("dataset a/b", FileNotFoundError("Dataset 'a/b' doesn't exist.\nmore"))
    assert isinstance(unknown, UserError)
    assert "doesn't exist; check its name" in str(unknown)
