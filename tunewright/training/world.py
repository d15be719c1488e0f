"""Where this process stands among the others: rank, device, and how they meet.

Under torchrun the usual variables (RANK, WORLD_SIZE, LOCAL_RANK) say so; without them the process
is alone. Work that may take long and needs one process only (tokenizing, downloading) is done
before any process group exists: a group that waits for it would run into its own time-out.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from tunewright.contract.failures import TunewrightError, UserError

PREPARATION_TIMEOUT = timedelta(hours=24)
"""How long ranks wait for rank 0 to prepare; the deadline of a run belongs to its launcher."""

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Longest wait in one collective. Rank 0 reads the whole model from the volume inside one."""

PARTING_TIMEOUT = timedelta(seconds=10)

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process's rank, the number of ranks, and the device it computes on."""

    rank: int
    size: int
    device: torch.device
    store: Store

    @property
    def main(self) -> bool:
        return self.rank == 0

    def prepared(self, prepare: Callable[[], T], name: str = "prepared") -> T:
        """What `prepare` gives on rank 0, on every rank; needs no process group.

        An error of ours on rank 0 is raised on every rank, so that every node knows the cause.
        `name` tells one such work from another.
        """
        if self.main:
            self.store.set(name, pickle.dumps(_outcome(prepare)))  # type: ignore[arg-type]
        self.store.wait([name], PREPARATION_TIMEOUT)
        found: T = _unwrapped(pickle.loads(self.store.get(name)))
        return found

    def parted(self) -> None:
        """Rank 0, which holds the store, goes last; it waits for nobody longer than moments."""
        self.store.set(f"parted-{self.rank}", "")
        if self.main:
            with suppress(RuntimeError):
                others = [f"parted-{rank}" for rank in range(self.size)]
                self.store.wait(others, PARTING_TIMEOUT)

    @contextmanager
    def group(self) -> Iterator[None]:
        """The process group of all ranks. After an error it is left as it is.

        Taking it down needs the other ranks, and a failed one must end at once.
        """
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo",
            store=self.store,
            rank=self.rank,
            world_size=self.size,
            timeout=COLLECTIVE_TIMEOUT,
            device_id=self.device if self.device.type == "cuda" else None,
        )
        yield
        dist.barrier()
        dist.destroy_process_group()

    def on_main(self, work: Callable[[], T]) -> T:
        """What `work` gives on rank 0, on every rank; an error of ours is raised on every rank."""
        box = [_outcome(work) if self.main else None]
        dist.broadcast_object_list(box, src=0)
        found: T = _unwrapped(box[0])
        return found

    def gathered(self, value: T) -> list[T]:
        """Every rank's value, in order of rank, on every rank."""
        boxes: list[Any] = [None] * self.size
        dist.all_gather_object(boxes, value)
        return boxes

    def total(self, *values: float | torch.Tensor) -> list[float]:
        """Each value summed over the ranks, in float64; whole numbers stay exact."""
        sums = torch.stack(
            [torch.as_tensor(v, dtype=torch.float64, device=self.device) for v in values]
        )
        dist.all_reduce(sums)
        return [float(v) for v in sums.tolist()]


def join() -> World:
    """Find this process's place and meet the others' key-value store.

    Raises UserError when there are more processes here than GPUs.
    """
    _grow_segments()
    device = _device(int(os.environ.get("LOCAL_RANK", "0")))
    if "WORLD_SIZE" not in os.environ or "RANK" not in os.environ:
        return World(0, 1, device, HashStore())
    store, rank, size = next(rendezvous("env://", timeout=COLLECTIVE_TIMEOUT))
    return World(rank, size, device, store)


def meet() -> World:
    """The nodes of a command as a world, each one rank of it: for a process that runs once a node.

    NODE_RANK, NUM_NODES, MASTER_ADDR and MASTER_PORT say where; without them the node is alone.
    Nothing is computed in such a world: its device is the CPU.
    """
    _grow_segments()
    size, rank = int(os.environ.get("NUM_NODES") or 1), int(os.environ.get("NODE_RANK") or 0)
    cpu = torch.device("cpu")
    if size == 1:
        return World(0, 1, cpu, HashStore())
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=rank == 0, timeout=COLLECTIVE_TIMEOUT)
    return World(rank, size, cpu, store)


def _grow_segments() -> None:
    """Let GPU memory be handed out from segments that grow: less of it lies unusable between them.

    Read when the first tensor is made on a GPU; what the user has set stays.
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the new name and the old one
    if not any(name in os.environ for name in names):
        os.environ.update(dict.fromkeys(names, "expandable_segments:True"))


def _outcome(work: Callable[[], T]) -> T | TunewrightError:
    try:
        return work()
    except TunewrightError as error:
        return error


def _unwrapped(outcome: Any) -> Any:
    if isinstance(outcome, TunewrightError):
        raise outcome
    return outcome


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    gpus, here = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if max(here, local_rank + 1) > gpus:
        raise UserError(
            f"{here} processes were started on this node, which has {gpus} GPUs; start at most "
            f"{gpus} (--nproc-per-node), or set CUDA_VISIBLE_DEVICES= to train on the CPU"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
