"""The local target: every node of a workload is a process group on this machine."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tasks.targets.guardian import Node, Say, marked, start_all, watch
from tasks.targets.job import Ending, Job, ending_of
from tunewright.contract.environment import has_interface, may_pass
from tunewright.contract.failures import DEADLINE_VARIABLE, GRACE_VARIABLE, UserError
from tunewright.contract.gpus import visible_gpus
from tunewright.contract.processes import GRACE_S
from tunewright.contract.rundir import home
from tunewright.contract.workload import Workload


@dataclass(frozen=True)
class Placement:
    """What a workload gets on this machine."""

    nodes: int
    procs_per_node: int
    gpus: tuple[str, ...]
    """The GPUs the nodes share out, as CUDA_VISIBLE_DEVICES names them; empty on CPUs."""
    note: str | None = None


def place(workload: Workload, *, simulate: bool, procs_per_node: int | None) -> Placement:
    """Fit a workload's accelerators to what is here; raises UserError when they do not fit."""
    gpus, asked = visible_gpus(), workload.compute.gpus_per_node
    nodes, total = workload.nodes, workload.compute.num_accelerators
    if not simulate:
        if procs_per_node is not None:
            raise UserError("--procs-per-node only makes sense with --simulate; add it")
        if len(gpus) < total:
            raise UserError(
                f"the workload asks for {total} accelerators ({workload.compute.accelerator_type}) "
                f"and this machine has {len(gpus)}; add --simulate to run it on what is here"
            )
        return Placement(nodes, asked, tuple(gpus[:total]))
    if procs_per_node is not None and procs_per_node < 1:
        raise UserError(f"--procs-per-node is {procs_per_node}; it must be at least 1")
    if gpus and len(gpus) >= nodes * (procs_per_node or 1):
        procs = procs_per_node or min(asked, len(gpus) // nodes)
        return _simulated(workload, procs, tuple(gpus[: nodes * procs]))
    procs = procs_per_node or max(1, min(asked, (os.cpu_count() or 1) // nodes))
    return _simulated(workload, procs, ())


def _simulated(workload: Workload, procs: int, gpus: tuple[str, ...]) -> Placement:
    device = "GPUs" if gpus else "CPUs"
    asked = f"{workload.nodes} x {workload.compute.gpus_per_node}"
    note = f"simulating {asked} {workload.compute.accelerator_type} by {workload.nodes} x {procs}"
    return Placement(workload.nodes, procs, gpus, f"{note} processes on {device}")


def run(
    job: Job,
    secrets: Mapping[str, str],
    say: Say,
    placement: Placement,
    *,
    cancelled: Callable[[], bool] = lambda: False,
    started: Callable[[list[int]], None] = lambda pids: None,
    grace_s: float = GRACE_S,
) -> Ending:
    """Run one attempt to its end, whatever the end is; afterwards no process of it is left."""
    port = free_port()
    deadline = time.monotonic() + job.deadline_s if job.deadline_s else None
    nodes = [node_of(job, rank, port, placement, grace_s) for rank in range(job.nodes)]

    def reason_to_stop() -> str | None:
        if deadline is not None and time.monotonic() > deadline:
            return "timeout"
        return "cancel" if cancelled() else None

    guardians = start_all(nodes, secrets, grace_s)
    return ending_of(watch(guardians, say, reason_to_stop, started))


def node_of(job: Job, rank: int, port: int, placement: Placement, grace_s: float = GRACE_S) -> Node:
    """The command of one node, with the environment that every node sees; started now."""
    env = {
        **inherited_environment(),
        **_interface(job.env_variables),
        **_on_this_machine(job, rank, placement),
        **job.mlflow,
        "NUM_NODES": str(job.nodes),
        "NODE_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(job.procs_per_node),
        "WORLD_SIZE": str(job.nodes * job.procs_per_node),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TUNEWRIGHT_RUN_DIR": str(job.run.root),
        "TUNEWRIGHT_ATTEMPT": str(job.attempt),
        GRACE_VARIABLE: f"{grace_s:g}",
    }
    if job.deadline_s:
        env[DEADLINE_VARIABLE] = f"{time.time() + job.deadline_s:.3f}"
    if job.code is not None:
        env["CODE_SOURCE_PATH"] = str(job.code)
    if job.has_parameters:
        env["HYPERPARAMETERS_PATH"] = str(job.run.hyperparameters)
    return Node(
        argv=["bash", "-c", f"set -euo pipefail\n{job.command}"],
        env=marked(env, job.run.root, rank),
        cwd=job.run.root / "work",
        log=job.run.node_log(job.attempt, rank),
        exit=job.run.node_exit(job.attempt, rank),
        rank=rank,
    )


def inherited_environment() -> dict[str, str]:
    """Our environment without Prefect's and Databricks' settings and undeclared secrets.

    The folder of this Python comes first in PATH, so that `python` and `torchrun` are ours.
    """
    env = {name: value for name, value in os.environ.items() if may_pass(name)}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
    env["PYTHONUNBUFFERED"] = "1"
    env["TUNEWRIGHT_HOME"] = str(home())
    return env


def notes(env_variables: Mapping[str, str]) -> list[str]:
    """What this target does with a workload's variables that its user may not expect."""
    found = []
    asked = env_variables.get("NCCL_SOCKET_IFNAME")
    used = _interface(env_variables).get("NCCL_SOCKET_IFNAME")
    if asked != used:
        found.append(f"NCCL_SOCKET_IFNAME={asked} is no interface of this machine; using {used}")
    if "CUDA_VISIBLE_DEVICES" in env_variables:
        found.append("CUDA_VISIBLE_DEVICES is set by this target, for each node its own GPUs")
    return found


def _on_this_machine(job: Job, rank: int, placement: Placement) -> dict[str, str]:
    """Disjoint GPUs per node; on CPUs a share of the cores per process, unless the user says."""
    mine = placement.gpus[rank * job.procs_per_node : (rank + 1) * job.procs_per_node]
    env = {"CUDA_VISIBLE_DEVICES": ",".join(mine)}
    if placement.gpus:
        return env
    share = (os.cpu_count() or 1) // (job.nodes * job.procs_per_node)
    # Threads that spin while they wait cost a shared machine many times the work they do.
    ours = {"OMP_NUM_THREADS": str(max(1, share)), "OMP_WAIT_POLICY": "PASSIVE"}
    said = {**os.environ, **job.env_variables}
    return env | {name: value for name, value in ours.items() if name not in said}


def _interface(env_variables: Mapping[str, str]) -> dict[str, str]:
    """The user's variables, with NCCL's interface replaced when this machine lacks it."""
    env = dict(env_variables)
    asked = env.get("NCCL_SOCKET_IFNAME")
    if asked is not None and not has_interface(asked):
        env["NCCL_SOCKET_IFNAME"] = "lo" if has_interface("=lo") else "lo0"
    return env


def free_port() -> int:
    """A TCP port of this machine that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
