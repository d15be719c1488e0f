"""One Prefect test server for all flow tests, and a home for each."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.flows.cli import Home


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Prefect server, ours, for the whole session; its API's URL."""
    from flows.server import prefect_api

    home = tmp_path_factory.mktemp("prefect")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PREFECT_API_URL", "PREFECT_PROFILE"):
            patch.delenv(name, raising=False)
        patch.setenv("PREFECT_HOME", str(home / "home"))
        patch.setenv("TUNEWRIGHT_HOME", str(home / "tunewright"))
        with prefect_api() as address:
            yield address


@pytest.fixture
def home(prefect_server: str, tmp_path: Path) -> Home:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MLFLOW_", "TUNEWRIGHT_HOME"))}
    env = {**kept, "PREFECT_API_URL": prefect_server, "TUNEWRIGHT_HOME": str(tmp_path / "home")}
    return Home(tmp_path / "home", env)


@pytest.fixture
def api(prefect_server: str) -> Callable[[str, dict[str, Any]], Any]:
    """POST to the Prefect API."""

    def post(path: str, body: dict[str, Any]) -> Any:
        answer = httpx.post(f"{prefect_server}{path}", json=body, timeout=30)
        answer.raise_for_status()
        return answer.json()

    return post


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """A workload file for a command of a user's own."""

    def workload(command: str, name: str = "own", **fields: Any) -> Path:
        document = {
            "experiment_name": name,
            "command": command,
            "compute": {"num_accelerators": 1, "accelerator_type": "GPU_1xH100"},
            "max_retries": 0,
            **fields,
        }
        path = tmp_path / f"{name}.yaml"
        path.write_text(json.dumps(document))
        return path

    return workload
