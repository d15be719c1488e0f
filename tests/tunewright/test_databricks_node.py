"""One node's command, where the run's folder cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tunewright.databricks_node import COMMAND_VARIABLE

NODE = """
import sys
from tunewright import databricks_node
databricks_node._COPY_PAUSES_S = (0,)
sys.exit(databricks_node.main([]))
"""


@pytest.mark.parametrize(("command", "code"), [("echo said", 0), ("echo said; exit 7", 7)])
def test_a_volume_that_is_away_does_not_change_how_the_command_ended(
    tmp_path: Path, command: str, code: int
) -> None:
    (tmp_path / "away").touch()
    env = {
        **os.environ, "TUNEWRIGHT_RUN_DIR": str(tmp_path / "away" / "run"),
        "TUNEWRIGHT_ATTEMPT": "1", COMMAND_VARIABLE: command,
    }  # fmt: skip
    ran = subprocess.run(
        [sys.executable, "-P", "-c", NODE], env=env, capture_output=True, text=True, timeout=60
    )
    assert (ran.returncode, ran.stdout) == (code, "said\n"), ran.stderr
    assert "the run's folder cannot be written" in ran.stderr
