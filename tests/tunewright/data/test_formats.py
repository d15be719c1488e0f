"""Every kind of file gives the same rows, lazily; what is torn is told with its place."""

import bz2
import csv
import gzip
import io
import json
import lzma
import tracemalloc

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import ipc, parquet

from tunewright.contract.failures import DataError, UserError
from tunewright.data import jsonrows
from tunewright.data.examples import BadRow
from tunewright.data.formats import count_rows, read_file

ROWS = [{"instruction": "Add é\n1.", "output": "3"}, {"instruction": "Sub;,\t'\"", "output": "1"}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
TABLE = pa.Table.from_pylist(ROWS)


def as_csv(delimiter=","):
    text = io.StringIO()
    writer = csv.DictWriter(text, ["instruction", "output"], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(ROWS)
    return text.getvalue().encode()


def as_arrow(new):
    sink = pa.BufferOutputStream()
    with new(sink, TABLE.schema) as writer:
        writer.write_table(TABLE)
    return sink.getvalue().to_pybytes()


def as_parquet(table=TABLE):
    sink = pa.BufferOutputStream()
    parquet.write_table(table, sink)
    return sink.getvalue().to_pybytes()


def zstd(content):
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


FILES = {
    "list.json": json.dumps(ROWS).encode(),
    "pretty.json": json.dumps(ROWS, indent=2, ensure_ascii=False).encode(),
    "lines.json": LINES,
    "data.json": json.dumps({"version": 1, "data": ROWS}).encode(),
    "lines.jsonl": LINES,
    "mark.jsonl": b"\xef\xbb\xbf" + LINES,
    "windows.ndjson": LINES.replace(b"\n", b"\r\n"),
    "UPPER.JSONL": LINES,
    "table.csv": as_csv(),
    "semicolons.csv": b"\xef\xbb\xbf" + as_csv(";"),
    "table.tsv": as_csv("\t"),
    "rows.parquet": as_parquet(),
    "file.arrow": as_arrow(ipc.new_file),
    "stream.arrow": as_arrow(ipc.new_stream),
    "lines.jsonl.gz": gzip.compress(LINES, mtime=0),
    "list.json.bz2": bz2.compress(json.dumps(ROWS).encode()),
    "table.csv.xz": lzma.compress(as_csv()),
    "lines.jsonl.zst": zstd(LINES),
}


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_file_holds_the_same(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(FILES[name])
    assert list(read_file(path)) == [(1, ROWS[0]), (2, ROWS[1])]
    assert count_rows(path) == 2


def test_the_rows_of_a_jsonl_file_are_its_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\n{"n": 1}\n \n{"n": "\\u2028\xe2\x80\xa8"}\n')
    assert list(read_file(path)) == [(2, {"n": 1}), (4, {"n": "\u2028\u2028"})]


def test_a_line_that_cannot_be_read_costs_no_other(tmp_path):
    path = tmp_path / "a.jsonl"
    deep = b"[" * 100_000
    path.write_bytes(b'{"n": 1}\n{"n": \n' + deep + b'\n{"n": "\xe9"}\n{"n": 5}')
    found = dict(read_file(path))
    assert {n: str(v) for n, v in found.items() if isinstance(v, BadRow)} == {
        2: "not JSON (Expecting value, column 8; a line is one object)",
        3: "not JSON (nested too deep)",
    }
    assert found[4] == {"n": "\udce9"}
    assert found[5] == {"n": 5}


def test_a_table_whose_rows_are_not_as_wide_as_its_header(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('a,b\n1,2\n3\n\n"x"y,2\n4,5,6\n"7\n8",9\n')
    found = list(read_file(path))
    assert [number for number, _ in found] == [1, 2, 4, 5, 6]
    assert [str(value) for _, value in found[1:4]] == [
        "not as wide as the header (1 fields, not 2)",
        "not CSV (',' expected after '\"')",
        "not as wide as the header (3 fields, not 2)",
    ]
    assert found[0] == (1, {"a": "1", "b": "2"})
    assert found[4] == (6, {"a": "7\n8", "b": "9"})


def test_a_field_may_be_long(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(f"text\n{'x' * 1_000_000}\n")
    assert [len(row["text"]) for _, row in read_file(path)] == [1_000_000]


@pytest.mark.parametrize("write", [as_parquet, lambda table: _stream(table)])
def test_a_column_s_type_adds_no_keys_to_a_row(tmp_path, write):
    """An Arrow struct has every key of every row; what a row did not have is null there."""
    rows = [
        {"messages": [{"role": "user", "args": {"x": 1}}], "id": None},
        {"messages": [{"role": "tool", "args": {"y": "é"}, "name": "f"}], "id": "b"},
    ]
    path = tmp_path / ("a.parquet" if write is as_parquet else "a.arrow")
    path.write_bytes(write(pa.Table.from_pylist(rows)))
    assert [row for _, row in read_file(path)] == [
        {"messages": [{"role": "user", "args": {"x": 1}}]},
        rows[1],
    ]


def _stream(table):
    sink = pa.BufferOutputStream()
    with ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("torn.json", b'[{"a": 1},\n', "torn.json is not JSON: Expecting value at line 2, row 2"),
        ("torn.json", b'[{"a": 1},\n{"a": "x', "Unterminated string starting at at line 2, row 2"),
        ("torn.json", b'[{"a": 1}', "is not JSON: Expecting ',' delimiter at line 1, row 2"),
        ("comma.json", b'[{"a": 1},]', "is not JSON: Expecting value at line 1, row 2"),
        ("bare.json", b'[{"a": 1} {"a": 2}]', "Expecting ',' delimiter at line 1, row 2"),
        ("two.json", b"[1][2]", "is not JSON: Extra data at line 1, row 2"),
        ("number.json", b"3", "number.json must be a list of objects"),
        ("deep.json", b"[" * 100_000, "deep.json is not JSON: nested too deep at line 1, row 1"),
        ("wide.jsonl", '{"a": 1}'.encode("utf-16"), "is UTF-16, not UTF-8 text; convert it"),
        ("torn.csv", b'a,b\n1,2\n"3,4\n5,6\n', "row 2 opens a quote that is never closed"),
        ("twice.csv", b"a,b,a\n1,2,3\n", "has a header with a column twice: a,b,a"),
        ("cut.parquet", b"PAR1....PAR1", "cut.parquet is not a whole .parquet file"),
        ("cut.parquet", as_parquet()[:-20], "cut.parquet is not a whole .parquet file"),
        ("cut.arrow", as_arrow(ipc.new_file)[:-30], "cut.arrow is not a whole .arrow file"),
        ("cut.arrow", as_arrow(ipc.new_stream)[:-60], "cut.arrow is not a whole .arrow file"),
        ("none.arrow", b"", "none.arrow is not a whole .arrow file"),
        ("cut.json.gz", gzip.compress(LINES, mtime=0)[:-9], "cut.json.gz is not a whole .gz file"),
        ("not.json.gz", LINES, "not.json.gz is not a whole .gz file: Not a gzipped file"),
        ("not.json.bz2", LINES, "not.json.bz2 is not a whole .bz2 file: Invalid data stream"),
        ("cut.json.bz2", bz2.compress(LINES)[:-9], "cut.json.bz2 is not a whole .bz2 file"),
        ("cut.json.xz", lzma.compress(LINES)[:-9], "cut.json.xz is not a whole .xz file"),
        ("not.json.xz", LINES, "not.json.xz is not a whole .xz file"),
        ("not.json.zst", LINES, "not.json.zst is not a whole .zst file"),
        ("cut.jsonl.zst", zstd(LINES)[:-9], "cut.jsonl.zst is not a whole .zst file"),
    ],
)
def test_a_torn_file_is_one_sentence(tmp_path, name, content, words):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        list(read_file(path))
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_file_that_is_gone(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*gone\.jsonl: No such file"):
        list(read_file(tmp_path / "gone.jsonl"))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(VALUES), st.integers(1, 40), st.sampled_from([None, 1]), st.booleans())
def test_json_is_decoded_the_same_through_a_window_of_any_size(rows, size, indent, ascii_):
    text = json.dumps(rows, indent=indent, ensure_ascii=ascii_)
    window, jsonrows._WINDOW = jsonrows._WINDOW, size
    try:
        assert list(jsonrows.json_rows(io.StringIO(text), "x")) == rows
    finally:
        jsonrows._WINDOW = window


@given(st.lists(VALUES, min_size=1), st.data(), st.integers(1, 40))
def test_json_that_is_cut_anywhere_is_never_taken_for_whole(rows, data, size):
    text = json.dumps(rows)
    cut = data.draw(st.integers(1, len(text) - 1))
    window, jsonrows._WINDOW = jsonrows._WINDOW, size
    try:
        with pytest.raises(DataError, match="is not JSON"):
            list(jsonrows.json_rows(io.StringIO(text[:cut]), "x"))
    finally:
        jsonrows._WINDOW = window


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.csv", "a.jsonl.gz"])
def test_a_file_is_never_in_memory_whole(tmp_path, name):
    """16 MB of rows, with less than 6 MB of Python's memory."""
    row = {"text": "x" * 1000}
    line = json.dumps(row)
    content = {
        "a.json": f"[{','.join([line] * 16_000)}]",
        "a.csv": "text\n" + f"{row['text']}\n" * 16_000,
    }.get(name, f"{line}\n" * 16_000).encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(content, mtime=0) if name.endswith(".gz") else content)
    del content
    tracemalloc.start()
    try:
        assert sum(1 for _, found in read_file(path) if found == row) == 16_000
        assert tracemalloc.get_traced_memory()[1] < 6_000_000
    finally:
        tracemalloc.stop()
