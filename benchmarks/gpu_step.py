"""The training step on GPUs: our recipe, as users run it, against the hardware and a usual script.

    python benchmarks/gpu_step.py [--json] [--quick] [--gpus N] [--only CASE …]

Every case is a process group of its own under torchrun, on all GPUs of this machine or the first N.
The recipe is `torchrun -m tunewright.recipes.fsdp` with a hyperparameters file and nothing that is
not its default but the batch and the precision; the figures are those it writes into its events.
Model shapes are real ones with random weights. Rows have the lengths of 999 real Alpaca rows
(alpaca_lengths.txt), so that what a padded script wastes is what it wastes in life; every token is
learnt from, in both. Beside each recipe a large bf16 matrix product runs on all GPUs, before it and
after it.

Cases: llama (Llama-3.1-8B, bf16), fp8 (the same with precision: fp8), padded (rows padded to 1,024,
FSDP1, bf16 weights and states, recomputation: what the usual script does), qwen (Qwen2.5-3B).
Without GPUs `--quick` runs a tiny shape on the CPU, to see that all of it works.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
LENGTHS = Path(__file__).parent / "alpaca_lengths.txt"
PACK_TOKENS = 4096
BATCH_TOKENS = 131_072
"""The public example's: 16 GPUs x 4 rows x 2 accumulated x 1,024."""
WARM_UP = 2
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256,
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "rope_theta": 500000.0,
    "bos_token_id": 128000, "eos_token_id": 128001,
}  # fmt: skip
QWEN = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 151936,
    "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
    "num_attention_heads": 16, "num_key_value_heads": 2, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "rope_theta": 1000000.0,
    "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip
TINY = {**LLAMA, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
CASES = {"llama": LLAMA, "fp8": LLAMA, "padded": LLAMA, "qwen": QWEN}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one document on stdout")
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--gpus", type=int, default=gpus_here(), help="how many to use")
    parser.add_argument("--only", nargs="*", choices=CASES, help="cases to run")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="of the recipe")
    args = parser.parse_args()
    chosen = args.only or default_cases(args.gpus)
    more = dict(pair.split("=", 1) for pair in args.set)
    with tempfile.TemporaryDirectory(prefix="tunewright-gpu-step-") as scratch:
        bench = Bench(Path(scratch), args.gpus, steps=4 if args.quick else 10, more=more)
        found = bench.document({case: bench.attempt(case) for case in chosen})
    print(json.dumps(found, indent=2)) if args.json else print("\n".join(table(found)))
    return 0 if found["met"] else 1


def gpus_here() -> int:
    import torch

    return torch.cuda.device_count()


def default_cases(gpus: int) -> list[str]:
    return ["llama", "qwen"] if gpus < 2 else ["llama", "padded", "fp8"]


class Bench:
    """Runs cases one after the other in a folder of their own."""

    def __init__(self, scratch: Path, gpus: int, steps: int, more: dict[str, str]) -> None:
        self.scratch = scratch
        self.gpus = gpus
        self.steps = steps
        self.more = more
        self._product: float | None = None

    def attempt(self, case: str) -> dict[str, Any]:
        """A case that fails says why, and leaves its targets unmet; the others still run."""
        try:
            return self.run(case)
        except RuntimeError as error:
            say(str(error))
            return {"failed": str(error)}

    def run(self, case: str) -> dict[str, Any]:
        """The figures of one case, with the matrix product before and after it."""
        say(f"{case} on {self.gpus or 'no'} GPUs")
        before = self._product or self._matmul()
        found = self._padded() if case == "padded" else self._recipe(case)
        # Also the one before the next case, which follows at once.
        after = self._product = self._matmul()
        product = (before + after) / 2
        return {**found, "product_before": before, "product_after": after, "product": product}

    def document(self, found: dict[str, dict[str, Any]]) -> dict[str, Any]:
        figures: dict[str, float] = {}
        for case, values in found.items():
            for name, value in values.items():
                if isinstance(value, int | float):
                    figures[f"{case}_{name}"] = value
            if "model_flops" in values:
                figures[f"{case}_share"] = values["model_flops"] / values["product"]
        speeds = {case: v.get("tokens_per_second") for case, v in found.items()}
        for name, ours, theirs in (
            ("llama_over_padded", "llama", "padded"),
            ("fp8_over_bf16", "fp8", "llama"),
        ):
            if speeds.get(ours) and speeds.get(theirs):
                figures[name] = speeds[ours] / speeds[theirs]
        targets = {k: v for k, v in self._targets().items() if k in figures}
        return {
            "benchmark": "gpu_step",
            "machine": machine(),
            "versions": versions(),
            "gpus": self.gpus,
            "figures": figures,
            "seconds_by_phase": {c: v["phases"] for c, v in found.items() if "phases" in v},
            "fast_paths": {c: v["paths"] for c, v in found.items() if "paths" in v},
            "targets": targets,
            "not_run": sorted(self._targets().keys() - figures.keys()),
            "failed": {case: v["failed"] for case, v in found.items() if "failed" in v},
            "met": all(figures[name] >= target for name, target in targets.items())
            and not any("failed" in v for v in found.values()),
        }

    def _targets(self) -> dict[str, float]:
        if self.gpus == 1:
            return {"llama_tokens_per_second": 8_500, "qwen_tokens_per_second": 24_000}
        if self.gpus == 2:
            return {"llama_over_padded": 9, "llama_share": 0.69, "fp8_over_bf16": 1.12}
        return {}

    def _recipe(self, case: str) -> dict[str, Any]:
        """Train until enough steps are done, then end it: nothing is saved, nothing exported."""
        model, store = self._model(case), self._store(case)
        run = self.scratch / f"run-{case}-{time.time_ns()}"
        parameters: dict[str, Any] = {
            "model_name": str(model), "init": "random", "dataset_name": str(store),
            "tokens_path": str(store), "output_dir": str(run), "max_steps": 10_000,
            "global_batch_tokens": self._batch(), "save_steps": 10_000, "eval_steps": 10_000,
            "pack_tokens": PACK_TOKENS, "max_length": 1024,
            **({"precision": "fp8"} if case == "fp8" else {}), **self.more,
        }  # fmt: skip
        file = self.scratch / f"{case}.yaml"
        file.write_text(
            "".join(
                f"{k}: {json.dumps(v) if isinstance(v, str) and k not in self.more else v}\n"
                for k, v in parameters.items()
            )
        )
        process = self.torchrun("-m", "tunewright.recipes.fsdp", str(file))
        events = follow(process, run / "events.jsonl", self.steps + WARM_UP)
        return recipe_figures(events, self.steps)

    def _padded(self) -> dict[str, Any]:
        result = self.scratch / "padded.json"
        process = self.torchrun(
            str(Path(__file__).parent / "padded_fsdp1.py"), str(self._model("padded")),
            str(LENGTHS), str(result), str(self.steps),
        )  # fmt: skip
        finish(process)
        return dict(json.loads(result.read_text()))

    def _matmul(self) -> float:
        """FLOP/s of one GPU, mean over all of them at once."""
        result = self.scratch / "matmul.json"
        finish(self.torchrun(str(Path(__file__).parent / "matmul.py"), str(result)))
        return float(json.loads(result.read_text())["flops"])

    def torchrun(self, *command: str) -> subprocess.Popen[str]:
        each = max(1, self.gpus)
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "4"}
        if self.gpus:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(self.gpus)))
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[: self.gpus])
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={each}",
             "--standalone", *command],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def _model(self, case: str) -> Path:
        folder = self.scratch / f"model-{case}"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self._config(case)))
        return folder

    def _config(self, case: str) -> dict[str, Any]:
        return CASES[case] if self.gpus else TINY

    def _batch(self) -> int:
        return BATCH_TOKENS if self.gpus else 4 * PACK_TOKENS

    def _store(self, case: str) -> Path:
        vocabulary = self._config(case)["vocab_size"]
        name = f"tokens-{vocabulary}"
        if not (self.scratch / name).exists():
            make_store(self.scratch, name, vocabulary, packs=32 * (self.steps + WARM_UP + 2))
        return self.scratch / name


def make_store(folder: Path, name: str, vocabulary: int, packs: int) -> None:
    """Random ids in documents with the lengths of real rows; every token but the first a label."""
    sys.path.insert(0, str(ROOT))
    from tunewright.data.packing import pack
    from tunewright.data.store import SplitArrays, compact, write_store

    draw = np.random.default_rng(0)
    known = np.array(LENGTHS.read_text().split(), dtype=np.int64)
    lengths = draw.choice(known, packs * PACK_TOKENS // int(known.mean()))
    order, offsets = pack(lengths, PACK_TOKENS)
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
        {"pack_tokens": PACK_TOKENS, "vocabulary": vocabulary, "counts": counts},
    )  # fmt: skip


def follow(process: subprocess.Popen[str], events: Path, steps: int) -> list[dict[str, Any]]:
    """The events of a run, which is ended after so many steps."""
    assert process.stdout is not None
    lines, done = [], 0
    for line in process.stdout:
        lines.append(line)
        if os.environ.get("TUNEWRIGHT_BENCHMARK_VERBOSE"):
            say(line.rstrip())
        done += line.startswith("step ")
        if done >= steps:
            break
    else:
        raise RuntimeError(f"the recipe ended early:\n{''.join(lines[-60:])}")
    found = [json.loads(line) for line in events.read_text().splitlines()]
    process.send_signal(signal.SIGTERM)
    try:
        process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return found


def finish(process: subprocess.Popen[str]) -> None:
    said, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{process.args} failed:\n{said[-4000:]}")


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
        "model_flops": speed * 6 * start["matmul_parameters"],
        "start_up_seconds": start["seconds"],
        "to_third_step_seconds": taken[0]["time"] - start["time"],
        "peak_memory_gib": taken[-1].get("memory_gib", 0.0),
        "phases": phases,
        "paths": start["fast_paths"],
    }


def machine() -> str:
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return f"{os.cpu_count()} cores, {platform.machine()}, no GPU"


def versions() -> dict[str, str]:
    names = ("torch", "transformers", "torchao", "triton")
    return dict(pair for name in names for pair in found_version(name))


def found_version(name: str) -> Iterator[tuple[str, str]]:
    try:
        yield name, version(name)
    except PackageNotFoundError:
        return


def table(found: dict[str, Any]) -> Iterator[str]:
    yield f"{found['machine']}, {found['versions']}, {found['gpus']} used"
    for name, value in found["figures"].items():
        target = found["targets"].get(name)
        wanted = "" if target is None else f"   (at least {target:,})"
        yield f"  {name:34} {value:>20,.4g}{wanted}"
    for case, phases in found["seconds_by_phase"].items():
        yield f"  {case}: " + ", ".join(f"{name} {s * 1000:,.0f} ms" for name, s in phases.items())
        yield f"  {case}: {found['fast_paths'][case]}"
    for case, reason in found["failed"].items():
        yield f"  {case} failed: {reason.splitlines()[0]}"
    yield f"met: {found['met']}"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
