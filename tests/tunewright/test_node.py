"""The guardian as a process of its own: what it is told by stdin, and what it leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tunewright.contract.rundir import read_json

Start = Callable[..., subprocess.Popen]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a guardian over a bash command; `more` goes into its specification."""
    guardians = []

    def begin(command: str, then: str = "", **more: Any) -> subprocess.Popen:
        specification = {
            "argv": ["bash", "-c", command],
            "env": {"PATH": os.environ["PATH"]},
            "cwd": str(tmp_path / "work"),
            "log": str(tmp_path / "logs" / "node.log"),
            "exit": str(tmp_path / "exit.json"),
            "grace_s": 0.3,
            **more,
        }
        guardian = subprocess.Popen(
            [sys.executable, "-m", "tunewright.node"], stdin=subprocess.PIPE
        )
        guardians.append(guardian)
        guardian.stdin.write(f"{json.dumps(specification)}\n{then}".encode())
        guardian.stdin.flush()
        return guardian

    yield begin
    for guardian in guardians:
        guardian.kill()
        guardian.wait()
        guardian.stdin.close()


@pytest.fixture
def told(tmp_path: Path) -> Callable[[], dict[str, Any]]:
    return lambda: read_json(tmp_path / "exit.json") or {}


@pytest.fixture
def log(tmp_path: Path) -> Callable[[], str]:
    path = tmp_path / "logs" / "node.log"
    return lambda: path.read_text() if path.exists() else ""


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it did not come to be"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("command", "code"), [("true", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill -15 $$", 143)]
)
def test_its_exit_code_is_the_command_s(start, told, command, code):
    assert start(command).wait(20) == code
    assert told()["exit_code"] == code
    assert (told()["failure"] is None) == (code == 0)


def test_the_command_sees_only_the_environment_it_was_given(start, log):
    start("env", env={"PATH": os.environ["PATH"], "A": "1"}, secrets={"S": "the-secret"}).wait(20)
    names = {line.partition("=")[0] for line in log().splitlines()}
    assert names - {"PWD", "SHLVL", "_"} == {"PATH", "A", "S", "TUNEWRIGHT_FAILURE_DIR"}
    assert "S=********" in log()


def test_secrets_are_not_in_its_own_environment(start):
    guardian = start("sleep 30", secrets={"S": "the-secret"})
    for place in ("environ", "cmdline"):
        assert b"the-secret" not in Path(f"/proc/{guardian.pid}/{place}").read_bytes()


@pytest.mark.parametrize(
    ("reason", "failure"),
    [("timeout", "timeout"), ("cancel", None), ("interrupted", None), ("peer", None)],
)
def test_told_to_stop(start, told, log, reason, failure):
    guardian = start("trap 'echo saved; exit 3' TERM; echo begun; sleep 30 & wait")
    until(lambda: "begun" in log())
    guardian.stdin.write(f"stop {reason}\n".encode())
    guardian.stdin.flush()
    assert guardian.wait(20) == 3
    assert told()["stopped_by"] == reason
    assert (told()["failure"] or {}).get("class") == failure
    assert "saved" in log()


def test_told_to_stop_in_one_breath_with_what_to_do(start, told):
    assert start("sleep 30", then="stop cancel\n").wait(20) == 143
    assert told()["stopped_by"] == "cancel"


def test_a_parent_that_goes_away_ends_it(start, told):
    guardian = start("sleep 30")
    guardian.stdin.close()
    assert guardian.wait(20) == 143
    assert told()["failure"]["class"] == "preemption"


def test_a_parent_that_says_nothing_wants_nothing():
    guardian = subprocess.run(
        [sys.executable, "-m", "tunewright.node"], input=b"", capture_output=True, timeout=30
    )
    assert (guardian.returncode, guardian.stderr) == (1, b"")


def test_sigterm_is_a_preemption(start, told, log):
    guardian = start("echo begun; sleep 30")
    until(lambda: "begun" in log())
    guardian.send_signal(signal.SIGTERM)
    guardian.wait(20)
    assert told()["stopped_by"] == "preempted"
    assert told()["failure"]["class"] == "preemption"


def test_sigint_is_for_the_flow_to_handle(start, told, log):
    guardian = start("echo begun; sleep 0.5; echo done")
    until(lambda: "begun" in log())
    guardian.send_signal(signal.SIGINT)
    assert guardian.wait(20) == 0
    assert log().splitlines() == ["begun", "done"]


def test_a_command_that_ignores_sigterm_gets_its_grace_and_no_more(start, told, log):
    guardian = start("trap '' TERM; echo begun; sleep 30; sleep 30", grace_s=1.0)
    until(lambda: "begun" in log())
    began = time.monotonic()
    guardian.stdin.write(b"stop timeout\n")
    guardian.stdin.flush()
    assert guardian.wait(20) == 137
    assert 1.0 <= time.monotonic() - began < 8
    assert told()["failure"]["class"] == "timeout"


def test_its_private_folder_is_gone_afterwards(start, log, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    start('echo x > "$TUNEWRIGHT_FAILURE_DIR/rank-0.json"; exit 1').wait(20)
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("content", ["{", "[]", "5", "{}", '{"class": "data"}'])
def test_a_failure_file_of_another_shape_is_not_believed(start, told, content):
    start(f"echo '{content}' > \"$TUNEWRIGHT_FAILURE_DIR/rank-0.json\"; exit 1").wait(20)
    assert told()["failure"]["class"] == "unknown"


def test_a_program_that_cannot_be_started(start, told):
    assert start("", argv=["/no/such/program"]).wait(20) == 127
    assert told()["failure"]["class"] == "infrastructure"
    assert "/no/such/program" in told()["failure"]["message"]


def test_output_is_written_while_the_command_runs(start, log):
    guardian = start("printf 'no line end'; sleep 30")
    until(lambda: log() == "no line end")
    assert guardian.poll() is None
