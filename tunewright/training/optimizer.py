"""AdamW over sharded parameters, with state that is there from the start."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tunewright.contract.settings import FsdpSettings


def adamw(parameters: dict[str, nn.Parameter], settings: FsdpSettings) -> torch.optim.AdamW:
    """AdamW; norms, biases and other one-dimensional parameters do not decay.

    Its state is made now, so that a checkpoint always has the same tensors to read or write.
    """
    matrices = [p for p in parameters.values() if p.ndim > 1]
    others = [p for p in parameters.values() if p.ndim <= 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    fused = all(p.device.type == "cuda" for p in parameters.values())
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_epsilon,
        fused=fused,
    )
    for parameter in parameters.values():
        optimizer.state[parameter] = {
            "step": torch.zeros((), device=parameter.device if fused else "cpu"),
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }
    return optimizer


def state_by_name(
    parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """The optimizer's own tensors as {`<parameter>.<state>`: tensor}, to be read or written."""
    return {
        f"{name}.{key}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state[parameter].items()
    }
