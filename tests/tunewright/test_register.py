"""Registration by path: one version per run, in a database and behind a server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tunewright.consolidate import consolidate
from tunewright.contract import rundir
from tunewright.contract.failures import TunewrightError, UserError
from tunewright.contract.rundir import RunDir
from tunewright.mlflow_store import StoreUnavailable
from tunewright.register import RUN_TAG, main, register

TAGS = {"tunewright.workload_sha256": "abc", "tunewright.data_fingerprint": "f", "commit": None}
GENERATE = """
import sys, mlflow
model = mlflow.pyfunc.load_model(sys.argv[1])
print(model.predict(["hello world"])[0])
"""


@pytest.fixture(scope="module")
def sealed_model(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A sealed model folder, as a user's script and consolidate leave it."""
    run = RunDir(tmp_path_factory.mktemp("runs") / "tiny-0a1b2c3d")
    shutil.copytree(tiny_model, run.model)
    consolidate(run)
    return run.model


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A registered model of its own for each test."""
    return request.node.name.removeprefix("test_")[:60]


def client() -> Any:
    from mlflow import MlflowClient

    from tunewright.mlflow_store import registry_uri, tracking_uri

    return MlflowClient(tracking_uri=tracking_uri(), registry_uri=registry_uri())


def new_run() -> str:
    found = client()
    experiment = found.get_experiment_by_name("registering")
    number = experiment.experiment_id if experiment else found.create_experiment("registering")
    return found.create_run(number).info.run_id


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(p.relative_to(folder)): (p.stat().st_size, p.stat().st_mtime_ns)
        for p in folder.rglob("*")
    }


def generated(uri: str) -> str:
    """The prompt, which comes back first."""
    return said(uri)[:11]


def said(uri: str) -> str:
    from tunewright.mlflow_store import tracking_uri

    ran = subprocess.run(
        [sys.executable, "-c", GENERATE, uri],
        capture_output=True,
        text=True,
        env={**os.environ, "MLFLOW_TRACKING_URI": tracking_uri()},
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.fixture
def sealed_adapter(tmp_path: Path, tiny_model: Path) -> Callable[..., Path]:
    """A sealed folder with an adapter of the tiny model that always says another thing."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    def make(base: str, revision: str | None) -> Path:
        run = RunDir(tmp_path / "adapted-0a1b2c3d")
        torch.manual_seed(1)
        model = get_peft_model(
            AutoModelForCausalLM.from_pretrained(tiny_model),
            LoraConfig(
                r=4, lora_alpha=400, target_modules=["down_proj"], init_lora_weights=False,
                task_type="CAUSAL_LM",
            ),
        )  # fmt: skip
        model.save_pretrained(run.model)
        config = run.model / "adapter_config.json"
        named = {"base_model_name_or_path": base, "revision": revision}
        config.write_text(json.dumps(json.loads(config.read_text()) | named))
        for path in [*tiny_model.glob("*token*"), tiny_model / "config.json"]:
            shutil.copy(path, run.model)
        consolidate(run)
        return run.model

    return make


# What PEFT asks of transformers when it makes an adapter.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize("on_the_hub", [False, True], ids=["a folder", "on the Hub"])
def test_an_adapter_is_loaded_on_its_base_model(
    on_the_hub, local_store, sealed_model, sealed_adapter, tiny_model, tmp_path, monkeypatch, name
):
    """What stands for the Hub is its cache on this machine, which is asked first."""
    base, revision = str(tiny_model), None
    if on_the_hub:
        base, revision = "example-org/tiny", "0123456789abcdef" * 2 + "01234567"
        cache = tmp_path / "hub" / "models--example-org--tiny" / "snapshots" / revision
        shutil.copytree(tiny_model, cache)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    adapter = sealed_adapter(base, revision)
    assert rundir.manifest(adapter)["kind"] == "adapter"
    register(adapter, name, "adapted-0a1b2c3d", new_run(), TAGS)
    register(sealed_model, name, "tiny-0a1b2c3d", new_run(), TAGS)
    adapted, without = (said(f"models:/{name}/{version}") for version in (1, 2))
    assert adapted.startswith("hello world")
    assert adapted != without
    assert "peft==" in (adapter / "requirements.txt").read_text()


def test_in_a_database_the_version_is_the_folder_itself(local_store, sealed_model, name):
    before = contents(sealed_model)
    run_id = new_run()
    first = register(sealed_model, name, "tiny-0a1b2c3d", run_id, TAGS)
    assert first == {
        "name": name,
        "version": 1,
        "source": str(sealed_model),
        "registry_uri": f"sqlite:///{local_store}/mlflow.db",
    }
    assert register(sealed_model, name, "tiny-0a1b2c3d", run_id, TAGS) == first
    assert register(sealed_model, name, "other-99999999", run_id, TAGS)["version"] == 2
    assert contents(sealed_model) == before
    version = client().get_model_version(name, "1")
    assert version.tags == {
        "tunewright.workload_sha256": "abc",
        "tunewright.data_fingerprint": "f",
        RUN_TAG: "tiny-0a1b2c3d",
    }
    assert version.run_id == run_id
    assert "Run tiny-0a1b2c3d, from the command. 28,192 parameters" in version.description
    assert RUN_TAG in client().get_registered_model(name).description
    assert generated(f"models:/{name}/1") == "hello world"


def test_behind_a_server_the_files_are_artifacts_of_the_run(server_store, sealed_model, name):
    before = contents(sealed_model)
    run_id = new_run()
    first = register(sealed_model, name, "tiny-0a1b2c3d", run_id, TAGS)
    assert (first["version"], first["registry_uri"]) == (1, server_store)
    assert first["source"].endswith(f"{run_id}/artifacts/model")
    assert register(sealed_model, name, "tiny-0a1b2c3d", run_id, TAGS) == first
    assert contents(sealed_model) == before
    assert uploaded(run_id) == files(sealed_model)
    assert generated(f"models:/{name}/1") == "hello world"


def files(folder: Path) -> set[str]:
    """The sealed files and the seal. Loading a version, MLflow may put a note beside them."""
    return {*rundir.manifest(folder)["files"], rundir.MANIFEST}


def uploaded(run_id: str, folder: str = "model") -> set[str]:
    found: set[str] = set()
    for entry in client().list_artifacts(run_id, folder):
        found |= uploaded(run_id, entry.path) if entry.is_dir else {entry.path[len("model/") :]}
    return found


def test_an_upload_cut_short_is_completed(server_store, sealed_model, name, tmp_path, capsys):
    run_id = new_run()
    client().log_artifact(run_id, str(sealed_model / "config.json"), "model")
    torn = tmp_path / "tokenizer.json"
    torn.write_text("{")
    client().log_artifact(run_id, str(torn), "model")
    register(sealed_model, name, "tiny-0a1b2c3d", run_id, {})
    count = len(files(sealed_model)) - 1  # the manifest always goes last
    assert f"uploading {count - 1} of {count} files" in capsys.readouterr().err
    sizes = {e.path: e.file_size for e in client().list_artifacts(run_id, "model")}
    assert sizes["model/tokenizer.json"] == (sealed_model / "tokenizer.json").stat().st_size


def test_states_of_a_trainer_are_not_uploaded(server_store, tiny_model, name, run):
    shutil.copytree(tiny_model, run.model)
    (run.model / "checkpoint-5").mkdir()
    (run.model / "checkpoint-5" / "optimizer.pt").write_text("large")
    consolidate(run)
    run_id = new_run()
    register(run.model, name, run.name, run_id, {})
    assert not [path for path in uploaded(run_id) if path.startswith("checkpoint-5")]


def test_killed_after_registering_it_gives_the_same_version(
    local_store, sealed_model, name, tmp_path
):
    """The process dies between making the version and writing its result."""
    code = (
        "import os, sys\n"
        "from tunewright import register\n"
        "register.rundir.write_json = lambda *a: os.kill(os.getpid(), 9)\n"
        "register.main(sys.argv[1:])\n"
    )
    arguments = ["--model", str(sealed_model), "--name", name, "--run", "tiny-0a1b2c3d"]
    arguments += ["--result", str(tmp_path / "result.json")]
    ran = subprocess.run([sys.executable, "-c", code, *arguments], timeout=60)
    assert ran.returncode == -9
    main(arguments)
    assert json.loads((tmp_path / "result.json").read_text())["version"] == 1
    assert len(client().search_model_versions(f"name='{name}'")) == 1


def test_the_registry_may_be_another_store_than_the_tracking(
    server_store, sealed_model, name, tmp_path, monkeypatch
):
    registry = f"sqlite:///{tmp_path}/registry.db"
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", registry)
    outcome = register(sealed_model, name, "tiny-0a1b2c3d", new_run(), {})
    assert (outcome["source"], outcome["registry_uri"]) == (str(sealed_model), registry)


def test_a_registry_that_cannot_read_the_artifacts_is_refused(
    mlflow_server, local_store, sealed_model, name, monkeypatch
):
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", mlflow_server)
    with pytest.raises(UserError, match="cannot read artifacts kept in"):
        register(sealed_model, name, "tiny-0a1b2c3d", new_run(), {})


def test_a_server_needs_a_run_to_upload_to(server_store, sealed_model, name):
    with pytest.raises(UserError, match="give --run-id"):
        register(sealed_model, name, "tiny-0a1b2c3d", None, {})


def test_a_bad_model_name_is_the_users(local_store, sealed_model):
    with pytest.raises(UserError, match="does not accept the model name 'a/b:c'"):
        register(sealed_model, "a/b:c", "tiny-0a1b2c3d", None, {})


def test_only_whole_sealed_folders_are_registered(local_store, sealed_model, name, tmp_path):
    with pytest.raises(UserError, match="is not sealed"):
        register(tmp_path, name, "tiny-0a1b2c3d", None, {})
    changed = tmp_path / "changed"
    shutil.copytree(sealed_model, changed)
    (changed / "config.json").write_text("{}")
    with pytest.raises(TunewrightError, match=r"config.json has 2 bytes.* changed after it was"):
        register(changed, name, "tiny-0a1b2c3d", None, {})
    assert rundir.is_sealed(sealed_model)


def test_a_registry_nobody_answers_for_is_worth_another_attempt(
    sealed_model, name, monkeypatch, tmp_path
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setattr("tunewright.mlflow_store.WAIT_S", 0.0)
    with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:9 does not answer") as caught:
        register(sealed_model, name, "tiny-0a1b2c3d", None, {})
    assert caught.value.failure_class == "infrastructure"
