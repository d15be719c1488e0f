"""What remains after training, on the platform itself, where the volume is: one small job.

    python -P -m tunewright.databricks_finish --run FOLDER --result FILE
        [--name CATALOG.SCHEMA.MODEL --run-id ID --tags JSON --alias ALIAS]

Consolidates the run's shards, registers the model when a name is given, and leaves in `result`
{"consolidate": {...}, "register": {...} | null}. Each part that was done before is found done.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tunewright.consolidate import consolidate
from tunewright.contract.failures import reported
from tunewright.contract.rundir import RunDir, write_json


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tunewright.databricks_finish")
    parser.add_argument("--run", type=Path, required=True, help="the run's folder")
    parser.add_argument("--result", type=Path, required=True, help="where the outcome goes")
    parser.add_argument("--name", help="register the model under this name")
    parser.add_argument("--run-id", help="the MLflow run that trained it")
    parser.add_argument("--tags", default="{}", help="a JSON object of tags")
    parser.add_argument("--alias", help="let this alias point at the version")
    given = parser.parse_args(argv)
    run = RunDir(given.run)
    made = consolidate(run)
    registered = None
    if given.name and made["model"] is not None:
        from tunewright import uc_register

        registered = uc_register.register(
            run.model,
            given.name,
            run.name,
            run_id=given.run_id,
            tags=json.loads(given.tags),
            alias=given.alias,
        )
    write_json(given.result, {"consolidate": made, "register": registered})


if __name__ == "__main__":
    with reported():
        main()
