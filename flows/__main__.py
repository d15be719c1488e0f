"""The command line: `tunewright`, the same as `python -m flows`.

Covers what Prefect's own cannot. Nothing but `run` imports Prefect. Results go to stdout,
narration to stderr. Exit codes: 0 completed, 1 the run failed, 2 the file or the arguments are
wrong, 130 interrupted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

from tunewright.contract.document import assignments
from tunewright.contract.failures import TunewrightError, UserError, WorkloadError
from tunewright.contract.workload import Workload

HELP = """Fine-tune language models from one workload file.

\b
tunewright check deployments/tiny.yaml
tunewright run deployments/tiny.yaml --simulate
tunewright run -f deployments/alpaca.yaml --simulate --set parameters.max_steps=50
tunewright get tiny-7f3a91c2
tunewright import axolotl.yml -o workload.yaml
"""


@click.group(help=HELP, context_settings={"max_content_width": 100})
def cli() -> None:
    """All commands; see HELP."""


def _workload_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """FILE as argument or -f, and --set, for the commands that read a workload."""
    given = click.option("--set", "pairs", multiple=True, metavar="PATH=VALUE")
    option = click.option("-f", "--file", "option", type=click.Path(path_type=Path))
    argument = click.argument("file", required=False, type=click.Path(path_type=Path))

    @wraps(command)
    def with_file(
        file: Path | None, option: Path | None, pairs: tuple[str, ...], **rest: Any
    ) -> Any:
        if (file is None) == (option is None):
            raise UserError("give one workload file: tunewright check -f deployments/tiny.yaml")
        return command(file=file or option, overrides=assignments(pairs), **rest)

    return argument(option(given(with_file)))


@cli.command()
@_workload_options
@click.option("--target", type=click.Choice(["databricks"]), help="Look there too; not offline.")
@click.option("--register", "register_as", metavar="NAME", help="Name of the registered model.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def check(
    file: Path, overrides: dict[str, str], target: str | None, register_as: str | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Validate a workload and show the plan: offline, or with what a platform lacks for it."""
    from tasks import plan

    try:
        workload = Workload.load(file, overrides)
        found = plan.plan(workload)
        if target:
            found |= plan.on_platform(workload, target, register_as)
    except UserError as error:
        if not as_json:
            raise
        problems = error.problems if isinstance(error, WorkloadError) else []
        listed = [p._asdict() for p in problems] or [{"path": "", "message": str(error)}]
        _print_json({"valid": False, "problems": listed})
        sys.exit(error.exit_code)
    if as_json:
        _print_json(found)
    else:
        click.echo("\n".join(plan.text(found)))
    if not found["valid"]:
        sys.exit(2)


@cli.command()
@_workload_options
@click.option("--target", default="local", show_default=True, help="local, ray or databricks.")
@click.option("--register", "register_as", metavar="NAME", help="Name of the registered model.")
@click.option("--simulate", is_flag=True, help="Use what is here instead of the GPUs asked for.")
@click.option("--procs-per-node", type=int, help="Processes per simulated node.")
@click.option(
    "--pretokenize", "tokens", type=click.Choice(["auto", "on", "off"]), default="auto",
    show_default=True, help="auto: for our recipes.",
)  # fmt: skip
@click.option("--resume", metavar="RUN", help="Go on with this run.")
@click.option("--fresh", is_flag=True, help="Start over instead of continuing an unfinished run.")
@click.option("--dry-run", is_flag=True, help="Print what would run, and run nothing.")
@click.option("--json", "as_json", is_flag=True, help="The receipt as JSON on stdout.")
def run(
    file: Path, overrides: dict[str, str], dry_run: bool, as_json: bool, **options: Any
) -> None:
    """Run a workload to a registered model, here and now."""
    from flows import launcher

    if dry_run:
        found = launcher.dry_run(file, overrides, **options)
        _print_json(found) if as_json else click.echo("\n".join(launcher.dry_text(found)))
        return
    receipt, code = launcher.run(file, overrides, **options)
    if as_json:
        _print_json(receipt)
    elif "run" in receipt:
        click.echo("\n".join(launcher.summary(receipt)))
    else:
        click.echo(f"error: {receipt['reason']}", err=True)
    sys.exit(code)


@cli.command(name="list")
@click.option("--limit", default=20, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def list_runs(limit: int, as_json: bool) -> None:
    """Runs, newest first: from the Prefect API, or those of this machine."""
    from flows import api
    from tasks import records

    try:
        rows = [_row_of_api(found) for found in api.flow_runs(limit)] if api.url() else None
    except api.ApiFailed as error:
        click.echo(f"{error}; these are the runs started on this machine", err=True)
        rows = None
    if rows is None:
        rows = [_row(records.receipt(name)) for name in records.known()[:limit]]
    if as_json:
        _print_json(rows)
        return
    for row in rows:
        click.echo(f"{row['run']:<32} {row['state']:<12} {row['started'] or ''}")


@cli.command()
@click.argument("name", metavar="RUN")
@click.option("--json", "as_json", is_flag=True, help="The receipt as JSON on stdout.")
def get(name: str, as_json: bool) -> None:
    """The receipt of a run."""
    from flows import launcher
    from tasks import records

    receipt = records.receipt(name)
    _print_json(receipt) if as_json else click.echo("\n".join(launcher.summary(receipt)))


@cli.command()
@click.argument("name", metavar="RUN")
@click.option("--node", type=int, help="Only this node.")
@click.option("--attempt", type=int, help="This attempt instead of the last.")
@click.option("--follow", is_flag=True, help="Go on until the run ends.")
def logs(name: str, node: int | None, attempt: int | None, follow: bool) -> None:
    """The output of a run's steps and nodes."""
    from tasks import records

    if follow:
        for path, line in records.follow(name, node, attempt):
            click.echo(f"[{path.stem}] {line}")
        return
    for path in records.log_files(name, node, attempt):
        for line in path.read_text(errors="replace").splitlines():
            click.echo(f"[{path.stem}] {line}")


@cli.command()
@click.argument("name", metavar="RUN")
def cancel(name: str) -> None:
    """End a run in order: its processes, then its MLflow run and receipt."""
    from flows import api
    from tasks import records

    here = records.request_cancel(name) if name in records.known() else False
    try:
        there = api.cancel(name) if api.url() else 0
    except api.ApiFailed as error:
        if not here:
            raise
        click.echo(f"{error}; the request in the run's folder is enough", err=True)
        there = 0
    if not here and not there:
        records.entry(name)
        raise TunewrightError(f"run {name} is not going on; nothing to cancel")
    click.echo(f"asked {name} to end", err=True)


@cli.command(name="import")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write it there.")
@click.option("--force", is_flag=True, help="Overwrite that file.")
@click.option("--from", "tool", type=click.Choice(["axolotl", "llama-factory", "torchtune"]))
@click.option("--gpus", type=click.IntRange(min=1), default=1, show_default=True, help="In all.")
@click.option("--json", "as_json", is_flag=True, help="Workload and notes as JSON on stdout.")
def import_file(
    file: Path, output: Path | None, force: bool, tool: str | None, gpus: int, as_json: bool
) -> None:
    """Turn a file of axolotl, LLaMA-Factory or torchtune into a workload."""
    from flows import importing

    found = importing.convert(file, tool, gpus)
    if output is not None:
        _write_new(output, found.text, force)
    if as_json:
        _print_json(found.document())
        return
    if output is None:
        click.echo(found.text, nl=False)
    click.echo("\n".join(found.narration()), err=True)


@cli.command(name="export")
@_workload_options
@click.option("--bundle", type=click.Path(path_type=Path), required=True, help="Write it there.")
@click.option("--force", is_flag=True, help="Also into a folder that is not empty.")
def export_bundle(file: Path, overrides: dict[str, str], bundle: Path, force: bool) -> None:
    """Write a workload as a Databricks bundle, for a schedule there without Prefect."""
    from flows import launcher

    for name in launcher.export_bundle(file, overrides, bundle, force=force):
        click.echo(name)
    click.echo(f"wrote {bundle}; deploy it with: databricks bundle deploy", err=True)


def _write_new(path: Path, text: str, force: bool) -> None:
    """Write a file; one that is there is only overwritten when that is wanted."""
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"{path} is there already; give --force to overwrite it") from None
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}; give another -o") from None
    click.echo(f"wrote {path}", err=True)


def _row_of_api(found: dict[str, Any]) -> dict[str, Any]:
    return {"run": found["name"], "state": found["state_name"], "started": found["start_time"]}


def _row(receipt: dict[str, Any]) -> dict[str, Any]:
    attempts = receipt.get("attempts") or [{}]
    return {
        "run": receipt["run"],
        "state": receipt["state"],
        "started": _when(attempts[0].get("started")),
    }


def _when(seconds: float | None) -> str | None:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds") if seconds else None


def _print_json(found: Any) -> None:
    click.echo(json.dumps(found, indent=2, default=str))


def main() -> int:
    """Run the command line; returns the exit code. An error for the user is one sentence."""
    try:
        cli.main(prog_name="tunewright", standalone_mode=False)
    except TunewrightError as error:
        click.echo(f"error: {error}", err=True)
        return error.exit_code
    except OSError as error:
        click.echo(f"error: {error.filename or ''}: {error.strerror or error}", err=True)
        return 1
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
