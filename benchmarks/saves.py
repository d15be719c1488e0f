"""What a checkpoint costs the training beside it, against one that training waits for.

    python benchmarks/saves.py [--json] [--quick] [--folder DISK]

Qwen2.5-3B's shape with random weights and AdamW's state (37 GB) on all GPUs of this machine, one
process each; without GPUs, or with --quick, a tiny shape on what is there. The project's own model,
trainer and checkpoints. In turn: how fast the disk takes files from all ranks; a first save, which
also takes the pinned memory; steps with a save begun every 1.5 times what the first took to write,
until the time is used up. Steps that a save was written beside are compared with the others, and
blocked seconds with those of a save that training waits for: the write of the first.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BLOCKED_S = 0.5
"""Longest that training may stand for a save after the first."""
INTERVAL = 1.5
LIMIT_S = 150.0
"""No round of steps is begun that would end later than this after the start."""
TRIAL_BYTES = 1 << 30
WRITE_S = 40.0
"""What one save may take for all of it to fit the limit; on a slower disk the model has fewer
layers, and the target is not held against it."""
STATE_BYTES = 37e9
QWEN = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 151936,
    "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
    "num_attention_heads": 16, "num_key_value_heads": 2, "max_position_embeddings": 32768,
    "tie_word_embeddings": True, "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip
TINY = {**QWEN, "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 2048,
        "num_hidden_layers": 4, "num_attention_heads": 4, "bos_token_id": 1,
        "eos_token_id": 2}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one document on stdout")
    parser.add_argument("--quick", action="store_true", help="a tiny shape, a few seconds")
    parser.add_argument("--folder", help="an existing folder on the disk to write to")
    args = parser.parse_args()
    if "RANK" in os.environ:
        measure(Path(args.folder), args.quick)
        return 0
    with tempfile.TemporaryDirectory(prefix="tunewright-saves-", dir=args.folder) as scratch:
        ranks = gpus_here() or 2
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
        command += ["--standalone", __file__, "--folder", scratch, *["--quick"] * args.quick]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=env, stdout=sys.stderr)
        found = json.loads((Path(scratch) / "found.json").read_text())
    print(json.dumps(found, indent=2)) if args.json else print("\n".join(table(found)))
    return 0 if found["met"] else 1


def gpus_here() -> int:
    import torch

    return torch.cuda.device_count()


def measure(folder: Path, quick: bool) -> None:
    """On every rank; rank 0 leaves the document in `folder`/found.json."""
    started = time.perf_counter()
    from tunewright.training.world import join

    world = join()
    tiny = quick or world.device.type == "cpu"
    with world.group():
        disk = disk_speed(folder, world, TRIAL_BYTES >> (6 if tiny else 0))
        tell(world, started, f"disk: {disk / 1e9:.2f} GB/s from {world.size} ranks together")
        shape = TINY if tiny else fitting(disk)
        checkpoints, trainer = prepared(folder, shape, world)
        with trainer.loader, checkpoints:
            rounds = Rounds(checkpoints, trainer, started, 12.0 if quick else LIMIT_S)
            rounds.run()
        if world.main:
            found = document(rounds, disk, world)
            (folder / "found.json").write_text(json.dumps(found))


def tell(world: Any, started: float, line: str) -> None:
    if world.main:
        print(f"[{time.perf_counter() - started:5.1f} s] {line}", flush=True)


def fitting(disk: float) -> dict[str, Any]:
    """The large shape, or as much of it as this disk takes in time."""
    layers = int(QWEN["num_hidden_layers"] * disk * WRITE_S / STATE_BYTES)
    return {**QWEN, "num_hidden_layers": max(1, min(layers, QWEN["num_hidden_layers"]))}


def disk_speed(folder: Path, world: Any, size: int) -> float:
    """Bytes a second that reach the disk when every rank writes a file of `size` bytes."""
    import torch.distributed as dist

    piece, path = os.urandom(16 << 20), folder / f"trial-{world.rank}"
    dist.barrier()
    began = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(size // len(piece)):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    slowest = max(world.gathered(time.perf_counter() - began))
    path.unlink()
    return world.size * size / slowest


def prepared(folder: Path, shape: dict[str, Any], world: Any) -> tuple[Any, Any]:
    """Checkpoints and a trainer of a model of this shape, over rows of random tokens."""
    from tunewright.contract.rundir import RunDir
    from tunewright.contract.settings import FsdpSettings
    from tunewright.training.batches import Loader
    from tunewright.training.checkpoint import Checkpoints
    from tunewright.training.model import BaseModel, build
    from tunewright.training.optimizer import adamw
    from tunewright.training.plan import Plan
    from tunewright.training.step import Trainer
    from tunewright.training.timing import Clock

    pack = 32 if shape is TINY else 4096
    base = BaseModel("a shape", None, folder / "base")
    settings = FsdpSettings(
        model_name=str(base.folder), dataset_name="none", init="random", pack_tokens=pack,
        max_length=pack, global_batch_tokens=4 * world.size * pack, max_steps=100_000,
        save_total_limit=1, compile=False, gradient_checkpointing=False,
    )  # fmt: skip
    store = world.on_main(lambda: random_rows(folder, shape, pack))
    model = build(base, settings, world)
    optimizer = adamw(model.parameters, settings)
    loader = Loader(store.train, Plan.of(settings, len(store.train)), 1, world, None)
    trainer = Trainer(model, optimizer, loader, Clock(world.device), settings.max_grad_norm)
    identity = {"data": store.fingerprint}
    run = RunDir(folder / "run")
    return Checkpoints(run, world, model, optimizer, base, identity, settings, None), trainer


def random_rows(folder: Path, shape: dict[str, Any], pack: int, packs: int = 64) -> Any:
    """A store of packs of one document each, all of it trained on; and the base model's folder."""
    import numpy as np

    from tunewright.data.store import SplitArrays, write_store

    (folder / "base").mkdir()
    (folder / "base" / "config.json").write_text(json.dumps(shape))
    ids = np.random.default_rng(0).integers(3, shape["vocab_size"], packs * pack)
    borders = np.arange(packs + 1)
    spans = np.tile(np.array([[1, pack]], dtype=np.uint32), (packs, 1))
    train = SplitArrays(
        ids.astype(np.uint32), borders * pack, borders[1:], spans, borders.copy(), borders.copy()
    )
    facts = {"pack_tokens": pack, "vocabulary": shape["vocab_size"]}
    facts["counts"] = {"train": {"rows": packs}}
    return write_store(folder / "tokens", "random", {"train": train}, facts)


@dataclass
class Rounds:
    """Steps with a save now and then. What rank 0 measured; all ranks take the same steps."""

    checkpoints: Any
    trainer: Any
    started: float
    limit_s: float
    beside: list[float] = field(default_factory=list)
    """Seconds of the steps that a save was written beside from start to end."""
    free: list[float] = field(default_factory=list)
    saves: list[Any] = field(default_factory=list)
    _step: int = 0

    def run(self) -> None:
        world = self.trainer.world
        for _ in range(3):
            self.step()
        tell(world, self.started, "warm")
        self.begin()
        self.saves += self.checkpoints.finish()
        self.tell("the first, waited for")
        # Long enough for steps without a save even where the write is quick.
        interval = max(INTERVAL * self.written_s, self.written_s + 2.0)
        self.round(interval)
        while self.agreed(time.perf_counter() - self.started + interval < self.limit_s):
            self.round(interval)
        self.saves += self.checkpoints.finish()

    def round(self, interval: float) -> None:
        """One save begun, and steps until it is sealed and the interval is over."""
        began, in_flight = time.perf_counter(), True
        self.begin()
        while self.agreed(in_flight or time.perf_counter() - began < interval):
            seconds = self.step()
            sealed = self.checkpoints.poll()
            if not sealed:
                (self.beside if in_flight else self.free).append(seconds)
                continue
            self.saves += sealed
            in_flight = False
            self.tell(f"beside {len(self.beside)} steps so far")

    def begin(self) -> None:
        from tunewright.training.checkpoint import Progress

        self.checkpoints.begin(Progress(step=self._step), finished=False)

    def step(self) -> float:
        """One step; its seconds, with the optimizer's kernels of the step before."""
        self._step += 1
        began = time.perf_counter()
        self.trainer.take(self._step, 1e-5)
        return time.perf_counter() - began

    def agreed(self, wish: bool) -> bool:
        """Whether any rank wishes it."""
        return bool(self.trainer.world.total(float(wish))[0])

    @property
    def written_s(self) -> float:
        """What the first save took without its copying and the taking of memory; of all ranks."""
        first = self.saves[0]
        return max(self.trainer.world.gathered(first.seconds - first.blocked))

    def tell(self, how: str) -> None:
        saved = self.saves[-1]
        line = f"saved in {saved.seconds:.1f} s, blocked {saved.blocked:.3f} s ({how})"
        tell(self.trainer.world, self.started, line)


def document(rounds: Rounds, disk: float, world: Any) -> dict[str, Any]:
    first, *later = rounds.saves
    size = sum(path.stat().st_size for path in tensor_files(rounds))
    beside, free = median(rounds.beside), median(rounds.free)
    waited = first.seconds - first.blocked
    blocked = max(saved.blocked for saved in later)
    figures = {
        "state_gb": size / 1e9,
        "disk_gb_per_s": disk / 1e9,
        "saves_after_the_first": len(later),
        "blocked_s_longest": blocked,
        "blocked_s_median": statistics.median(saved.blocked for saved in later),
        "blocked_s_first": first.blocked,
        "write_s_beside_training": statistics.median(s.seconds for s in later),
        "write_s_training_waits": waited,
        "write_gb_per_s_training_waits": size / 1e9 / waited,
        "step_s_without": free,
        "step_s_beside": beside,
        "step_s_beside_longest": max(rounds.beside, default=math.nan),
        "slowdown_beside_percent": 100 * (beside / free - 1),
        "steps_without": len(rounds.free),
        "steps_beside": len(rounds.beside),
        "waiting_to_blocked_ratio": waited / blocked,
        "total_s": time.perf_counter() - rounds.started,
    }
    full = world.device.type == "cuda" and size > 0.95 * STATE_BYTES
    return {
        "benchmark": "saves",
        "machine": machine(world),
        "versions": {"torch": version("torch")},
        "figures": {n: round(value, 4) for n, value in figures.items() if math.isfinite(value)},
        "targets": {"blocked_s_longest": BLOCKED_S} if full else {},
        "not_run": {} if full else {"blocked_s_longest": "needs GPUs and 37 GB of state"},
        "met": blocked <= BLOCKED_S if full else True,
    }


def median(values: list[float]) -> float:
    """Not a number where a write was too quick, or the time too short, for any such step."""
    return statistics.median(values) if values else math.nan


def tensor_files(rounds: Rounds) -> list[Path]:
    """The tensors' files of the newest checkpoint; each is as large as the others."""
    return list(rounds.saves[-1].path.glob("*.distcp"))


def machine(world: Any) -> str:
    import torch

    if world.device.type == "cpu":
        return f"{platform.machine()}, {os.cpu_count()} cores, {world.size} ranks"
    return f"{world.size} x {torch.cuda.get_device_name()}, {os.cpu_count()} cores"


def table(found: dict[str, Any]) -> list[str]:
    """The document for a reader."""
    lines = [f"saves on {found['machine']}, {found['versions']}"]
    lines += [f"  {name:<32} {value:10.3f}" for name, value in found["figures"].items()]
    for name, target in found["targets"].items():
        lines.append(f"  target {name} <= {target}: {'met' if found['met'] else 'missed'}")
    lines += [f"  not run: {name} ({why})" for name, why in found["not_run"].items()]
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
