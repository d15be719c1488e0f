"""A workspace without MLflow, with one volume, and a client of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from databricks.sdk import WorkspaceClient

from tests.databricks_server import DatabricksServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[DatabricksServer]:
    with DatabricksServer(tmp_path, mlflow=False) as found:
        found.add_volume("main.default.runs")
        yield found


@pytest.fixture
def client(server: DatabricksServer) -> WorkspaceClient:
    return WorkspaceClient(host=server.url, token=server.token)
