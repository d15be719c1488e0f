"""Make a sealed model folder a version of a model in Unity Catalog, by path, exactly once.

The model is never loaded and its weights are not copied: what is uploaded is a folder of links to
the sealed files, with an `MLmodel` that says how Unity Catalog's endpoints may serve it. A version
carries its run's name in the tag `tunewright.run`, and is looked for first; one that an earlier
start left unfinished is taken away before it is made again.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tunewright import mlflow_store
from tunewright.contract import rundir
from tunewright.contract.failures import TunewrightError, UserError
from tunewright.mlflow_store import StoreUnavailable
from tunewright.mlmodel import MLMODEL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

REGISTRY = "databricks-uc"
RUN_TAG = "tunewright.run"
READY_S = 3600
"""How long a version may take to become READY: large models take many minutes."""
_STALE_S = 30.0
"""How long a version that an earlier start made is waited for before it is made again."""
_CHAT, _COMPLETIONS = "llm/v1/chat", "llm/v1/completions"
_WEIGHTS = "model"
_MLFLOWS = ("requirements.txt", "conda.yaml", "python_env.yaml", "components")
_EXAMPLES = ("input_example.json", "serving_input_example.json")
"""Plain text, which is not what a chat takes."""


def register(
    model: Path,
    name: str,
    run: str,
    *,
    run_id: str | None = None,
    tags: Mapping[str, Any] | None = None,
    alias: str | None = None,
    ready_s: int = READY_S,
) -> dict[str, Any]:
    """The version of `name` that belongs to `run`, READY: {"name", "version", "alias", "task"}.

    `alias` then points at it, unless it points at a newer version: the answer's is None then.

    Raises UserError for a folder or name that Unity Catalog does not take, and StoreUnavailable,
    which is worth another attempt.
    """
    facts = rundir.manifest(model)
    if facts is None or rundir.damage(model, facts, sizes_only=True):
        raise UserError(f"{model} is not sealed, or not whole; it is not registered")
    if not (model / MLMODEL).is_file():
        reason = "; ".join(["it is no MLflow model", *facts.get("warnings", [])])
        raise UserError(f"{model} cannot be registered in Unity Catalog: {reason}")
    # Uploads through the SDK's Files API work where vended storage credentials are blocked.
    os.environ.setdefault("MLFLOW_USE_DATABRICKS_SDK_MODEL_ARTIFACTS_REPO_FOR_UC", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "600")
    from mlflow import MlflowClient

    client = MlflowClient(registry_uri=REGISTRY)
    with mlflow_store.explained():
        _ensure_model(client, name)
        known = _numbers(client, name)
        version, task = _version_of(client, name, run, known), _task(model)
        is_new = version is None
        if version is None:
            all_tags = {key: str(value) for key, value in (tags or {}).items()} | {RUN_TAG: run}
            with _as_mlflow_model(model, task) as folder:
                _say(f"uploading {model} as a version of {name}")
                version = client._create_model_version(
                    name,
                    str(model),
                    run_id=run_id,
                    tags=all_tags,
                    await_creation_for=0,
                    local_model_path=str(folder),
                )
        _await_ready(client, name, version.version, ready_s)
        if is_new:
            _take_away_twins(client, name, run, version.version, known)
        if alias and not _move_alias(client, name, alias, int(version.version)):
            alias = None
    _say(f"{name} version {version.version} is ready")
    return {"name": name, "version": int(version.version), "alias": alias, "task": task}


def _ensure_model(client: MlflowClient, name: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(
            name,
            description=f"Fine-tuned by Tunewright; the tag {RUN_TAG} of a version names its run.",
        )
    except MlflowException as error:
        # Who may add versions need not be allowed to make the model.
        if error.error_code not in ("RESOURCE_ALREADY_EXISTS", "ALREADY_EXISTS"):
            try:
                client.get_registered_model(name)
            except MlflowException:
                raise error from None


def _version_of(
    client: MlflowClient, name: str, run: str, numbers: set[int]
) -> ModelVersion | None:
    """This run's version, READY or on its way; what a torn start left is deleted."""
    found = None
    for version in _of_run(client, name, run, numbers):
        if version.status == "READY" or _becomes_ready(client, name, version.version, _STALE_S):
            found = found or version
        else:
            _say(f"version {version.version} was never finished; making it again")
            client.delete_model_version(name, version.version)
    return found


def _take_away_twins(
    client: MlflowClient, name: str, run: str, ours: str, before: set[int]
) -> None:
    """Delete what else was made for this run meanwhile: MLflow asks again when an answer is lost,
    and the version of that answer has no files.
    """
    for version in _of_run(client, name, run, _numbers(client, name) - before):
        if int(version.version) != int(ours):
            client.delete_model_version(name, version.version)


def _numbers(client: MlflowClient, name: str) -> set[int]:
    """The numbers of all versions of a model."""
    token, numbers = None, set()
    while True:
        page = client.search_model_versions(f"name='{name}'", max_results=100, page_token=token)
        numbers |= {int(version.version) for version in page}
        if not (token := page.token):
            return numbers


def _of_run(client: MlflowClient, name: str, run: str, numbers: set[int]) -> Iterator[ModelVersion]:
    """Those with the run's tag, oldest first. A search tells no tags, so each is asked for."""
    for number in sorted(numbers):
        version = client.get_model_version(name, str(number))
        if version.tags.get(RUN_TAG) == run:
            yield version


def _await_ready(client: MlflowClient, name: str, number: str, limit_s: float) -> None:
    if not _becomes_ready(client, name, number, limit_s):
        raise StoreUnavailable(f"{name} version {number} is not READY after {limit_s:.0f} s")


def _becomes_ready(client: MlflowClient, name: str, number: str, limit_s: float) -> bool:
    end, pause = time.monotonic() + limit_s, 0.5
    while True:
        version = client.get_model_version(name, number)
        if version.status == "READY":
            return True
        if version.status == "FAILED_REGISTRATION":
            client.delete_model_version(name, number)
            raise StoreUnavailable(
                f"{name} version {number} failed to register: {version.status_message}"
            )
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 15.0)


def _move_alias(client: MlflowClient, name: str, alias: str, number: int) -> bool:
    """Let the alias point at a version; not back from a newer one, as a run that is gone on with
    would. Says whether it does.
    """
    from mlflow.exceptions import MlflowException

    try:
        newer = int(client.get_model_version_by_alias(name, alias).version)
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise
    else:
        if newer > number:
            _say(f"the alias {alias} stays at version {newer}, which is newer")
            return False
    client.set_registered_model_alias(name, alias, str(number))
    return True


def _task(model: Path) -> str:
    """What the model can be served as: chat needs a template, which base models lack."""
    facts = _json(model / "tokenizer_config.json")
    has_template = facts.get("chat_template") or (model / "chat_template.jinja").is_file()
    return _CHAT if has_template else _COMPLETIONS


def _json(path: Path) -> dict[str, Any]:
    return rundir.read_json(path) or {}


@contextmanager
def _as_mlflow_model(model: Path, task: str) -> Iterator[Path]:
    """The sealed files as links, beside an MLmodel with Unity Catalog's task and signature."""
    with tempfile.TemporaryDirectory(prefix="tunewright-register-") as scratch:
        for path in sorted(p for p in model.rglob("*") if p.is_file()):
            name = path.relative_to(model)
            if name.parts[0] in (MLMODEL, rundir.MANIFEST, *_EXAMPLES):
                continue
            # MLflow takes a model for one without weights unless they lie in a folder `model`.
            is_mlflows = name.parts[0] in _MLFLOWS
            place = Path(scratch, name) if is_mlflows else Path(scratch, _WEIGHTS, name)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(path)
        described = yaml.safe_load((model / MLMODEL).read_text())
        Path(scratch, MLMODEL).write_text(yaml.safe_dump(_served(described, task), sort_keys=False))
        yield Path(scratch)


def _served(described: dict[str, Any], task: str) -> dict[str, Any]:
    """An MLmodel with the task and the signature that goes with it, in MLflow's own words."""
    from mlflow.transformers import llm_inference_utils

    signature = llm_inference_utils.infer_signature_from_llm_inference_task(task)
    if signature is None:
        raise TunewrightError(f"this MLflow knows no signature for the task {task}")
    found = {**described, "signature": signature.to_dict()}
    found["metadata"] = {**(described.get("metadata") or {}), "task": task}
    flavors = dict(described["flavors"])
    ours = {"inference_task": task, "model_binary": _WEIGHTS}
    flavors["transformers"] = {**flavors["transformers"], **ours}
    found.pop("saved_input_example_info", None)
    return {**found, "flavors": flavors}


def _say(text: str) -> None:
    print(f"register: {text}", file=sys.stderr, flush=True)
