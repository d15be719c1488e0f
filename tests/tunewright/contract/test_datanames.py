"""Names of rows, taken apart and made absolute."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunewright.contract.datanames import DataName, bounds, parse, resolved


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("owner/rows", ("owner/rows", None, None)),
        ("owner/rows:train_sft", ("owner/rows", "train_sft", None)),
        ("owner/rows:test[:1000]", ("owner/rows", "test", ":1000")),
        ("./rows.jsonl[-100:]", ("./rows.jsonl", None, "-100:")),
        ("./rows.jsonl:[10%:20%]", ("./rows.jsonl", None, "10%:20%")),
        ("./rows-[0-9].jsonl", ("./rows-[0-9].jsonl", None, None)),
        ("./rows-[0-9].jsonl[5:]", ("./rows-[0-9].jsonl", None, "5:")),
        ("./rows[1:2:3]", ("./rows[1:2:3]", None, None)),
        ("./rows[3]", ("./rows[3]", None, None)),
        (".:test", (".", "test", None)),
        ("[:5]", ("[:5]", None, None)),
    ],
)
def test_a_name_is_taken_apart(name, found):
    assert parse(name) == DataName(*found)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("./rows.jsonl:train[:5]", "/base/rows.jsonl:train[:5]"),
        ("../rows:[5:]", "/rows[5:]"),
        (".:test", "/base:test"),
        ("./:test", "/base:test"),
        ("~/rows[:10%]", "/me/rows[:10%]"),
        ("/rows/../x:train", "/x:train"),
        ("owner/rows:train[:5]", "owner/rows:train[:5]"),
    ],
)
def test_a_path_is_made_absolute_and_keeps_its_suffix(name, expected, monkeypatch):
    monkeypatch.setenv("HOME", "/me")
    assert resolved(name, Path("/base")) == expected
    assert resolved(expected, Path("/other")) == expected


@pytest.mark.parametrize(
    ("part", "total", "expected"),
    [
        (":1000", 50, (0, 50)),
        (":1000", 5000, (0, 1000)),
        ("10%:20%", 1000, (100, 200)),
        ("-100:", 1000, (900, 1000)),
        ("-100:", 50, (0, 50)),
        (":", 7, (0, 7)),
        (":-1", 7, (0, 6)),
        ("-10%:", 7, (6, 7)),
        ("33%:67%", 3, (1, 2)),
        ("5:2", 7, (5, 2)),
        ("9:", 7, (7, 7)),
    ],
)
def test_the_borders_of_a_slice(part, total, expected):
    assert bounds(part, total) == expected


@given(st.integers(0, 10_000), st.lists(st.integers(0, 100), max_size=5))
def test_parts_in_per_cent_give_every_row_once(total, cuts):
    borders = [0, *sorted(cuts), 100]
    rows = []
    for start, end in pairwise(borders):
        rows += range(*bounds(f"{start}%:{end}%", total))
    assert rows == list(range(total))


@given(st.integers(-20, 20), st.integers(-20, 20), st.integers(0, 15))
def test_a_slice_means_what_it_means_in_python(start, end, total):
    rows = list(range(total))
    first, last = bounds(f"{start}:{end}", total)
    assert rows[first:last] == rows[start:end]
