"""The parts of a workload file, with the rules inside each."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictInt,
    StrictStr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from tunewright.contract import document
from tunewright.contract.failures import UserError
from tunewright.contract.problems import nearest

GPUS_PER_NODE = {"GPU_1xA10": 1, "GPU_1xH100": 1, "GPU_8xH100": 8, "GPU_8xB300": 8}

_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}\Z")
_VERSION = re.compile(r"(AI|databricks_ai_v)?\d+\Z", re.IGNORECASE)


def _run_name(value: str) -> str:
    if not _NAME.match(value):
        raise ValueError(
            f"{value!r} must be 1 to 100 ASCII letters, digits, - or _, without spaces or line ends"
        )
    return value


RunName = Annotated[StrictStr, AfterValidator(_run_name)]


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Compute(Part):
    num_accelerators: StrictInt = Field(
        description="In total: a multiple of the type's count per node."
    )
    accelerator_type: StrictStr = Field(description="GPU_<count per node>x<name>, e.g. GPU_8xH100.")
    pool_id: StrictStr | None = None
    provisioned_capacity_id: StrictStr | None = None
    priority_class: Literal["BEST_EFFORT", "NORMAL", "CRITICAL"] | None = None

    @field_validator("accelerator_type")
    @classmethod
    def _has_a_count(cls, value: str) -> str:
        by_case = {known.lower(): known for known in GPUS_PER_NODE}
        if value not in GPUS_PER_NODE and value.lower() in by_case:
            raise ValueError(f"{value!r} must be written {by_case[value.lower()]} (case matters)")
        if not re.match(r"GPU_[1-9]\d{0,2}x[A-Za-z0-9_]+\Z", value):
            raise ValueError(
                f"{value!r} is not of the form GPU_<n>x<name>; {nearest(value, GPUS_PER_NODE)}"
            )
        return value

    @model_validator(mode="after")
    def _whole_nodes(self) -> Self:
        if self.num_accelerators < 1 or self.num_accelerators % self.gpus_per_node:
            raise ValueError(
                f"num_accelerators is {self.num_accelerators} but {self.accelerator_type} has "
                f"{self.gpus_per_node} per node; use a positive multiple of {self.gpus_per_node}"
            )
        if self.priority_class and not self.provisioned_capacity_id:
            raise ValueError(
                f"priority_class is {self.priority_class} but provisioned_capacity_id is not set; "
                "set it, or remove priority_class"
            )
        return self

    @property
    def gpus_per_node(self) -> int:
        return int(self.accelerator_type.removeprefix("GPU_").partition("x")[0])


class DockerImage(Part):
    """A container image; registry credentials and tag policy are passed through."""

    url: StrictStr = Field(min_length=1)
    tag_policy: StrictStr | None = None
    credentials_secret_scope: StrictStr | None = None
    credentials_secret_key: StrictStr | None = None


class Environment(Part):
    version: StrictStr | StrictInt = Field("4", description="4, AI5 or databricks_ai_v6.")
    dependencies: list[StrictStr] = Field(
        default_factory=list, description="pip requirements, or the path of a YAML with them."
    )
    docker_image: DockerImage | None = None
    unity_catalog_image: StrictStr | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_dependencies(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, dict) or not isinstance(value.get("dependencies"), str):
            return value
        base = (info.context or {}).get("base", Path.cwd())
        try:
            found = document.read(base / value["dependencies"])
        except UserError as error:
            raise ValueError(f"dependencies: {error}") from None
        if unknown := set(found) - {"version", "dependencies"}:
            raise ValueError(
                f"{value['dependencies']} holds {min(unknown)}; known there: version, dependencies"
            )
        return {**value, "dependencies": [], **found}

    @field_validator("version")
    @classmethod
    def _version(cls, value: str | int) -> str:
        if not _VERSION.match(str(value)):
            raise ValueError(
                f"{value!r} is not a version; write digits, AI<N> or databricks_ai_v<N>, e.g. '4'"
            )
        return str(value)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = self.model_fields_set & {"docker_image", "unity_catalog_image"}
        packages = self.model_fields_set & {"version", "dependencies"}
        if len(given) == 2:
            raise ValueError("docker_image and unity_catalog_image are both set; keep one")
        if given and packages:
            raise ValueError(
                f"{min(given)} and {' and '.join(sorted(packages))} are both set; "
                "an image brings its own packages, keep one way"
            )
        return self


class Git(Part):
    branch: StrictStr | None = None
    commit: StrictStr | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.branch is None) == (self.commit is None):
            raise ValueError("give exactly one of branch and commit")
        return self


class CodeSource(Part):
    """What is packed for the nodes: {type: snapshot, snapshot: {root_path, …}}, or flat."""

    root_path: StrictStr = Field(description="Folder to pack, relative to the workload file.")
    include_paths: list[StrictStr] | None = None
    remote_volume: StrictStr | None = None
    git: Git | None = None

    @model_validator(mode="before")
    @classmethod
    def _flatten(cls, value: Any) -> Any:
        if not isinstance(value, dict) or not ({"type", "snapshot"} & set(value)):
            return value
        if value.get("type", "snapshot") != "snapshot":
            raise ValueError(f"type is {value['type']!r}; the only type is snapshot")
        if unknown := set(value) - {"type", "snapshot", *cls.model_fields}:
            raise ValueError(
                f"unknown key {min(unknown)}; {nearest(min(unknown), ['type', 'snapshot'])}"
            )
        if "snapshot" not in value:
            return {key: part for key, part in value.items() if key != "type"}
        if beside := set(value) & set(cls.model_fields):
            raise ValueError(f"{min(beside)} stands beside snapshot; move it into snapshot")
        return value["snapshot"] if value["snapshot"] is not None else {}

    @field_validator("include_paths")
    @classmethod
    def _inside(cls, value: list[str] | None) -> list[str] | None:
        for path in value or []:
            if path.startswith(("/", "~")) or ".." in Path(path).parts or not path.strip():
                raise ValueError(f"{path!r} must be relative to root_path, without ..")
        return value

    @field_validator("root_path")
    @classmethod
    def _exists(cls, value: str, info: ValidationInfo) -> str:
        base = (info.context or {}).get("base", Path.cwd())
        root = (base / Path(value).expanduser()).resolve()
        if not root.is_dir():
            raise ValueError(f"{root} is not a folder; root_path is relative to the workload file")
        return str(root)


class Permission(Part):
    user_name: StrictStr | None = None
    group_name: StrictStr | None = None
    service_principal_name: StrictStr | None = None
    level: StrictStr

    @model_validator(mode="after")
    def _one_principal(self) -> Self:
        given = [
            n for n in ("user_name", "group_name", "service_principal_name") if getattr(self, n)
        ]
        if len(given) != 1:
            raise ValueError(
                f"{' and '.join(given) or 'no principal'} given; "
                "give exactly one of user_name, group_name, service_principal_name"
            )
        return self
