"""What it takes to make a model folder's weights out of a sharded checkpoint.

    python benchmarks/checkpoint.py [--json] [--quick] [--disk DIR]

Four gloo processes write a checkpoint of a Llama-shaped model of random fp32 numbers (3.2 GB; with
--quick 0.4 GB) as DTensors cut along the first dimension. Then, each time in a fresh process whose
imports are done before the clock starts, and with hashing and fsync:

    disk    `write_weights`, without a cast, against a plain sequential write of as many random
            bytes with one fsync: five pairs, in turn, each side first in every other one. The
            checkpoint is in memory as it is after training; DIR (default: the folder for temporary
            files) says which disk
    tmpfs   `write_weights` against torch's `dcp_to_torch_save` on /dev/shm, and beside them torch's
            `consolidate_safetensors_files` with one file and thread, and with four

Every tensor of the outputs is compared with torch's, the one cast to bfloat16 included. Growth of
memory is the peak of the process over what it held when the clock started.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RANKS = 4
TMPFS = Path("/dev/shm")
PAIRS, QUICK_PAIRS = 5, 3
COPIES_IN_MEMORY = 5
"""Checkpoints and outputs that are in memory at once, those of torch's programs included."""
LAYERS, QUICK_LAYERS = 14, 1
VOCABULARY, QUICK_VOCABULARY = 32_000, 12_000
HIDDEN, FEED_FORWARD, KEY_VALUE = 2048, 5632, 1024
AT_LEAST = {
    "share_of_disk_speed": 0.7,
    "faster_than_dcp_to_torch_save": 4.0,
    "bit_equal": 1.0,
}
AT_MOST = {"growth_mib": 200.0}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one document on stdout")
    parser.add_argument("--quick", action="store_true", help="a model of 0.4 GB, three pairs")
    parser.add_argument("--disk", type=Path, help="folder on the disk to measure")
    parser.add_argument("--program", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.program:
        name, *words = args.program
        print(json.dumps(PROGRAMS[name](*words)))
        return 0
    found = measure(args)
    print(json.dumps(found, indent=2)) if args.json else print("\n".join(table(found)))
    return 0 if found["met"] else 1


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All figures, as one document."""
    figures, not_run = cpu_figures(args)
    found = document(figures, not_run)
    return with_saves(found, args) if shutil.which("nvidia-smi") else found


def with_saves(found: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Where there are GPUs, what a save costs the training beside it: saves.py, with targets."""
    command = [sys.executable, str(Path(__file__).with_name("saves.py")), "--json"]
    command += ["--quick"] * args.quick + (["--folder", str(args.disk)] if args.disk else [])
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    saves = json.loads(said.stdout)
    for name in ("figures", "targets", "not_run"):
        found[name] |= saves.get(name, {})
    return {**found, "met": found["met"] and saves["met"]}


def cpu_figures(args: argparse.Namespace) -> tuple[dict[str, float], dict[str, str]]:
    """What needs no GPU: {name: figure}, and {name of a target: why it was not run}."""
    with tempfile.TemporaryDirectory(prefix="tunewright-benchmark-", dir=args.disk) as scratch:
        figures = on_disk(Path(scratch), args.quick)
    needed = COPIES_IN_MEMORY * figures["gigabytes"]
    if room_in_memory() < needed * 1e9:
        return figures, {
            name: f"needs {needed:.0f} GB of free memory in {TMPFS}"
            for name in ("faster_than_dcp_to_torch_save", "bit_equal")
        }
    with tempfile.TemporaryDirectory(prefix="tunewright-benchmark-", dir=TMPFS) as scratch:
        figures |= on_tmpfs(Path(scratch), args.quick)
    return figures, {}


def room_in_memory() -> int:
    """Bytes that fit in the file system in memory, and in memory."""
    import psutil

    room = shutil.disk_usage(TMPFS).free if TMPFS.is_dir() else 0
    return int(min(room, psutil.virtual_memory().available))


def on_disk(scratch: Path, quick: bool) -> dict[str, float]:
    """Pairs of our export and a plain write of as many bytes."""
    checkpoint = make_checkpoint(scratch, "dcp", quick)
    shares, ours, plain, growth = [], [], [], []
    for pair in range(QUICK_PAIRS if quick else PAIRS):
        sides: dict[str, Any] = {}
        for side in ("ours", "plain") if pair % 2 else ("plain", "ours"):
            shutil.rmtree(scratch / side, ignore_errors=True)
            settle(checkpoint)
            words = (checkpoint, "float32") if side == "ours" else (size_of(checkpoint),)
            sides[side] = run_program(side, scratch / side, *words)
        shares.append(sides["plain"]["seconds"] / sides["ours"]["seconds"])
        ours.append(size_of(scratch / "ours") / sides["ours"]["seconds"] / 1e9)
        plain.append(size_of(scratch / "plain") / sides["plain"]["seconds"] / 1e9)
        growth.append(sides["ours"]["growth_mib"])
    return {
        "gigabytes": size_of(scratch / "ours") / 1e9,
        "disk_ours_gb_s": statistics.median(ours),
        "disk_plain_gb_s": statistics.median(plain),
        "share_of_disk_speed": statistics.median(shares),
        "share_of_disk_speed_least": min(shares),
        "share_of_disk_speed_most": max(shares),
        "growth_mib": max(growth),
    }


def on_tmpfs(scratch: Path, quick: bool) -> dict[str, float]:
    """Medians of seconds of ours and torch's programs in turn; and whether all bits are equal."""
    checkpoint, sharded = (make_checkpoint(scratch, kind, quick) for kind in ("dcp", "hf"))
    jobs: dict[str, tuple[str, tuple[Any, ...]]] = {
        "dcp_to_torch_save": ("dcp_to_torch_save", (checkpoint,)),
        "consolidate_1_thread": ("consolidate_safetensors", (sharded, 1)),
        "consolidate_4_threads": ("consolidate_safetensors", (sharded, 4)),
        "ours_bfloat16": ("ours", (checkpoint, "bfloat16")),
        "ours": ("ours", (checkpoint, "float32")),
    }
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(1 if quick else 3):
        for name, (program, words) in jobs.items():
            seconds[name].append(run_program(program, scratch / name, *words)["seconds"])
            shutil.rmtree(scratch / name)
    equal = has_bits_of(scratch, jobs["consolidate_4_threads"], checkpoint)
    shutil.rmtree(sharded)
    equal &= has_bits_of(scratch, jobs["dcp_to_torch_save"], checkpoint)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        **{f"tmpfs_{name}_s": value for name, value in median.items()},
        "faster_than_dcp_to_torch_save": median["dcp_to_torch_save"] / median["ours"],
        "faster_than_consolidate_1_thread": median["consolidate_1_thread"] / median["ours"],
        "faster_than_consolidate_4_threads": median["consolidate_4_threads"] / median["ours"],
        "bit_equal": float(equal),
    }


def has_bits_of(scratch: Path, oracle: tuple[str, tuple[Any, ...]], checkpoint: Path) -> bool:
    """Whether our tensors are torch's, as they are and cast with `to`, bit by bit."""
    program, words = oracle
    run_program(program, scratch / "torch", *words)
    equal = True
    for dtype in ("float32", "bfloat16"):
        run_program("ours", scratch / "ours", checkpoint, dtype)
        equal &= run_program("compare", scratch / "ours", scratch / "torch", dtype)["equal"]
        shutil.rmtree(scratch / "ours")
    shutil.rmtree(scratch / "torch")
    return equal


def make_checkpoint(scratch: Path, kind: str, quick: bool) -> Path:
    """A checkpoint written by four processes: "dcp" as training does, "hf" as torch can also."""
    folder = scratch / kind
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    words += [__file__, "--program", "make", str(folder), kind, str(int(quick))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    if ran.returncode != 0:
        raise SystemExit(f"the checkpoint could not be made:\n{ran.stderr[-2000:]}")
    return folder


def settle(checkpoint: Path) -> None:
    """Nothing left for the disk to write, and the checkpoint in memory."""
    os.sync()
    for path in checkpoint.glob("*.distcp"):
        with path.open("rb", buffering=0) as file:
            while file.read(4 << 20):
                pass


def run_program(name: str, out: Path, *words: Any) -> dict[str, Any]:
    command = [sys.executable, __file__, "--program", name, str(out), *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if ran.returncode != 0:
        raise SystemExit(f"{command[2:]} failed:\n{ran.stderr[-2000:]}")
    return dict(json.loads(ran.stdout.splitlines()[-1]))


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# What follows runs in processes of its own.


def shapes(quick: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a Llama with grouped attention and untied embeddings."""
    vocabulary = QUICK_VOCABULARY if quick else VOCABULARY
    yield "model.embed_tokens.weight", (vocabulary, HIDDEN)
    for layer in range(QUICK_LAYERS if quick else LAYERS):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", (HIDDEN,)
        yield f"{at}.self_attn.q_proj.weight", (HIDDEN, HIDDEN)
        yield f"{at}.self_attn.k_proj.weight", (KEY_VALUE, HIDDEN)
        yield f"{at}.self_attn.v_proj.weight", (KEY_VALUE, HIDDEN)
        yield f"{at}.self_attn.o_proj.weight", (HIDDEN, HIDDEN)
        yield f"{at}.post_attention_layernorm.weight", (HIDDEN,)
        yield f"{at}.mlp.gate_proj.weight", (FEED_FORWARD, HIDDEN)
        yield f"{at}.mlp.up_proj.weight", (FEED_FORWARD, HIDDEN)
        yield f"{at}.mlp.down_proj.weight", (HIDDEN, FEED_FORWARD)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (vocabulary, HIDDEN)


def make(out: str, kind: str, quick: str) -> dict[str, Any]:
    """One rank's part: its shards of random numbers, and the optimizer's step counts."""
    import torch
    import torch.distributed as dist
    from torch.distributed import checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (RANKS,))
    torch.manual_seed(dist.get_rank())
    model = {}
    for name, shape in shapes(quick == "1"):
        local = torch.randn(shape[0] // RANKS, *shape[1:])
        model[name] = DTensor.from_local(local, mesh, [Shard(0)])
    if kind == "hf":
        writer = dcp.HuggingFaceStorageWriter(out, save_distributed=True)
        dcp.save(model, storage_writer=writer)
    else:
        optimizer = {name: {"step": torch.tensor(1.0)} for name in model}
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=out)
    dist.destroy_process_group()
    return {}


def ours(out: str, checkpoint: str, dtype: str) -> dict[str, Any]:
    import torch

    from tunewright.export import write_weights
    from tunewright.sharded import ShardedModel

    Path(out).mkdir()

    def job() -> None:
        with ShardedModel(Path(checkpoint)) as model:
            write_weights(model, model.entries(getattr(torch, dtype)), Path(out))

    return timed(job)


def plain(out: str, size: str) -> dict[str, Any]:
    """A file of random bytes in one go: what the disk takes from a single writer."""
    Path(out).mkdir()
    block = os.urandom(64 << 20)

    def job() -> None:
        descriptor = os.open(Path(out, "bytes"), os.O_WRONLY | os.O_CREAT)
        left = int(size)
        while left:
            start = left % len(block) & ~((4 << 20) - 1)
            left -= os.write(descriptor, memoryview(block)[start : start + min(left, 4 << 20)])
        os.fsync(descriptor)
        os.close(descriptor)

    return timed(job)


def dcp_to_torch_save(out: str, checkpoint: str) -> dict[str, Any]:
    from torch.distributed.checkpoint import format_utils

    Path(out).mkdir()
    return timed(lambda: format_utils.dcp_to_torch_save(checkpoint, Path(out, "model.pt")))


def consolidate_safetensors(out: str, sharded: str, threads: str) -> dict[str, Any]:
    """Torch's consolidator works on one file a thread, so it gets as many files as threads."""
    from torch.distributed.checkpoint import _consolidate_hf_safetensors as torchs

    Path(out).mkdir()
    names = [name for name, _ in shapes(quick=False)]
    present = set(names_in(Path(sharded)))
    files = {n: 1 + i % int(threads) for i, n in enumerate(n for n in names if n in present)}
    return timed(
        lambda: torchs.consolidate_safetensors_files(sharded, out, files, num_threads=int(threads))
    )


def names_in(folder: Path) -> Iterator[str]:
    from safetensors import safe_open

    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            yield from file.keys()


def compare(out: str, torchs: str, dtype: str) -> dict[str, Any]:
    import torch
    from safetensors import safe_open

    wanted = getattr(torch, dtype)
    with safe_open(Path(out, "model.safetensors"), framework="pt") as mine:
        left = set(mine.keys())
        for name, tensor in tensors_of(Path(torchs)):
            left.discard(name)
            found, expected = mine.get_tensor(name), tensor.to(wanted)
            same_type = (found.dtype, found.shape) == (expected.dtype, expected.shape)
            if not same_type or not torch.equal(
                found.view(torch.uint8), expected.view(torch.uint8)
            ):
                return {"equal": False, "name": name}
    return {"equal": not left}


def tensors_of(folder: Path) -> Iterator[tuple[str, Any]]:
    """The model's tensors in what one of torch's programs left."""
    import torch
    from safetensors import safe_open

    if (folder / "model.pt").exists():
        yield from torch.load(folder / "model.pt", mmap=True)["model"].items()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a dict)
                yield name, file.get_tensor(name)


def timed(job: Callable[[], Any]) -> dict[str, Any]:
    import psutil

    before = psutil.Process().memory_info().rss
    began = time.perf_counter()
    job()
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "growth_mib": max(peak_rss() - before, 0) / 2**20}


def peak_rss() -> int:
    """Bytes at the peak of this process, without that of the one that started it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("this kernel does not say what a process took at most")


PROGRAMS: dict[str, Callable[..., dict[str, Any]]] = {
    "make": make,
    "ours": ours,
    "plain": plain,
    "dcp_to_torch_save": dcp_to_torch_save,
    "consolidate_safetensors": consolidate_safetensors,
    "compare": compare,
}


def document(figures: dict[str, float], not_run: dict[str, str]) -> dict[str, Any]:
    targets = {n: t for n, t in {**AT_LEAST, **AT_MOST}.items() if n not in not_run}
    return {
        "benchmark": "checkpoint",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("torch", "safetensors", "xxhash")},
        "figures": {name: round(value, 3) for name, value in figures.items()},
        "targets": targets,
        "not_run": not_run,
        "met": all(is_met(name, figures[name], target) for name, target in targets.items()),
    }


def is_met(name: str, value: float, target: float) -> bool:
    return value >= target if name in AT_LEAST else value <= target


def table(found: dict[str, Any]) -> list[str]:
    """The document for a reader."""
    lines = [f"checkpoint on {found['machine']}, {found['versions']}"]
    lines += [f"  {name:<36} {value:10.3f}" for name, value in found["figures"].items()]
    for name, target in found["targets"].items():
        sign = ">=" if name in AT_LEAST else "<="
        met = "met" if is_met(name, found["figures"][name], target) else "missed"
        lines.append(f"  target {name} {sign} {target:g}: {met}")
    return lines + [f"  not run: {name} ({why})" for name, why in found["not_run"].items()]


if __name__ == "__main__":
    raise SystemExit(main())
