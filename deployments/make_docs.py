"""Write the generated blocks of the documents anew: the tables of fields, the workload shown.

    python deployments/make_docs.py

A block stands between `<!-- table: NAME -->` or `<!-- copy: FILE -->` and `<!-- end -->`. A table
is made from the models that check a workload, a copy from the file. A test fails when one is stale.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tunewright.contract.settings import RECIPES
from tunewright.contract.workload import Workload

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", ROOT / "deployments" / "README.md")
MODELS: dict[str, type[BaseModel]] = {"workload": Workload, **RECIPES}
BLOCK = re.compile(r"<!-- (table|copy): (\S+) -->.*?<!-- end -->", re.DOTALL)
HEAD = ["| field | type | default | meaning |", "|---|---|---|---|"]
WORDS = {str: "text", int: "whole number", float: "number", bool: "true or false", dict: "mapping"}


def main() -> None:
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")


def filled(page: str) -> str:
    """The page with every generated block written anew."""

    def block(found: re.Match[str]) -> str:
        kind, name = found[1], found[2]
        content = table(MODELS[name]) if kind == "table" else copy(ROOT / name)
        return f"<!-- {kind}: {name} -->\n\n{content}\n\n<!-- end -->"

    return BLOCK.sub(block, page)


def copy(path: Path) -> str:
    return f"```{path.suffix[1:]}\n{path.read_text(encoding='utf-8').rstrip()}\n```"


def table(model: type[BaseModel]) -> str:
    return "\n".join([*HEAD, *rows(model)])


def rows(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """One row per field; the fields of a part follow it with their dotted paths."""
    for name, field in model.model_fields.items():
        part = part_of(field.annotation)
        kind = "mapping" if part else type_of(field.annotation)
        meaning = (field.description or "").replace("<", "&lt;").replace("|", "\\|")
        yield f"| `{prefix}{name}` | {kind} | {default_of(field)} | {meaning} |"
        if part:
            yield from rows(part, f"{prefix}{name}.")


def part_of(annotation: Any) -> type[BaseModel] | None:
    """The model that a field holds, not counting None."""
    found = [kind for kind in choices(annotation) if isinstance(kind, type)]
    return next((kind for kind in found if issubclass(kind, BaseModel)), None)


def type_of(annotation: Any) -> str:
    """An annotation in a reader's words."""
    if hasattr(annotation, "__metadata__"):
        return type_of(annotation.__origin__)
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if get_origin(annotation) is list:
        (inner,) = get_args(annotation)
        return "list of mappings" if part_of(inner) else f"list of {type_of(inner)}"
    kinds = choices(annotation)
    if kinds == [annotation]:
        return WORDS[get_origin(annotation) or annotation]
    return " or ".join(dict.fromkeys(type_of(kind) for kind in kinds))


def choices(annotation: Any) -> list[Any]:
    """The members of a union without None; of anything else, itself."""
    if get_origin(annotation) not in (Union, types.UnionType):
        return [annotation]
    return [kind for kind in get_args(annotation) if kind is not type(None)]


def default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    if default is None or default in ({}, []):
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


if __name__ == "__main__":
    main()
