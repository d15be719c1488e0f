"""A function on rank 0 with a Ray of this machine around it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from typing import Any


class OnRay:
    """Called on every rank; on rank 0 it starts Ray, runs the function and ends Ray again."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns on rank 0; None elsewhere."""
        if os.environ["RANK"] != "0":
            return None
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # A key for this Ray alone. Left to itself, Ray may keep one in the home folder.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        gpus = int(os.environ["WORLD_SIZE"])
        if not os.environ["CUDA_VISIBLE_DEVICES"]:
            # Ray wants a name for each GPU that tasks may ask for; CUDA finds none by these.
            simulated = [f"GPU-simulated-{number}" for number in range(gpus)]
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(simulated)
        import ray

        ray.init(
            address="local",
            num_gpus=gpus,
            num_cpus=max(gpus, os.cpu_count() or 1),
            include_dashboard=False,
        )
        try:
            return self.function(*args, **kwargs)
        finally:
            ray.shutdown()
