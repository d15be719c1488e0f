"""A real `mlflow server` on loopback, with its database and artifacts in a folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from tasks.targets.local import free_port

_UP_S = 90


class MlflowServer:
    """Started and healthy once it is made; raises RuntimeError with its log otherwise."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        port = free_port()
        self.address = f"http://127.0.0.1:{port}"
        command = [
            sys.executable, "-m", "mlflow", "server", "--workers", "1", "--host", "127.0.0.1",
            "--port", str(port), "--backend-store-uri", f"sqlite:///{folder}/mlflow.db",
            "--artifacts-destination", str(folder / "artifacts"),
        ]  # fmt: skip
        # What points the caller to a store is not for the server.
        theirs = ("MLFLOW_", "DATABRICKS_")
        plain = {name: value for name, value in os.environ.items() if not name.startswith(theirs)}
        quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        with (folder / "log").open("w") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, env={**plain, **quiet}
            )
        try:
            self._await_health(folder / "log")
        except BaseException:
            self.stop()
            raise

    def _await_health(self, log: Path) -> None:
        end = time.monotonic() + _UP_S
        while time.monotonic() < end and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.address}/health", timeout=2) as answer:
                    if answer.status == 200:
                        return
            except OSError:
                time.sleep(0.1)
        raise RuntimeError(f"mlflow server did not become healthy:\n{log.read_text()[-2000:]}")

    def stop(self) -> None:
        """End it with its workers."""
        if self._process.poll() is not None:
            return
        os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
