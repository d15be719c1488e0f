"""What a run says: events for the flow, plain lines for the reader, metrics for MLflow.

Rank 0 alone speaks. Every event is one JSON line, complete as soon as it is in the file.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import torch

from tunewright.contract.failures import UserError
from tunewright.training.checkpoint import Found, Progress
from tunewright.training.step import StepResult
from tunewright.training.tracking import Tracking
from tunewright.training.world import World


class Journal:
    """Told what has just happened; the time since the last thing told is what it took."""

    def __init__(self, path: Path, world: World, attempt: int, logging_steps: int) -> None:
        self.world = world
        self.attempt = attempt
        self.logging_steps = logging_steps
        self.tracking = Tracking.of(world.main)
        self._file: IO[str] | None = None
        self._begun = self._mark = time.perf_counter()
        self._speeds: list[tuple[int, float]] = []
        self._steps = 0
        if world.main:
            self._file = _opened(path)

    def started(
        self, found: Found, steps: int, facts: Mapping[str, Any], parameters: Mapping[str, Any]
    ) -> None:
        """`facts` join the start event; `parameters` are what MLflow records of the settings."""
        self._steps = steps
        self.tracking.start(parameters)
        self._say(self._where(found))
        self._write(
            "start", step=found.progress.step, steps=steps, world_size=self.world.size, **facts
        )
        self._mark = time.perf_counter()

    def stepped(self, step: int, rate: float, result: StepResult) -> None:
        seconds = self._seconds()
        self._speeds.append((result.tokens, seconds))
        self._write("step", step=step, lr=rate, seconds=seconds, **result._asdict())
        if step % self.logging_steps and step != self._steps:
            return
        speed = result.tokens / seconds
        self._say(step_line(step, self._steps, rate, result, speed))
        self.tracking.log(
            step,
            train_loss=result.loss,
            learning_rate=rate,
            grad_norm=result.grad_norm,
            tokens_per_second=speed,
        )

    def evaluated(self, progress: Progress) -> None:
        if progress.eval_loss is not None:
            self._write("eval", step=progress.step, loss=progress.eval_loss)
            self._say(f"evaluation after step {progress.step}  loss {progress.eval_loss:.4f}")
            self.tracking.log(progress.step, eval_loss=progress.eval_loss)
        self._mark = time.perf_counter()

    def saved(self, step: int, path: Path) -> None:
        seconds = self._seconds()
        self._write("checkpoint", step=step, path=str(path), seconds=seconds)
        self._say(f"checkpoint after step {step} in {seconds:.1f} s: {path}")

    def ended(self, progress: Progress, matmul_parameters: int) -> None:
        """Every rank calls this, since the peak of memory is asked of all."""
        speed = tokens_per_second(self._speeds)
        each = None if speed is None else speed / self.world.size
        on_gpu = self.world.device.type == "cuda"
        self._write(
            "end",
            step=progress.step,
            loss=progress.loss,
            eval_loss=progress.eval_loss,
            tokens=progress.tokens,
            supervised_tokens=progress.supervised_tokens,
            tokens_per_second_per_gpu=each,
            model_tflops_per_gpu=6e-12 * matmul_parameters * each if on_gpu and each else None,
            peak_memory_gib=peak_memory_gib(self.world),
            seconds=time.perf_counter() - self._begun,
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

    def _write(self, event: str, **facts: Any) -> None:
        if self._file is not None:
            line = {"event": event, "time": time.time(), **facts}
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
            self._file.flush()

    def _say(self, line: str) -> None:
        if self._file is not None:
            print(line, flush=True)

    def _seconds(self) -> float:
        """Since the last thing told."""
        before, self._mark = self._mark, time.perf_counter()
        return self._mark - before


def _opened(path: Path) -> IO[str]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a")
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror}; set output_dir to a folder that can be written"
        ) from error


def step_line(step: int, steps: int, rate: float, result: StepResult, speed: float) -> str:
    """The line of a step on stdout; `speed` in tokens a second, all ranks together."""
    if result.loss is None or result.grad_norm is None:
        return f"step {step}/{steps}  no supervised tokens, skipped"
    return (
        f"step {step}/{steps}  loss {result.loss:.4f}  lr {rate:.1e}  "
        f"grad {result.grad_norm:.2f}  {speed:,.0f} tokens/s"
    )


def tokens_per_second(steps: list[tuple[int, float]]) -> float | None:
    """Of (tokens, seconds) pairs, without the first, which warms up, when others follow."""
    counted = steps[1:] or steps
    seconds = sum(s for _, s in counted)
    return sum(t for t, _ in counted) / seconds if seconds else None


def peak_memory_gib(world: World) -> float:
    """The most memory any rank has had: allocated on its GPU, or resident on a CPU."""
    if world.device.type == "cuda":
        peak = float(torch.cuda.max_memory_allocated())
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        peak = float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
    return max(world.gathered(peak)) / 2**30
