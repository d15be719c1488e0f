"""Make the run's model folder a version of a registered model, by path:

    python -m tunewright.register --model FOLDER --name NAME --run RUN --run-id ID \
        --tags FILE --result FILE

The model is never loaded and the sealed folder is left as it is. A registry in a database refers to
the folder; one behind a server gets the files as artifacts of the MLflow run. One run gives one
version, however often this is started: the version carries the run's name in the tag
`tunewright.run`, and is looked for first.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from tunewright import mlflow_store
from tunewright.contract import rundir
from tunewright.contract.failures import TunewrightError, UserError, reported

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

RUN_TAG = "tunewright.run"
_ARTIFACT_FOLDER = "model"
_MAX_TAG_CHARS = 5000
# Left behind by a Trainer beside the model: states for going on, not part of what it predicts with.
_TRAINER_FOLDER = re.compile(r"checkpoint-\d+")
_RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"


def register(
    model: Path, name: str, run: str, run_id: str | None, tags: Mapping[str, Any]
) -> dict[str, Any]:
    """The version of `name` that belongs to `run`, as {"name", "version", "source", …}.

    Raises UserError for a name the registry refuses or an unsealed folder, and StoreUnavailable,
    which is worth another attempt, when the registry does not answer.
    """
    facts = _verified(model)
    # Uploads of large files are answered only when the server has stored them.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "600")
    client = mlflow_store.connect()
    with mlflow_store.explained():
        _ensure_registered_model(client, name)
        version = _version_of(client, name, run)
        if version is not None:
            _say(f"{name} version {version.version} is this run's already")
        else:
            source = _source(client, model, facts, run_id)
            all_tags = {**_texts(tags), RUN_TAG: run}
            with _sent_once():
                version = client.create_model_version(
                    name, source, run_id=run_id, tags=all_tags, description=_description(run, facts)
                )
            _say(f"{name} version {version.version}: {source}")
    return {
        "name": name,
        "version": int(version.version),
        "source": version.source,
        "registry_uri": mlflow_store.registry_uri(),
    }


def _verified(model: Path) -> dict[str, Any]:
    facts = rundir.manifest(model)
    if facts is None:
        raise UserError(f"{model} is not sealed; run tunewright.consolidate first")
    if wrong := rundir.damage(model, facts):
        raise TunewrightError(
            f"{wrong[0]}; {model} changed after it was sealed and is not registered"
        )
    return facts


def _ensure_registered_model(client: MlflowClient, name: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(
            name,
            description=f"Fine-tuned by Tunewright; the tag {RUN_TAG} of a version names its run.",
        )
    except MlflowException as error:
        if error.error_code == "RESOURCE_ALREADY_EXISTS":
            return
        if error.error_code == "INVALID_PARAMETER_VALUE":
            raise UserError(
                f"the registry does not accept the model name {name!r}; use letters, digits, "
                "dashes and underscores"
            ) from error
        raise


def _version_of(client: MlflowClient, name: str, run: str) -> ModelVersion | None:
    """The first version that carries the run's tag. Tags are compared here: not every registry
    can search by them."""
    escaped = name.replace("'", "\\'")
    token, found = None, []
    while True:
        page = client.search_model_versions(f"name='{escaped}'", max_results=200, page_token=token)
        found += [v for v in page if v.tags.get(RUN_TAG) == run]
        token = page.token
        if not token:
            return min(found, key=lambda v: int(v.version), default=None)


def _source(client: MlflowClient, model: Path, facts: Mapping[str, Any], run_id: str | None) -> str:
    """Where the registry finds the files: the folder itself, or the run's artifacts."""
    registry = mlflow_store.registry_uri()
    if not mlflow_store.is_server(registry):
        return str(model)
    if not run_id:
        raise UserError(
            f"the registry at {registry} takes files only through an MLflow run; give --run-id"
        )
    root = str(client.get_run(run_id).info.artifact_uri)
    shared = registry == mlflow_store.tracking_uri()
    if not shared and root.startswith(("/", "file:", "mlflow-artifacts:")):
        raise UserError(
            f"the registry at {registry} cannot read artifacts kept in {root}; set "
            "MLFLOW_TRACKING_URI to the same server, or use an artifact location that both reach"
        )
    _upload(client, model, facts, run_id)
    return f"{root.rstrip('/')}/{_ARTIFACT_FOLDER}"


def _upload(client: MlflowClient, model: Path, facts: Mapping[str, Any], run_id: str) -> None:
    """Bring the files that are not there yet, with their sizes, the manifest last."""
    names = [n for n in facts["files"] if not _TRAINER_FOLDER.fullmatch(PurePosixPath(n).parts[0])]
    there = _uploaded(client, run_id, _ARTIFACT_FOLDER)
    missing = [n for n in names if there.get(n) != facts["files"][n]["size"]]
    size = sum(facts["files"][n]["size"] for n in missing)
    _say(f"uploading {len(missing)} of {len(names)} files, {size / 1e6:,.1f} MB")
    for name in [*missing, rundir.MANIFEST]:
        folder = str(PurePosixPath(_ARTIFACT_FOLDER, name).parent)
        client.log_artifact(run_id, str(model / name), folder)


def _uploaded(client: MlflowClient, run_id: str, folder: str) -> dict[str, int]:
    """Sizes in bytes of the run's artifacts below a folder, by path relative to the model."""
    found: dict[str, int] = {}
    for entry in client.list_artifacts(run_id, folder):
        if entry.is_dir:
            found |= _uploaded(client, run_id, entry.path)
        else:
            found[entry.path.removeprefix(f"{_ARTIFACT_FOLDER}/")] = entry.file_size
    return found


@contextmanager
def _sent_once() -> Iterator[None]:
    """Without MLflow's own repetition: a request whose answer is lost may have made the version.

    The next start of this program looks before it asks again.
    """
    before = os.environ.get(_RETRIES)
    os.environ[_RETRIES] = "0"
    try:
        yield
    finally:
        os.environ.pop(_RETRIES)
        if before is not None:
            os.environ[_RETRIES] = before


def _texts(tags: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(value)[:_MAX_TAG_CHARS] for key, value in tags.items() if value is not None}


def _description(run: str, facts: Mapping[str, Any]) -> str:
    base = (facts.get("base_model") or {}).get("name")
    words = [f"Run {run}, from {facts.get('source')}."]
    if base:
        words.append(f"Base model {base}.")
    if facts.get("parameters"):
        words.append(f"{facts['parameters']:,} parameters in {facts.get('dtype')}.")
    return " ".join(words)


def _say(text: str) -> None:
    print(f"register: {text}", file=sys.stderr, flush=True)


def _read_tags(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"--tags {path} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"--tags {path} must hold a JSON object")
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tunewright.register", description="Register a sealed model folder by path."
    )
    parser.add_argument("--model", type=Path, required=True, help="the sealed model folder")
    parser.add_argument("--name", required=True, help="the registered model's name")
    parser.add_argument("--run", required=True, help="the run's name; one run gives one version")
    parser.add_argument("--run-id", help="the MLflow run the version belongs to")
    parser.add_argument("--tags", type=Path, help="a JSON object of tags for the version")
    parser.add_argument(
        "--result", type=Path, required=True, help="where the outcome goes, as JSON"
    )
    given = parser.parse_args(argv)
    tags = _read_tags(given.tags)
    outcome = register(given.model.absolute(), given.name, given.run, given.run_id, tags)
    rundir.write_json(given.result, outcome)


if __name__ == "__main__":
    with reported():
        main()
