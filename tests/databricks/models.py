"""Registered models and their versions, as values in the words of either API."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from tests.databricks.wire import now_ms


@dataclass
class Version:
    """One model version; it is finalized when its files are there, and READY some time later."""

    model: str
    number: int
    user: str
    source: str = ""
    run_id: str = ""
    description: str = ""
    tags: dict[str, str] = field(default_factory=dict)
    created: int = field(default_factory=now_ms)
    updated: int = field(default_factory=now_ms)
    ready_at: float | None = None
    """Monotonic seconds; None until it is finalized."""
    fails: bool = False

    @property
    def status(self) -> str:
        if self.ready_at is None or time.monotonic() < self.ready_at:
            return "PENDING_REGISTRATION"
        return "FAILED_REGISTRATION" if self.fails else "READY"

    def for_mlflow(self, aliases: list[str]) -> dict[str, Any]:
        return {
            "name": self.model, "version": str(self.number), "user_id": self.user,
            "creation_timestamp": self.created, "last_updated_timestamp": self.updated,
            "description": self.description, "source": self.source, "run_id": self.run_id,
            "status": self.status, "tags": _pairs(self.tags),
            "aliases": [{"alias": name, "version": str(self.number)} for name in aliases],
        }  # fmt: skip

    def for_catalog(self, aliases: list[str]) -> dict[str, Any]:
        catalog, schema, name = self.model.split(".")
        return {
            "catalog_name": catalog, "schema_name": schema, "model_name": name,
            "version": self.number, "source": self.source, "run_id": self.run_id,
            "status": self.status, "comment": self.description, "created_at": self.created,
            "updated_at": self.updated, "created_by": self.user,
            "aliases": [{"alias_name": name, "version_num": self.number} for name in aliases],
        }  # fmt: skip


@dataclass
class Model:
    """A registered model; version numbers are never used twice."""

    name: str
    user: str
    description: str = ""
    tags: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, int] = field(default_factory=dict)
    versions: dict[int, Version] = field(default_factory=dict)
    last: int = 0
    created: int = field(default_factory=now_ms)
    updated: int = field(default_factory=now_ms)

    def aliases_of(self, number: int) -> list[str]:
        return [alias for alias, version in self.aliases.items() if version == number]

    def for_mlflow(self) -> dict[str, Any]:
        return {
            "name": self.name, "user_id": self.user, "description": self.description,
            "creation_timestamp": self.created, "last_updated_timestamp": self.updated,
            "tags": _pairs(self.tags),
            "aliases": [{"alias": a, "version": str(v)} for a, v in self.aliases.items()],
        }  # fmt: skip

    def for_catalog(self) -> dict[str, Any]:
        catalog, schema, name = self.name.split(".")
        return {
            "catalog_name": catalog, "schema_name": schema, "name": name, "full_name": self.name,
            "comment": self.description, "created_at": self.created, "updated_at": self.updated,
            "created_by": self.user, "owner": self.user,
            "aliases": [{"alias_name": a, "version_num": v} for a, v in self.aliases.items()],
        }  # fmt: skip


def _pairs(tags: dict[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": value} for key, value in tags.items()]
