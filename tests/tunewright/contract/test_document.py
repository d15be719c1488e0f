"""Files that are no good YAML, and --set."""

from __future__ import annotations

import time

import pytest

from tunewright.contract import document
from tunewright.contract.failures import UserError

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]"
    for old, new in zip("abcdefg", "bcdefgh", strict=True)
)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty; write names and values"),
        (b"# only a comment\n", "is empty"),
        (b"---\n", "is empty"),
        (b"- a\n- b\n", "is not a mapping but a list"),
        (b"just words", "is not a mapping but a single value"),
        (b"5", "is not a mapping but a single value"),
        (b"a: 1\nb: 2\na: 3\n", "the key 'a' is given twice at line 3, column 1"),
        (b"a: {b: 1, b: 2}", "the key 'b' is given twice at line 1"),
        (b"a: &x [*x]", "the anchor at line 1 contains itself"),
        (b"a: &x {b: {c: *x}}", "the anchor at line 1 contains itself"),
        (BOMB.encode(), "expands to more than 100,000 values"),
        (b"a: " + b"[" * 60 + b"]" * 60, "nested more than 50 levels deep"),
        (b"a: " + b"[" * 2000 + b"]" * 2000, "nested more than 50 levels deep"),
        (b"a: " + b"{b: " * 2000, "nested more than 50 levels deep"),
        (b"a: \xff\n", "is not UTF-8 text (byte 3); save it as UTF-8"),
        ("a: é".encode("utf-16"), "is not UTF-8 text"),
        (b"a: 1\x00", "special characters are not allowed"),
        (b"a:\n\tb: 1\n", r"found character '\t' that cannot start any token at line 2, column 1"),
        (b"a: *nowhere", "undefined alias 'nowhere' at line 1"),
        (b"a: 'open", "unexpected end of stream at line 1"),
        (b"a: 1\n---\nb: 2\n", "another document at line 2"),
        (b"a: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
        (b"a: 2026-13-45", "month must be in 1..12"),
        (b'a: "\\ud800"', "half a character"),
        (b"? [a, b]\n: 1\n", "unhashable key"),
        (b"a: " + b"9" * 5000, "is not valid YAML"),
    ],
    ids=lambda value: value[:20] if isinstance(value, bytes) else None,
)
def test_a_file_that_is_no_workload_is_one_sentence(content, words, tmp_path):
    file = tmp_path / "w.yaml"
    file.write_bytes(content)
    began = time.monotonic()
    with pytest.raises(UserError) as error:
        document.read(file)
    assert str(error.value).startswith(str(file))
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert time.monotonic() - began < 10


def test_what_is_no_file(tmp_path):
    with pytest.raises(UserError, match=r"none\.yaml does not exist; give the path"):
        document.read(tmp_path / "none.yaml")
    with pytest.raises(UserError, match="is a folder"):
        document.read(tmp_path)
    with pytest.raises(UserError, match="cannot be read"):
        document.read(tmp_path / ("n" * 300))
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be read: Not a directory"):
        document.read(tmp_path / "file" / "w.yaml")


def test_a_file_has_at_most_one_mebibyte(tmp_path):
    file = tmp_path / "w.yaml"
    head = b"a: |\n"
    file.write_bytes(head + b"  " + b"x" * (document.MAX_BYTES - len(head) - 2))
    assert list(document.read(file)) == ["a"]
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(UserError, match="larger than 1 MiB"):
        document.read(file)


def test_a_file_without_end_is_not_read_for_ever():
    with pytest.raises(UserError, match="larger than 1 MiB"):
        document.read(document.Path("/dev/zero"))


def test_merge_keys_and_aliases_are_welcome():
    text = "base: &b {x: 1, y: 2}\nmore: &m {<<: *b, y: 3}\nlast: {<<: *m, y: 4}\nlist: [*b, *m]"
    found = document.parse(text, "w")
    assert found["last"] == {"x": 1, "y": 4}
    assert found["list"] == [{"x": 1, "y": 2}, {"x": 1, "y": 3}]


def test_a_byte_order_mark_is_welcome():
    assert document.parse("\ufeffa: 1", "w") == {"a": 1}


# --set

DOCUMENT = {
    "experiment_name": "tiny",
    "max_retries": 3,
    "env_variables": {"A": "1"},
    "environment": {"dependencies": ["a", "b"]},
    "parameters": {
        "rate": 1e-3, "steps": 5, "on": True, "text": "7", "none": None, "list": [1, {"x": "y"}],
        "map": {"a": 1},
    },
}  # fmt: skip


def after(path: str, value) -> dict:
    found, problems = document.override(DOCUMENT, {path: value})
    assert problems == []
    return found


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("experiment_name", "5", "5"),
        ("experiment_name", "", ""),
        ("experiment_name", "true", "true"),
        ("max_retries", "0", 0),
        ("parameters.text", "8", "8"),
        ("parameters.text", "[1, 2]", "[1, 2]"),
        ("parameters.steps", "50", 50),
        ("parameters.steps", "1.5", 1.5),
        ("parameters.rate", "3e-5", 3e-5),
        ("parameters.rate", "1", 1.0),
        ("parameters.on", "false", False),
        ("parameters.none", "5", 5),
        ("parameters.list", "[3]", [3]),
        ("parameters.list.0", "9", 9),
        ("parameters.list.1.x", "z", "z"),
        ("parameters.map", "{b: 2}", {"b": 2}),
        ("parameters.steps", "null", None),
        ("parameters.new", "true", True),
        ("parameters.new", "[a, 2]", ["a", 2]),
        ("parameters.new", "3", 3),
        ("parameters.new", "text", "text"),
        ("parameters.new.deep", "1", 1),
        ("parameters.new", "a=b", "a=b"),
        ("env_variables.A", "2", "2"),
        ("env_variables.NEW", "1", "1"),
        ("env_variables.NEW", "true", "true"),
        ("secrets.T", "a/b", "a/b"),
        ("environment.dependencies", "[trl>=1.1]", ["trl>=1.1"]),
        ("parameters.steps", 7, 7),
        ("parameters.steps", [7], [7]),
    ],
)
def test_set_takes_the_type_of_what_it_replaces(path, value, expected):
    place = after(path, value)
    for part in path.split("."):
        place = place[int(part)] if isinstance(place, list) else place[part]
    assert place == expected
    assert type(place) is type(expected)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("max_retries", "many", "'many' replaces 3 and must be a number"),
        ("max_retries", "", "write null to remove it"),
        ("parameters.on", "1", "must be true or false"),
        ("parameters.list", "x", "must be a list, like [a, b]"),
        ("parameters.map", "[1]", "must be a mapping, like {a: b}"),
        ("experiment_name.x", "1", "is 'tiny', not a mapping"),
        ("experiment_name.x.y", "1", "leads through 'tiny', which is not a mapping"),
        ("parameters.list.2", "1", "'2' is not one of the 2 list places"),
        ("parameters.list.x", "1", "'x' is not one of the 2 list places"),
        ("parameters.list.-1", "1", "is not one of the 2 list places"),
        ("parameters.new", "[1", "is not a YAML value"),
        ("parameters.new", "&a [*a]", "contains itself"),
        ("parameters.new", "[" * 60 + "]" * 60, "nested more than 50 levels"),
    ],
)
def test_set_that_cannot_be(path, value, words):
    found, problems = document.override(DOCUMENT, {path: value})
    assert found == DOCUMENT
    assert [problem.path for problem in problems] == [path]
    assert problems[0].message.startswith("--set: ")
    assert words in problems[0].message


def test_set_leaves_the_document_it_was_given_alone():
    before = repr(DOCUMENT)
    after("parameters.list.1.x", "changed")
    assert repr(DOCUMENT) == before


def test_set_on_the_command_line():
    pairs = ("a.b=1", "c=x=y", " d =", "e= z ")
    assert document.assignments(pairs) == {"a.b": "1", "c": "x=y", "d": "", "e": " z "}
    for pair in ("a.b", "=5", ""):
        with pytest.raises(UserError, match=r"write --set parameters\.max_steps=50"):
            document.assignments((pair,))
