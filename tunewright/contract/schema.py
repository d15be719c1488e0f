"""The JSON schema of a workload file, for editors: `python -m tunewright.contract.schema`.

It says what a field may look like; the rules between fields are the loader's.
"""

from __future__ import annotations

import json
from typing import Any

from tunewright.contract.settings import RECIPES
from tunewright.contract.workload import RESERVED_VARIABLES, Workload

_RUN_NAME = "^[A-Za-z0-9_-]{1,100}$"
_SECRET = "^[A-Za-z0-9_.-]{1,128}/[A-Za-z0-9_.-]{1,128}$"
_VARIABLES = {
    "pattern": "^[A-Za-z_][A-Za-z0-9_]*$",
    "not": {"enum": sorted(RESERVED_VARIABLES)},
}


def workload_schema() -> dict[str, Any]:
    """The schema of both dialects, draft 2020-12; parameters are typed when the command is ours."""
    found = Workload.model_json_schema()
    fields, parts = found["properties"], found["$defs"]
    fields["experiment_name"]["pattern"] = fields["mlflow_run_name"]["pattern"] = _RUN_NAME
    for block in ("env_variables", "secrets"):
        fields[block]["propertyNames"] = _VARIABLES
    fields["secrets"]["additionalProperties"]["pattern"] = _SECRET
    environment = parts["Environment"]["properties"]
    environment["version"]["type"] = ["string", "integer"]
    environment["dependencies"]["type"] = ["array", "string"]
    parts["CodeSource"] = _both_dialects(parts["CodeSource"], parts)
    found["allOf"] = [_typed_parameters(recipe, parts) for recipe in RECIPES]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}


def _both_dialects(flat: dict[str, Any], parts: dict[str, Any]) -> dict[str, Any]:
    """{root_path, …}, or {type: snapshot, snapshot: {root_path, …}}."""
    kind = flat["properties"]["type"]
    parts["Snapshot"] = flat | {"title": "Snapshot"}
    wrapped = {
        "type": "object",
        "properties": {"type": kind, "snapshot": {"$ref": "#/$defs/Snapshot"}},
        "required": ["snapshot"],
        "additionalProperties": False,
    }
    title, text = flat["title"], flat["description"]
    return {"title": title, "description": text, "anyOf": [{"$ref": "#/$defs/Snapshot"}, wrapped]}


def _typed_parameters(recipe: str, parts: dict[str, Any]) -> dict[str, Any]:
    model = RECIPES[recipe]
    settings = model.model_json_schema()
    # The names that users' files have are as welcome, and one of them stands for another field.
    more = {name: {"type": "integer", "minimum": 1} for name in model.also_known}
    settings["properties"] = {
        name: _also_as_text(field) for name, field in (settings["properties"] | more).items()
    }
    parts[model.__name__] = settings
    ours = {"command": {"pattern": rf"tunewright\.recipes\.{recipe}(?![\w.])"}}
    return {
        "if": {"properties": ours, "required": ["command"]},
        "then": {"properties": {"parameters": {"$ref": f"#/$defs/{model.__name__}"}}},
    }


def _also_as_text(field: dict[str, Any]) -> dict[str, Any]:
    """A number may be text: some readers of YAML take 2e-5 for one."""
    if "anyOf" in field:
        return {**field, "anyOf": [_also_as_text(part) for part in field["anyOf"]]}
    if field.get("type") not in ("number", "integer"):
        return field
    return {**field, "type": [field["type"], "string"]}


def main() -> None:
    print(json.dumps(workload_schema(), indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
