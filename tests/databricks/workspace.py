"""Workspace files, the current user, and secrets."""

from __future__ import annotations

import base64
import binascii
import shutil
import zlib
from pathlib import Path
from typing import Any

from tests.databricks.state import State
from tests.databricks.wire import (
    WORKSPACE_ID,
    Answer,
    ApiError,
    Request,
    Wire,
    invalid,
    missing,
    shown,
)

MAX_IMPORT = 10 << 20
MAX_FILE = 500 << 20


class Workspace:
    """Files below /Workspace: a real folder, whose paths the API also knows without the prefix."""

    def __init__(self, wire: Wire, state: State, root: Path) -> None:
        self.state, self.root = state, root
        self._notebooks: set[Path] = set()
        self._acl: dict[tuple[str, str], list[dict[str, Any]]] = {}
        (root / "Users" / state.user).mkdir(parents=True)
        (root / "Shared").mkdir()
        base = "/api/2.0/workspace"
        wire.route("POST", f"{base}/import", self._import)
        wire.route("POST", r"/api/2.0/workspace-files/import-file/(.+)", self._import_raw)
        wire.route("GET", f"{base}/export", self._export)
        wire.route("POST", f"{base}/mkdirs", self._mkdirs)
        wire.route("GET", f"{base}/get-status", self._status)
        wire.route("GET", f"{base}/list", self._list)
        wire.route("POST", f"{base}/delete", self._delete)
        wire.route("GET", "/api/2.0/preview/scim/v2/Me", self._me)
        wire.route("GET", "/.well-known/databricks-config", self._discovery)
        policies = r"/api/2.1/accounts/[^/]+/budget-policies/([^/]+)"
        wire.route("GET", policies, self._policy)
        wire.route("GET", r"/api/2.1/accounts/[^/]+/budget-policies", self._policies)
        wire.route("PATCH", r"/api/2.0/permissions/([^/]+)/([^/]+)", self._permit)
        wire.route("GET", r"/api/2.0/permissions/([^/]+)/([^/]+)", self._permissions)
        wire.route("GET", "/api/2.0/secrets/list", self._secrets)
        wire.route("GET", "/api/2.0/secrets/get", self._secret)
        wire.route("GET", "/api/2.0/secrets/scopes/list", self._scopes)

    def path(self, name: str) -> Path:
        """The real file of a workspace path; raises ApiError when it is none."""
        if not name.startswith("/") or ".." in name.split("/"):
            raise invalid(f"Path ({name}) is not a valid workspace path")
        return self.root / name.removeprefix("/Workspace").lstrip("/")

    def _name(self, path: Path) -> str:
        return f"/{path.relative_to(self.root)}"

    def _existing(self, name: str) -> Path:
        if not (path := self.path(name)).exists():
            raise missing(f"Path ({name}) doesn't exist.")
        return path

    def _import(self, request: Request) -> None:
        name, data = request.need("path"), request.form.get("content")
        if data is None:
            try:
                data = base64.b64decode(request.get("content", ""), validate=True)
            except (binascii.Error, ValueError):
                raise invalid("content is not base64") from None
            request.body = {**request.body, "content": shown(data)}
        if len(data) > MAX_IMPORT:
            message = f"The content is larger than the limit of {MAX_IMPORT} bytes"
            raise ApiError(400, "MAX_NOTEBOOK_SIZE_EXCEEDED", message)
        notebook = request.get("format", "SOURCE") == "SOURCE"
        if notebook and not request.get("language"):
            raise invalid("The language of a notebook in SOURCE format is missing")
        path = self._write(name, data, request.true("overwrite"))
        (self._notebooks.add if notebook else self._notebooks.discard)(path)

    def _import_raw(self, request: Request, name: str) -> None:
        request.body = shown(request.raw)
        if len(request.raw) > MAX_FILE:
            raise ApiError(400, "MAX_WORKSPACE_FILE_SIZE_EXCEEDED", f"more than {MAX_FILE} bytes")
        self._write(f"/{name}", request.raw, request.true("overwrite"))

    def _write(self, name: str, data: bytes, overwrite: bool) -> Path:
        path = self.path(name)
        if not path.parent.is_dir():
            raise missing(f"The parent folder ({self._name(path.parent)}) does not exist.")
        if path.is_dir() or (path.exists() and not overwrite):
            raise ApiError(400, "RESOURCE_ALREADY_EXISTS", f"Path ({name}) already exists.")
        path.write_bytes(data)
        return path

    def _export(self, request: Request) -> Any:
        path = self._existing(request.need("path"))
        if path.is_dir():
            raise invalid("A folder can only be exported as DBC")
        data = path.read_bytes()
        if request.true("direct_download"):
            return Answer(data, headers={"Content-Type": "application/octet-stream"})
        if len(data) > MAX_IMPORT:
            raise ApiError(400, "MAX_NOTEBOOK_SIZE_EXCEEDED", "The content is larger than 10 MB")
        return {"content": base64.b64encode(data).decode(), "file_type": path.suffix.lstrip(".")}

    def _mkdirs(self, request: Request) -> None:
        path = self.path(request.need("path"))
        if any(place.is_file() for place in (path, *path.parents)):
            raise ApiError(400, "RESOURCE_ALREADY_EXISTS", f"{self._name(path)} is a file")
        path.mkdir(parents=True, exist_ok=True)

    def _status(self, request: Request) -> dict[str, Any]:
        return self._info(self._existing(request.need("path")))

    def _list(self, request: Request) -> dict[str, Any]:
        path = self._existing(request.need("path"))
        found = sorted(path.iterdir()) if path.is_dir() else [path]
        # An empty folder is answered without the field.
        return {"objects": [self._info(each) for each in found]} if found else {}

    def _delete(self, request: Request) -> None:
        path = self._existing(request.need("path"))
        if path.is_file():
            return path.unlink()
        if any(path.iterdir()) and not request.true("recursive"):
            message = f"Folder ({self._name(path)}) is not empty."
            raise ApiError(400, "DIRECTORY_NOT_EMPTY", message)
        return shutil.rmtree(path)

    def _info(self, path: Path) -> dict[str, Any]:
        facts, name = path.stat(), self._name(path)
        kind = "DIRECTORY" if path.is_dir() else "FILE"
        found = {"path": name, "object_id": zlib.crc32(name.encode()), "object_type": kind}
        if path in self._notebooks:
            found["object_type"] = "NOTEBOOK"
        if path.is_file():
            found |= {"size": facts.st_size, "modified_at": int(facts.st_mtime * 1000)}
        return found

    def _me(self, request: Request) -> dict[str, Any]:
        user = self.state.user
        emails = [{"type": "work", "value": user, "primary": True}]
        return {"id": "1001", "userName": user, "displayName": user, "active": True,
                "emails": emails}  # fmt: skip

    def _permit(self, request: Request, kind: str, name: str) -> dict[str, Any]:
        self._acl.setdefault((kind, name), []).extend(request.need("access_control_list"))
        return self._permissions(request, kind, name)

    def _permissions(self, request: Request, kind: str, name: str) -> dict[str, Any]:
        entries = self._acl.get((kind, name), [])
        return {"object_id": f"/{kind}/{name}", "access_control_list": entries}

    def _discovery(self, request: Request) -> dict[str, Any]:
        host = f"http://{request.headers['Host']}"
        account = {"account_id": self.state.account_id} if self.state.account_id else {}
        return {"oidc_endpoint": f"{host}/oidc", "workspace_id": WORKSPACE_ID, "cloud": "AWS",
                **account}  # fmt: skip

    def _policy(self, request: Request, policy: str) -> dict[str, Any]:
        if self.state.policies and policy not in self.state.policies:
            raise missing(f"Budget policy {policy} does not exist")
        return {"policy_id": policy, "policy_name": policy}

    def _policies(self, request: Request) -> dict[str, Any]:
        """One a page, so that whoever asks must ask on."""
        wanted = request.query.get("filter_by.policy_name", "")
        found = [name for name in sorted(self.state.policy_names) if wanted in name]
        start = request.number("page_token", 0)
        entries = [{"policy_id": self.state.policy_names[name], "policy_name": name}
                   for name in found[start : start + 1]]  # fmt: skip
        more = {"next_page_token": str(start + 1)} if start + 1 < len(found) else {}
        return {"policies": entries, **more}

    def _scope(self, request: Request) -> dict[str, str]:
        scope = request.need("scope")
        if scope not in self.state.secrets:
            raise missing(f"Scope {scope} does not exist!")
        if scope in self.state.unreadable_scopes:
            message = f"User {self.state.user} does not have READ permission on scope {scope}"
            raise ApiError(403, "PERMISSION_DENIED", message)
        return self.state.secrets[scope]

    def _secrets(self, request: Request) -> dict[str, Any]:
        keys = self._scope(request)
        return {"secrets": [{"key": key, "last_updated_timestamp": 0} for key in keys]}

    def _secret(self, request: Request) -> dict[str, Any]:
        keys, key = self._scope(request), request.need("key")
        if key not in keys:
            raise missing(f"No secret with key {key} exists in scope {request.need('scope')}")
        if not self.state.secrets_readable:
            raise ApiError(400, "BAD_REQUEST", "get-secret is only allowed from a notebook")
        return {"key": key, "value": base64.b64encode(keys[key].encode()).decode()}

    def _scopes(self, request: Request) -> dict[str, Any]:
        names = [{"name": name, "backend_type": "DATABRICKS"} for name in self.state.secrets]
        return {"scopes": names}
