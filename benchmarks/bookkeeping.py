"""What our own work of a step costs the CPU, on 1 to 8 ranks; nobody's model or kernels.

    python benchmarks/bookkeeping.py [--json] [--quick]

On each number of gloo ranks the steps of a plan are gone through with everything of the recipe but
the model: plan, micro-batches, counts, loader, learning rate, the agreement of the ranks, journal,
deadline. A rank's part of a step is always four packs, so the batch grows with the ranks. CPU time
of rank 0's process, its loader's thread included, is what is counted; on this machine's few cores
wall time would count waiting. Beside it stands an all-reduce of three numbers alone, the one
collective among these: gloo's part of the whole.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import PACK_TOKENS, make_store, versions

ROOT = Path(__file__).parents[1]
RANKS = (1, 2, 4, 8)
PACKS_EACH = 4
MOST_GROWTH = 1.5
"""Of eight ranks over one, without the collective: flat, but for noise."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one document on stdout")
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    steps = 100 if args.quick else 400
    if "RANK" in os.environ:
        measure(args.folder, steps)
        return 0
    with tempfile.TemporaryDirectory(prefix="tunewright-bookkeeping-") as scratch:
        make_store(Path(scratch), "tokens", 512, packs=2 * PACKS_EACH * max(RANKS))
        found = document({n: on_ranks(Path(scratch), n, args.quick) for n in RANKS})
    print(json.dumps(found, indent=2)) if args.json else print("\n".join(table(found)))
    return 0 if found["met"] else 1


def on_ranks(scratch: Path, ranks: int, quick: bool) -> dict[str, float]:
    """CPU milliseconds a step of rank 0."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    command += ["--standalone", __file__, "--folder", str(scratch), *["--quick"] * quick]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)
    return dict(json.loads((scratch / "found.json").read_text()))


def measure(folder: Path, steps: int) -> None:
    """On every rank; rank 0 leaves what it measured in `folder`/found.json."""
    from tunewright.contract.settings import FsdpSettings
    from tunewright.data.store import TokenStore
    from tunewright.training.batches import Loader
    from tunewright.training.journal import Journal
    from tunewright.training.plan import Plan
    from tunewright.training.schedule import learning_rate
    from tunewright.training.step import StepResult
    from tunewright.training.stopping import Stopping
    from tunewright.training.world import join

    world = join()
    settings = FsdpSettings(
        model_name="./none", dataset_name="./none", max_steps=steps + 1,
        global_batch_tokens=PACKS_EACH * PACK_TOKENS * world.size,
    )  # fmt: skip
    store = TokenStore.open(folder / "tokens")
    plan = Plan.of(settings, len(store.train))
    stopping = Stopping.of_environment()
    with world.group(), Journal(folder / "events.jsonl", world, 1, 1) as journal:
        with Loader(store.train, plan, 1, world, None) as loader:

            def step(number: int) -> None:
                rate = learning_rate(settings, number, plan.steps)
                tokens, supervised = loader.counts(number)
                with journal.clock.phase("data"):
                    loader.batches(number)
                world.total(1.0, 1.0, float(stopping.wanted(1.0)))
                journal.stepped(number, rate, StepResult(1.0, 1.0, tokens, supervised))

            all_of_it = cpu_ms(step, steps)
        collective = cpu_ms(lambda _: world.total(1.0, 1.0, 0.0), steps)
    if world.main:
        found = {"step_ms": all_of_it, "collective_ms": collective}
        (folder / "found.json").write_text(json.dumps(found))


def cpu_ms(work: Any, steps: int) -> float:
    """CPU milliseconds of this process for each call, after one that warms up."""
    work(1)
    begun = time.process_time()
    for number in range(2, steps + 2):
        work(number)
    return 1000 * (time.process_time() - begun) / steps


def document(found: dict[int, dict[str, float]]) -> dict[str, Any]:
    figures: dict[str, float] = {}
    for ranks, values in found.items():
        figures |= {f"ranks_{ranks}_{name}": round(v, 3) for name, v in values.items()}
        own = values["step_ms"] - values["collective_ms"]
        figures[f"ranks_{ranks}_own_ms"] = round(own, 3)
    first, last = (figures[f"ranks_{n}_own_ms"] for n in (RANKS[0], RANKS[-1]))
    figures["growth"] = round(last / first, 3)
    return {
        "benchmark": "bookkeeping",
        "machine": f"{os.cpu_count()} cores",
        "versions": versions(),
        "figures": figures,
        "targets": {"growth": MOST_GROWTH},
        "met": figures["growth"] <= MOST_GROWTH,
    }


def table(found: dict[str, Any]) -> list[str]:
    figures = found["figures"]
    lines = ["ranks   CPU ms a step and rank   of it the collective   our own"]
    for ranks in RANKS:
        step, collective, own = (
            figures[f"ranks_{ranks}_{name}"] for name in ("step_ms", "collective_ms", "own_ms")
        )
        lines.append(f"{ranks:5} {step:24.2f} {collective:22.2f} {own:9.2f}")
    growth = f"growth from 1 to 8: {figures['growth']:.2f} (at most {MOST_GROWTH})"
    return [*lines, growth, f"met: {found['met']}"]


if __name__ == "__main__":
    sys.exit(main())
