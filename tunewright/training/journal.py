"""What a run says: events for the flow, plain lines for the reader, metrics for MLflow.

Rank 0 alone speaks. Every event is one JSON line, complete as soon as it is in the file.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import torch

from tunewright.contract.progress import step_of
from tunewright.contract.receipt import time_table
from tunewright.training.checkpoint import Found, Progress
from tunewright.training.eventfile import EventFile
from tunewright.training.saving import Saved
from tunewright.training.step import StepResult
from tunewright.training.timing import Clock, Pace, Sum, compiled_graphs
from tunewright.training.tracking import Tracking
from tunewright.training.world import World


class Journal:
    """Told what has just happened; the time since the last thing told is what it took.

    `clock` is for whoever does the work: where its time goes is said here, step by step and at the
    end. Speeds leave out what is not usual (see Pace). `folder`: of the attempt's events, and of
    whatever else is to lie beside them.
    """

    def __init__(self, path: Path, world: World, attempt: int, logging_steps: int) -> None:
        self.folder = path.parent
        self.world = world
        self.attempt = attempt
        self.logging_steps = logging_steps
        self.folder = path.parent
        self.tracking = Tracking.of(world.main)
        self.clock = Clock(world.device)
        self._pace = Pace()
        self._since_line = Sum()
        self._file: EventFile | None = None
        self._begun = self._mark = time.perf_counter()
        self._steps = 0
        self._flops_per_token: float | None = None
        self._ceiling: float | None = None
        if world.main:
            self._file = EventFile(path)

    def started(
        self,
        found: Found,
        steps: int,
        facts: Mapping[str, Any],
        parameters: Mapping[str, Any],
        *,
        flops_per_token: float | None = None,
        ceiling: float | None = None,
    ) -> None:
        """`facts` join the start event; `parameters` are what MLflow records of the settings.

        `flops_per_token`: of the model, forward and backward. `ceiling`: FLOP/s of one rank's
        device (tunewright.training.ceiling), of which shares are told. Of a rank they are TFLOP/s
        in the events of a GPU only: nobody compares CPUs by them.
        """
        self._steps = steps
        self._flops_per_token, self._ceiling = flops_per_token, ceiling
        self.tracking.start(parameters)
        if facts.get("memory"):
            self.say(f"memory: {facts['memory']}")
        self.say(self._where(found))
        if found.caveat:
            self.say(found.caveat)
        if ceiling:
            kind = "GPU" if self._on_gpu else "process"
            self.say(f"ceiling: {ceiling / 1e12:,.3g} TFLOP/s a {kind} in one matrix product")
        start_up = time.time() - psutil.Process().create_time()
        self._pace.spend("start_up", start_up)
        self._write(
            "start",
            step=found.progress.step,
            steps=steps,
            world_size=self.world.size,
            seconds=start_up,
            ceiling_tflops_per_gpu=self._tflops(ceiling),
            **facts,
        )
        self.tracking.log(found.progress.step, ceiling_tflops_per_gpu=self._tflops(ceiling))
        self.clock.collect()
        self._mark = time.perf_counter()

    def stepped(self, step: int, rate: float, result: StepResult, *, usual: bool = True) -> None:
        """A step is done; `usual`: nothing but training was done in it (it was not traced)."""
        seconds, phases = self._seconds(), self.clock.collect()
        counts = self._pace.add(result.tokens, seconds, phases, usual=usual)
        self._since_line.add(result.tokens, seconds, phases)
        self._write(
            "step",
            step=step,
            lr=rate,
            loss=result.loss,
            grad_norm=result.grad_norm,
            tokens=result.tokens,
            supervised_tokens=result.supervised_tokens,
            seconds=seconds,
            seconds_by_phase=_rounded(phases),
            counts=counts,
        )
        if step % self.logging_steps and step != self._steps:
            return
        since, self._since_line = self._since_line, Sum()
        speed = since.tokens / since.seconds
        memory, share = memory_gib(self.world.device), self._share(speed)
        left = self._pace.left(self._steps - step)
        self.say(step_line(step, self._steps, rate, result, speed, share, memory, left))
        self.tracking.log(
            step,
            train_loss=result.loss,
            learning_rate=rate,
            grad_norm=result.grad_norm,
            tokens_per_second=speed,
            tokens_per_second_per_gpu=speed / self.world.size,
            ceiling_share=share,
            memory_gib=memory,
            **{f"time/{name}": value for name, value in since.each().items()},
        )

    def evaluated(self, progress: Progress) -> None:
        if progress.eval_loss is not None:
            self._write("eval", step=progress.step, loss=progress.eval_loss)
            self.say(f"evaluation after step {progress.step}  loss {progress.eval_loss:.4f}")
            self.tracking.log(progress.step, eval_loss=progress.eval_loss)
        self._mark = time.perf_counter()

    def saving(self, step: int, blocked_seconds: float) -> None:
        """Training goes on, after standing still so long; the checkpoint is still being written."""
        self.tracking.log(step, checkpoint_blocked_seconds=blocked_seconds)
        self._mark = time.perf_counter()

    def saved(self, sealed: Iterable[Saved]) -> None:
        """Checkpoints have been sealed."""
        for save in sealed:
            self._write(
                "checkpoint",
                step=save.step,
                path=str(save.path),
                seconds=save.seconds,
                blocked_seconds=save.blocked,
            )
            self.say(
                f"checkpoint after step {save.step} in {save.seconds:.1f} s, {save.blocked:.1f} s "
                f"of it blocked: {save.path}"
            )
            self.tracking.log(save.step, checkpoint_seconds=save.seconds)

    def ended(self, progress: Progress) -> None:
        """Every rank calls this, since the peak of memory is asked of all."""
        peak = max(self.world.gathered(memory_gib(self.world.device)))
        for name, seconds in self.clock.collect(wait=True).items():
            self._pace.spend(name, seconds)
        speed = self._pace.tokens_per_second()
        each = None if speed is None else speed / self.world.size
        flops = each * self._flops_per_token if each and self._flops_per_token else None
        spent = self._pace.seconds
        total = time.time() - psutil.Process().create_time()
        spent["other"] = max(0.0, total - sum(spent.values()))
        self.say("\n".join(time_table(spent)))
        self._write(
            "end",
            step=progress.step,
            loss=progress.loss,
            eval_loss=progress.eval_loss,
            tokens=progress.tokens,
            supervised_tokens=progress.supervised_tokens,
            tokens_per_second_per_gpu=each,
            model_tflops_per_gpu=self._tflops(flops),
            ceiling_share=None if speed is None else self._share(speed),
            peak_memory_gib=peak,
            compiled_graphs=compiled_graphs(),
            seconds=time.perf_counter() - self._begun,
            seconds_by_phase=_rounded(spent),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A rank that failed ends at once; the last metrics are worth a few seconds only.
        self.tracking.end(within_s=30.0 if error is None else 5.0)
        if self._file is not None:
            self._file.close()

    def _where(self, found: Found) -> str:
        if found.path is None:
            return f"attempt {self.attempt} starts at step 0: no sealed checkpoint"
        step = found.progress.step
        if step == self._steps:
            return f"attempt {self.attempt} has nothing to train after step {step} ({found.path})"
        return f"attempt {self.attempt} resumes from step {step} ({found.path})"

    @property
    def _on_gpu(self) -> bool:
        return self.world.device.type == "cuda"

    def _share(self, speed: float) -> float | None:
        """The share of the ceiling, 0 to 1, that the model's FLOP/s are at this speed."""
        if not (self._flops_per_token and self._ceiling):
            return None
        return speed / self.world.size * self._flops_per_token / self._ceiling

    def _tflops(self, flops: float | None) -> float | None:
        return flops / 1e12 if flops and self._on_gpu else None

    def _write(self, event: str, **facts: Any) -> None:
        if self._file is not None:
            line = {"event": event, "time": time.time(), **facts}
            text = json.dumps(line, allow_nan=False) + "\n"
            self._file.write(text, now=event in ("checkpoint", "end"))

    def say(self, line: str) -> None:
        """A line for the reader, from rank 0."""
        if self._file is not None:
            print(line, flush=True)

    def _seconds(self) -> float:
        """Since the last thing told."""
        before, self._mark = self._mark, time.perf_counter()
        return self._mark - before


def step_line(
    step: int,
    steps: int,
    rate: float,
    result: StepResult,
    speed: float,
    share: float | None,
    memory: float,
    left: float | None,
) -> str:
    """The line of a step on stdout, in columns that keep their places.

    `speed` in tokens a second, all ranks together; `share` of the ceiling, 0 to 1; `memory` in GiB,
    the most that this rank has had; `left` in seconds.
    """
    place = step_of(step, steps)
    if result.loss is None or result.grad_norm is None:
        return f"{place}  no supervised tokens, skipped"
    shown = "" if share is None else f"  {100 * share:5.1f} % of ceiling"
    return (
        f"{place}  loss {result.loss:7.4f}  lr {rate:.1e}  grad {result.grad_norm:7.2f}  "
        f"{speed:11,.0f} tokens/s{shown}  {memory:6.2f} GiB  {_clock(left):>8} left"
    )


def memory_gib(device: torch.device) -> float:
    """The most memory this rank has had: allocated on its GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def _clock(seconds: float | None) -> str:
    """Hours, minutes and seconds: 1:23:45; a dash for what is not known yet."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 6) for name, value in seconds.items()}
