"""What the route itself costs: a whole flow whose command does nothing, against that command.

    python benchmarks/route.py [--json] [--quick]

Three things are timed as whole processes, in turn, on one running Prefect server and a warm MLflow
database: `bash -c true`, a process with an empty Prefect flow, and `tunewright run` of a workload
whose command is `true`. The difference between the last and the first is the overhead; the empty
flow stands beside it as Prefect's own part. Where the rest goes is read from the receipt.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TARGET_S = 4.5
WORKLOAD = """
experiment_name: nothing
command: "true"
compute: {num_accelerators: 1, accelerator_type: GPU_1xH100}
max_retries: 0
"""
EMPTY_FLOW = """
from prefect import flow
@flow
def empty(): pass
empty()
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one document on stdout")
    parser.add_argument("--quick", action="store_true", help="three rounds instead of seven")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tunewright-benchmark-") as scratch:
        found = measure(Path(scratch), rounds=3 if args.quick else 7)
    print(json.dumps(found, indent=2)) if args.json else print("\n".join(table(found)))
    return 0 if found["met"] else 1


def measure(scratch: Path, rounds: int) -> dict[str, Any]:
    """The figures, in seconds, as medians over interleaved rounds."""
    for name in ("PREFECT_API_URL", "PREFECT_PROFILE", "MLFLOW_TRACKING_URI"):
        os.environ.pop(name, None)
    os.environ |= {"PREFECT_HOME": str(scratch / "prefect"), "TUNEWRIGHT_HOME": str(scratch)}
    sys.path.insert(0, str(ROOT))
    from flows.server import prefect_api

    workload = scratch / "nothing.yaml"
    workload.write_text(WORKLOAD)
    route = [sys.executable, "-m", "flows", "run", str(workload), "--simulate", "--json"]
    receipts = []
    times: dict[str, list[float]] = {"command": [], "empty_flow": [], "route": []}
    with prefect_api():
        _timed(route)  # Makes the databases, which happens once in a home's life.
        for _ in range(rounds):
            times["command"].append(_timed(["bash", "-c", "true"])[0])
            times["empty_flow"].append(_timed([sys.executable, "-c", EMPTY_FLOW])[0])
            seconds, out = _timed(route)
            times["route"].append(seconds)
            receipts.append(json.loads(out)["seconds"])
    return _document(times, receipts)


def _timed(words: list[str]) -> tuple[float, str]:
    began = time.perf_counter()
    found = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    seconds = time.perf_counter() - began
    if found.returncode != 0:
        raise SystemExit(f"{words[:4]} failed:\n{found.stderr[-2000:]}")
    return seconds, found.stdout


def _document(times: dict[str, list[float]], receipts: list[dict[str, float]]) -> dict[str, Any]:
    median = {name: statistics.median(values) for name, values in times.items()}
    steps = {f"step_{name}": statistics.median(r[name] for r in receipts) for name in receipts[0]}
    overhead = median["route"] - median["command"]
    figures = {
        **{f"{name}_s": seconds for name, seconds in median.items()},
        "overhead_s": overhead,
        "overhead_over_empty_flow_s": median["route"] - median["empty_flow"],
        "overhead_to_empty_flow_ratio": overhead / median["empty_flow"],
        "process_outside_flow_s": median["route"] - steps["step_total"],
        **{f"{name}_s": seconds for name, seconds in steps.items()},
    }
    return {
        "benchmark": "route",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("prefect", "mlflow-skinny")},
        "figures": {name: round(value, 3) for name, value in figures.items()},
        "targets": {"overhead_s": TARGET_S},
        "met": overhead <= TARGET_S,
    }


def table(found: dict[str, Any]) -> list[str]:
    """The document for a reader."""
    lines = [f"route on {found['machine']}, {found['versions']}"]
    lines += [f"  {name:<32} {value:8.3f}" for name, value in found["figures"].items()]
    lines.append(f"  target overhead_s <= {TARGET_S}: {'met' if found['met'] else 'missed'}")
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
