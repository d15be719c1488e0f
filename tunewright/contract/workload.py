"""The workload file: every field, both dialects, the rules between fields.

It is the AI Runtime workload YAML. `Workload.load` reads a file or a mapping, applies `--set`
overrides, and either returns a frozen Workload or raises one WorkloadError that lists every
problem with its dotted path and a way out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from pydantic import (
    Field,
    StrictInt,
    StrictStr,
    ValidationError,
    field_validator,
    model_validator,
)

from tunewright.contract import document
from tunewright.contract.failures import Problem, WorkloadError
from tunewright.contract.parts import (
    GPUS_PER_NODE,
    CodeSource,
    Compute,
    Environment,
    Part,
    Permission,
    RunName,
)
from tunewright.contract.problems import nearest, problems_of
from tunewright.contract.settings import RECIPES, FsdpSettings, is_path, settings_of

PLATFORM_MAX_RETRIES = 3
RESERVED_VARIABLES = frozenset(
    """NUM_NODES NODE_RANK LOCAL_WORLD_SIZE WORLD_SIZE MASTER_ADDR MASTER_PORT CODE_SOURCE_PATH
    HYPERPARAMETERS_PATH MLFLOW_RUN_ID MLFLOW_TRACKING_URI TUNEWRIGHT_RUN_DIR TUNEWRIGHT_ATTEMPT
    TUNEWRIGHT_FAILURE_DIR LOCAL_ADDR RANK LOCAL_RANK""".split()  # noqa: SIM905
)
PATH_PARAMETERS = ("model_name", "dataset_name", "eval_dataset")
"""Parameters of a recipe that may be paths."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_SECRET = re.compile(r"[A-Za-z0-9_.-]{1,128}/[A-Za-z0-9_.-]{1,128}\Z")
_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\Z")
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:\S+\Z")
_OUR_COMMAND = re.compile(r"(?<![\w./-])tunewright\.recipes\.([A-Za-z0-9_]+)(?![\w.])")


class Workload(Part):
    """A fine-tuning job as its file says it. Frozen; `load` is the door."""

    experiment_name: RunName
    command: StrictStr = Field(description="Run with bash once per node, taken literally.")
    compute: Compute
    environment: Environment | None = None
    code_source: CodeSource | None = None
    env_variables: dict[str, StrictStr] = Field(default_factory=dict)
    secrets: dict[str, StrictStr] = Field(default_factory=dict, description="NAME: scope/key")
    parameters: dict[str, Any] = Field(default_factory=dict, description="Read by the command.")
    max_retries: StrictInt = Field(PLATFORM_MAX_RETRIES, ge=0, description="0 = one attempt.")
    timeout_minutes: StrictInt | None = Field(None, ge=1, description="Per attempt.")
    idempotency_token: StrictStr | None = Field(None, min_length=1, max_length=64)
    mlflow_run_name: RunName | None = None
    mlflow_experiment_directory: StrictStr | None = None
    mlflow_artifact_location: StrictStr | None = None
    permissions: list[Permission] = Field(default_factory=list)
    usage_policy_name: StrictStr | None = None
    usage_policy_id: StrictStr | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_containers(cls, value: Any) -> Any:
        if isinstance(value, dict) and "containers" in value:
            raise ValueError(
                "containers (several images by rank) is valid on the platform but not supported "
                "here; use one environment for all ranks"
            )
        # An empty block (`env_variables:` and nothing below) is one that is not there.
        return (
            {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value
        )

    @field_validator("command")
    @classmethod
    def _command(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("must not be blank; give the command that each node runs")
        if (lines := len(value.splitlines())) > 1000:
            raise ValueError(f"has {lines} lines, at most 1,000; move the script into code_source")
        if "\0" in value:
            raise ValueError("contains a NUL byte, which no shell accepts")
        return value

    @field_validator("env_variables", "secrets")
    @classmethod
    def _variables(cls, value: dict[str, str]) -> dict[str, str]:
        for name, content in value.items():
            if not _VARIABLE.match(name):
                raise ValueError(f"{name!r} is not a variable name; use letters, digits and _")
            if name in RESERVED_VARIABLES:
                raise ValueError(f"{name} is set by the platform for every node; use another name")
            if "\0" in content:
                raise ValueError(f"{name} contains a NUL byte, which no environment accepts")
        return value

    @field_validator("secrets")
    @classmethod
    def _references(cls, value: dict[str, str]) -> dict[str, str]:
        for name, reference in value.items():
            if not _SECRET.match(reference):
                raise ValueError(
                    f"{name} must be a reference scope/key with exactly one / "
                    "(letters, digits, - _ . up to 128 each); never the value itself"
                )
        return value

    @field_validator("mlflow_experiment_directory")
    @classmethod
    def _in_workspace(cls, value: str | None) -> str | None:
        if value is not None and not (value == "/Workspace" or value.startswith("/Workspace/")):
            raise ValueError(f"{value!r} must start with /Workspace")
        return value

    @field_validator("mlflow_artifact_location")
    @classmethod
    def _artifact_uri(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if re.match(r"/Volumes/[^/]+/[^/]+/[^/]+", value):
            return f"dbfs:{value}"
        if value.startswith("file:") or not _URI.match(value):
            raise ValueError(
                f"{value!r} must be a URI that every node reaches, "
                "e.g. /Volumes/catalog/schema/volume"
            )
        return value

    @field_validator("usage_policy_id")
    @classmethod
    def _uuid(cls, value: str | None) -> str | None:
        if value is not None and not _UUID.match(value):
            raise ValueError(f"{value!r} is not a UUID")
        return value

    @model_validator(mode="after")
    def _between_fields(self) -> Self:
        if both := sorted(set(self.env_variables) & set(self.secrets)):
            raise ValueError(f"{', '.join(both)} is in env_variables and in secrets; keep one")
        if self.usage_policy_name and self.usage_policy_id:
            raise ValueError("usage_policy_name and usage_policy_id are both set; keep one")
        output_dir = self.parameters.get("output_dir")
        if output_dir is not None and not (isinstance(output_dir, str) and output_dir.strip()):
            raise ValueError(f"parameters.output_dir is {output_dir!r}; it must be a path")
        return self

    @classmethod
    def load(
        cls, source: Path | str | Mapping[str, Any], overrides: Mapping[str, Any] | None = None
    ) -> Workload:
        """A workload from a file or a mapping, with overrides ({dotted path: value}) applied.

        Relative paths in it become absolute: to the file's folder, or for a mapping and for
        overrides to the working directory. Raises WorkloadError with every problem.
        """
        if isinstance(source, Mapping):
            name, base, found = "the given workload", Path.cwd(), dict(source)
        else:
            path = Path(source).expanduser().absolute()
            name, base, found = str(source), path.parent, document.read(path)
        overrides = {key: _from_here(key, value) for key, value in (overrides or {}).items()}
        found, problems = document.override(found, overrides)
        try:
            workload = cls.model_validate(found, context={"base": base})
        except ValidationError as error:
            raise WorkloadError(name, problems + problems_of(error, cls)) from None
        workload = workload.model_copy(update={"parameters": _absolute(workload, base)})
        problems += workload.recipe_problems()
        if problems:
            raise WorkloadError(name, problems)
        return workload

    @property
    def nodes(self) -> int:
        return self.compute.num_accelerators // self.compute.gpus_per_node

    @property
    def attempts(self) -> int:
        """Launches at most."""
        return self.max_retries + 1

    @cached_property
    def recipe(self) -> str | None:
        """The recipe's name when the command is ours, else None."""
        lines = [line for line in self.command.splitlines() if not line.lstrip().startswith("#")]
        found = _OUR_COMMAND.search("\n".join(lines))
        return found[1] if found else None

    @cached_property
    def settings(self) -> FsdpSettings | None:
        """The typed settings of our recipe; None for a user's own command."""
        if self.recipe is None:
            return None
        settings, _ = settings_of(self.recipe, self.parameters, self.compute.num_accelerators)
        return settings

    def recipe_problems(self) -> list[Problem]:
        """What is wrong between the command and the parameters."""
        if self.recipe is None:
            return []
        if self.recipe not in RECIPES:
            hint = nearest(self.recipe, RECIPES)
            return [Problem("command", f"tunewright.recipes.{self.recipe} is not a recipe; {hint}")]
        return settings_of(self.recipe, self.parameters, self.compute.num_accelerators)[1]

    def document(self) -> dict[str, Any]:
        """The effective workload as plain values, defaults left out; secret names only."""
        return self.model_dump(mode="json", exclude_defaults=True)

    @property
    def sha256(self) -> str:
        """Hash of the effective workload."""
        return document.digest(self.document())

    def warnings(self) -> list[str]:
        """What is allowed but may surprise, one sentence each."""
        found = []
        if self.compute.accelerator_type not in GPUS_PER_NODE:
            found.append(
                f"accelerator type {self.compute.accelerator_type} is not one we know; "
                f"taking {self.compute.gpus_per_node} per node"
            )
        if "max_retries" not in self.model_fields_set:
            found.append(
                f"max_retries is not set: the platform's default of {PLATFORM_MAX_RETRIES} applies"
            )
        return found


def _from_here(key: str, value: Any) -> Any:
    """A relative path given by --set is relative to the working directory."""
    if (
        key.removeprefix("parameters.") in PATH_PARAMETERS
        and isinstance(value, str)
        and is_path(value)
    ):
        return str(_resolve(value, Path.cwd()))
    return value


def _absolute(workload: Workload, base: Path) -> dict[str, Any]:
    """The parameters with our recipe's paths made absolute; a user's own are left alone."""
    parameters = dict(workload.parameters)
    names = PATH_PARAMETERS if workload.recipe else ()
    for name in names:
        value = parameters.get(name)
        if isinstance(value, str) and is_path(value):
            parameters[name] = str(_resolve(value, base))
    return parameters


def _resolve(value: str, base: Path) -> Path:
    """An absolute path without `..`; symbolic links stay, they are the user's names."""
    return Path(os.path.normpath(base / Path(value).expanduser()))
