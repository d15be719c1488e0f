"""A YAML file as a plain document: read safely, overridden by --set, hashed.

Knows nothing of what the fields mean.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Hashable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from tunewright.contract.failures import Problem, UserError

MAX_BYTES = 1 << 20
MAX_VALUES = 100_000
MAX_DEPTH = 50
_KINDS: Mapping[type, str] = defaultdict(lambda: "a single value", {list: "a list", set: "a set"})
_AS_TEXT = ("env_variables", "secrets")
"""Fields whose values are text whatever they look like."""


def read(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file of at most 1 MiB.

    Raises UserError with one sentence: missing, unreadable, too large, not UTF-8, not YAML (with
    line and column), a key given twice, aliases that expand without end, or not a mapping.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise UserError(f"{path} is larger than 1 MiB; move data and scripts into other files")
        text = content.decode("utf-8")
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; give the path of a YAML file") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder; give the YAML file in it") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8"
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be read: {reason}; give another file") from None
    return parse(text, str(path))


def parse(text: str, source: str) -> dict[str, Any]:
    """The mapping in YAML text; raises UserError, see `read`."""
    try:
        found = _construct(text)
    except yaml.YAMLError as error:
        raise UserError(f"{source} is not valid YAML: {_where(error)}; mend it there") from None
    except ValueError as error:
        raise UserError(f"{source} is not valid YAML: {error}") from None
    if not isinstance(found, dict):
        kind = "is empty" if found is None else f"is not a mapping but {_KINDS[type(found)]}"
        raise UserError(f"{source} {kind}; write names and values, like experiment_name: tiny")
    return found


def override(
    document: Mapping[str, Any], overrides: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Problem]]:
    """A copy with dotted paths set to new values, and what could not be set.

    A text value takes the type of the value it replaces; for a new key it is read as YAML.
    """
    result = deepcopy(dict(document))
    problems = []
    for path, value in overrides.items():
        try:
            _set(result, path, value)
        except ValueError as error:
            problems.append(Problem(path, f"--set: {error}"))
    return result, problems


def assignments(pairs: tuple[str, ...]) -> dict[str, str]:
    """("a.b=v", …) as {"a.b": "v"}; raises UserError for a pair without `=`."""
    found = {}
    for pair in pairs:
        path, separator, value = pair.partition("=")
        if not separator or not path.strip():
            raise UserError(f"--set {pair!r} has no value; write --set parameters.max_steps=50")
        found[path.strip()] = value
    return found


def digest(document: Any) -> str:
    """sha256 of a document's canonical JSON, in hex: the same for equal documents everywhere."""
    canonical = json.dumps(_canonical(document), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _canonical(value: Any) -> Any:
    """Plain JSON for everything that YAML can say: dates, bytes, sets, keys that are no text."""
    if isinstance(value, Mapping):
        return {
            key if isinstance(key, str) else repr(key): _canonical(v) for key, v in value.items()
        }
    if isinstance(value, list | tuple):
        return [_canonical(part) for part in value]
    if isinstance(value, set | frozenset):
        return sorted((_canonical(part) for part in value), key=repr)
    return value if isinstance(value, str | int | float | None) else repr(value)


def _construct(text: str) -> Any:
    """The value in YAML text. Raises yaml.YAMLError, or ValueError for bombs and bad dates."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _refuse_bombs(node)
        return loader.construct_document(node)
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep") from None
    finally:
        loader.dispose()


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, where YAML's own loader keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge" or not isinstance(
                key_node, yaml.ScalarNode
            ):
                continue
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key_node.value!r} is given twice", key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep=deep)


def _where(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return f"{problem} at line {mark.line + 1}, column {mark.column + 1}" if mark else str(problem)


def _refuse_bombs(root: yaml.Node) -> None:
    """Count values as if every alias were written out; refuse cycles, depth and explosions."""
    sizes: dict[int, int] = {}
    open_nodes: set[int] = set()

    def size(node: yaml.Node) -> int:
        if isinstance(node, yaml.ScalarNode):
            return _scalar(node)
        key = id(node)
        if key in open_nodes:
            raise ValueError(f"the anchor at line {node.start_mark.line + 1} contains itself")
        if len(open_nodes) == MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
        if key not in sizes:
            open_nodes.add(key)
            sizes[key] = 1 + sum(size(child) for child in _children(node))
            open_nodes.discard(key)
        return sizes[key]

    if size(root) > MAX_VALUES:
        raise ValueError(f"it expands to more than {MAX_VALUES:,} values; write less by aliases")


def _scalar(node: yaml.ScalarNode) -> int:
    if any("\ud800" <= letter <= "\udfff" for letter in node.value):
        line = node.start_mark.line + 1
        raise ValueError(f"half a character (a surrogate) at line {line}; write it whole")
    return 1


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value)


def _set(document: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    place: Any = document
    for part in parents:
        if isinstance(place, dict) and place.get(part) is None:
            place[part] = {}
        place = _child(place, part, path)
    if isinstance(place, list):
        index = _index(place, last, path)
        place[index] = _typed(value, place[index])
    elif isinstance(place, dict):
        as_text = len(parents) == 1 and parents[0] in _AS_TEXT
        place[last] = _typed(value, "" if as_text else place.get(last))
    else:
        raise ValueError(f"{path} cannot be set: {'.'.join(parents)} is {place!r}, not a mapping")


def _child(place: Any, part: str, path: str) -> Any:
    if isinstance(place, dict):
        return place[part]
    if isinstance(place, list):
        return place[_index(place, part, path)]
    raise ValueError(f"{path} cannot be set: it leads through {place!r}, which is not a mapping")


def _index(place: list[Any], part: str, path: str) -> int:
    if not part.isdigit() or int(part) >= len(place):
        raise ValueError(
            f"{path} cannot be set: {part!r} is not one of the {len(place)} list places"
        )
    return int(part)


def _typed(value: Any, old: Any) -> Any:
    if not isinstance(value, str) or isinstance(old, str):
        return value
    if old is not None and value.strip() == "":
        raise ValueError(f"an empty value cannot replace {old!r}; write null to remove it")
    try:
        new = _construct(value)
    except yaml.YAMLError as error:
        raise ValueError(f"{value!r} is not a YAML value: {_where(error)}") from None
    if old is None or new is None:
        return new
    if isinstance(old, bool) or not isinstance(old, int | float):
        return _same_kind(value, new, old)
    return _number(value, old)


def _same_kind(value: str, new: Any, old: Any) -> Any:
    if isinstance(new, type(old)):
        return new
    names = {bool: "true or false", list: "a list, like [a, b]", dict: "a mapping, like {a: b}"}
    raise ValueError(
        f"{value!r} replaces {old!r} and must be {names.get(type(old), type(old).__name__)}"
    )


def _number(value: str, old: int | float) -> int | float:
    for kind in (float,) if isinstance(old, float) else (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    raise ValueError(f"{value!r} replaces {old!r} and must be a number")
