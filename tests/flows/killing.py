"""A worker that is killed at one call of its route to Databricks, and started again.

The command leaves a small model, so that a second job consolidates and registers it. Nothing is
trained, which keeps a round short enough to kill the worker at every call there is.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.databricks_server import DatabricksServer
from tests.flows.cli import ROOT, Home
from tests.flows.on_databricks import OUTPUT, ended, run

MODEL = "main.default.own"
_POLLED = ("/jobs/runs/get", "/jobs/runs/get-output", "/logs")
SUBMIT = "POST /api/2.2/jobs/runs/submit"
_LIMIT_S = 240


@dataclass(frozen=True)
class Moment:
    """When the worker is killed: at the call that matches, after `after` others like it.

    `done`: the platform has done what was asked, and the worker is killed before it hears of it;
    else it is killed before the platform does anything, so between two calls.
    """

    call: str
    after: int = 0
    done: bool = False

    def __str__(self) -> str:
        which = f" (number {self.after + 1})" if self.after else ""
        return f"{self.call}{which}, {'done' if self.done else 'not done'}"


def prepare(folder: Path, server: DatabricksServer) -> Path:
    """A model on the volume, and a workload that leaves a copy of it as its own."""
    model = server.add_volume("main.default.runs") / "inputs" / "model"
    if not (folder / "model").exists():
        make_model(folder / "model")
    shutil.copytree(folder / "model", model)
    document = {
        "experiment_name": "own",
        "command": f'cp -r {OUTPUT}/inputs/model "$TUNEWRIGHT_RUN_DIR/model"',
        "compute": {"num_accelerators": 1, "accelerator_type": "GPU_1xH100"},
        "secrets": {"A_TOKEN": "scope/key"},
        "parameters": {"output_dir": OUTPUT},
        "max_retries": 0,
    }
    server.state.secrets["scope"] = {"key": "s3cr3t-value"}
    file = folder / "own.yaml"
    file.write_text(yaml.safe_dump(document))
    return file


def make_model(folder: Path) -> Path:
    """A small model as a command leaves it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    source = ROOT / "tests" / "data" / "models" / "llama"
    shutil.copytree(source, folder)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source)).save_pretrained(folder)
    return folder


def undisturbed(home: Home, server: DatabricksServer, file: Path) -> list[Moment]:
    """The whole route once; every moment between two of its calls, and in the middle of some."""
    facts, narration = ended(run(home, server, file, "--register", MODEL), _LIMIT_S)
    check(server, facts, narration)
    return list(_moments(server))


def _moments(server: DatabricksServer) -> Iterator[Moment]:
    """Of what is asked again and again only the first two times of each job."""
    seen: Counter[str] = Counter()
    of_job: Counter[tuple[str, int]] = Counter()
    for request in server.calls(origin="client"):
        call = re.sub(r"own-[0-9a-f]{8}", "own-*", f"{request.method} {request.path}")
        number, job = seen[call], seen[SUBMIT]
        seen[call] += 1
        of_job[call, job] += 1
        if of_job[call, job] > 2 and call.endswith(_POLLED):
            continue
        yield Moment(call, number)
        if call == SUBMIT:
            yield Moment(call, number, done=True)


def killed_at(moment: Moment, home: Home, server: DatabricksServer, file: Path) -> bool:
    """Kill the worker at a moment, start it again, and check what came of it.

    Returns whether it was killed: it is not when the platform was asked less often this time.
    """
    dead: list[int] = []
    worker: list[subprocess.Popen[str]] = []

    def kill() -> None:
        os.killpg(worker[0].pid, signal.SIGKILL)
        dead.append(worker[0].wait())

    kind = "lost" if moment.done else "cut"
    server.fault(moment.call, kind, after=moment.after, origin="client", then=kill)
    worker.append(run(home, server, file, "--register", MODEL))
    out, narration = worker[0].communicate(timeout=_LIMIT_S)
    server.clear_faults()
    receipts = list((home.path / OUTPUT.lstrip("/")).glob("own-*/receipt.json"))
    if not dead:
        facts = json.loads(out)
    elif receipts:
        # All was done but for the copies of the records; another start would be another run.
        facts = json.loads(receipts[0].read_text())
    else:
        facts, narration = ended(run(home, server, file, "--register", MODEL), _LIMIT_S)
    check(server, facts, narration)
    return bool(dead)


def check(server: DatabricksServer, facts: dict[str, Any], narration: str) -> None:
    """One job each, both at their end, one version, and a receipt that says so."""
    assert facts["state"] == "Completed", narration
    names = sorted(str(each.payload["run_name"]) for each in server.runs)
    assert names == [f"{facts['run']} attempt 1", f"{facts['run']}-finish attempt 1"], names
    assert [each.phase.result for each in server.runs] == ["SUCCESS", "SUCCESS"]
    assert [attempt["attempt"] for attempt in facts["attempts"]] == [1]
    assert facts["registered"] == {"name": MODEL, "version": 1, "alias": "candidate"}
    assert list(server.registry.models[MODEL].versions) == [1]
