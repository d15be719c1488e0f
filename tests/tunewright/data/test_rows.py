"""Sources of rows: files, folders, globs, splits, slices, weights and the Hub; and their places."""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunewright.contract.datasettings import DatasetSource, DataSettings
from tunewright.contract.failures import DataError, TunewrightError, UserError
from tunewright.data.examples import Alpaca, BadRow, Chat
from tunewright.data.hub import HubRows, hub_error
from tunewright.data.rows import evaluation_sources, read_rows, training_sources


def source(name, **more):
    return DatasetSource(name=str(name), **more)


def numbers(*names, **more):
    """The `n` of every row of some sources."""
    sources = [name if isinstance(name, DatasetSource) else source(name, **more) for name in names]
    return [value["n"] for _, value in read_rows(*sources)]


def write(path, *values):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f'{{"n": {value}}}\n' for value in values))
    return path


def test_rows_may_be_read_again_and_know_their_places(tmp_path):
    folder = tmp_path / "set"
    write(folder / "a.jsonl", '1}\n\n\n{"n": 2')
    (folder / "b.json").write_text('[{"n": 3}, {"n": 4}]')
    (folder / "README.md").write_text("not rows")
    (folder / "dataset_info.json").write_text("{}")
    (folder / ".hidden.json").write_text("[0]")
    (folder / "_cache").mkdir()
    (folder / "_cache" / "x.json").write_text("[0]")
    rows = read_rows(source(folder))
    for _ in range(2):
        assert list(rows) == [(n, {"n": n}) for n in (1, 2, 3, 4)]
        assert [rows.place(n) for n in (1, 2, 3, 4)] == [
            "a.jsonl row 1", "a.jsonl row 4", "b.json row 1", "b.json row 2",
        ]  # fmt: skip


def test_reading_stops_where_the_reader_stops(tmp_path):
    (tmp_path / "b.json").write_text('[{"n": 1}, oops')
    rows = iter(read_rows(source(tmp_path / "b.json")))
    assert next(rows) == (1, {"n": 1})
    with pytest.raises(DataError, match="row 2"):
        next(rows)


@pytest.mark.parametrize(
    ("suffix", "found"),
    [
        ("", range(10)),
        ("[:3]", range(3)),
        (":[7:]", [7, 8, 9]),
        (":train[-2:]", [8, 9]),
        ("[10%:30%]", [1, 2]),
        ("[4:6]", [4, 5]),
    ],
)
def test_a_part_of_the_rows(tmp_path, suffix, found):
    """A slice counts the rows of all files together."""
    write(tmp_path / "set" / "a.jsonl", *range(5))
    write(tmp_path / "set" / "b.jsonl", *range(5, 10))
    assert numbers(f"{tmp_path}/set{suffix}") == list(found)
    assert numbers(f"{tmp_path}/set/*.jsonl{suffix}") == list(found)


def test_places_in_a_part(tmp_path):
    rows = read_rows(source(f"{write(tmp_path / 'a.jsonl', *range(9))}[5:7]"))
    assert [(n, rows.place(n)) for n, _ in rows] == [
        (1, f"{tmp_path}/a.jsonl row 6"),
        (2, f"{tmp_path}/a.jsonl row 7"),
    ]


def test_a_path_that_exists_is_taken_as_it_is_written(tmp_path):
    write(tmp_path / "a[:1].jsonl", 1, 2)
    write(tmp_path / "odd:test" / "a.jsonl", 3)
    assert numbers(tmp_path / "a[:1].jsonl") == [1, 2]
    assert numbers(tmp_path / "odd:test") == [3]


def test_globs(tmp_path):
    write(tmp_path / "a-1.jsonl", 1)
    write(tmp_path / "a-2.jsonl", 2)
    write(tmp_path / "deep" / "er" / "a-3.jsonl", 3)
    (tmp_path / "a-4.txt").write_text("no rows")
    assert numbers(tmp_path / "a-*") == [1, 2]
    assert numbers(tmp_path / "a-[2-9].jsonl") == [2]
    assert numbers(f"{tmp_path}/**/*.jsonl") == [1, 2, 3]
    with pytest.raises(UserError, match="has no file with rows"):
        read_rows(source(tmp_path / "b-*"))


SPLIT_FOLDER = {
    "data/train-00000-of-00002.jsonl": 1,
    "data/train-00001-of-00002.jsonl": 2,
    "data/test-00000-of-00001.jsonl": 3,
    "data/train_sft.jsonl": 4,
    "dev/rows.jsonl": 5,
    "contest.jsonl": 6,
}


@pytest.mark.parametrize(
    ("suffix", "found"),
    [
        ("", [6, 1, 2, 4]),
        (":train", [6, 1, 2, 4]),
        (":test", [3]),
        (":validation", [5]),
        (":train_sft", [4]),
        (":train[1:2]", [1]),
        (":dev", [5]),
        (":eval", [3]),
    ],
)
def test_of_a_folder_with_several_splits_one_is_read(tmp_path, suffix, found):
    for name, number in SPLIT_FOLDER.items():
        write(tmp_path / name, number)
    assert numbers(f"{tmp_path}{suffix}") == found


def test_a_folder_of_one_split_is_read_whole(tmp_path):
    write(tmp_path / "test.jsonl", 1)
    assert numbers(tmp_path) == [1]
    with pytest.raises(UserError, match=r"has no split train, only test; name one, like .*:test"):
        read_rows(source(f"{tmp_path}:train"))
    with pytest.raises(UserError, match="has no split dev"):
        read_rows(source(f"{tmp_path}/test.jsonl:dev"))


def test_a_dataset_saved_by_the_library(tmp_path):
    datasets = pytest.importorskip("datasets")
    split = {
        name: datasets.Dataset.from_list([{"n": n}]) for n, name in enumerate(("test", "train"))
    }
    datasets.DatasetDict(split).save_to_disk(str(tmp_path / "saved"))
    assert numbers(tmp_path / "saved") == [1]
    assert numbers(f"{tmp_path}/saved:test") == [0]


# Weights


def test_a_weight_of_two_gives_each_row_twice(tmp_path):
    a, b = write(tmp_path / "a.jsonl", 1, 2), write(tmp_path / "b.jsonl", 3)
    rows = read_rows(source(a, weight=2), source(b))
    assert [(n, value["n"]) for n, value in rows] == [(1, 1), (1, 1), (2, 2), (2, 2), (3, 3)]
    assert rows.name == f"{a}, {b}"
    assert rows.place(3) == f"{b} row 1"


def test_a_weight_of_a_half_takes_the_same_half_whatever_is_added(tmp_path):
    path = write(tmp_path / "a.jsonl", *range(2000))
    half = numbers(path, weight=0.5)
    assert 900 < len(half) < 1100
    assert numbers(path, weight=0.5) == half == sorted({*half})
    more = numbers(write(tmp_path / "b.jsonl", *range(-500, 2000)), weight=0.5)
    assert [n for n in more if n >= 0] == half
    twice = Counter(numbers(path, weight=1.5))
    assert {n for n, count in twice.items() if count == 2} == {*half}
    assert len(twice) == 2000
    assert {*numbers(path, weight=0.25)} < {*half}


def test_numbers_and_places_with_rows_left_out(tmp_path):
    path = write(tmp_path / "a.jsonl", *range(1, 101))
    rows = read_rows(source(path, weight=0.3))
    found = [(number, value["n"]) for number, value in rows]
    assert all(number == n for number, n in found)
    assert [rows.place(n) for n, _ in found] == [f"{path} row {n}" for n, _ in found]


# Examples


def test_the_shape_of_each_file_is_found_and_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n{"instruction": "Q", "output": "A"}\n')
    (tmp_path / "b.jsonl").write_text('{"text": "T"}\n{"prompt": "Q", "completion": "A"}\n')
    rows = read_rows(source(tmp_path))
    found = [f"{rows.place(number)}: {content}" for number, content in rows.examples()]
    assert rows.formats == {"a.jsonl": "alpaca", "b.jsonl": "text"}
    assert found[0].startswith("a.jsonl row 1: unknown shape (its keys: x;")
    assert found[1:] == [
        "a.jsonl row 2: Alpaca(instruction='Q', input='', output='A')",
        "b.jsonl row 1: Text(text='T')",
        "b.jsonl row 2: another shape than the file's first row (prompt_completion, not text)",
    ]


def test_each_source_has_its_own_shape_columns_and_weight(tmp_path):
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    a.write_text('{"q": "Q", "a": "A"}\n{"q": "Q"}\n')
    b.write_text('{"text": "T", "instruction": "Q", "output": "B"}\n')
    columns = {"instruction": "q", "output": "a"}
    rows = read_rows(source(a, columns=columns, weight=2), source(b, format="text"))
    found = list(rows.examples())
    assert found[:2] == [(1, Alpaca("Q", "", "A"))] * 2
    assert [(n, str(bad)) for n, bad in found[2:3]] == [(2, "no answer")]
    assert str(found[3]) == "(3, Text(text='T'))"


def test_bad_bytes_are_a_bad_row_with_its_place(tmp_path):
    for name in ("a.jsonl", "b.json", "c.csv"):
        row = {
            "a.jsonl": b'{"text": "ok"}\n{"text": "\xe9t\xe9"}\n{"text": "ok"}\n',
            "b.json": b'[{"text": "ok"},\n{"text": "\xe9t\xe9"}, {"text": "ok"}]',
            "c.csv": b"text\nok\n\xe9t\xe9\nok\n",
        }[name]
        (tmp_path / name).write_bytes(row)
    rows = read_rows(source(tmp_path))
    bad = [f"{rows.place(n)}: {c}" for n, c in rows.examples() if isinstance(c, BadRow)]
    assert bad == [
        f"{name} row 2: not UTF-8 text (text has the byte 0xe9)"
        for name in ("a.jsonl", "b.json", "c.csv")
    ]


def test_the_sources_of_settings(tmp_path):
    one = DataSettings(
        model_name="a/b", dataset_name="c/d:x[:5]", dataset_split="y", dataset_revision="r",
        eval_dataset="./e", format="text", columns={"text": "t"},
    )  # fmt: skip
    shared = {"revision": "r", "split": "y", "format": "text", "columns": {"text": "t"}}
    assert training_sources(one) == [DatasetSource(name="c/d:x[:5]", **shared)]
    assert evaluation_sources(one) == [DatasetSource(name="./e", **shared)]
    several = DataSettings(model_name="a/b", datasets=[{"name": "c/d", "weight": 2}])
    assert training_sources(several) == [DatasetSource(name="c/d", weight=2)]
    assert evaluation_sources(several) == []


# What is not there


@pytest.mark.parametrize(
    ("name", "content", "error", "words"),
    [
        ("none.json", None, UserError, "does not exist; name a file, glob or folder of rows"),
        ("rows.xlsx", b"a,b", UserError, "is not a file of rows; known are .json, .jsonl"),
        ("rows.parquet.gz", b"", UserError, "is not a file of rows"),
        ("empty.jsonl", b"\n\n", DataError, "holds no rows; a dataset needs at least one"),
        ("empty.json", b"[]", DataError, "holds no rows"),
        ("blank.json", b"", DataError, "holds no rows"),
        ("header.csv", b"a,b\n", DataError, "holds no rows"),
        ("blank.csv", b"", DataError, "holds no rows"),
    ],
)
def test_what_is_not_there_is_one_sentence(tmp_path, name, content, error, words):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(error) as caught:
        list(read_rows(source(tmp_path / name)))
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_part_without_rows(tmp_path):
    path = write(tmp_path / "a.jsonl", 1)
    with pytest.raises(DataError, match=r"a\.jsonl\[5:\] holds no rows"):
        list(read_rows(source(f"{path}[5:]")))


def test_a_folder_without_rows(tmp_path):
    with pytest.raises(UserError, match="has no file with rows"):
        read_rows(source(tmp_path))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.integers(1, 3))
def test_every_row_once_in_order_whatever_the_files(tmp_path_factory, sizes, weight):
    folder = tmp_path_factory.mktemp("rows")
    values = iter(range(100))
    for index, size in enumerate(sizes):
        write(folder / f"{index}.jsonl", *(next(values) for _ in range(size)))
    if not sum(sizes):
        return
    found = numbers(folder, weight=weight)
    assert found == [n for n in range(sum(sizes)) for _ in range(weight)]


# The Hub


def test_a_name_that_is_neither_path_nor_hub_name():
    with pytest.raises(UserError, match=r"is not a Hub name .*; a path starts with \./"):
        read_rows(source("data/my rows.json"))


def test_a_hub_name_never_means_a_folder_that_happens_to_lie_here(tmp_path, monkeypatch):
    (tmp_path / "owner" / "rows").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"write \./owner/rows for it"):
        read_rows(source("owner/rows:test[:5]"))


def offline(tmp_path, code):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    return done.stdout.strip()


READ = """
from tunewright.contract.datasettings import DatasetSource
from tunewright.data.rows import read_rows
def f(name): return list(read_rows(DatasetSource(name=name)))
"""


@pytest.mark.parametrize(
    ("code", "what"),
    [
        (f"{READ}\nname = 'owner/rows'", "dataset owner/rows"),
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
    code = f"import sys; sys.modules['datasets'] = None\n{READ}\n"
    code += "try: f('owner/rows')\nexcept Exception as error: print(error)"
    assert "pip install 'tunewright[hub]'" in offline(tmp_path, code)


@pytest.mark.parametrize("streamed", [False, True])
def test_the_library_s_rows_memory_mapped_or_streamed(tmp_path, streamed):
    """Its loading code on a local folder, which it reads as it does one of the Hub."""
    pytest.importorskip("datasets")
    for split, values in {"train": range(5), "test": range(5, 7)}.items():
        write(tmp_path / "rows" / f"{split}.jsonl", *values)
    code = f"""
from tunewright.data.hub import HubRows
for split in ("train", "test"):
    rows = HubRows({str(tmp_path / "rows")!r}, split, None, None, {streamed})
    assert list(rows.read()) == list(rows.read())
    print([(number, row["n"]) for number, row in rows.read()], rows.count())
"""
    assert offline(tmp_path / "rows", code).splitlines() == [
        "[(1, 0), (2, 1), (3, 2), (4, 3), (5, 4)] 5",
        "[(1, 5), (2, 6)] 2",
    ]


def test_a_split_that_the_library_does_not_know(tmp_path):
    pytest.importorskip("datasets")
    write(tmp_path / "rows" / "train.jsonl", 1)
    rows = HubRows(str(tmp_path / "rows"), "dev", None, None, True)
    with pytest.raises(UserError, match=r"cannot load dataset .* from the Hub: Bad split: dev"):
        list(rows.read())


def test_an_unreachable_hub_is_worth_another_attempt_and_an_unknown_name_is_not(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    unreachable = hub_error("dataset a/b", ConnectionError("no route"))
    assert type(unreachable) is TunewrightError
    unknown = hub_error("dataset a/b", FileNotFoundError("Dataset 'a/b' doesn't exist.\nmore"))
    assert isinstance(unknown, UserError)
    assert "doesn't exist; check its name" in str(unknown)
    assert hub_error("dataset a/b", unreachable) is unreachable


# Real rows


def test_the_shared_files_are_read_unchanged(real_data):
    found = {
        "alpaca_en_demo.json": ("alpaca", 999, Alpaca),
        "v1_sft_demo.jsonl": ("messages", 500, Chat),
        "glaive_toolcall_en_demo.json": ("sharegpt", 300, Chat),
    }
    for name, (shape, count, kind) in found.items():
        rows = read_rows(source(real_data / name))
        examples = [content for _, content in rows.examples()]
        assert {type(example) for example in examples} == {kind}
        assert len(examples) == count
        assert rows.formats == {str(real_data / name): shape}


def test_the_shared_typed_parts_keep_their_weights(real_data):
    path = real_data / "v1_sft_demo.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line, (_, chat) in zip(lines, read_rows(source(path)).examples(), strict=True):
        for turn, message in zip(line["messages"], chat.messages, strict=True):
            assert message.content == "".join(part["value"] for part in turn["content"])
            assert message.answer == (turn["loss_weight"] == 1.0)


def test_the_shared_tool_calls_by_value(real_data):
    rows = read_rows(source(real_data / "glaive_toolcall_en_demo.json"))
    first = next(content for _, content in rows.examples())
    assert [(m.role, m.answer) for m in first.messages] == [
        ("user", False), ("assistant", True), ("user", False), ("assistant", True),
        ("tool", False), ("assistant", True),
    ] + [(m.role, m.answer) for m in first.messages[6:]]  # fmt: skip
    (call,) = first.messages[3].tool_calls
    assert call.name == "search_recipes"
    assert call.arguments == {"ingredients": ["chicken", "bell peppers", "rice"]}
    assert first.messages[3].content == ""
    assert first.messages[4].content.startswith('{"recipes": [{"name": "Chicken and Bell Pepper')
    assert [tool["function"]["name"] for tool in first.tools] == ["search_recipes"]
    calls = [m for _, chat in rows.examples() for m in chat.messages if m.tool_calls]
    assert len(calls) == 211
    assert sum(len(chat.tools) == 0 for _, chat in rows.examples()) == 109
