"""Where a run's time goes, measured without holding it up, and how fast its steps are."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch

from tunewright.contract.receipt import IN_STEP

Phase = Literal["data", "forward_backward", "optimizer", "checkpoint", "evaluation"]


class Clock:
    """Seconds by phase, on the time line of the device.

    On a GPU each end of a phase is an event in the stream of its kernels. Nothing is waited for:
    an event that the GPU reaches while it works is the end of that work, and one that it reaches
    while idle is the moment the host came. So `data` is how long the GPU stood still for want of a
    batch, not how long the host read while the GPU had work, and phases never overlap. On a CPU the
    two are the same and a wall clock tells it. Phases must not lie inside each other.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._pending: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._free: list[torch.cuda.Event] = []

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """What is done inside counts as this phase; what ends in an error does not count."""
        if self._on_gpu:
            begun = self._event()
            yield
            self._pending.append((name, begun, self._event()))
        else:
            start = time.perf_counter()
            yield
            self._add(name, time.perf_counter() - start)

    def collect(self, *, wait: bool = False) -> dict[str, float]:
        """Seconds by phase since the last call. To be called right after the step's own wait.

        What the GPU has not finished by then (the optimizer, when the step waits for the loss
        alone) is part of the next call's answer; `wait` is for the last call.
        """
        if wait and self._pending:
            self._pending[-1][2].synchronize()
        while self._pending and self._pending[0][2].query():
            name, begun, ended = self._pending.pop(0)
            self._add(name, begun.elapsed_time(ended) / 1000)
            self._free += (begun, ended)
        found, self._seconds = self._seconds, {}
        return found

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def _event(self) -> torch.cuda.Event:
        """An event in the current stream, here; taken from those that were read, if any."""
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Pace:
    """The steps of one attempt: their speed when nothing unusual happens, and all their time.

    A step is left out of the speed when it is the first (kernels are loaded, memory is taken), when
    torch.compile made a graph in it, which happens again when a shape is new, and when `usual` is
    false (it was traced). Its whole time counts as `warm_up`. With no other steps these give the
    speed: better than none.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._usual, self._unusual = Sum(), Sum()
        self._graphs = compiled_graphs()

    def add(self, tokens: int, seconds: float, phases: Mapping[str, float], *, usual: bool) -> bool:
        """One more step; `phases` may hold what lay before it. Whether it counts for the speed."""
        before, self._graphs = self._graphs, compiled_graphs()
        first = not self._usual.steps + self._unusual.steps
        counts = usual and not first and self._graphs == before
        (self._usual if counts else self._unusual).add(tokens, seconds, phases)
        if not counts:
            self.spend("warm_up", seconds)
        for name, spent in phases.items():
            if counts or name not in IN_STEP:
                self.spend(name, spent)
        return counts

    def spend(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def tokens_per_second(self) -> float | None:
        """Of all ranks; None before any step."""
        counted = self._usual if self._usual.steps else self._unusual
        return counted.tokens / counted.seconds if counted.seconds else None

    def left(self, steps: int) -> float | None:
        """Seconds that so many steps will take, with what lies between them; None: too early."""
        if not self._usual.steps:
            return None
        between = sum(self.seconds.get(name, 0.0) for name in ("checkpoint", "evaluation"))
        each = self._usual.seconds / self._usual.steps
        return steps * (each + between / (self._usual.steps + self._unusual.steps))


def compiled_graphs() -> int:
    """How many graphs torch.compile has made in this process; 0 where it was never used."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo else 0


@dataclass
class Sum:
    """Steps together: their tokens (all ranks), their seconds, and those by phase."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)

    def add(self, tokens: int, seconds: float, phases: Mapping[str, float]) -> None:
        self.steps += 1
        self.tokens += tokens
        self.seconds += seconds
        for name, spent in phases.items():
            self.phases[name] = self.phases.get(name, 0.0) + spent

    def each(self) -> dict[str, float]:
        """Seconds of a step by phase, and of a whole `step`; what lies between steps is shared."""
        return {n: s / self.steps for n, s in {**self.phases, "step": self.seconds}.items()}
