"""A model folder through the Files API, beside a plain copy over the same loopback.

    python benchmarks/volumes.py [--json] [--quick]

2 GB of random bytes in eight files, sealed, go to a volume of the stand-in
(tests/databricks_server.py, in a process of its own) and come back, as the target does it where
the volume is not mounted: several at once, large ones in parts on the way out, sizes checked there
and hashes on the way in. The plain copy reads the same files and sends them over TCP, one after the
other, to a process that writes them down: nothing is hashed, asked or answered. Rounds take turns;
figures are medians. The stand-in is Python and shares the machine's cores: the ratios say what
client and stand-in cost together.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
FILES = 8
CHUNK = 1 << 20
MEMORY_MIB = {"upload": 200, "download": 100}
"""More than what is on its way, less than one file."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one document on stdout")
    parser.add_argument("--quick", action="store_true", help="200 MB instead of 2 GB")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--sink", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if args.serve or args.sink:
        serve(args.serve) if args.serve else sink(args.sink)
        return 0
    with tempfile.TemporaryDirectory(prefix="tunewright-benchmark-") as scratch:
        size = 200_000_000 if args.quick else 2_000_000_000
        found = document(measure(Path(scratch), size // FILES, rounds=3))
    print(json.dumps(found, indent=2)) if args.json else print("\n".join(table(found)))
    return 0 if found["met"] else 1


def serve(folder: Path) -> None:
    """The stand-in, until stdin ends."""
    from tests.databricks_server import DatabricksServer

    with DatabricksServer(folder, mlflow=False) as server:
        server.add_volume("main.default.models")
        print(json.dumps(server.environment), flush=True)
        sys.stdin.read()


def sink(folder: Path) -> None:
    """The other end of plain copies: one connection after the other, each into one file."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        while True:
            connection, _ = server.accept()
            with connection, (folder / "copy").open("wb") as file:
                while chunk := connection.recv(CHUNK):
                    file.write(chunk)
                connection.sendall(b".")


@contextmanager
def process(option: str, folder: Path) -> Iterator[str]:
    """This program with an option; yields its first line."""
    folder.mkdir()
    command = [sys.executable, __file__, option, str(folder)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        yield child.stdout.readline()
    finally:
        child.stdin.close()
        if option == "--sink":
            child.terminate()
        child.wait(30)


def measure(scratch: Path, size: int, rounds: int) -> dict[str, Any]:
    from tasks.targets.databricks import files as databricks_files
    from tasks.targets.databricks.api import connect

    model = make_folder(scratch / "model", size)
    times: dict[str, list[float]] = {"plain": [], "upload": [], "download": []}
    memory = {"upload": 0.0, "download": 0.0}
    with process("--serve", scratch / "served") as told, process("--sink", scratch / "sink") as to:
        os.environ |= json.loads(told)
        workspace = connect()
        for number in range(rounds):
            target = f"/Volumes/main/default/models/{number}"
            back = scratch / "back"
            times["plain"].append(seconds(partial(send_plainly, model, int(to))))
            transfers = {
                "upload": partial(databricks_files.upload, workspace, model, target),
                "download": partial(databricks_files.download, workspace, target, back),
            }
            for name, transfer in transfers.items():
                with peak_mib() as peak:
                    times[name].append(seconds(transfer))
                memory[name] = max(memory[name], peak[0])
            shutil.rmtree(back)
            shutil.rmtree(scratch / "served" / "databricks" / target.lstrip("/"))
    return {"bytes": FILES * size, "times": times, "memory": memory}


def make_folder(folder: Path, size: int) -> Path:
    from tunewright.contract import rundir

    folder.mkdir()
    for number in range(FILES):
        with (folder / f"model-{number}.safetensors").open("wb") as file:
            for start in range(0, size, CHUNK):
                file.write(os.urandom(min(CHUNK, size - start)))
    rundir.seal(folder, {})
    return folder


def send_plainly(folder: Path, port: int) -> None:
    for path in sorted(folder.iterdir()):
        with socket.create_connection(("127.0.0.1", port)) as wire, path.open("rb") as file:
            while chunk := file.read(CHUNK):
                wire.sendall(chunk)
            wire.shutdown(socket.SHUT_WR)
            wire.recv(1)


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@contextmanager
def peak_mib() -> Iterator[list[float]]:
    """By how much this process grows at most within the block."""
    this, ended, peak = psutil.Process(), threading.Event(), [0.0]
    before = this.memory_info().rss

    def look() -> None:
        while not ended.wait(0.02):
            peak[0] = max(peak[0], (this.memory_info().rss - before) / (1 << 20))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield peak
    finally:
        ended.set()
        watcher.join()


def document(found: dict[str, Any]) -> dict[str, Any]:
    median = {name: statistics.median(values) for name, values in found["times"].items()}
    figures = {f"{name}_mb_per_s": found["bytes"] / 1e6 / s for name, s in median.items()}
    for name in ("upload", "download"):
        figures[f"{name}_to_plain"] = median["plain"] / median[name]
        figures[f"{name}_memory_mib"] = found["memory"][name]
    targets = {f"{name}_memory_mib": limit for name, limit in MEMORY_MIB.items()}
    return {
        "benchmark": "volumes",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"databricks-sdk": version("databricks-sdk")},
        "figures": {name: round(value, 2) for name, value in figures.items()},
        "targets": targets,
        "met": all(figures[name] <= limit for name, limit in targets.items()),
    }


def table(found: dict[str, Any]) -> list[str]:
    """The document for a reader."""
    lines = [f"volumes on {found['machine']}, {found['versions']}"]
    lines += [f"  {name:<24} {value:10.2f}" for name, value in found["figures"].items()]
    lines += [f"  target {name} <= {value}" for name, value in found["targets"].items()]
    return [*lines, f"  met: {found['met']}"]


if __name__ == "__main__":
    raise SystemExit(main())
