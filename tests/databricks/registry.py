"""Registered models: Unity Catalog's API and the one that MLflow speaks, over the same models."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.databricks.models import Model, Version
from tests.databricks.state import Rules, State
from tests.databricks.wire import ApiError, Request, Wire, invalid, missing, now_ms


class Registry:
    """Models by full name. The files of a version are below `folder`, which is /Models."""

    def __init__(self, wire: Wire, state: State, rules: Rules, folder: Path) -> None:
        self.state, self.rules, self.folder = state, rules, folder
        self.models: dict[str, Model] = {}
        self._lock = threading.RLock()
        self._route_mlflow(wire)
        self._route_catalog(wire)

    def _route_mlflow(self, wire: Wire) -> None:
        base = "/api/2.0/mlflow/unity-catalog"
        routes: list[tuple[str, str, Callable[..., Any]]] = [
            ("POST", "registered-models/create", self._create_model),
            ("GET", "registered-models/get", self._get_model),
            ("PATCH", "registered-models/update", self._update_model),
            ("DELETE", "registered-models/delete", self._delete_model),
            ("GET", "registered-models/search", self._search_models),
            ("POST", "registered-models/set-tag", self._set_tag),
            ("DELETE", "registered-models/delete-tag", self._delete_tag),
            ("POST", "registered-models/alias", self._set_alias),
            ("DELETE", "registered-models/alias", self._delete_alias),
            ("GET", "registered-models/alias", self._by_alias),
            ("GET", "registered-models:is-databricks-sdk-models-artifact-repository-enabled",
             self._through_files),
            ("POST", "model-versions/create", self._create_version),
            ("POST", "model-versions/finalize", self._finalize),
            ("POST", "model-versions/generate-temporary-credentials", self._credentials),
            ("POST", "model-versions/emit-lineage", self._get_version),
            ("GET", "model-versions/get", self._get_version),
            ("GET", "model-versions/search", self._search_versions),
            ("GET", "model-versions/get-download-uri", self._download_uri),
            ("PATCH", "model-versions/update", self._update_version),
            ("DELETE", "model-versions/delete", self._delete_version),
            ("POST", "model-versions/set-tag", self._set_tag),
            ("DELETE", "model-versions/delete-tag", self._delete_tag),
        ]  # fmt: skip
        for method, name, handler in routes:
            wire.route(method, f"{base}/{name}", self._alone(handler))

    def _route_catalog(self, wire: Wire) -> None:
        base = "/api/2.1/unity-catalog/models"
        routes: list[tuple[str, str, Callable[..., Any]]] = [
            ("GET", "", self._list_catalog), ("POST", "", self._create_catalog),
            ("GET", "/([^/]+)", self._get_catalog), ("DELETE", "/([^/]+)", self._delete_model),
            ("PATCH", "/([^/]+)", self._comment_model),
            ("GET", "/([^/]+)/versions", self._list_versions),
            ("GET", r"/([^/]+)/versions/(\d+)", self._get_catalog_version),
            ("DELETE", r"/([^/]+)/versions/(\d+)", self._delete_version),
            ("PATCH", r"/([^/]+)/versions/(\d+)", self._comment),
            ("GET", "/([^/]+)/aliases/([^/]+)", self._catalog_by_alias),
            ("PUT", "/([^/]+)/aliases/([^/]+)", self._put_alias),
            ("DELETE", "/([^/]+)/aliases/([^/]+)", self._delete_alias),
        ]  # fmt: skip
        for method, name, handler in routes:
            wire.route(method, base + name, self._alone(handler))

    def _alone(self, handler: Callable[..., Any]) -> Callable[..., Any]:
        """One call at a time."""

        def serve(request: Request, *groups: str) -> Any:
            with self._lock:
                return handler(request, *groups)

        return serve

    # What both share.

    def _model(self, name: str) -> Model:
        _check_name(name)
        if name not in self.models:
            raise missing(f"Registered Model '{name}' does not exist.")
        return self.models[name]

    def _version(self, name: str, number: str | int) -> Version:
        model = self._model(name)
        if not str(number).isdigit() or int(number) not in model.versions:
            raise missing(f"Model version '{number}' of '{name}' does not exist.")
        return model.versions[int(number)]

    def _by_name_and_alias(self, name: str, alias: str) -> Version:
        model = self._model(name)
        if alias not in model.aliases:
            raise missing(f"Alias '{alias}' of model '{name}' does not exist.")
        return model.versions[model.aliases[alias]]

    def _new_model(self, name: str) -> Model:
        _check_name(name)
        schema = name.rpartition(".")[0]
        if schema not in self.state.schemas:
            raise ApiError(404, "SCHEMA_DOES_NOT_EXIST", f"Schema '{schema}' does not exist.")
        self._need("CREATE_MODEL", schema)
        if name in self.models:
            raise ApiError(400, "RESOURCE_ALREADY_EXISTS", f"Model '{name}' already exists")
        self.models[name] = Model(name, self.state.user)
        return self.models[name]

    def _need(self, privilege: str, full: str) -> None:
        if (privilege, full) in self.state.denied:
            message = f"User does not have {privilege.replace('_', ' ')} on '{full}'."
            raise ApiError(403, "PERMISSION_DENIED", message)

    def _files_of(self, version: Version) -> Path:
        return self.folder.joinpath(*version.model.split("."), str(version.number))

    # As MLflow asks.

    def _create_model(self, request: Request) -> dict[str, Any]:
        model = self._new_model(request.need("name"))
        model.description, model.tags = request.get("description", ""), _tags(request)
        return {"registered_model": model.for_mlflow()}

    def _get_model(self, request: Request) -> dict[str, Any]:
        return {"registered_model": self._model(request.need("name")).for_mlflow()}

    def _update_model(self, request: Request) -> dict[str, Any]:
        model = self._model(request.need("name"))
        model.description, model.updated = request.get("description", ""), now_ms()
        return {"registered_model": model.for_mlflow()}

    def _delete_model(self, request: Request, name: str = "") -> None:
        model = self._model(name or request.need("name"))
        for version in model.versions.values():
            shutil.rmtree(self._files_of(version), ignore_errors=True)
        del self.models[model.name]

    def _search_models(self, request: Request) -> dict[str, Any]:
        found = [model.for_mlflow() for model in self.models.values()]
        return _page(request, found, "registered_models")

    def _target(self, request: Request) -> Model | Version:
        """What a tag is for: the version, where one is named."""
        name, number = request.need("name"), request.get("version")
        return self._version(name, number) if number else self._model(name)

    def _set_tag(self, request: Request) -> None:
        target = self._target(request)
        self._need("APPLY_TAG", request.need("name"))
        target.tags[request.need("key")] = request.get("value", "")
        target.updated = now_ms()

    def _delete_tag(self, request: Request) -> None:
        self._target(request).tags.pop(request.need("key"), None)

    def _set_alias(self, request: Request) -> None:
        name, alias = request.need("name"), request.need("alias")
        version = self._version(name, request.need("version"))
        if re.fullmatch(r"v\d+|latest", alias, re.IGNORECASE):
            raise invalid(f"alias {alias!r} is reserved")
        self.models[name].aliases[alias] = version.number

    def _delete_alias(self, request: Request, name: str = "", alias: str = "") -> None:
        model = self._model(name or request.need("name"))
        model.aliases.pop(alias or request.need("alias"), None)

    def _shown(self, version: Version) -> dict[str, Any]:
        aliases = self.models[version.model].aliases_of(version.number)
        return {"model_version": version.for_mlflow(aliases)}

    def _by_alias(self, request: Request) -> dict[str, Any]:
        return self._shown(self._by_name_and_alias(request.need("name"), request.need("alias")))

    def _through_files(self, request: Request) -> dict[str, Any]:
        name = "is_databricks_sdk_models_artifact_repository_enabled"
        return {name: self.rules.models_through_files}

    def _create_version(self, request: Request) -> dict[str, Any]:
        model = self._model(request.need("name"))
        self._need("CREATE_MODEL_VERSION", model.name)
        model.last += 1
        version = Version(
            model.name, model.last, self.state.user, source=request.need("source"),
            run_id=request.get("run_id", ""), description=request.get("description", ""),
            tags=_tags(request),
        )  # fmt: skip
        model.versions[version.number] = version
        self._files_of(version).mkdir(parents=True)
        return self._shown(version)

    def _finalize(self, request: Request) -> dict[str, Any]:
        version = self._version(request.need("name"), request.need("version"))
        if not (self._files_of(version) / "MLmodel").is_file():
            raise invalid(f"Version {version.number} has no MLmodel file")
        # A repeated call changes nothing.
        if version.ready_at is None:
            version.ready_at = time.monotonic() + self.rules.ready_after_s
            version.fails, version.updated = self.rules.registration_fails, now_ms()
        return self._shown(version)

    def _credentials(self, request: Request) -> dict[str, Any]:
        self._version(request.need("name"), request.need("version"))
        expiry = now_ms() + 3_600_000
        return {"credentials": {"expiration_time": expiry, "storage_mode": "DEFAULT_STORAGE"}}

    def _get_version(self, request: Request) -> dict[str, Any]:
        return self._shown(self._version(request.need("name"), request.need("version")))

    def _search_versions(self, request: Request) -> dict[str, Any]:
        asked = dict(re.findall(r"(name|run_id)\s*=\s*'([^']*)'", request.get("filter", "")))
        found = [
            self._shown(version)["model_version"]
            for model in self.models.values() for version in model.versions.values()
            if asked.get("name", model.name) == model.name
            and asked.get("run_id", version.run_id) == version.run_id
        ]  # fmt: skip
        found.sort(key=lambda version: -int(version["version"]))
        return _page(request, found, "model_versions")

    def _download_uri(self, request: Request) -> dict[str, Any]:
        version = self._version(request.need("name"), request.need("version"))
        return {"artifact_uri": f"dbfs:/Models/{version.model.replace('.', '/')}/{version.number}"}

    def _update_version(self, request: Request) -> dict[str, Any]:
        version = self._version(request.need("name"), request.need("version"))
        version.description, version.updated = request.get("description", ""), now_ms()
        return self._shown(version)

    def _delete_version(self, request: Request, name: str = "", number: str = "") -> None:
        version = self._version(name or request.need("name"), number or request.need("version"))
        model = self.models[version.model]
        del model.versions[version.number]
        model.aliases = {a: v for a, v in model.aliases.items() if v != version.number}
        shutil.rmtree(self._files_of(version), ignore_errors=True)

    # As Unity Catalog's own API asks.

    def _list_catalog(self, request: Request) -> dict[str, Any]:
        catalog, schema = request.get("catalog_name"), request.get("schema_name")
        start = f"{catalog}.{schema}." if catalog and schema else ""
        found = [model.for_catalog() for name, model in sorted(self.models.items())
                 if name.startswith(start)]  # fmt: skip
        return _page(request, found, "registered_models")

    def _create_catalog(self, request: Request) -> dict[str, Any]:
        parts = [request.need(key) for key in ("catalog_name", "schema_name", "name")]
        model = self._new_model(".".join(parts))
        model.description = request.get("comment", "")
        return model.for_catalog()

    def _get_catalog(self, request: Request, name: str) -> dict[str, Any]:
        return self._model(name).for_catalog()

    def _comment_model(self, request: Request, name: str) -> dict[str, Any]:
        model = self._model(name)
        model.description, model.updated = request.get("comment", model.description), now_ms()
        return model.for_catalog()

    def _catalog_version(self, version: Version) -> dict[str, Any]:
        return version.for_catalog(self.models[version.model].aliases_of(version.number))

    def _list_versions(self, request: Request, name: str) -> dict[str, Any]:
        versions = self._model(name).versions.values()
        return _page(request, [self._catalog_version(each) for each in versions], "model_versions")

    def _get_catalog_version(self, request: Request, name: str, number: str) -> dict[str, Any]:
        return self._catalog_version(self._version(name, number))

    def _comment(self, request: Request, name: str, number: str) -> dict[str, Any]:
        version = self._version(name, number)
        version.description, version.updated = request.get("comment", ""), now_ms()
        return self._catalog_version(version)

    def _catalog_by_alias(self, request: Request, name: str, alias: str) -> dict[str, Any]:
        return self._catalog_version(self._by_name_and_alias(name, alias))

    def _put_alias(self, request: Request, name: str, alias: str) -> dict[str, Any]:
        version = self._version(name, request.need("version_num"))
        self.models[name].aliases[alias] = version.number
        return {"alias_name": alias, "version_num": version.number}


def _check_name(name: str) -> None:
    """Three parts, each of 1 to 255 characters that Unity Catalog allows."""
    if name.count(".") != 2:
        raise invalid(f"Name '{name}' does not specify all three levels: catalog.schema.model")
    if not all(re.fullmatch(r"[^./ \x00-\x1f\x7f]{1,255}", part) for part in name.split(".")):
        raise invalid(f"Name '{name}' has a part that is empty, too long or not valid")


def _tags(request: Request) -> dict[str, str]:
    return {tag["key"]: tag.get("value", "") for tag in request.get("tags") or []}


def _page(request: Request, found: list[dict[str, Any]], name: str) -> dict[str, Any]:
    start, size = request.number("page_token", 0), request.number("max_results", 100)
    answer: dict[str, Any] = {name: found[start : start + size]} if found else {}
    if start + size < len(found):
        answer["next_page_token"] = str(start + size)
    return answer
