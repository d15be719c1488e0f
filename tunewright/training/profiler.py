"""A trace of some steps on request: what each kernel took, and when.

Rank 0 traces, since the ranks do the same. Tracing slows steps down, and its start and end take
seconds, so the steps that `slows` names are left out of the speed.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from tunewright.contract.rundir import trace_name
from tunewright.contract.settings import FsdpSettings
from tunewright.training.world import World

_ROWS = 15
_NAME = 60


@contextmanager
def of(settings: FsdpSettings, folder: Path, world: World) -> Iterator[Profile]:
    """A profile of `settings.profile_steps`, which leaves its trace in `folder`.

    A run that ends within these steps leaves the trace of those it did; an error leaves none.
    """
    made = Profile(settings.profiled if world.main else range(0), folder, world)
    try:
        yield made
    except BaseException:
        made.drop()
        raise
    made.finish()
    if made.missed:
        print(f"nothing was traced: no step of {settings.profile_steps} was trained", flush=True)


class Profile:
    """Told of each step; traces those that were asked for."""

    def __init__(self, steps: range, folder: Path, world: World) -> None:
        self._steps = steps
        self._folder = folder
        self._on_gpu = world.device.type == "cuda"
        self._trace: Any = None
        self._traced: list[int] = []

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """What is done inside is step `step`; the trace ends with the last one asked for."""
        if step not in self._steps:
            yield
            return
        if self._trace is None:
            self._begin()
        with record_function(f"step {step}"):
            yield
        self._traced.append(step)
        if step == self._steps[-1]:
            self.finish()

    def slows(self, step: int) -> bool:
        """Whether tracing is part of the time of this step."""
        return step in self._steps

    @property
    def missed(self) -> bool:
        """Whether steps were asked for and none was traced."""
        return bool(self._steps) and not self._traced

    def finish(self) -> None:
        """Write the trace of the steps so far, and say where it is; nothing without any.

        A trace that cannot be written costs the trace, never the run.
        """
        if self._trace is None:
            return
        traced, self._trace = self._trace, None
        traced.stop()
        steps = range(self._traced[0], self._traced[-1] + 1)
        path = self._folder / trace_name(steps)
        try:
            _write(traced, path)
        except OSError as error:
            print(f"the trace cannot be written, training goes on: {error}", file=sys.stderr)
        else:
            print(f"trace of steps {steps[0]} to {steps[-1]}: {path}", flush=True)
        print("\n".join(table(traced, len(steps), self._on_gpu)), flush=True)

    def drop(self) -> None:
        """Stop tracing without a trace: a rank that failed ends at once."""
        if self._trace is not None:
            with suppress(Exception):
                self._trace.stop()
            self._trace = None

    def _begin(self) -> None:
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
        # Of the one cycle that there is all events are kept; torch asks that it be said.
        self._trace = profile(activities=kinds, acc_events=True)
        self._trace.start()


def table(traced: profile, steps: int, on_gpu: bool) -> Iterator[str]:
    """The kernels (on a CPU: the operators) that took most of the time, and their share of it."""
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    spent = [
        (e.self_device_time_total if on_gpu else e.self_cpu_time_total, e.count, e.key)
        for e in traced.key_averages()
        # A mark spans kernels that are listed themselves.
        if e.device_type == kind and not e.is_user_annotation
    ]
    whole = sum(microseconds for microseconds, _, _ in spent) or 1.0
    yield f"{'kernel' if on_gpu else 'operator':{_NAME}}  {'ms/step':>9}  {'%':>5}  calls/step"
    for microseconds, count, name in sorted(spent, reverse=True)[:_ROWS]:
        short = name if len(name) <= _NAME else f"{name[: _NAME - 1]}…"
        yield (
            f"{short:{_NAME}}  {microseconds / 1000 / steps:9.3f}  "
            f"{100 * microseconds / whole:5.1f}  {count / steps:10,.1f}"
        )


def _write(traced: profile, path: Path) -> None:
    """Made on a local disk, then copied: a volume may not let a file be written in pieces."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / path.name
        traced.export_chrome_trace(str(made))
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(made, path)
