"""What a run would do, without doing any of it: `tunewright check` and `--dry-run`.

Needs no network, no credentials, no Prefect and no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tasks import volumes
from tasks.targets import target_named
from tunewright.contract.datasettings import BATCH_NAMES
from tunewright.contract.rundir import RunDir
from tunewright.contract.workload import Workload


def plan(workload: Workload) -> dict[str, Any]:
    """The plan of a workload as the JSON document of `check --json`."""
    root = volumes.output_root(workload)
    run = RunDir(root / f"{workload.experiment_name}-<8 hex>")
    settings = workload.settings
    return {
        "valid": True,
        "name": workload.experiment_name,
        "workload_sha256": workload.sha256,
        "nodes": workload.nodes,
        "gpus_per_node": workload.compute.gpus_per_node,
        "accelerator_type": workload.compute.accelerator_type,
        "recipe": workload.recipe,
        "command": workload.command,
        "attempts": workload.attempts,
        "timeout_minutes": workload.timeout_minutes,
        "env_variables": sorted(workload.env_variables),
        "secrets": dict(workload.secrets),
        "dependencies": workload.environment.dependencies if workload.environment else [],
        "code": workload.code_source.root_path if workload.code_source else None,
        "batch": _batch(workload) if settings else None,
        "paths": {
            "output_dir": str(root),
            "tokens": str(root / "tokens" / "<fingerprint>") if settings else None,
            "run": str(run.root),
            "checkpoints": str(run.checkpoints) if settings else None,
            "model": str(run.model),
        },
        "warnings": [*workload.warnings(), *volumes.notes(workload)],
    }


def on_platform(workload: Workload, target: str, register_as: str | None) -> dict[str, Any]:
    """What a platform says to this workload; `valid` is then whether it lacks nothing there.

    Asks the network. Raises UserError where nobody lets us in.
    """
    module = target_named(target)
    module.place(workload, simulate=False, procs_per_node=None)
    module.check_name(register_as, workload)
    found = module.look(workload, register_as)
    lacking = [f for f in found["findings"] if f["state"] == "missing"]
    notes = [*workload.warnings(), *module.notes_of(workload)]
    return {"platform": found, "valid": not lacking, "warnings": notes}


def text(found: Mapping[str, Any]) -> Iterator[str]:
    """The plan for a reader, line by line."""
    retries, minutes = found["attempts"] - 1, found["timeout_minutes"]
    yield f"{found['name']}  {found['workload_sha256'][:12]}"
    yield ""
    yield (
        f"  compute       {found['nodes']} x {found['gpus_per_node']} GPUs on {found['nodes']} "
        f"{'node' if found['nodes'] == 1 else 'nodes'} "
        f"({found['accelerator_type']})"
    )
    yield f"  steps         {' → '.join(_steps(found))}"
    yield (
        f"  launch        retries={retries} (at most {found['attempts']} launches), "
        + (f"deadline {minutes} minutes per attempt" if minutes else "no deadline")
    )
    if found["batch"]:
        batch = found["batch"]
        yield (
            f"  batch         {batch['global_batch_tokens']:,} tokens a step: "
            f"{batch['packs_per_step']} packs of {batch['pack_tokens']:,}{batch['derived']}"
        )
    yield f"  environment   {', '.join(found['env_variables']) or 'nothing of its own'}"
    secrets = (f"{name} from {reference}" for name, reference in found["secrets"].items())
    yield f"  secrets       {', '.join(secrets) or 'none'}"
    if found["dependencies"]:
        yield f"  dependencies  {', '.join(found['dependencies'])}"
    if found["code"]:
        yield f"  code          {found['code']}"
    for name, path in found["paths"].items():
        if path:
            yield f"  {name:<13} {path}"
    if platform := found.get("platform"):
        yield f"  workspace     {platform['host']} as {platform['user']} ({platform['auth']})"
        for finding in platform["findings"]:
            yield f"    {finding['state']:<11} {finding['what']}: {finding['message']}"
    yield "  command"
    yield from (f"    {line}" for line in found["command"].rstrip().splitlines())
    yield from (f"  note: {warning}" for warning in found["warnings"])


def _steps(found: Mapping[str, Any]) -> list[str]:
    rows = ["pretokenize"] if found["recipe"] else []
    return ["resolve_secret", *rows, "launch", "consolidate", "register"]


def _batch(workload: Workload) -> dict[str, Any]:
    settings = workload.settings
    assert settings is not None
    users = [name for name in BATCH_NAMES if workload.parameters.get(name) is not None]
    count = workload.compute.num_accelerators
    derived = f" (from {', '.join(users)} and {count} accelerators)" if users else ""
    return {
        "global_batch_tokens": settings.global_batch_tokens,
        "pack_tokens": settings.pack_tokens,
        "packs_per_step": settings.packs_per_step,
        "derived": derived,
    }
