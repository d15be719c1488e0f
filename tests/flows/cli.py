"""The command line as users call it, and what its runs leave behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TINY = ROOT / "deployments" / "tiny.yaml"
FEW_STEPS = {
    "parameters.max_steps": 6,
    "parameters.global_batch_tokens": 1024,
    "parameters.save_steps": 3,
    "parameters.eval_steps": 6,
}


@dataclass
class Home:
    """State of its own for one test: TUNEWRIGHT_HOME, on the shared Prefect server."""

    path: Path
    env: dict[str, str] = field(default_factory=dict)

    def start(self, *words: str, **env: str) -> subprocess.Popen[str]:
        """`tunewright <words>` in a session of its own, from a folder that is not the root."""
        elsewhere = self.path / "elsewhere"
        elsewhere.mkdir(parents=True, exist_ok=True)
        return subprocess.Popen(
            [sys.executable, "-m", "flows", *words],
            env={**self.env, "PYTHONPATH": str(ROOT), **env},
            cwd=elsewhere,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # Tests started in the background of a shell inherit an ignored Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def call(
        self, *words: str, timeout: float = 600, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """The same, to its end."""
        process = self.start(*words, **env)
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def run(
        self, file: Path, *words: str, sets: dict[str, Any] | None = None, **env: str
    ) -> Receipt:
        """`tunewright run FILE --simulate --json`, and its receipt."""
        pairs = [f"--set={key}={_word(value)}" for key, value in (sets or {}).items()]
        found = self.call("run", str(file), "--simulate", "--json", *pairs, *words, **env)
        receipt = json.loads(found.stdout) if found.stdout.strip() else {}
        return Receipt(found.returncode, receipt, found.stderr)

    def runs(self, experiment: str) -> list[Path]:
        return sorted((self.path / "Volumes" / "runs" / experiment).glob(f"{experiment}-*"))


@dataclass
class Receipt:
    """How a call of `run` ended."""

    code: int
    facts: dict[str, Any]
    narration: str


def processes_of(mark: str) -> list[int]:
    """Pids of every process whose environment or command line names `mark`."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            text = (folder / "environ").read_bytes() + (folder / "cmdline").read_bytes()
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if mark.encode() in text and state != "Z":
            found.append(int(folder.name))
    return found


def wait_for(what: Callable[[], Any], limit_s: float = 90) -> Any:
    """The first true value of a condition; fails when none comes."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if found := what():
            return found
        time.sleep(0.05)
    pytest.fail(f"waited {limit_s} s in vain for {what}")


def events(run: Path, attempt: int, kind: str) -> list[dict[str, Any]]:
    """What the recipe left in one attempt, of one kind."""
    path = run / "logs" / f"attempt-{attempt}" / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return [event for event in found if event["event"] == kind]


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
