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
_SMALL = {
    "compute.num_accelerators": 16,  # two nodes; each runs one process here
    "parameters.init": "random",
    "parameters.dataset_name": f"{OUTPUT}/inputs/demo.jsonl",
    "parameters.output_dir": OUTPUT,
    "parameters.max_seq_len": 256,
    "parameters.per_device_batch_size": 1,
    "parameters.gradient_accumulation_steps": 1,
    "parameters.learning_rate": 0.01,
    "parameters.max_steps": 4,
    "parameters.save_steps": 2,
    "parameters.eval_steps": 4,
}


def small(name: str) -> dict[str, Any]:
    """What a deployment is set to, so that two nodes train a small model in a few steps; its folder
    and the rows lie on the volume.
    """
    return {**_SMALL, "parameters.model_name": f"{OUTPUT}/inputs/{name}"}


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
