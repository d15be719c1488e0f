"""Runs against the Databricks stand-in, as users start them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.databricks.nodes import GUARD, mounted
from tests.databricks_server import DatabricksServer
from tests.flows.cli import ROOT, Home

OUTPUT = "/Volumes/main/default/runs"


def run(home: Home, server: DatabricksServer, file: Path, *words: str) -> subprocess.Popen[str]:
    words = ("run", str(file), "--target", "databricks", "--json", *words)
    return home.start(*words, **server.environment)


def run_mounted(
    home: Home, server: DatabricksServer, file: Path, *words: str
) -> subprocess.Popen[str]:
    """The same on a worker that has the volumes mounted, with what their mount refuses."""
    site = home.path / "site"
    site.mkdir(parents=True)
    (site / "sitecustomize.py").write_text(GUARD)
    env = {
        **home.env, **server.environment, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]),
        "DATABRICKS_STANDIN_VOLUMES": "/Volumes/",
    }  # fmt: skip
    command = [sys.executable, "-m", "flows", "run", str(file), "--target", "databricks", "--json"]
    return subprocess.Popen(
        [*mounted(server.places, home.path / "mounts"), *command, *words],
        env=env, cwd=home.path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


def ended(process: subprocess.Popen[str], limit_s: float = 120) -> tuple[dict[str, Any], str]:
    """The receipt and the narration."""
    out, narration = process.communicate(timeout=limit_s)
    return json.loads(out), narration
