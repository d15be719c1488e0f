"""SIGKILL of the worker between any two calls of its route to Databricks, and a new start.

    python benchmarks/worker_kills.py [--json] [--quick]

The route goes once undisturbed against the stand-in (tests/databricks_server.py), and what it asked
the platform is the list of moments. At each of them a worker of its own, on a workspace of its own,
is killed with everything in its process group when that call arrives and before it is acted on; at
the submissions also after they were acted on and before the answer. Started again, it must end with
one training job, one job that consolidates and registers, and one version. Nothing is trained: the
command leaves a small model. `--quick` takes every eighth moment.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
EVERY = 8


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one document on stdout")
    parser.add_argument("--quick", action="store_true", help="every eighth moment")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tunewright-benchmark-") as scratch:
        found = measure(Path(scratch), EVERY if args.quick else 1)
    print(json.dumps(found, indent=2)) if args.json else print("\n".join(table(found)))
    return 0 if found["met"] else 1


def measure(scratch: Path, every: int) -> dict[str, Any]:
    for name in ("PREFECT_API_URL", "PREFECT_PROFILE", "MLFLOW_TRACKING_URI"):
        os.environ.pop(name, None)
    os.environ |= {"PREFECT_HOME": str(scratch / "prefect"), "TUNEWRIGHT_HOME": str(scratch)}
    sys.path.insert(0, str(ROOT))
    from flows.server import prefect_api
    from tests.databricks_server import DatabricksServer
    from tests.flows import killing
    from tests.flows.cli import Home

    def home(name: str) -> Home:
        path = scratch / name / "home"
        return Home(path, {**os.environ, "TUNEWRIGHT_HOME": str(path)})

    killed, wrong = 0, []
    with prefect_api():
        with DatabricksServer(scratch / "undisturbed", mlflow=False) as server:
            file = killing.prepare(scratch, server)
            moments = killing.undisturbed(home("undisturbed"), server, file)
        began = time.perf_counter()
        for number, moment in enumerate(moments[::every]):
            try:
                with DatabricksServer(scratch / str(number), mlflow=False) as server:
                    killing.prepare(scratch, server)
                    killed += killing.killed_at(moment, home(str(number)), server, file)
            except Exception as error:
                wrong.append(f"{moment}: {error}")
            print(f"{number}: {moment}", file=sys.stderr)
        seconds = time.perf_counter() - began
    figures = {
        "moments": len(moments[::every]), "killed": killed, "wrong": len(wrong),
        "seconds": round(seconds, 1),
    }  # fmt: skip
    return {
        "benchmark": "worker_kills",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("prefect", "databricks-sdk")},
        "figures": figures,
        "targets": {"wrong": 0},
        "met": not wrong,
        "wrong": wrong,
    }


def table(found: dict[str, Any]) -> list[str]:
    """The document for a reader."""
    lines = [f"worker_kills on {found['machine']}, {found['versions']}"]
    lines += [f"  {name:<10} {value:8}" for name, value in found["figures"].items()]
    return [*lines, *found["wrong"], f"  target wrong = 0: {'met' if found['met'] else 'missed'}"]


if __name__ == "__main__":
    raise SystemExit(main())
