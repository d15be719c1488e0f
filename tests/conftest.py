"""A real MLflow server, shared by the tests of registration and of the route."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real `mlflow server` that keeps artifacts itself."""
    folder = tmp_path_factory.mktemp("mlflow-server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "mlflow", "server", "--workers", "1", "--host", "127.0.0.1",
        "--port", str(port), "--backend-store-uri", f"sqlite:///{folder}/mlflow.db",
        "--artifacts-destination", str(folder / "artifacts"),
    ]  # fmt: skip
    plain = {k: v for k, v in os.environ.items() if not k.startswith("MLFLOW_")}
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**plain, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        )
    try:
        address = f"http://127.0.0.1:{port}"
        _await_health(address, server, folder / "log")
        yield address
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _await_health(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 90
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=2) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.2)
    pytest.fail(f"mlflow server did not become healthy:\n{log.read_text()[-2000:]}")
