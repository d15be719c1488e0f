"""The recipe fsdp on more and more GPUs: its speed, two nodes against one, resuming on fewer.

    python benchmarks/scaling.py [--json] [--quick] [--gpus N] [--only CASE …]

Cases:
  speed   Llama-3.1-8B shape on 1, 2, 4, … up to N GPUs: the rate of each GPU against that of each
          of two, and one traced step: how long collectives run while nothing is computed
  padded  the usual script on all N (padded_fsdp1.py)
  nodes   the same steps as one node of N GPUs and as two nodes of N/2, each with an agent of its
          own that sees only its GPUs: the losses of both, and the rates
  resume  steps on N GPUs with a checkpoint in the middle, then from there on N, N/2 and N/4: the
          losses of each against the first, and how many tokens each step took

Shapes and rows are those of gpu_step.py; nodes and resume take a smaller model, since checkpoints
are written. Without GPUs everything runs tiny on eight processes, to see that all of it works.
"""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bench import (
    LENGTHS,
    PACK_TOKENS,
    ROOT,
    WARM_UP,
    Runner,
    arguments,
    document,
    finish,
    follow,
    ratio,
    recipe_figures,
    shown,
)
from gpu_step import BATCH_TOKENS, LLAMA, TINY

SMALL = {**LLAMA, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8,
         "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32000,
         "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
CASES = ("speed", "padded", "nodes", "resume")
SAVED, STEPS = 4, 8
"""Of the cases that compare losses: when they save, and when they end."""


def main() -> int:
    args = arguments(__doc__, CASES).parse_args()
    more = dict(pair.split("=", 1) for pair in args.set)
    with tempfile.TemporaryDirectory(prefix="tunewright-scaling-") as scratch:
        bench = Bench(Path(scratch), args.gpus, steps=4 if args.quick else 10, more=more)
        found: dict[str, dict[str, Any]] = {}
        for case in args.only or CASES:
            found |= getattr(bench, case)()
        return shown(bench.document(found), args.json)


class Bench(Runner):
    cpu_ranks = 8

    def speed(self) -> dict[str, dict[str, Any]]:
        counts = [n for n in (1, 2, 4, 8) if n <= self.ranks]
        return {
            f"on_{n}": self.attempt(f"speed, {n} ranks", lambda n=n: self._speed(n)) for n in counts
        }

    def padded(self) -> dict[str, dict[str, Any]]:
        if not self.gpus:
            return {}  # it has no way to run without
        folder = str(self.model("llama", LLAMA))
        words = ("padded_fsdp1.py", folder, str(LENGTHS), self.steps)
        return {"padded": self.attempt("padded", lambda: self.beside(*words, torchrun=True))}

    def nodes(self) -> dict[str, dict[str, Any]]:
        """Two nodes against one: {"nodes": {"losses_apart", rates}}."""
        return {"nodes": self.attempt("nodes", self._nodes)}

    def resume(self) -> dict[str, dict[str, Any]]:
        return {"resume": self.attempt("resume", self._resume)}

    def document(self, found: dict[str, dict[str, Any]]) -> dict[str, Any]:
        most = f"on_{self.ranks}"
        more = {
            **ratio(found, f"{most}_over_2", most, "on_2"),
            **ratio(found, f"{most}_over_padded", most, "padded"),
        }
        targets = {"on_8_over_2": 0.97} if self.gpus == 8 else {}
        return document("scaling", self, found, more, targets)

    def _speed(self, ranks: int) -> dict[str, Any]:
        """The figures of untraced steps, and what the trace of one more says of collectives."""
        traced = WARM_UP + self.steps + 1
        parameters = self._parameters(LLAMA if self.gpus else TINY, f"speed-{ranks}")
        parameters |= {"max_steps": 10_000, "profile_steps": f"{traced}-{traced}"}
        process = self._start(parameters, range(ranks))
        # One step more than the traced one: the trace is written by then.
        run = Path(parameters["output_dir"])
        events = follow(process, run / "events.jsonl", traced + 1)
        figures = recipe_figures([e for e in events if e["step"] < traced], self.steps)
        (trace,) = run.rglob("trace-steps-*.json.gz")
        return {**figures, **exposed(trace)}

    def _nodes(self) -> dict[str, Any]:
        model = SMALL if self.gpus else TINY
        one = self._parameters(model, "one-node")
        two = self._parameters(model, "two-nodes")
        finish(self._start(one, range(self.ranks)))
        half = self.ranks // 2
        sys.path.insert(0, str(ROOT))
        from tasks.targets.local import free_port

        where = ("--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}")
        parts = (range(half), range(half, self.ranks))
        agents = [
            self._start(two, part, *where, f"--node-rank={node}") for node, part in enumerate(parts)
        ]
        for agent in agents:
            finish(agent)
        single, double = steps_of(one), steps_of(two)
        return {
            "losses_apart": apart(single, double),
            "one_tokens_per_second": rate(single) / self.ranks,
            "two_tokens_per_second": rate(double) / self.ranks,
        }

    def _resume(self) -> dict[str, Any]:
        model = SMALL if self.gpus else TINY
        straight = self._parameters(model, "straight")
        finish(self._start(straight, range(self.ranks)))
        expected = steps_of(straight)[SAVED:]
        found: dict[str, Any] = {}
        for ranks in filter(None, (self.ranks, self.ranks // 2, self.ranks // 4)):
            again = self._parameters(model, f"resumed-{ranks}")
            begin_at(SAVED, Path(straight["output_dir"]), Path(again["output_dir"]))
            finish(self._start(again, range(ranks)))
            steps = steps_of(again)
            found[f"on_{ranks}_losses_apart"] = apart(expected, steps)
            tokens = [[step["tokens"] for step in run] for run in (expected, steps)]
            found[f"on_{ranks}_same_tokens"] = float(tokens[0] == tokens[1])
        return found

    def _parameters(self, model: Mapping[str, Any], name: str) -> dict[str, Any]:
        batch = BATCH_TOKENS if self.gpus else self.cpu_ranks * PACK_TOKENS
        tokens = str(self.store(model["vocab_size"], batch))
        return {
            "model_name": str(self.model(f"{model['hidden_size']}", model)), "tokens_path": tokens,
            "global_batch_tokens": batch, "pack_tokens": PACK_TOKENS, "max_length": 1024,
            "max_steps": STEPS, "save_steps": SAVED, "save_total_limit": 9,
            # Steps so large that another order of sums shows in the losses of the next ones.
            "learning_rate": 1e-3, "warmup_ratio": 0.0,
            "output_dir": str(self.scratch / name),
        }  # fmt: skip

    def _start(
        self, parameters: Mapping[str, Any], ranks: range, *where: str
    ) -> subprocess.Popen[str]:
        """A node whose processes are these ranks, on their GPUs and no others."""
        file = self.hyperparameters(Path(parameters["output_dir"]).name, parameters)
        words = ("-m", "tunewright.recipes.fsdp", file)
        return self.torchrun(*words, ranks=ranks, where=where or ("--standalone",))


def exposed(trace: Path) -> dict[str, float]:
    """Of a traced step on a GPU: the seconds that collectives run, and that they run alone.

    A collective that waits for another rank runs while it waits, so a rank's own delays count.
    """
    with gzip.open(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    kernels = [e for e in events if e.get("cat") == "kernel"]
    if not kernels:
        return {}
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for kernel in kernels:
        begin = float(kernel["ts"])
        spans["nccl" in kernel["name"].lower()].append((begin, begin + float(kernel["dur"])))
    either = length([*spans[True], *spans[False]])
    return {
        "traced_collectives_seconds": length(spans[True]) / 1e6,
        "traced_exposed_seconds": (either - length(spans[False])) / 1e6,
        "traced_busy_seconds": either / 1e6,
    }


def length(spans: Iterable[tuple[float, float]]) -> float:
    """What spans cover together, those that overlap once."""
    covered, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        covered += max(0.0, last - max(first, end))
        end = max(end, last)
    return covered


def steps_of(parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The step events of a run."""
    path = Path(parameters["output_dir"]) / "events.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    return [event for event in events if event["event"] == "step"]


def apart(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> float:
    """The largest relative difference of the losses of the same steps."""
    pairs = list(zip(one, other, strict=True))
    assert all(a["step"] == b["step"] for a, b in pairs)
    return max(abs(a["loss"] - b["loss"]) / abs(a["loss"]) for a, b in pairs)


def rate(steps: list[dict[str, Any]]) -> float:
    """Tokens a second of all ranks after the warm-up, without the steps that a save is beside."""
    taken = steps[WARM_UP:SAVED]
    return sum(step["tokens"] for step in taken) / sum(step["seconds"] for step in taken)


def begin_at(step: int, source: Path, target: Path) -> None:
    """A run that has one checkpoint of another."""
    place = f"step-{step:08d}"
    shutil.copytree(source / "checkpoints" / place, target / "checkpoints" / place)


if __name__ == "__main__":
    sys.exit(main())
