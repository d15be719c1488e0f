"""Events where files can be appended to, and where they come whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunewright.contract.failures import UserError
from tunewright.training import eventfile
from tunewright.training.eventfile import EventFile


@pytest.fixture
def whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An events file on a mount that takes whole files only."""
    monkeypatch.setenv("TUNEWRIGHT_WHOLE_FILES", str(tmp_path / "volume"))
    return tmp_path / "volume" / "events.jsonl"


def test_every_line_is_in_its_place_at_once(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "events.jsonl"
    file = EventFile(path)
    file.write("a\n")
    assert path.read_text() == "a\n"
    file.close()


def test_a_whole_file_comes_when_it_matters_and_at_the_end(whole: Path) -> None:
    file = EventFile(whole)
    assert whole.read_text() == ""
    file.write("a\n")
    assert whole.read_text() == ""
    file.write("checkpoint\n", now=True)
    assert whole.read_text() == "a\ncheckpoint\n"
    file.write("b\n")
    file.close()
    assert whole.read_text() == "a\ncheckpoint\nb\n"


def test_a_whole_file_comes_now_and_then(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eventfile, "_COPY_EVERY_S", 0.0)
    file = EventFile(whole)
    file.write("a\n")
    assert whole.read_text() == "a\n"
    file.close()


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="set output_dir to a folder that can be written"):
        EventFile(tmp_path / "file" / "events.jsonl")


def test_training_goes_on_when_a_copy_fails(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = EventFile(whole)
    whole.unlink()
    whole.mkdir()
    file.write("a\n", now=True)
    assert "cannot be written now" in capsys.readouterr().err
    whole.rmdir()
    file.close()
    assert whole.read_text() == "a\n"
