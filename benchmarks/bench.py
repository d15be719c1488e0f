"""What the benchmarks of training steps share: the programs they start, the rows, the figures.

A recipe runs as users run it, in processes of its own, until enough steps are done; the figures
are those it writes into its events. What runs beside it is a program of its own too, which leaves
its figures in a file. Models have real shapes and random weights; rows have real lengths
(alpaca_lengths.txt) and random tokens, every one of which but a row's first is learnt.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import psutil

ROOT = Path(__file__).parents[1]
LENGTHS = Path(__file__).parent / "alpaca_lengths.txt"
PACK_TOKENS = 4096
WARM_UP = 2
_MEMORY = re.compile(r"([\d.]+) GiB")
_ERROR = re.compile(r"(out of memory|\b[\w.]*(Error|Exception|Lost)\b:|^error: )", re.IGNORECASE)


def arguments(doc: str | None, cases: Iterable[str]) -> argparse.ArgumentParser:
    """The words that these benchmarks take."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one document on stdout")
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--gpus", type=int, default=gpus_here(), help="how many to use")
    parser.add_argument("--only", nargs="*", choices=list(cases), help="cases to run")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="of the recipe")
    return parser


def gpus_here() -> int:
    import torch

    return torch.cuda.device_count()


class Runner:
    """Starts programs one after the other; what they need and leave lies in `scratch`.

    `gpus`: how many they use, 0 for the CPU. `more`: settings of the recipe, set by hand.
    """

    cpu_ranks = 1
    """Processes where there is no GPU."""

    def __init__(self, scratch: Path, gpus: int, steps: int, more: dict[str, str]) -> None:
        self.scratch = scratch
        self.gpus = gpus
        self.steps = steps
        self.more = more

    @property
    def ranks(self) -> int:
        """Processes: one for each GPU."""
        return self.gpus or self.cpu_ranks

    def attempt(self, case: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The figures of a case; one that fails says why, and the others still run."""
        say(f"{case} on {self.gpus or 'no'} GPUs")
        try:
            found = run()
        except RuntimeError as error:
            say(str(error))
            return {"failed": str(error)}
        say(json.dumps(found))
        return found

    def recipe(
        self,
        case: str,
        parameters: Mapping[str, Any],
        start: Callable[[str], subprocess.Popen[str]],
    ) -> dict[str, Any]:
        """Train until enough steps are done, then end it: nothing is saved, nothing exported.

        `start` is given the hyperparameters file. Nothing is set that the case does not set.
        """
        run = self.scratch / f"run-{case}-{time.time_ns()}"
        settings: dict[str, Any] = {
            "output_dir": str(run), "max_steps": 10_000, "save_steps": 10_000, **parameters
        }  # fmt: skip
        events = follow(
            start(self.hyperparameters(case, settings)), run / "events.jsonl", self.steps + WARM_UP
        )
        return recipe_figures(events, self.steps)

    def hyperparameters(self, name: str, parameters: Mapping[str, Any]) -> str:
        """The file of a run on random weights that holds nothing out, and what was set by hand."""
        settings = {
            "init": "random", "eval_steps": 10_000, "dataset_name": parameters["tokens_path"],
            **parameters, **self.more,
        }  # fmt: skip
        file = self.scratch / f"{name}.yaml"
        file.write_text(
            "".join(f"{k}: {v if k in self.more else json.dumps(v)}\n" for k, v in settings.items())
        )
        return str(file)

    def beside(self, script: str, *words: str | int, torchrun: bool = False) -> dict[str, Any]:
        """The figures that a script of this folder leaves in the file named by its last word."""
        result = self.scratch / f"{script}.json"
        command = [str(Path(__file__).parent / script), *map(str, words), str(result)]
        finish(self.torchrun(*command) if torchrun else self.python(*command))
        return dict(json.loads(result.read_text()))

    def torchrun(
        self, *command: str, ranks: range | None = None, where: Sequence[str] = ("--standalone",)
    ) -> subprocess.Popen[str]:
        """A node of torchrun, `where` among others; its processes are `ranks` (default: all)."""
        each = f"--nproc-per-node={len(ranks) if ranks else self.ranks}"
        words = ("-m", "torch.distributed.run", each, *where, *command)
        return self.python(*words, gpus=ranks)

    def python(
        self, *command: str, gpus: range | None = None, **variables: str
    ) -> subprocess.Popen[str]:
        """A program that sees these `gpus` (default: all that are used) and no others."""
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {
            **os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "4", "PYTHONUNBUFFERED": "1",
            **variables,
        }  # fmt: skip
        if self.gpus:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(self.gpus)))
            chosen = [visible.split(",")[place] for place in gpus or range(self.gpus)]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(chosen)
        return subprocess.Popen(
            [sys.executable, *command],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def model(self, case: str, config: Mapping[str, Any]) -> Path:
        """A folder with a configuration and nothing else."""
        folder = self.scratch / f"model-{case}"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    def store(
        self,
        vocabulary: int,
        batch_tokens: int,
        stretch: float = 1.0,
        pack_tokens: int = PACK_TOKENS,
    ) -> Path:
        """Rows enough for all steps; see make_store."""
        name = f"tokens-{vocabulary}-{stretch:g}"
        packs = -(-batch_tokens // pack_tokens) * (self.steps + WARM_UP + 2)
        if not (self.scratch / name).exists():
            make_store(self.scratch, name, vocabulary, packs, stretch, pack_tokens)
        return self.scratch / name


def make_store(
    folder: Path,
    name: str,
    vocabulary: int,
    packs: int,
    stretch: float = 1.0,
    pack_tokens: int = PACK_TOKENS,
) -> None:
    """Random ids in documents with the lengths of real rows, `stretch` times as long; every token
    but the first a label."""
    sys.path.insert(0, str(ROOT))
    from tunewright.data.packing import pack
    from tunewright.data.store import SplitArrays, compact, write_store

    draw = np.random.default_rng(0)
    known = (row_lengths() * stretch).astype(np.int64)
    lengths = draw.choice(known, packs * pack_tokens // int(known.mean()))
    order, offsets = pack(lengths, pack_tokens)
    lengths = lengths[order]
    spans = np.stack([np.ones_like(lengths), lengths], axis=1)
    arrays = SplitArrays(
        tokens=compact(draw.integers(3, vocabulary, int(lengths.sum()))),
        documents=np.concatenate([[0], np.cumsum(lengths)]),
        rows=np.arange(1, len(lengths) + 1),
        spans=spans,
        span_offsets=np.arange(len(lengths) + 1),
        packs=offsets,
    )
    counts = {"train": {"rows": len(lengths)}}
    write_store(
        folder, name, {"train": arrays},
        {"pack_tokens": pack_tokens, "vocabulary": vocabulary, "counts": counts},
    )  # fmt: skip


def row_lengths() -> np.ndarray[Any, np.dtype[np.int64]]:
    """Tokens of each of 999 real Alpaca rows."""
    return np.array(LENGTHS.read_text().split(), dtype=np.int64)


def follow(process: subprocess.Popen[str], events: Path, steps: int) -> list[dict[str, Any]]:
    """The events of a run, which is ended after so many steps.

    Those of steps also get the peak of memory that the line of their step tells.
    """
    assert process.stdout is not None
    lines: list[str] = []
    memory: list[float] = []
    for line in process.stdout:
        lines.append(line)
        if os.environ.get("TUNEWRIGHT_BENCHMARK_VERBOSE"):
            say(line.rstrip())
        if line.startswith("step "):
            told = _MEMORY.search(line)
            memory.append(float(told[1]) if told else 0.0)
        if len(memory) >= steps:
            break
    else:
        raise RuntimeError(f"{reason(lines)}\nthe recipe ended early:\n{''.join(lines[-60:])}")
    found = [json.loads(line) for line in events.read_text().splitlines()]
    for event, gib in zip((e for e in found if e["event"] == "step"), memory, strict=False):
        event["memory_gib"] = gib
    end(process)
    return found


def end(process: subprocess.Popen[str]) -> None:
    """In order; then whatever it has started and left, since that would keep its GPU's memory."""
    below = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=15)
    process.kill()
    for left in below:
        with suppress(psutil.NoSuchProcess):
            left.kill()
    process.wait()


def finish(process: subprocess.Popen[str]) -> None:
    said, _ = process.communicate()
    if process.returncode:
        lines = said.splitlines(keepends=True)
        raise RuntimeError(f"{reason(lines)}\n{process.args} failed:\n{said[-4000:]}")


def reason(lines: Iterable[str]) -> str:
    """The line in which a program says what it failed of, as well as that can be told."""
    found = [line.strip() for line in lines if _ERROR.search(line)]
    memory = [line for line in found if "out of memory" in line.lower()]
    return (memory or found or ["no reason was given"])[0][:400]


def recipe_figures(events: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """Medians over the steps after the warm-up; tokens are counted without padding."""
    start = events[0]
    taken = [e for e in events if e["event"] == "step"][WARM_UP:]
    ranks = start["world_size"]
    rates = [e["tokens"] / e["seconds"] / ranks for e in taken]
    speed = statistics.median(rates)
    phases = {
        name: statistics.median(e["seconds_by_phase"].get(name, 0.0) for e in taken)
        for name in taken[0]["seconds_by_phase"]
    }
    return {
        "tokens_per_second": speed,
        "spread": max(rates) / min(rates) - 1,
        "step_seconds": statistics.median(e["seconds"] for e in taken),
        "steps": len(taken),
        "ceiling_flops": 1e12 * (start["ceiling_tflops_per_gpu"] or 0.0),
        "model_flops": speed * flops_per_token(start),
        "start_up_seconds": start["seconds"],
        "to_third_step_seconds": taken[0]["time"] - start["time"],
        "peak_memory_gib": taken[-1]["memory_gib"],
        "adapter_parameters": start.get("adapter_parameters"),
        "phases": phases,
        "paths": start["fast_paths"],
        "memory": start["memory"],
    }


def flops_per_token(start: Mapping[str, Any]) -> float:
    """Forward and backward: three products for a weight that trains, two for a frozen one.

    What adapters add is left out: it is little, and depends on how they are applied.
    """
    products = 2 if "adapter_parameters" in start else 3
    return 2.0 * products * float(start["matmul_parameters"])


def document(
    benchmark: str,
    runner: Runner,
    found: Mapping[str, Mapping[str, Any]],
    more: Mapping[str, float],
    targets: Mapping[str, float],
    packages: Iterable[str] = (),
) -> dict[str, Any]:
    """What README.md describes. `found`: figures of each case; `more`: those between cases."""
    figures = {
        f"{case}_{name}": value
        for case, values in found.items()
        for name, value in values.items()
        if isinstance(value, int | float)
    } | dict(more)
    reached = {name: target for name, target in targets.items() if name in figures}
    return {
        "benchmark": benchmark,
        "machine": machine(),
        "versions": versions(packages),
        "gpus": runner.gpus,
        "figures": figures,
        "seconds_by_phase": {c: v["phases"] for c, v in found.items() if "phases" in v},
        "fast_paths": {c: v["paths"] for c, v in found.items() if "paths" in v},
        "memory": {c: v["memory"] for c, v in found.items() if v.get("memory")},
        "targets": reached,
        "not_run": sorted(targets.keys() - figures.keys()),
        "failed": {case: v["failed"] for case, v in found.items() if "failed" in v},
        "met": all(figures[name] >= target for name, target in reached.items())
        and not any("failed" in v for v in found.values()),
    }


def ratio(
    found: Mapping[str, Mapping[str, Any]], name: str, ours: str, theirs: str
) -> dict[str, float]:
    """{name: how many times as many tokens a second `ours` takes}, where both were measured."""
    speeds = [found.get(case, {}).get("tokens_per_second") for case in (ours, theirs)]
    return {name: speeds[0] / speeds[1]} if speeds[0] and speeds[1] else {}


def shown(found: dict[str, Any], as_json: bool) -> int:
    """Print a document, whole or as a table; the exit code."""
    print(json.dumps(found, indent=2)) if as_json else print("\n".join(table(found)))
    return 0 if found["met"] else 1


def machine() -> str:
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return f"{os.cpu_count()} cores, {platform.machine()}, no GPU"


def versions(more: Iterable[str] = ()) -> dict[str, str]:
    names = ("torch", "transformers", "torchao", "triton", *more)
    return dict(pair for name in names for pair in _found_version(name))


def _found_version(name: str) -> Iterator[tuple[str, str]]:
    try:
        yield name, version(name)
    except PackageNotFoundError:
        return


def table(found: dict[str, Any]) -> Iterator[str]:
    yield f"{found['machine']}, {found['versions']}, {found['gpus']} used"
    for name, value in found["figures"].items():
        target = found["targets"].get(name)
        wanted = "" if target is None else f"   (at least {target:,})"
        yield f"  {name:44} {value:>12,.4g}{wanted}"
    for case, phases in found["seconds_by_phase"].items():
        yield f"  {case}: " + ", ".join(f"{name} {s * 1000:,.0f} ms" for name, s in phases.items())
    for case, paths in found["fast_paths"].items():
        yield f"  {case}: {paths}"
    for case, chosen in found["memory"].items():
        yield f"  {case}: {chosen}"
    for case, why in found["failed"].items():
        yield f"  {case} failed: {why.splitlines()[0]}"
    yield f"met: {found['met']}"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
