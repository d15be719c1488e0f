"""`tunewright run`: the flow in this very process, and its receipt for the reader."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from tasks import plan, requirements, snapshot
from tasks.targets import is_platform, target_named
from tunewright.contract.failures import UserError
from tunewright.contract.receipt import saving, speed, time_table
from tunewright.contract.rundir import RunDir
from tunewright.contract.workload import Workload


def run(file: Path, overrides: Mapping[str, str], **options: Any) -> tuple[dict[str, Any], int]:
    """Run the flow; the receipt ({"state", "reason"} when no run came to be) and the exit code.

    What can be refused is refused first, before a server is started or anything is written.
    """
    workload = Workload.load(file, overrides)
    _refuse(workload, options)
    from flows.server import prefect_api

    with prefect_api(without=workload.secrets):
        from flows.sft import sft
        from tasks.ending import receipt_of

        state = sft(file.absolute(), set=dict(overrides), return_state=True, **options)
        return receipt_of(state)


def dry_run(file: Path, overrides: Mapping[str, str], **options: Any) -> dict[str, Any]:
    """The exact command and environment names of every node; nothing is run, and nothing stays."""
    from tasks.targets.job import Job

    workload = Workload.load(file, overrides)
    placement = _refuse(workload, options)
    found = plan.plan(workload)
    job = Job(
        run=RunDir(Path(found["paths"]["run"])),
        attempt=1,
        command=workload.command,
        nodes=placement.nodes,
        procs_per_node=placement.procs_per_node,
        env_variables=workload.env_variables,
        code=None,
        has_parameters=bool(workload.parameters),
        mlflow={"MLFLOW_RUN_ID": "<run id>", "MLFLOW_TRACKING_URI": "<tracking URI>"},
        deadline_s=workload.timeout_minutes * 60 if workload.timeout_minutes else None,
    )
    target = target_named(options["target"])
    if is_platform(options["target"]):
        # The size of the code decides where it goes.
        with _unpacked(workload) as code:
            requests = list(target.dry_requests(replace(job, code=code), workload))
        return {**found, "requests": requests}
    job = replace(job, code=_code(workload, job.run.root))
    nodes = [target.node_of(job, rank, 0, placement) for rank in range(job.nodes)]
    own = [sorted(set(node.env) - set(os.environ)) for node in nodes]
    return {
        **found,
        "placement": placement.note,
        "launches": [
            {"node": node.rank, "argv": list(node.argv), "environment": [*names, *workload.secrets]}
            for node, names in zip(nodes, own, strict=True)
        ],
    }


@contextmanager
def _unpacked(workload: Workload) -> Iterator[Path | None]:
    """The code of a workload, `…/<hash>/<folder>`, for as long as it is looked at."""
    if workload.code_source is None:
        yield None
        return
    packed = snapshot.snapshot(workload.code_source)
    with tempfile.TemporaryDirectory(prefix="tunewright-code-") as scratch:
        yield snapshot.unpack(packed, Path(scratch, packed.sha256[:12]))


def export_bundle(
    file: Path, overrides: Mapping[str, str], folder: Path, *, force: bool
) -> list[str]:
    """Write a workload as a bundle of the platform; the names of its files."""
    from tasks.targets.databricks import bundle

    workload = Workload.load(file, overrides)
    with _unpacked(workload) as code:
        return bundle.write(workload, folder, code, force=force)


def dry_text(found: Mapping[str, Any]) -> Iterator[str]:
    """A dry run for the reader."""
    yield from plan.text(found)
    for request in found.get("requests", []):
        yield ""
        yield f"{request['method']} {request['path']}"
        rest = {key: part for key, part in request.items() if key in ("query", "body")}
        yield from (yaml.safe_dump(rest, sort_keys=False).rstrip().splitlines() if rest else ())
        if "content" in request:
            yield "content: |"
            yield from (f"  {line}" for line in request["content"].splitlines())
    for launch in found.get("launches", []):
        yield f"  node {launch['node']} runs {' '.join(launch['argv'][:2])} with the command above"
        yield f"    and {', '.join(launch['environment'])}"


def summary(receipt: Mapping[str, Any]) -> Iterator[str]:
    """What happened, in a dozen lines."""
    name, data = receipt["run"], receipt.get("data")
    yield f"{name}: {receipt['state']}" + (f" ({r})" if (r := receipt.get("reason")) else "")
    if data:
        share = data["supervised_tokens"] / max(1, data["tokens"])
        yield (
            f"  data        {data['rows']:,} rows, {data['tokens']:,} tokens, "
            f"{share:.0%} supervised ({data['cache']})"
        )
    if receipt["steps"]:
        world = receipt["world_size"]
        yield f"  training    {receipt['steps']} steps on {world} processes"
        yield f"  loss        {receipt['first_loss']:.4f} → {receipt['last_loss']:.4f}"
        yield from _figures(receipt)
    if receipt.get("eval_loss") is not None:
        yield f"  evaluation  {receipt['first_eval_loss']:.4f} → {receipt['eval_loss']:.4f}"
    for attempt in receipt["attempts"]:
        if attempt["failure"]:
            failure = attempt["failure"]
            yield f"  attempt {attempt['attempt']}   {failure['class']}: {failure['message']}"
    if registered := receipt.get("registered"):
        yield f"  registered  {registered['name']} version {registered['version']}"
    if mlflow := receipt.get("mlflow"):
        yield f"  mlflow      run {mlflow['run_id']} in {mlflow['tracking_uri']}"
    if total := (receipt.get("seconds") or {}).get("total"):
        yield f"  time        {total:.1f} s"
    yield from (f"    {line}" for line in time_table(receipt.get("seconds_by_phase") or {}))
    yield f"  folder      {receipt['folder']}"
    yield f"  more        {_this_command()} get {name}"
    yield f"              {_this_command()} logs {name}"


def _figures(receipt: Mapping[str, Any]) -> Iterator[str]:
    """Speed and checkpoints, as far as they were measured."""
    each = receipt.get("tokens_per_second_per_gpu")
    if each is not None:
        share = f" ({used})" if (used := speed(receipt)) else ""
        yield f"  speed       {each:,.0f} tokens/s per GPU or process{share}"
    if saved := saving(receipt):
        yield f"  checkpoints {saved}"


def _this_command() -> str:
    """How the reader can call us again: with the same home, by a path that works from here."""
    place = Path(sys.argv[0])
    found = shutil.which("tunewright")
    program = "tunewright" if found and Path(found).samefile(place) else os.path.relpath(place)
    if place.name == "__main__.py":
        program = f"{os.path.relpath(sys.executable)} -m flows"
    given = os.environ.get("TUNEWRIGHT_HOME")
    return f"TUNEWRIGHT_HOME={shlex.quote(given)} {program}" if given else program


def _code(workload: Workload, run: Path) -> Path | None:
    """Where the snapshot would be unpacked."""
    if workload.code_source is None:
        return None
    packed = snapshot.snapshot(workload.code_source)
    return run / "code" / packed.sha256[:12] / packed.folder


def _refuse(workload: Workload, options: Mapping[str, Any]) -> Any:
    if options["fresh"] and options["resume"]:
        raise UserError("--fresh and --resume are both given; keep one")
    target = target_named(options["target"])
    if is_platform(options["target"]):
        target.check_name(options["register_as"], workload)
    else:
        requirements.check(workload)
    return target.place(
        workload, simulate=options["simulate"], procs_per_node=options["procs_per_node"]
    )
