"""The stand-in: catalogs, schemas, volumes, privileges."""

from __future__ import annotations

import io

import pytest
from databricks.sdk import WorkspaceClient
from databricks.sdk.errors import (
    NotFound,
    PermissionDenied,
)
from databricks.sdk.service.catalog import PermissionsChange, Privilege, VolumeType

from tests.databricks_server import DatabricksServer


def test_the_catalog(server: DatabricksServer, client: WorkspaceClient) -> None:
    assert client.catalogs.get("main").name == "main"
    assert client.schemas.get("main.default").full_name == "main.default"
    assert client.volumes.read("main.default.runs").full_name == "main.default.runs"
    for ask in (lambda: client.catalogs.get("no"), lambda: client.schemas.get("main.no"),
                lambda: client.volumes.read("main.default.no")):  # fmt: skip
        with pytest.raises(NotFound):
            ask()
    client.schemas.create("made", "main")
    client.volumes.create("main", "made", "new", VolumeType.MANAGED)
    assert [schema.name for schema in client.schemas.list("main")] == ["default", "made"]
    assert [volume.name for volume in client.volumes.list("main", "made")] == ["new"]
    client.files.upload("/Volumes/main/made/new/x", io.BytesIO(b"1"))
    server.state.denied |= {("CREATE_SCHEMA", "main"), ("CREATE_VOLUME", "main.made")}
    with pytest.raises(PermissionDenied):
        client.schemas.create("another", "main")
    with pytest.raises(PermissionDenied):
        client.volumes.create("main", "made", "another", VolumeType.MANAGED)


def test_privileges_are_inherited(server: DatabricksServer, client: WorkspaceClient) -> None:
    def grant(kind: str, name: str, *privileges: Privilege) -> None:
        change = PermissionsChange(principal="ann@example.com", add=list(privileges))
        client.grants.update(kind, name, changes=[change])

    grant("catalog", "main", Privilege.USE_CATALOG)
    grant("volume", "main.default.runs", Privilege.READ_VOLUME, Privilege.WRITE_VOLUME)
    found = client.grants.get_effective("volume", "main.default.runs", principal="ann@example.com")
    (mine,) = found.privilege_assignments or []
    assert [(held.privilege, held.inherited_from_name) for held in mine.privileges or []] == [
        (Privilege.USE_CATALOG, "main"), (Privilege.READ_VOLUME, None),
        (Privilege.WRITE_VOLUME, None),
    ]  # fmt: skip
    own = client.grants.get("volume", "main.default.runs").privilege_assignments or []
    assert [held for entry in own for held in entry.privileges or []] == [
        Privilege.READ_VOLUME, Privilege.WRITE_VOLUME,
    ]  # fmt: skip
    server.state.denied.add(("WRITE_VOLUME", "main.default.runs"))
    (mine,) = client.grants.get_effective("volume", "main.default.runs").privilege_assignments or []
    assert Privilege.WRITE_VOLUME not in [held.privilege for held in mine.privileges or []]
