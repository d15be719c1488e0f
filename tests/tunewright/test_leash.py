"""The leash: a command and all it started end with it, or with whoever holds it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tunewright.contract import processes

PATH = "/usr/local/bin:/usr/bin:/bin"
ROOT = Path(__file__).parents[2]
# A child that has left session and parent, and ignores what it can.
DAEMON = "(trap '' TERM HUP; setsid sleep 600 & echo $! > daemon) ; "


@pytest.fixture
def leash(tmp_path):
    """Start a bash line on a leash."""
    started = []

    def start(line: str) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "tunewright.leash", "bash", "-c", line]
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": PATH}
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.communicate(timeout=60)


def daemon(folder: Path) -> dict[str, Any]:
    """Who it is, for `is_alive`."""
    end = time.monotonic() + 60
    while not (path := folder / "daemon").exists() or not path.read_text().strip():
        assert time.monotonic() < end
        time.sleep(0.02)
    return processes.identity(int(path.read_text()))


def test_the_exit_code_is_that_of_the_command(leash):
    assert leash("exit 7").wait(60) == 7
    assert leash("kill -KILL $$").wait(60) == 128 + 9


def test_what_the_command_leaves_behind_ends_with_it(leash, tmp_path):
    process = leash(DAEMON + "sleep 1")
    left = daemon(tmp_path)
    assert process.wait(60) == 0
    assert not processes.is_alive(left)


def test_all_of_it_ends_with_its_holder(leash, tmp_path):
    process = leash(DAEMON + "sleep 600")
    left = daemon(tmp_path)
    process.stdin.close()
    process.stdin = None
    assert process.wait(60) == 128 + 15
    assert not processes.is_alive(left)
