"""What the tests of several ranks look at while they run."""

from __future__ import annotations

import time

import psutil
import pytest


def await_event(path, kind, process):
    end = time.monotonic() + 90
    while time.monotonic() < end and process.poll() is None:
        if path.exists() and f'"event": "{kind}"' in path.read_text():
            return
        time.sleep(0.01)
    pytest.fail(f"no {kind} event: {process.communicate()[0]}")


def worker(agent: int, rank: int) -> psutil.Process:
    children = psutil.Process(agent).children(recursive=True)
    return next(p for p in children if p.environ().get("RANK") == str(rank))
