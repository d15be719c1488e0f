"""The stand-in: tracking and registered models, by MLflow's own client on a node."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from databricks.sdk import WorkspaceClient
from databricks.sdk.errors import (
    InvalidParameterValue,
    NotFound,
    PermissionDenied,
    ResourceAlreadyExists,
    ResourceDoesNotExist,
)

from tests.databricks.submitting import launch, lines, until
from tests.databricks_server import DatabricksServer

REGISTER = """
import os, time, warnings
warnings.simplefilter("ignore")
import mlflow
from mlflow import MlflowClient

class Echo(mlflow.pyfunc.PythonModel):
    def predict(self, context, model_input: list[str]) -> list[str]:
        return model_input

name = "main.default.echo"
mlflow.set_registry_uri("databricks-uc")
client = MlflowClient()
run = os.environ["MLFLOW_RUN_ID"]
client.log_metric(run, "loss", 0.5)
open("note.txt", "w").write("kept")
client.log_artifact(run, "note.txt", "notes")
print("read", open(client.download_artifacts(run, "notes/note.txt")).read())
with mlflow.start_run(run_id=run):
    logged = mlflow.pyfunc.log_model(name="echo", python_model=Echo(), pip_requirements=[])
# Both ways in which MLflow sends the files: as the server says, and by signed addresses.
for through_files in (None, "false"):
    if through_files:
        os.environ["MLFLOW_USE_DATABRICKS_SDK_MODEL_ARTIFACTS_REPO_FOR_UC"] = through_files
    made = mlflow.register_model(logged.model_uri, name, await_registration_for=30)
    client.set_registered_model_alias(name, "champion", made.version)
    client.set_model_version_tag(name, made.version, "kind", "test")
    loaded = mlflow.pyfunc.load_model(f"models:/{name}@champion")
    # MLflow's client of Unity Catalog does not wait for READY.
    while (status := client.get_model_version(name, made.version).status) != "READY":
        time.sleep(0.1)
    print("answers", loaded.predict(["hello"]), made.version, status)
"""


def test_a_node_tracks_and_registers(tmp_path: Path) -> None:
    with DatabricksServer(tmp_path) as server:
        client = WorkspaceClient(host=server.url, token=server.token)
        run_id = launch(client, f"cat > p.py <<'EOF'\n{REGISTER}\nEOF\npython -W ignore p.py")
        server.await_runs()
        said = [line for line in lines(server) if line.startswith(("read", "answers"))]
        assert said == [
            "read kept", "answers ['hello'] 1 READY", "answers ['hello'] 2 READY",
        ], "\n".join(lines(server))  # fmt: skip
        assert server.calls("PUT /signed/file/*/Models/main/default/echo/2/MLmodel")
        attempt = server.runs[0].attempts[0]
        output = client.jobs.get_run_output(attempt.run_id).ai_runtime_task_output
        assert output is not None
        assert output.mlflow_run_id == attempt.mlflow_run_id
        ours = {"run_id": attempt.mlflow_run_id}
        found: Any = client.api_client.do("GET", "/api/2.0/mlflow/runs/get", query=ours)
        assert found["run"]["info"]["status"] == "FINISHED"
        assert found["run"]["info"]["artifact_uri"].startswith("dbfs:/databricks/mlflow-tracking/")
        assert found["run"]["data"]["metrics"][0]["value"] == 0.5
        assert ("mlflow.databricks.jobRunID", str(run_id)) in [
            (tag["key"], tag["value"]) for tag in found["run"]["data"]["tags"]
        ]
        version = server.registry.models["main.default.echo"].versions[1]
        assert (version.status, version.tags, version.run_id) == (
            "READY", {"kind": "test"}, attempt.mlflow_run_id,
        )  # fmt: skip
        champion = client.model_versions.get_by_alias("main.default.echo", "champion")
        assert (champion.version, champion.run_id) == (2, attempt.mlflow_run_id)
        assert client.registered_models.get("main.default.echo").full_name == "main.default.echo"
        path = "logs/attempt_0/node_0"
        logs: Any = client.api_client.do(
            "GET", "/api/2.0/mlflow/artifacts/list", query={**ours, "path": path}
        )
        assert [file["path"] for file in logs["files"]] == [f"{path}/logs-0.chunk.txt"]


def test_versions_become_ready_and_aliases_move(
    server: DatabricksServer, client: WorkspaceClient
) -> None:
    def ask(method: str, call: str, **fields: str) -> Any:
        path = f"/api/2.0/mlflow/unity-catalog/{call}"
        given = {"query" if method == "GET" else "body": fields}
        return client.api_client.do(method, path, **given)

    model = {"name": "main.default.echo"}
    ask("POST", "registered-models/create", **model)
    with pytest.raises(ResourceAlreadyExists):
        ask("POST", "registered-models/create", **model)
    for number in ("1", "2"):
        ask("POST", "model-versions/create", **model, source="dbfs:/x")
        with pytest.raises(InvalidParameterValue, match="MLmodel"):
            ask("POST", "model-versions/finalize", **model, version=number)
        client.files.upload(f"/Models/main/default/echo/{number}/MLmodel", io.BytesIO(b"x"))
    server.rules.ready_after_s = 0.3
    made = ask("POST", "model-versions/finalize", **model, version="1")
    assert made["model_version"]["status"] == "PENDING_REGISTRATION"
    server.rules.registration_fails = True
    ask("POST", "model-versions/finalize", **model, version="2")

    def statuses() -> list[str]:
        found = ask("GET", "model-versions/search", filter="name='main.default.echo'")
        return [version["status"] for version in found["model_versions"]]

    until(lambda: statuses() == ["FAILED_REGISTRATION", "READY"])
    for number in ("1", "2"):
        ask("POST", "registered-models/alias", **model, alias="champion", version=number)
    assert server.registry.models["main.default.echo"].aliases == {"champion": 2}
    ask("DELETE", "model-versions/delete", **model, version="2")
    with pytest.raises(ResourceDoesNotExist):
        ask("GET", "registered-models/alias", **model, alias="champion")
    # A number is never given twice.
    made = ask("POST", "model-versions/create", **model, source="dbfs:/x")
    assert made["model_version"]["version"] == "3"


@pytest.mark.parametrize(
    ("name", "error"),
    [("echo", InvalidParameterValue), ("main.default.a b", InvalidParameterValue),
     ("main.absent.echo", NotFound), ("main.default.denied", PermissionDenied)],
)  # fmt: skip
def test_models_that_cannot_be_made(
    server: DatabricksServer, client: WorkspaceClient, name: str, error: type[Exception]
) -> None:
    if name.endswith("denied"):
        server.state.denied.add(("CREATE_MODEL", "main.default"))
    path = "/api/2.0/mlflow/unity-catalog/registered-models/create"
    with pytest.raises(error):
        client.api_client.do("POST", path, body={"name": name})
    assert server.registry.models == {}
