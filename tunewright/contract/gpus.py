"""The NVIDIA GPUs of this machine, found without torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from itertools import takewhile


def visible_gpus() -> list[str]:
    """Their numbers or names, within CUDA_VISIBLE_DEVICES."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        named = [name.strip() for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",")]
        # CUDA's own rule: -1 and what follows it are not seen.
        return [name for name in takewhile(lambda n: not n.startswith("-"), named) if name]
    return asked_driver("index")


def asked_driver(field: str) -> list[str]:
    """One property of every GPU, by nvidia-smi; nothing without a driver that answers."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired:
        return []
    return [line.strip() for line in found.stdout.splitlines()] if found.returncode == 0 else []
