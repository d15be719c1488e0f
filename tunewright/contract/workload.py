"""The workload file: every field, both dialects, the rules between fields.

It is the AI Runtime workload YAML. `Workload.load` reads a file or a mapping, applies `--set`
overrides, and either returns a frozen Workload or raises one WorkloadError that lists every
problem with its dotted path and a way out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import (
    Field,
    StrictInt,
    StrictStr,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from tunewright.contract import datanames, document
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
from tunewright.contract.settings import RECIPES, FsdpSettings, settings_of

PLATFORM_MAX_RETRIES = 3
RESERVED_VARIABLES = frozenset(
    """NUM_NODES NODE_RANK LOCAL_WORLD_SIZE WORLD_SIZE MASTER_ADDR MASTER_PORT CODE_SOURCE_PATH
    HYPERPARAMETERS_PATH MLFLOW_RUN_ID MLFLOW_TRACKING_URI TUNEWRIGHT_RUN_DIR TUNEWRIGHT_ATTEMPT
    TUNEWRIGHT_FAILURE_DIR TUNEWRIGHT_DEADLINE TUNEWRIGHT_GRACE_S LOCAL_ADDR RANK
    LOCAL_RANK""".split()  # noqa: SIM905
)
PATH_PARAMETERS = ("model_name", "dataset_name", "eval_dataset", "chat_template")
"""Parameters of a recipe that may be paths; the names in `datasets` may, too."""
LONGEST_VALUE = 128_000
"""Bytes that Linux takes for one argument or variable, with room for what stands before it."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_SECRET = re.compile(r"[A-Za-z0-9_.-]{1,128}/[A-Za-z0-9_.-]{1,128}\Z")
_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\Z")
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:\S+\Z")
_OUR_COMMAND = re.compile(r"(?<![\w./=-])tunewright\.recipes\.([A-Za-z0-9_]+)(?![\w./-])")
_QUOTE_OR_COMMENT = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|(?<!\S)#[^\n]*""", re.DOTALL)
_OTHER_PATHS = (
    "code_source.root_path",
    "code_source.snapshot.root_path",
    "environment.dependencies",
)


class Workload(Part):
    """A fine-tuning job as its file says it. Frozen; `load` is the door."""

    experiment_name: RunName
    command: StrictStr = Field(description="Run with bash once per node, taken literally.")
    compute: Compute
    environment: Environment | None = Field(None, description="What is installed on each node.")
    code_source: CodeSource | None = Field(None, description="What travels to each node.")
    env_variables: dict[str, StrictStr] = Field(default_factory=dict)
    secrets: dict[str, StrictStr] = Field(default_factory=dict, description="NAME: scope/key")
    parameters: dict[str, Any] = Field(default_factory=dict, description="Read by the command.")
    max_retries: StrictInt = Field(PLATFORM_MAX_RETRIES, ge=0, description="0 = one attempt.")
    timeout_minutes: StrictInt | None = Field(None, ge=1, description="Per attempt.")
    idempotency_token: StrictStr | None = Field(None, min_length=1, max_length=64)
    mlflow_run_name: RunName | None = Field(None, description="Default: experiment_name.")
    mlflow_experiment_directory: StrictStr | None = Field(None, description="Below /Workspace.")
    mlflow_artifact_location: StrictStr | None = Field(
        None, description="A URI; /Volumes/… becomes dbfs:/Volumes/…."
    )
    permissions: list[Permission] = Field(
        default_factory=list, description="Who may see or manage the run on the platform."
    )
    usage_policy_name: StrictStr | None = Field(None, description="Either this or usage_policy_id.")
    usage_policy_id: StrictStr | None = Field(None, description="A UUID.")

    @field_validator("command")
    @classmethod
    def _command(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("must not be blank; give the command that each node runs")
        if (lines := len(value.splitlines())) > 1000:
            raise ValueError(f"has {lines} lines, at most 1,000; move the script into code_source")
        if "\0" in value:
            raise ValueError("contains a NUL byte, which no shell accepts; remove it")
        if (size := len(value.encode("utf-8", "replace"))) > LONGEST_VALUE:
            raise ValueError(
                f"has {size:,} bytes, at most {LONGEST_VALUE:,}; move the script into code_source"
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

    @field_validator("usage_policy_id")
    @classmethod
    def _one_policy(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value and info.data.get("usage_policy_name"):
            raise ValueError("usage_policy_name and usage_policy_id are both set; keep one")
        return value

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
        found, problems = document.override(found, overrides or {})
        recipe = recipe_of(found.get("command"))
        _from_here(found, overrides or {}, recipe)
        problems += [*_rules(found), *_recipe_problems(found, recipe)]
        try:
            kept = {key: part for key, part in found.items() if key != "containers"}
            workload = cls.model_validate(kept, context={"base": base})
        except ValidationError as error:
            own = [_as_written(problem, found) for problem in problems_of(error, cls)]
            raise WorkloadError(name, own + problems) from None
        if problems:
            raise WorkloadError(name, problems)
        return workload.model_copy(update={"parameters": _absolute(workload, base)})

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
        return recipe_of(self.command)

    @cached_property
    def settings(self) -> FsdpSettings | None:
        """The typed settings of our recipe; None for a user's own command."""
        if self.recipe is None:
            return None
        settings, _ = settings_of(self.recipe, self.parameters, self.compute.num_accelerators)
        return settings

    def document(self) -> dict[str, Any]:
        """The effective workload as plain values, defaults left out; secret names only."""
        return self.model_dump(exclude_defaults=True)

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


def recipe_of(command: Any) -> str | None:
    """The recipe that a shell word of a command names, comments apart; None without one."""
    if not isinstance(command, str):
        return None
    words = _QUOTE_OR_COMMENT.sub(lambda m: "" if m[0].startswith("#") else m[0], command)
    found = _OUR_COMMAND.search(words)
    return found[1] if found else None


def _rules(found: Mapping[str, Any]) -> Iterator[Problem]:
    """Rules that look at several fields, or at their names: one problem for each offence."""
    if "containers" in found:
        yield Problem(
            "containers",
            "(several images by rank) is valid on the platform but not supported here; "
            "use one environment for all ranks",
        )
    variables, secrets = (_mapping(found.get(key)) for key in ("env_variables", "secrets"))
    for block, values in (("env_variables", variables), ("secrets", secrets)):
        for name, content in values.items():
            if isinstance(name, str) and (reason := _wrong_variable(name, content)):
                yield Problem(f"{block}.{name}", reason)
    for name, reference in secrets.items():
        if isinstance(reference, str) and not _SECRET.match(reference):
            yield Problem(
                f"secrets.{name}",
                "must be a reference scope/key with exactly one / "
                "(letters, digits, - _ . up to 128 each); never the value itself",
            )
        if name in variables:
            yield Problem(f"secrets.{name}", "is in env_variables too; keep one of them")
    output_dir = _mapping(found.get("parameters")).get("output_dir", "/")
    if not (isinstance(output_dir, str) and output_dir.strip()) or _URI.match(output_dir):
        yield Problem(
            "parameters.output_dir",
            f"is {output_dir!r}; write a folder, e.g. /Volumes/catalog/schema/volume/runs",
        )


def _wrong_variable(name: str, content: Any) -> str | None:
    if not _VARIABLE.match(name):
        return "is not a variable name; use letters, digits and _, not starting with a digit"
    if name in RESERVED_VARIABLES:
        return "is set by the platform for every node; use another name"
    if isinstance(content, str) and "\0" in content:
        return "contains a NUL byte, which no environment accepts; remove it"
    if isinstance(content, str) and len(content.encode("utf-8", "replace")) > LONGEST_VALUE:
        return f"has more than {LONGEST_VALUE:,} bytes; put it into a file of code_source"
    return None


def _recipe_problems(found: Mapping[str, Any], recipe: str | None) -> list[Problem]:
    """What is wrong between the command and the parameters."""
    if recipe is None:
        return []
    if recipe not in RECIPES:
        hint = nearest(recipe, RECIPES)
        return [Problem("command", f"tunewright.recipes.{recipe} is not a recipe; {hint}")]
    parameters = found.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        return []
    named = {key: value for key, value in (parameters or {}).items() if isinstance(key, str)}
    accelerators = _mapping(found.get("compute")).get("num_accelerators")
    count = accelerators if isinstance(accelerators, int) and accelerators > 0 else 1
    return settings_of(recipe, named, count)[1]


def _as_written(problem: Problem, found: Mapping[str, Any]) -> Problem:
    """The path as the file has it: below code_source.snapshot in that dialect."""
    head, _, rest = problem.path.partition(".")
    source = _mapping(found.get(head))
    if head != "code_source" or not rest or "snapshot" not in source:
        return problem
    if rest.partition(".")[0] in source or rest == "type":
        return problem
    return Problem(f"code_source.snapshot.{rest}", problem.message)


def _from_here(found: dict[str, Any], overrides: Mapping[str, Any], recipe: str | None) -> None:
    """Make a relative path that came by --set relative to the working directory."""
    slots = [*_other_slots(found), *_path_slots(_mapping(found.get("parameters")), recipe)]
    for path, place, name in slots:
        if any(path == key or path.startswith(f"{key}.") for key in overrides):
            place[name] = _resolved(path, place.get(name), Path.cwd())


def _absolute(workload: Workload, base: Path) -> dict[str, Any]:
    """The parameters with our paths made absolute; a user's own are left alone."""
    parameters = deepcopy(workload.parameters)
    for path, place, name in _path_slots(parameters, workload.recipe):
        place[name] = _resolved(path, place[name], base)
    return parameters


def _other_slots(found: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """The paths outside the parameters that are there, like `_path_slots`."""
    for path in _OTHER_PATHS:
        *parents, last = path.split(".")
        place = found
        for parent in parents:
            place = _mapping(place.get(parent))
        if last in place:
            yield path, place, last


def _path_slots(
    parameters: dict[str, Any], recipe: str | None
) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Parameters that may be paths of ours: dotted path, mapping and key.

    For a user's own command that is output_dir only.
    """
    for name in (*PATH_PARAMETERS, "output_dir") if recipe else ("output_dir",):
        if name in parameters:
            yield f"parameters.{name}", parameters, name
    sources = parameters.get("datasets") if recipe else None
    for index, source in enumerate(sources if isinstance(sources, list) else ()):
        if isinstance(source, dict) and "name" in source:
            yield f"parameters.datasets.{index}.name", source, "name"


def _resolved(path: str, value: Any, base: Path) -> Any:
    """The value of a slot with a path made absolute; a name that is no path stays."""
    if not isinstance(value, str):
        return value
    if path in (*_OTHER_PATHS, "parameters.output_dir"):
        return str(_resolve(value, base))
    # A chat template may be given as its text.
    return value if "{" in value else datanames.resolved(value, base)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _resolve(value: str, base: Path) -> Path:
    """An absolute path without `..`; symbolic links stay, they are the user's names."""
    return Path(os.path.normpath(base / Path(value).expanduser()))
