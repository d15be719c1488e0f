"""Registration in Unity Catalog, against the stand-in: what is uploaded, and what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.databricks_server import DatabricksServer
from tests.flows.killing import make_model
from tunewright import mlflow_store, uc_register
from tunewright.consolidate import consolidate
from tunewright.contract import rundir
from tunewright.contract.failures import UserError
from tunewright.contract.rundir import RunDir

pytestmark = pytest.mark.skipif(
    find_spec("databricks") is None, reason="needs tunewright[databricks]"
)
NAME = "main.default.tiny"


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = RunDir(tmp_path_factory.mktemp("run") / "tiny-0a1b2c3d")
    make_model(run.model)
    consolidate(run)
    return run.model


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DatabricksServer]:
    monkeypatch.delenv("MLFLOW_REGISTRY_URI", raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "databricks")  # as on every node
    # It sets these where they are not set; here they must not outlive the test.
    monkeypatch.setenv("MLFLOW_USE_DATABRICKS_SDK_MODEL_ARTIFACTS_REPO_FOR_UC", "true")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    monkeypatch.setenv("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    with DatabricksServer(tmp_path, mlflow=False) as found:
        for name, value in found.environment.items():
            monkeypatch.setenv(name, value)
        yield found


def register(model: Path, **more: Any) -> dict[str, Any]:
    return uc_register.register(model, NAME, "tiny-0a1b2c3d", **more)


def test_a_version_is_made_once_and_can_be_served(server: DatabricksServer, sealed: Path) -> None:
    tags = {"tunewright.commit": "abc"}
    made = register(sealed, tags=tags, alias="candidate")
    assert made == {"name": NAME, "version": 1, "alias": "candidate", "task": "llm/v1/chat"}
    sent = len(server.calls("PUT */fs/files/Models/*"))
    assert register(sealed, tags=tags, alias="candidate") == made
    assert len(server.calls("PUT */fs/files/Models/*")) == sent
    model = server.registry.models[NAME]
    assert (list(model.versions), model.aliases) == ([1], {"candidate": 1})
    assert model.versions[1].tags == {**tags, "tunewright.run": "tiny-0a1b2c3d"}
    folder = server.folder / "Models" / "main" / "default" / "tiny" / "1"
    described = yaml.safe_load((folder / "MLmodel").read_text())
    assert described["metadata"]["task"] == "llm/v1/chat"
    assert described["signature"]["inputs"]
    weights = folder / described["flavors"]["transformers"]["model_binary"] / "model.safetensors"
    assert weights.read_bytes() == (sealed / "model.safetensors").read_bytes()
    assert "transformers==" in (folder / "requirements.txt").read_text()


def test_another_run_gets_a_version_of_its_own(server: DatabricksServer, sealed: Path) -> None:
    register(sealed, alias="candidate")
    second = uc_register.register(sealed, NAME, "tiny-ffffffff", alias="candidate")
    assert second["version"] == 2
    assert server.registry.models[NAME].aliases == {"candidate": 2}


def test_a_run_that_is_gone_on_with_does_not_move_the_alias_back(
    server: DatabricksServer, sealed: Path
) -> None:
    register(sealed, alias="candidate")
    uc_register.register(sealed, NAME, "tiny-ffffffff", alias="candidate")
    again = register(sealed, alias="candidate")
    assert (again["version"], again["alias"]) == (1, None)
    model = server.registry.models[NAME]
    assert model.aliases == {"candidate": 2}
    # One that points at an older version, or nowhere, is ours to move: we may have died before it.
    model.aliases["candidate"] = 1
    uc_register.register(sealed, NAME, "tiny-ffffffff", alias="candidate")
    assert model.aliases == {"candidate": 2}
    model.aliases.clear()
    assert register(sealed, alias="candidate")["alias"] == "candidate"
    assert model.aliases == {"candidate": 1}


def test_a_model_without_a_chat_template_completes(
    server: DatabricksServer, sealed: Path, tmp_path: Path
) -> None:
    base = tmp_path / "base" / "model"
    leave_out = shutil.ignore_patterns("chat_template.jinja", rundir.MANIFEST)
    shutil.copytree(sealed, base, ignore=leave_out)
    rundir.seal(base, {})
    assert register(base)["task"] == "llm/v1/completions"


def test_what_is_not_whole_is_refused(
    server: DatabricksServer, sealed: Path, tmp_path: Path
) -> None:
    torn = tmp_path / "torn" / "model"
    shutil.copytree(sealed, torn)
    (torn / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="is not sealed, or not whole"):
        register(torn)
    adapter = tmp_path / "adapter" / "model"
    adapter.mkdir(parents=True)
    rundir.seal(adapter, {"warnings": ["it is an adapter"]})
    with pytest.raises(UserError, match=r"cannot be registered in Unity Catalog: .*an adapter"):
        register(adapter)
    assert server.requests == []


def test_a_version_that_fails_or_takes_too_long_is_worth_another_start(
    server: DatabricksServer, sealed: Path
) -> None:
    server.rules.registration_fails = True
    with pytest.raises(mlflow_store.StoreUnavailable, match="failed to register"):
        register(sealed)
    assert server.registry.models[NAME].versions == {}
    server.rules.registration_fails = False
    server.rules.ready_after_s = 2
    with pytest.raises(mlflow_store.StoreUnavailable, match="is not READY after 0 s"):
        register(sealed, ready_s=0)
    again = register(sealed)
    assert list(server.registry.models[NAME].versions) == [again["version"]]


def test_a_schema_that_is_not_there_is_told(server: DatabricksServer, sealed: Path) -> None:
    with pytest.raises(UserError, match=r"main\.nowhere"):
        uc_register.register(sealed, "main.nowhere.tiny", "tiny-0a1b2c3d")
