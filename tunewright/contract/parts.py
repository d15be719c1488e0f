"""The parts of a workload file, with the rules inside each."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

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
from tunewright.contract.problems import nearest, without_empty

GPUS_PER_NODE = {"GPU_1xA10": 1, "GPU_1xH100": 1, "GPU_8xH100": 8, "GPU_8xB300": 8}

_PRINCIPALS = ("user_name", "group_name", "service_principal_name")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}\Z")
_VERSION = re.compile(r"(AI|databricks_ai_v)?\d+\Z", re.IGNORECASE)


def _run_name(value: str) -> str:
    if not _NAME.match(value):
        raise ValueError(
            f"{value!r} must be 1 to 100 ASCII letters, digits, - or _, without spaces or line ends"
        )
    return value


def _relative(value: str) -> str:
    if value.startswith(("/", "~")) or ".." in Path(value).parts or not value.strip():
        raise ValueError(f"{value!r} must be relative to root_path, without ..")
    return value


RelativePath = Annotated[StrictStr, AfterValidator(_relative)]
RunName = Annotated[StrictStr, AfterValidator(_run_name)]


class Part(BaseModel):
    """A block of the file. An empty key (`dependencies:` and nothing after it) is not there.

    Rules between fields stand at the later field, so that they are checked beside its neighbours'.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, value: Any) -> Any:
        return without_empty(value)


class Compute(Part):
    accelerator_type: StrictStr = Field(description="GPU_<count per node>x<name>, e.g. GPU_8xH100.")
    num_accelerators: StrictInt = Field(
        description="In total: a multiple of the type's count per node."
    )
    pool_id: StrictStr | None = Field(None, description="Passed through to the platform.")
    provisioned_capacity_id: StrictStr | None = Field(
        None, description="Passed through to the platform."
    )
    priority_class: Literal["BEST_EFFORT", "NORMAL", "CRITICAL"] | None = Field(
        None, description="Needs provisioned_capacity_id."
    )

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

    @field_validator("num_accelerators")
    @classmethod
    def _whole_nodes(cls, value: int, info: ValidationInfo) -> int:
        kind = info.data.get("accelerator_type")
        per_node = _per_node(kind) if kind else 1
        if value < 1 or value % per_node:
            raise ValueError(
                f"is {value}, but {kind or 'a node'} has {per_node} per node; "
                f"use a positive multiple of {per_node}"
            )
        return value

    @field_validator("priority_class")
    @classmethod
    def _in_a_capacity(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value and info.data.get("provisioned_capacity_id", "") is None:
            raise ValueError(
                f"is {value}, but provisioned_capacity_id is not set; "
                "set it, or remove priority_class"
            )
        return value

    @property
    def gpus_per_node(self) -> int:
        return _per_node(self.accelerator_type)


def _per_node(accelerator_type: str) -> int:
    return int(accelerator_type.removeprefix("GPU_").partition("x")[0])


class DockerImage(Part):
    """A container image; registry credentials and tag policy are passed through."""

    url: StrictStr = Field(min_length=1, description="The image.")
    tag_policy: StrictStr | None = Field(None, description="Passed through to the platform.")
    credentials_secret_scope: StrictStr | None = Field(
        None, description="Where the registry's credentials are."
    )
    credentials_secret_key: StrictStr | None = Field(
        None, description="Where the registry's credentials are."
    )


class Environment(Part):
    docker_image: DockerImage | None = Field(
        None, description="An image instead of version and dependencies."
    )
    unity_catalog_image: StrictStr | None = Field(
        None, description="The same, as catalog.schema.image:tag."
    )
    version: StrictStr = Field("4", description="4, AI5 or databricks_ai_v6.")
    dependencies: list[StrictStr] = Field(
        default_factory=list, description="pip requirements, or the path of a YAML with them."
    )

    @model_validator(mode="before")
    @classmethod
    def _read_dependencies(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, dict) or not isinstance(value.get("dependencies"), str):
            return value
        try:
            return {**value, "dependencies": [], **_dependencies(value["dependencies"], info)}
        except ValueError:
            # Said below, at its own place.
            return value

    @field_validator("unity_catalog_image")
    @classmethod
    def _one_image(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value and info.data.get("docker_image"):
            raise ValueError("docker_image and unity_catalog_image are both set; keep one")
        return value

    @field_validator("version", mode="before")
    @classmethod
    def _version(cls, value: Any) -> str:
        if isinstance(value, bool | float) or not _VERSION.match(str(value)):
            raise ValueError(
                f"{value!r} is not a version; write digits, AI<N> or databricks_ai_v<N>, e.g. '4'"
            )
        return str(value)

    @field_validator("dependencies", mode="before")
    @classmethod
    def _a_list(cls, value: Any, info: ValidationInfo) -> Any:
        return _dependencies(value, info) if isinstance(value, str) else value

    @field_validator("version", "dependencies")
    @classmethod
    def _no_image(cls, value: Any, info: ValidationInfo) -> Any:
        images = [n for n in ("docker_image", "unity_catalog_image") if info.data.get(n)]
        if images:
            raise ValueError(
                f"{images[0]} and {info.field_name} are both set; "
                "an image brings its own packages, keep one way"
            )
        return value


def _dependencies(path: str, info: ValidationInfo) -> dict[str, Any]:
    """The mapping in the YAML that `dependencies: <path>` names."""
    try:
        found = document.read(_base(info) / Path(path).expanduser())
    except UserError as error:
        raise ValueError(str(error)) from None
    if unknown := set(found) - {"version", "dependencies"}:
        raise ValueError(f"{path} holds {min(map(str, unknown))}; known: version, dependencies")
    return {key: part for key, part in found.items() if part is not None}


def _base(info: ValidationInfo) -> Path:
    """The folder that relative paths start from."""
    base: Path = (info.context or {}).get("base", Path.cwd())
    return base


class Git(Part):
    branch: StrictStr | None = Field(None, description="Pack the head of this branch.")
    commit: StrictStr | None = Field(None, validate_default=True)

    @field_validator("commit")
    @classmethod
    def _one(cls, value: str | None, info: ValidationInfo) -> str | None:
        if "branch" in info.data and (info.data["branch"] is None) == (value is None):
            raise ValueError("give exactly one of branch and commit")
        return value


class CodeSource(Part):
    """What is packed for the nodes: {type: snapshot, snapshot: {root_path, …}}, or flat."""

    also_known: ClassVar[tuple[str, ...]] = ("snapshot",)

    type: Literal["snapshot"] = "snapshot"
    root_path: StrictStr = Field(description="Folder to pack, relative to the workload file.")
    include_paths: list[RelativePath] | None = Field(
        None, description="Only these files and folders below root_path."
    )
    remote_volume: StrictStr | None = Field(
        None, description="Where the platform keeps the snapshot."
    )
    git: Git | None = Field(None, description="Pack a branch or commit, not the working tree.")

    @model_validator(mode="before")
    @classmethod
    def _flatten(cls, value: Any) -> Any:
        if not isinstance(value, dict) or "snapshot" not in value:
            return value
        inner, outer = value["snapshot"], {k: v for k, v in value.items() if k != "snapshot"}
        if inner is not None and not isinstance(inner, dict):
            raise ValueError("snapshot must be a mapping with root_path")
        if beside := set(outer) & (set(cls.model_fields) - {"type"}):
            raise ValueError(f"{min(beside)} stands beside snapshot; move it into snapshot")
        return {**outer, **(inner or {})}

    @field_validator("root_path")
    @classmethod
    def _exists(cls, value: str, info: ValidationInfo) -> str:
        root = (_base(info) / Path(value).expanduser()).resolve()
        if not root.is_dir():
            raise ValueError(f"{root} is not a folder; root_path is relative to the workload file")
        return str(root)


class Permission(Part):
    level: StrictStr = Field(min_length=1, description="E.g. CAN_VIEW.")
    user_name: StrictStr | None = Field(None, description="One of the three principals.")
    group_name: StrictStr | None = Field(None, description="One of the three principals.")
    service_principal_name: StrictStr | None = Field(None, validate_default=True)

    @field_validator("service_principal_name")
    @classmethod
    def _one_principal(cls, value: str | None, info: ValidationInfo) -> str | None:
        names = {**info.data, "service_principal_name": value}
        given = [n for n in _PRINCIPALS if names.get(n)]
        if len(given) != 1 and set(_PRINCIPALS) <= set(names):
            raise ValueError(
                f"{' and '.join(given) or 'no principal'} given; "
                f"give exactly one of {', '.join(_PRINCIPALS)}"
            )
        return value
