"""The fast paths on a GPU against the plain ones: the same losses, up to rounding?

    python benchmarks/exactness.py MODEL_FOLDER TOKENS [--json] [--steps 100]

The recipe trains MODEL_FOLDER on a token store three times on one GPU, in bf16 with the same seed:
with its fast paths; in the plain way (attention with a mask, whole logits, nothing compiled); and
in the plain way again, with micro-batches of twice the size, which changes nothing but the order of
sums. How far the two plain runs are apart is the noise of bf16; the fast one must not be further
from a plain one than that, by the mean over all steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import Runner, follow, machine, versions

ROOT = Path(__file__).parents[1]
MOST = 1.5
"""Distances to the plain run, in those between the two plain runs; two samples of one noise differ
by chance as well."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, help="folder of a Hugging Face model")
    parser.add_argument("tokens", type=Path, help="sealed tokens for it")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", action="store_true", help="one document on stdout")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tunewright-exactness-") as scratch:
        bench = Runner(Path(scratch), gpus=1, steps=args.steps, more={})
        pack = json.loads((args.tokens / "manifest.json").read_text())["pack_tokens"]
        runs = {
            "fast": losses(bench, args, pack, tokens_per_device=pack),
            "plain": losses(bench, args, pack, tokens_per_device=pack, plain=True),
            "again": losses(bench, args, pack, tokens_per_device=2 * pack, plain=True),
        }
    found = document(runs)
    print(json.dumps(found, indent=2)) if args.json else print("\n".join(table(found)))
    return 0 if found["met"] else 1


def losses(bench: Runner, args: argparse.Namespace, pack: int, **more: Any) -> list[float]:
    """The loss of each step of one run."""
    folder = bench.scratch / "-".join(f"{k}-{v}" for k, v in more.items())
    has_weights = any(args.model.glob("*.safetensors"))
    parameters = {
        "model_name": str(args.model.absolute()), "dataset_name": str(args.tokens.absolute()),
        "tokens_path": str(args.tokens.absolute()), "output_dir": str(folder),
        "init": "pretrained" if has_weights else "random", "max_steps": args.steps + 1,
        "global_batch_tokens": 4 * pack, "pack_tokens": pack, "learning_rate": 1e-4,
        "precision": "bf16", "gradient_checkpointing": False, "save_steps": 10_000,
        "eval_steps": 10_000, **more,
    }  # fmt: skip
    file = bench.scratch / f"{folder.name}.json"  # JSON is YAML, too
    file.write_text(json.dumps(parameters))
    process = bench.torchrun("-m", "tunewright.recipes.fsdp", str(file))
    events = follow(process, folder / "events.jsonl", args.steps)
    return [e["loss"] for e in events if e["event"] == "step"][: args.steps]


def document(runs: dict[str, list[float]]) -> dict[str, Any]:
    noise = apart(runs["plain"], runs["again"])
    ours = [apart(runs["fast"], runs[name]) for name in ("plain", "again")]
    figures = {
        "steps": len(runs["fast"]),
        "first_loss": runs["fast"][0],
        "last_loss": runs["fast"][-1],
        "last_loss_plain": runs["plain"][-1],
        "plain_to_plain": noise,
        "fast_to_plain": min(ours),
        "fast_to_plain_in_noises": min(ours) / noise,
    }
    return {
        "benchmark": "exactness",
        "machine": machine(),
        "versions": versions(),
        "figures": figures,
        "targets": {"fast_to_plain_in_noises": MOST},
        "met": min(ours) <= MOST * noise,
    }


def apart(one: list[float], other: list[float]) -> float:
    """Mean distance of two runs' losses."""
    return statistics.fmean(abs(a - b) for a, b in zip(one, other, strict=True))


def table(found: dict[str, Any]) -> list[str]:
    lines = [f"{found['machine']}, {found['versions']}"]
    lines += [f"  {name:28} {value:14,.6g}" for name, value in found["figures"].items()]
    return [*lines, f"met: {found['met']}"]


if __name__ == "__main__":
    sys.exit(main())
