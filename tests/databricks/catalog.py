"""Unity Catalog: catalogs, schemas, volumes, privileges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.databricks.state import State
from tests.databricks.wire import ApiError, Request, Wire, now_ms


class Catalog:
    """What exists is in the state; privileges are what was granted, less what is denied."""

    def __init__(self, wire: Wire, state: State, volumes: Path) -> None:
        self.state, self.volumes = state, volumes
        base = "/api/2.1/unity-catalog"
        wire.route("GET", rf"{base}/catalogs/([^/]+)", self._catalog)
        wire.route("GET", rf"{base}/schemas/([^/]+)", self._schema)
        wire.route("POST", rf"{base}/schemas", self._create_schema)
        wire.route("GET", rf"{base}/schemas", self._schemas)
        wire.route("GET", rf"{base}/volumes/([^/]+)", self._volume)
        wire.route("POST", rf"{base}/volumes", self._create_volume)
        wire.route("GET", rf"{base}/volumes", self._volumes)
        wire.route("GET", rf"{base}/permissions/([^/]+)/([^/]+)", self._grants)
        wire.route("PATCH", rf"{base}/permissions/([^/]+)/([^/]+)", self._grant)
        wire.route("GET", rf"{base}/effective-permissions/([^/]+)/([^/]+)", self._effective)

    def add_volume(self, name: str) -> Path:
        catalog, schema, volume = name.split(".")
        self.state.catalogs.add(catalog)
        self.state.schemas.add(f"{catalog}.{schema}")
        self.state.volumes.add(name)
        folder = self.volumes / catalog / schema / volume
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _catalog(self, request: Request, name: str) -> dict[str, Any]:
        if name not in self.state.catalogs:
            raise _unknown("Catalog", name, "CATALOG_DOES_NOT_EXIST")
        return self._info(name)

    def _info(self, full: str) -> dict[str, Any]:
        parts = full.split(".")
        keys = ("catalog_name", "schema_name")[: len(parts) - 1]
        owner = {"owner": "admin@example.com", "full_name": full, "name": parts[-1]}
        return {**owner, **dict(zip(keys, parts, strict=False))}

    def _known_schema(self, full: str) -> None:
        if full.split(".")[0] not in self.state.catalogs:
            raise _unknown("Catalog", full.split(".")[0], "CATALOG_DOES_NOT_EXIST")
        if full not in self.state.schemas:
            raise _unknown("Schema", full, "SCHEMA_DOES_NOT_EXIST")

    def _schema(self, request: Request, full: str) -> dict[str, Any]:
        self._known_schema(full)
        return self._info(full)

    def _create_schema(self, request: Request) -> dict[str, Any]:
        catalog = request.need("catalog_name")
        full = f"{catalog}.{request.need('name')}"
        if catalog not in self.state.catalogs:
            raise _unknown("Catalog", catalog, "CATALOG_DOES_NOT_EXIST")
        if full in self.state.schemas:
            raise ApiError(400, "SCHEMA_ALREADY_EXISTS", f"Schema '{full}' already exists")
        self._need("CREATE_SCHEMA", catalog)
        self.state.schemas.add(full)
        return self._info(full)

    def _schemas(self, request: Request) -> dict[str, Any]:
        prefix = request.need("catalog_name") + "."
        found = sorted(name for name in self.state.schemas if name.startswith(prefix))
        return {"schemas": [self._info(name) for name in found]}

    def _volume(self, request: Request, full: str) -> dict[str, Any]:
        self._known_schema(full.rpartition(".")[0])
        if full not in self.state.volumes:
            raise _unknown("Volume", full, "VOLUME_DOES_NOT_EXIST")
        return {**self._info(full), "volume_type": "MANAGED"}

    def _create_volume(self, request: Request) -> dict[str, Any]:
        schema = f"{request.need('catalog_name')}.{request.need('schema_name')}"
        self._known_schema(schema)
        full = f"{schema}.{request.need('name')}"
        if full in self.state.volumes:
            raise ApiError(400, "VOLUME_ALREADY_EXISTS", f"Volume '{full}' already exists")
        self._need("CREATE_VOLUME", schema)
        self.add_volume(full)
        return {**self._info(full), "volume_type": request.need("volume_type"),
                "created_at": now_ms()}  # fmt: skip

    def _volumes(self, request: Request) -> dict[str, Any]:
        prefix = f"{request.need('catalog_name')}.{request.need('schema_name')}."
        found = sorted(name for name in self.state.volumes if name.startswith(prefix))
        return {"volumes": [self._info(name) for name in found]}

    def _need(self, privilege: str, full: str) -> None:
        if (privilege, full) in self.state.denied:
            message = f"User does not have {privilege.replace('_', ' ')} on '{full}'."
            raise ApiError(403, "PERMISSION_DENIED", message)

    def _grants(self, request: Request, kind: str, full: str) -> dict[str, Any]:
        wanted, granted = request.get("principal"), self.state.grants.get(full, {})
        found = [
            {"principal": who, "privileges": sorted(privileges)}
            for who, privileges in sorted(granted.items()) if wanted in (None, who)
        ]  # fmt: skip
        return {"privilege_assignments": found} if found else {}

    def _grant(self, request: Request, kind: str, full: str) -> dict[str, Any]:
        granted = self.state.grants.setdefault(full, {})
        for change in request.need("changes"):
            held = granted.setdefault(change["principal"], set())
            held |= set(change.get("add") or [])
            held -= set(change.get("remove") or [])
        return self._grants(request, kind, full)

    def _effective(self, request: Request, kind: str, full: str) -> dict[str, Any]:
        wanted = request.get("principal")
        parts = full.split(".")
        found: dict[str, list[dict[str, str]]] = {}
        for depth, level in enumerate(("CATALOG", "SCHEMA", kind.upper())[: len(parts)], 1):
            name = ".".join(parts[:depth])
            for who, privileges in sorted(self.state.grants.get(name, {}).items()):
                for privilege in sorted(privileges):
                    entry = {"privilege": privilege}
                    if name != full:
                        entry |= {"inherited_from_name": name, "inherited_from_type": level}
                    if (privilege, full) not in self.state.denied and wanted in (None, who):
                        found.setdefault(who, []).append(entry)
        assignments = [{"principal": who, "privileges": held} for who, held in found.items()]
        return {"privilege_assignments": assignments} if assignments else {}


def _unknown(kind: str, name: str, code: str) -> ApiError:
    return ApiError(404, code, f"{kind} '{name}' does not exist.")
