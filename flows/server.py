"""A Prefect server of our own for `tunewright run` where no API is configured.

Prefect's temporary server hangs on Ctrl-C and outlives a kill; this one has a guardian, and ends
with us in every ending.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from flows import api
from tasks.targets.guardian import Guardian, Node, marked
from tasks.targets.local import free_port
from tunewright.contract.failures import TunewrightError
from tunewright.contract.rundir import home

_HEALTHY_S = 120.0
_GRACE_S = 3.0


@contextmanager
def prefect_api(without: Iterable[str] = ()) -> Iterator[str]:
    """The configured API's URL, or that of a server which lives as long as this block.

    Variables named in `without` (a workload's secrets) are not in the server's environment.
    """
    if configured := api.url():
        _check(configured)
        yield configured
        return
    with tempfile.TemporaryDirectory(prefix="tunewright-server-") as scratch:
        port, log = free_port(), home() / "prefect-server.log"
        node = _server(port, log, Path(scratch), set(without))
        guardian = Guardian(node, {}, _GRACE_S, without=without)
        guardian.begin()
        try:
            address = f"http://127.0.0.1:{port}/api"
            _wait_healthy(address, guardian, log)
            os.environ["PREFECT_API_URL"] = address
            try:
                yield address
            finally:
                _deliver()
        finally:
            os.environ.pop("PREFECT_API_URL", None)
            guardian.stop("cancel")
            guardian.wait_ended()


def _server(port: int, log: Path, scratch: Path, hidden: set[str]) -> Node:
    words = ["server", "start", "--host", "127.0.0.1", "--port", str(port)]
    quiet = {
        "PREFECT_SERVER_API_PORT": str(port),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return Node(
        argv=[sys.executable, "-m", "prefect", *words],
        env=marked({**kept, **quiet}, scratch, "server"),
        cwd=scratch,
        log=log,
        exit=scratch / "exit.json",
    )


def _wait_healthy(address: str, guardian: Guardian, log: Path) -> None:
    deadline = time.monotonic() + _HEALTHY_S
    while time.monotonic() < deadline and not guardian.ended():
        try:
            if httpx.get(f"{address}/health", timeout=2).is_success:
                return
        except httpx.HTTPError:
            time.sleep(0.1)
    raise TunewrightError(f"the Prefect server did not start; its log is {log}")


def _check(address: str) -> None:
    try:
        answer = httpx.get(f"{address}/health", headers=api.headers(), timeout=10)
        # An API that wants a key which we lack answers Prefect's own client in its own words.
        if answer.status_code not in (401, 403):
            answer.raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise TunewrightError(
            f"the Prefect API at {address} cannot be reached ({error}); start it, or unset "
            "PREFECT_API_URL and let this command bring its own"
        ) from None


def _deliver() -> None:
    """Hand over what Prefect still holds in its queues, before the server goes."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    APILogWorker.drain_all(timeout=10)
    EventsWorker.drain_all(timeout=10)
