"""A rank's tensors copied to host memory, so that training goes on while they are written."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from contextlib import suppress
from itertools import accumulate

import torch
from torch.distributed.tensor import DTensor

_ALIGNED = 256
"""Bytes; every tensor's place in the host memory is a multiple of it."""


class HostCopy:
    """One copy of a rank's shards in host memory: as many bytes as the shards themselves.

    For a GPU the memory is pinned, which makes copies fast and lets them run beside the training's
    kernels on a stream of their own; where it cannot be pinned, copying blocks instead. The memory
    is taken once and used for every save, so there is one copy at a time.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        """Make room for the shards of these tensors on this rank; `device` is the rank's own."""
        shards = {name: shard(tensor) for name, tensor in tensors.items()}
        sizes = [-(-part.nbytes // _ALIGNED) * _ALIGNED for part in shards.values()]
        places = list(accumulate(sizes, initial=0))
        # Anonymous memory: it starts on a page, as pinning wants, and is not in the heap's way.
        memory = mmap.mmap(-1, max(places[-1], 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes = sum(part.nbytes for part in shards.values())
        self.tensors = {
            name: _at(memory, place, part)
            for (name, part), place in zip(shards.items(), places, strict=False)
        }
        self._whole = torch.frombuffer(memory, dtype=torch.uint8)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied = torch.cuda.Event() if self._stream else None
        self.pinned = self._stream is not None and _pin(self._whole)

    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Begin to copy; on a GPU the copies come after all kernels asked for so far.

        The tensors must not change before `wait` or `hold_changes`.
        """
        if self._stream is None or self._copied is None:
            self._copy(tensors)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._copy(tensors)
            self._copied.record(self._stream)

    def hold_changes(self) -> None:
        """Let this stream's next kernels, which may change the tensors, come after the copies.

        The GPU waits, this process does not.
        """
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def wait(self) -> None:
        """Until the copies are there."""
        if self._copied is not None:
            self._copied.synchronize()

    def release(self) -> None:
        """Unpin the memory; it is given back when its tensors are gone."""
        if self.pinned:
            self.wait()
            torch.cuda.cudart().cudaHostUnregister(self._whole.data_ptr())
            self.pinned = False

    @torch.no_grad()
    def _copy(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, host in self.tensors.items():
            host.copy_(shard(tensors[name]), non_blocking=True)


def shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor: all of it, unless it is sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def share(
    state: Mapping[str, Mapping[str, torch.Tensor]], rank: int, ranks: int
) -> dict[str, dict[str, torch.Tensor]]:
    """What one rank writes of a state: its shards, and its part of what every rank has whole.

    Whole tensors are dealt out, the largest first.
    """
    whole = sorted(
        (-tensor.nbytes, kind, name)
        for kind, part in state.items()
        for name, tensor in part.items()
        if not isinstance(tensor, DTensor)
    )
    others = {(kind, name) for place, (_, kind, name) in enumerate(whole) if place % ranks != rank}
    return {
        kind: {name: tensor for name, tensor in part.items() if (kind, name) not in others}
        for kind, part in state.items()
    }


def _at(memory: mmap.mmap, place: int, like: torch.Tensor) -> torch.Tensor:
    """Room for a tensor, of exactly its size: a larger storage would be copied to be written."""
    if not like.numel():
        return torch.empty(like.shape, dtype=like.dtype)
    flat = torch.frombuffer(memory, dtype=like.dtype, count=like.numel(), offset=place)
    return flat.view(like.shape)


def _pin(memory: torch.Tensor) -> bool:
    """Whether the memory could be pinned for transfers."""
    if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0:
        return True
    # CUDA keeps the error for whoever asks next, which would be the training's next kernel.
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")
    return False
