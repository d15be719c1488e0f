"""`tunewright check --target databricks`: who and where we are, and what a workload lacks there.

Every finding is {"what", "state": "ok" | "missing" | "unchecked", "message"}. Asking changes
nothing; a secret is looked for in the list of its scope, and its value is never read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tasks.targets.databricks.access import with_policy
from tasks.targets.databricks.api import (
    Missing,
    Refused,
    Workspace,
    WorkspaceAway,
    connect,
    quoted,
)
from tunewright.contract.failures import UserError
from tunewright.contract.parts import GPUS_PER_NODE
from tunewright.contract.workload import Workload

_CATALOG = "/api/2.1/unity-catalog"
_VOLUME = re.compile(r"/Volumes/([^/]+)/([^/]+)/([^/]+)")
_ALL = {"ALL_PRIVILEGES", "OWNERSHIP"}

Wanted = list[tuple[str, ...]]
"""Of each tuple one privilege is enough; the first is the one to ask for."""
_OF_VOLUME: Wanted = [("READ_VOLUME",), ("WRITE_VOLUME",)]
_OF_MODELS = ("CREATE_MODEL", "CREATE_FUNCTION")

Finding = dict[str, str]


def look(workload: Workload, register_as: str | None = None) -> dict[str, Any]:
    """{"host", "user", "auth", "findings"} of the configured workspace for this workload.

    Raises UserError when no workspace is configured, or it does not let us in.
    """
    workspace = connect()
    found = {"host": workspace.host, "user": workspace.me, "auth": workspace.auth}
    return {**found, "findings": list(findings(workspace, workload, register_as))}


def findings(
    workspace: Workspace, workload: Workload, register_as: str | None
) -> Iterator[Finding]:
    """Everything that a run of this workload needs there, one finding each."""
    places = [str(workload.parameters.get("output_dir"))]
    source = workload.code_source
    if source is not None and source.remote_volume:
        places.append(source.remote_volume)
    for place in places:
        yield from _volume(workspace, place)
    if register_as:
        yield from _model_schema(workspace, register_as)
    for (kind, name), wanted in _around(places, register_as).items():
        yield from _level(workspace, kind, name, wanted)
    lacking = missing_secrets(workspace, workload.secrets)
    for name, reference in workload.secrets.items():
        reason = lacking.get(name)
        yield _finding(f"secret {name}", reason or f"{reference} is there", bool(reason))
    yield _accelerator(workload.compute.accelerator_type)
    yield from _policy(workspace, workload)
    yield from _unchecked(workload)


def missing_secrets(workspace: Workspace, secrets: Mapping[str, str]) -> dict[str, str]:
    """{NAME: why} for every secret that is not there; one listing a scope, no value is read."""
    scopes: dict[str, set[str] | str] = {}
    found = {}
    for name, reference in secrets.items():
        scope, key = reference.split("/", 1)
        if scope not in scopes:
            scopes[scope] = _keys(workspace, scope)
        keys = scopes[scope]
        if isinstance(keys, str):
            found[name] = keys
        elif key not in keys:
            found[name] = (
                f"the scope {scope} has no key {key}; add it with "
                f"`databricks secrets put-secret {scope} {key}`"
            )
    return found


def require_secrets(workspace: Workspace, secrets: Mapping[str, str]) -> None:
    """Raise UserError that names every secret which is not there, and where it was looked for."""
    lacking = missing_secrets(workspace, secrets)
    if lacking:
        lines = [f"{name} ({secrets[name]}): {reason}" for name, reason in lacking.items()]
        place = f"secrets are missing in the workspace {workspace.host}:\n  "
        raise UserError(place + "\n  ".join(lines))


def _keys(workspace: Workspace, scope: str) -> set[str] | str:
    """The names in a scope, or why they cannot be listed."""
    try:
        found = workspace.get("/api/2.0/secrets/list", {"scope": scope})
    except Missing:
        return f"there is no scope {scope}; make it with `databricks secrets create-scope {scope}`"
    except Refused as error:
        return f"the scope {scope} cannot be listed ({error}); ask for READ on it"
    return {str(secret["key"]) for secret in found.get("secrets") or []}


def _volume(workspace: Workspace, path: str) -> Iterator[Finding]:
    match = _VOLUME.match(path)
    if match is None:
        yield _finding(
            "volume", f"{path} lies on no volume; write /Volumes/catalog/schema/volume/…"
        )
        return
    catalog, schema, volume = match.groups()
    name = f"{catalog}.{schema}.{volume}"
    facts = _asked(workspace, f"{_CATALOG}/volumes/{quoted(name)}")
    if isinstance(facts, Mapping):
        yield _finding(f"volume {name}", "it is there", is_missing=False)
        yield from _privileges(workspace, "volume", name, _OF_VOLUME, facts.get("owner"))
        return
    schema_facts = _asked(workspace, f"{_CATALOG}/schemas/{quoted(f'{catalog}.{schema}')}")
    if isinstance(schema_facts, Mapping):
        way = f"`databricks volumes create {catalog} {schema} {volume} MANAGED`"
        yield _finding(f"volume {name}", f"{facts}; make it with {way}")
    else:
        yield _finding(
            f"schema {catalog}.{schema}", f"{schema_facts}; so there is no volume either"
        )


def _model_schema(workspace: Workspace, register_as: str) -> Iterator[Finding]:
    schema = register_as.rpartition(".")[0]
    facts = _asked(workspace, f"{_CATALOG}/schemas/{quoted(schema)}")
    if not isinstance(facts, Mapping):
        yield _finding(f"schema {schema}", f"{facts}; {register_as} is registered in it")
        return
    yield _finding(f"schema {schema}", "it is there", is_missing=False)


def _around(places: Iterable[str], register_as: str | None) -> dict[tuple[str, str], Wanted]:
    """What is needed on the catalogs and schemas around volumes and model, by kind and name."""
    schemas = [".".join(match.groups()[:2]) for match in map(_VOLUME.match, places) if match]
    if register_as:
        schemas.append(register_as.rpartition(".")[0])
    found: dict[tuple[str, str], Wanted] = {}
    for schema in schemas:
        found["catalog", schema.partition(".")[0]] = [("USE_CATALOG",)]
        found["schema", schema] = [("USE_SCHEMA",)]
    if register_as:
        found["schema", schemas[-1]].append(_OF_MODELS)
    return found


def _level(workspace: Workspace, kind: str, name: str, wanted: Wanted) -> Iterator[Finding]:
    """A catalog or schema; of a schema that is not there something else has told."""
    facts = _asked(workspace, f"{_CATALOG}/{kind}s/{quoted(name)}")
    if isinstance(facts, Mapping):
        yield from _privileges(workspace, kind, name, wanted, facts.get("owner"))
    elif kind == "catalog":
        way = _grant(workspace, kind, name, ["USE_CATALOG"])
        yield _finding(f"catalog {name}", f"{facts}; if it is there, ask for {way}")


def _privileges(
    workspace: Workspace, kind: str, name: str, wanted: Wanted, owner: Any
) -> Iterator[Finding]:
    """One finding on what we may do there, by grants on it and on what is around it."""
    what = f"privileges on {kind} {name}"
    if owner == workspace.me:
        yield _finding(what, "you own it", is_missing=False)
        return
    found = _asked(workspace, f"{_CATALOG}/effective-permissions/{kind}/{quoted(name)}")
    if not isinstance(found, Mapping):
        yield {"what": what, "state": "unchecked", "message": found}
        return
    held = {
        str(privilege.get("privilege")).replace(" ", "_")
        for assignment in found.get("privilege_assignments") or []
        if assignment.get("principal") in workspace.principals
        for privilege in assignment.get("privileges") or []
    }
    lacking = [either for either in wanted if not held & {*either, *_ALL}]
    if not lacking:
        yield _finding(what, "as they are needed", is_missing=False)
        return
    words = ", ".join(" or ".join(either) for either in lacking)
    way = _grant(workspace, kind, name, [either[0] for either in lacking])
    yield _finding(what, f"not granted: {words}; ask the owner ({owner}) for {way}")


def _grant(workspace: Workspace, kind: str, name: str, privileges: Iterable[str]) -> str:
    """The line of SQL that gives us what we lack."""
    words = ", ".join(privilege.replace("_", " ") for privilege in privileges)
    place = ".".join(f"`{part}`" for part in name.split("."))
    return f"GRANT {words} ON {kind.upper()} {place} TO `{workspace.me}`"


def _accelerator(kind: str) -> Finding:
    known = ", ".join(GPUS_PER_NODE)
    message = f"{kind} is none of {known}; the platform may know it"
    if kind in GPUS_PER_NODE:
        return _finding("accelerator type", f"{kind}; capacity shows when it is asked for", False)
    return {"what": "accelerator type", "state": "unchecked", "message": message}


def _policy(workspace: Workspace, workload: Workload) -> Iterator[Finding]:
    """Policies are the account's; a workspace's own address answers for them only sometimes."""
    if workload.usage_policy_name:
        what = f"usage policy {workload.usage_policy_name}"
        try:
            found = with_policy(workspace, workload)
        except UserError as error:
            yield _finding(what, str(error))
        else:
            yield _finding(what, f"its id is {found.usage_policy_id}", is_missing=False)
        return
    policy = workload.usage_policy_id
    if policy is None:
        return
    what = f"usage policy {policy}"
    if workspace.account_id is None:
        message = "policies are the account's; set DATABRICKS_ACCOUNT_ID to have it looked up"
        yield {"what": what, "state": "unchecked", "message": message}
        return
    path = f"/api/2.1/accounts/{workspace.account_id}/budget-policies/{quoted(policy)}"
    try:
        facts = workspace.get(path)
    except Missing as error:
        yield _finding(what, str(error))
    except (Refused, WorkspaceAway) as error:
        yield {"what": what, "state": "unchecked", "message": str(error)}
    else:
        yield _finding(what, str(facts.get("policy_name") or "it is there"), is_missing=False)


def _unchecked(workload: Workload) -> Iterator[Finding]:
    """What only the platform itself can say, when the job comes to it."""
    capacity = workload.compute.provisioned_capacity_id
    if capacity:
        message = "no endpoint tells whether it is there"
        yield {"what": f"capacity {capacity}", "state": "unchecked", "message": message}


def _asked(workspace: Workspace, path: str) -> Mapping[str, Any] | str:
    """The answer, or why there is none."""
    try:
        return workspace.get(path)
    except Missing:
        return "it is not there, or you may not see it"
    except Refused as error:
        return str(error)


def _finding(what: str, message: str, is_missing: bool = True) -> Finding:
    return {"what": what, "state": "missing" if is_missing else "ok", "message": message}
