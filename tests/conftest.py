"""A real MLflow server, shared by the tests of registration and of the route."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.mlflow_server import MlflowServer


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real `mlflow server` that keeps artifacts itself."""
    server = MlflowServer(tmp_path_factory.mktemp("mlflow-server"))
    try:
        yield server.address
    finally:
        server.stop()
