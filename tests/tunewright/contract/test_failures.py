"""How a program's error reaches the guardian and the reader."""

from __future__ import annotations

import json
import pickle

import pytest

from tunewright.contract import failures
from tunewright.contract.failures import reported


@pytest.fixture
def told(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNEWRIGHT_FAILURE_DIR", str(tmp_path))
    monkeypatch.delenv("RANK", raising=False)
    return lambda: [json.loads(path.read_text()) for path in tmp_path.glob("rank-*.json")]


@pytest.mark.parametrize(
    ("error", "failure_class", "code"),
    [
        (failures.UserError("m"), "user", 2),
        (failures.WorkloadError("m"), "user", 2),
        (failures.DataError("m"), "data", 1),
        (failures.OutOfMemory("m"), "oom", 1),
        (failures.NonFinite("m"), "nonfinite", 1),
        (failures.TunewrightError("m"), "unknown", 1),
    ],
)
def test_an_error_of_ours_is_one_sentence(error, failure_class, code, told, capsys):
    with pytest.raises(SystemExit) as exit_, reported():
        raise error
    assert exit_.value.code == code
    assert told() == [{"class": failure_class, "rank": 0, "message": "m"}]
    assert capsys.readouterr().err == "error: m\n"
    assert str(pickle.loads(pickle.dumps(error))) == "m"


def test_an_error_of_others_keeps_its_traceback(told, capsys):
    with pytest.raises(SystemExit) as exit_, reported():
        raise ZeroDivisionError("by zero")
    assert exit_.value.code == 1
    assert told() == [{"class": "unknown", "rank": 0, "message": "ZeroDivisionError: by zero"}]
    assert "Traceback" in capsys.readouterr().err


def test_memory_that_ran_out_is_known_by_its_type(told):
    OutOfMemoryError = type("OutOfMemoryError", (RuntimeError,), {})
    for error in (MemoryError(), OutOfMemoryError("CUDA out of memory")):
        with pytest.raises(SystemExit), reported():
            raise error
        assert told()[0]["class"] == "oom"


@pytest.mark.parametrize(("rank", "known"), [("3", 3), ("", 0), ("x", 0), ("../1", 0), ("-1", 0)])
def test_the_rank(rank, known, told, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    failures.write_failure("data", "half a character \ud800")
    assert [facts["rank"] for facts in told()] == [known]


def test_without_a_guardian_nothing_is_written(monkeypatch, tmp_path):
    monkeypatch.delenv("TUNEWRIGHT_FAILURE_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    failures.write_failure("data", "m")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_gone_does_not_hide_the_error(monkeypatch, capsys):
    monkeypatch.setenv("TUNEWRIGHT_FAILURE_DIR", "/nowhere")
    with pytest.raises(SystemExit) as exit_, reported():
        raise failures.UserError("the real one")
    assert exit_.value.code == 2
    assert "error: the real one" in capsys.readouterr().err
