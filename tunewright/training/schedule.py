"""The learning rate as a pure function of the step: a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from tunewright.contract.settings import FsdpSettings


def learning_rate(settings: FsdpSettings, step: int, steps: int) -> float:
    """The rate of a step counted from 1, of `steps` in all.

    It rises in equal parts during warm-up, is the full rate at its last step and at the first step
    after it, and then falls towards zero, which the step after the last would reach.
    """
    warmup = warmup_steps(settings, steps)
    if step <= warmup:
        return settings.learning_rate * step / warmup
    fraction = (step - 1 - warmup) / max(1, steps - warmup)
    return settings.learning_rate * _decay(settings.lr_scheduler_type, fraction)


def warmup_steps(settings: FsdpSettings, steps: int) -> int:
    if settings.warmup_steps is not None:
        return settings.warmup_steps
    return math.ceil(settings.warmup_ratio * steps)


def _decay(kind: str, fraction: float) -> float:
    if kind == "cosine":
        return 0.5 * (1 + math.cos(math.pi * fraction))
    return 1 - fraction if kind == "linear" else 1.0
