"""The Ray target: every node of a workload on a node of its own of an existing Ray cluster.

RAY_ADDRESS says where: `ray://host:10001`, `host:6379` on a node of the cluster, or
`http://host:8265` (a Ray job, without secrets). A child process (`tunewright.ray_driver`) speaks
to Ray, so that the flow imports nothing of it, and can end it whatever state Ray is in.
"""

from __future__ import annotations

import os
import secrets as randomness
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

import tunewright
from tasks.targets.guardian import Node, Say, marked
from tasks.targets.job import Ending, Job
from tasks.targets.ray_watch import Driver, Watch, look
from tunewright.contract.environment import is_secret
from tunewright.contract.failures import DEADLINE_VARIABLE, GRACE_VARIABLE, UserError
from tunewright.contract.lock import STALE_S
from tunewright.contract.processes import GRACE_S
from tunewright.contract.rundir import home, write_json
from tunewright.contract.workload import Workload

SILENCE_S = STALE_S
"""After how long without a beat of the run's lock a job believes that its flow is gone."""
_WAYS = "ray://host:10001, host:6379 on a node of the cluster, or http://host:8265"


@dataclass(frozen=True)
class Placement:
    """What a workload gets on a cluster."""

    nodes: int
    procs_per_node: int
    address: str
    bundle: Mapping[str, int]
    """What each node of the workload reserves: {"CPU": …, "GPU": …}."""
    strategy: str = "STRICT_SPREAD"
    note: str | None = None


def place(workload: Workload, *, simulate: bool, procs_per_node: int | None) -> Placement:
    """Fit a workload's accelerators to what the cluster has; UserError when they do not fit."""
    if procs_per_node is not None and not simulate:
        raise UserError("--procs-per-node only makes sense with --simulate; add it")
    if procs_per_node is not None and procs_per_node < 1:
        raise UserError(f"--procs-per-node is {procs_per_node}; it must be at least 1")
    address = _address(workload)
    try:
        nodes = look(address, workload.secrets)
    except UserError as error:
        raise UserError(f"{error}; RAY_ADDRESS is {_WAYS}") from None
    refuse_local_store(nodes, address)
    if simulate:
        return simulated(workload, nodes, procs_per_node, address)
    return whole(workload, nodes, address)


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
    values = {**_credentials(placement.address), **secrets}
    log = job.run.attempt_logs(job.attempt) / "ray.log"
    driver = Driver(_specification(job, placement, grace_s), values, log)
    return Watch(driver, job, say, cancelled).to_the_end(started)


def node_of(job: Job, rank: int, port: int, placement: Placement, grace_s: float = GRACE_S) -> Node:
    """The command of one node, with what the run adds to that Ray node's own environment.

    What is known only there is empty here: MASTER_ADDR, MASTER_PORT (`port` is not used), the
    place of the snapshot, the moment of the deadline.
    """
    own = (name for name in os.environ if name.startswith("MLFLOW_") and not is_secret(name))
    env = {
        **{name: os.environ[name] for name in own},
        **job.env_variables,
        **_processors(job, placement),
        **job.mlflow,
        "PYTHONUNBUFFERED": "1",
        "TUNEWRIGHT_HOME": str(home()),
        "NUM_NODES": str(job.nodes),
        "NODE_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(job.procs_per_node),
        "WORLD_SIZE": str(job.nodes * job.procs_per_node),
        "MASTER_ADDR": "",
        "MASTER_PORT": "",
        "TUNEWRIGHT_RUN_DIR": str(job.run.root),
        "TUNEWRIGHT_ATTEMPT": str(job.attempt),
        GRACE_VARIABLE: f"{grace_s:g}",
    }
    if job.deadline_s:
        env[DEADLINE_VARIABLE] = ""
    if job.code is not None:
        env["CODE_SOURCE_PATH"] = ""
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


def notes(env_variables: Mapping[str, str]) -> list[str]:
    """What this target does with a workload's variables that its user may not expect."""
    if "CUDA_VISIBLE_DEVICES" in env_variables:
        return ["CUDA_VISIBLE_DEVICES is set by Ray, for each node the GPUs it reserved"]
    return []


def _address(workload: Workload) -> str:
    """RAY_ADDRESS, when it is one that can take this workload; raises UserError."""
    address = os.environ.get("RAY_ADDRESS", "").strip().rstrip("/")
    if not address:
        raise UserError(f"target ray needs a cluster: set RAY_ADDRESS to {_WAYS}")
    is_http = address.startswith(("http://", "https://"))
    parts = urlsplit(address if "://" in address else f"ray://{address}")
    try:
        known = parts.scheme == "ray" or is_http
        complete = bool(parts.hostname) and (is_http or parts.port is not None)
    except ValueError:
        complete = False
    if not (known and complete):
        raise UserError(f"RAY_ADDRESS={address} is no address of a cluster; it is {_WAYS}")
    if is_http and workload.secrets:
        names = ", ".join(sorted(workload.secrets))
        raise UserError(
            f"secrets ({names}) do not travel through RAY_ADDRESS={address}: Ray stores what a job "
            "is submitted with; set it to ray://host:10001, or to host:6379 on a cluster node"
        )
    return address


def whole(workload: Workload, nodes: Sequence[Mapping[str, Any]], address: str) -> Placement:
    asked = workload.compute.gpus_per_node
    fitting = [node for node in nodes if node["GPU"] >= asked]
    if len(fitting) < workload.nodes:
        gpus = sum(node["GPU"] for node in nodes)
        raise UserError(
            f"the workload asks for {workload.compute.num_accelerators} accelerators "
            f"({workload.compute.accelerator_type}), {asked} on each of {workload.nodes} nodes, "
            f"and the Ray cluster {address} has {gpus:g} GPUs on {len(nodes)} nodes, at least "
            f"{asked} on {len(fitting)} of them; add --simulate to run it on what is there"
        )
    bundle = {"CPU": int(min(1, *(node["CPU"] for node in fitting))), "GPU": asked}
    note = f"on {workload.nodes} of the {len(nodes)} nodes of the Ray cluster {address}"
    return Placement(workload.nodes, asked, address, bundle, note=note)


def simulated(
    workload: Workload, nodes: Sequence[Mapping[str, Any]], given: int | None, address: str
) -> Placement:
    """As many nodes as asked, with the processes that fit: on GPUs if each gets one, else CPUs."""
    asked, wanted = workload.compute.gpus_per_node, workload.nodes
    # On fewer Ray nodes than the workload has, several share one.
    shared = -(-wanted // max(1, len(nodes)))

    def least(kind: str) -> int:
        """What every node of the workload can have, on the Ray nodes that have the most."""
        most = sorted((int(node[kind]) // shared for node in nodes), reverse=True)[:wanted]
        return min(most, default=0)

    gpus, cpus = least("GPU"), least("CPU")
    if gpus >= (given or 1):
        procs, device = given or min(asked, gpus), "GPUs"
        bundle = {"CPU": min(1, cpus), "GPU": procs}
    elif cpus:
        procs, device = given or min(asked, cpus), "CPUs"
        bundle = {"CPU": min(procs, cpus)}
    else:
        total = sum(node["CPU"] for node in nodes)
        raise UserError(
            f"simulating {wanted} nodes needs a CPU for each and the Ray cluster {address} has "
            f"{total:g} CPUs on {len(nodes)} nodes; use a smaller workload or another cluster"
        )
    note = (
        f"simulating {wanted} x {asked} {workload.compute.accelerator_type} by {wanted} x {procs} "
        f"processes on {device} of the Ray cluster {address} ({len(nodes)} nodes)"
    )
    strategy = "STRICT_SPREAD" if shared == 1 else "SPREAD"
    return Placement(wanted, procs, address, bundle, strategy, note)


def refuse_local_store(nodes: Sequence[Mapping[str, Any]], address: str) -> None:
    """Nodes on other machines cannot log to a file of this one."""
    given = os.environ.get("MLFLOW_TRACKING_URI")
    uri = given or f"sqlite:///{home() / 'mlflow.db'}"
    is_file = uri.startswith(("sqlite:", "file:")) or ("://" not in uri and uri != "databricks")
    elsewhere = sorted({str(node["address"]) for node in nodes if not _is_here(node)})
    if is_file and elsewhere:
        raise UserError(
            f"MLflow's store {uri} is a file of this machine and the Ray cluster {address} has "
            f"nodes on others ({', '.join(elsewhere[:3])}); start `mlflow server` and set "
            "MLFLOW_TRACKING_URI to its address"
        )


def _is_here(node: Mapping[str, Any]) -> bool:
    """Whether a Ray node is on this machine: by its address, and its name where it is known."""
    mine = {place.address for found in psutil.net_if_addrs().values() for place in found}
    return node["address"] in mine and node["host"] in (None, socket.gethostname())


def _processors(job: Job, placement: Placement) -> dict[str, str]:
    """No GPUs where none are reserved; then a share of the CPUs per process, unless said."""
    if "GPU" in placement.bundle:
        return {}
    share = max(1, placement.bundle["CPU"] // job.procs_per_node)
    # Threads that spin while they wait cost a shared machine many times the work they do.
    ours = {"OMP_NUM_THREADS": str(share), "OMP_WAIT_POLICY": "PASSIVE"}
    free = {name: value for name, value in ours.items() if name not in job.env_variables}
    return {"CUDA_VISIBLE_DEVICES": "", **free}


def _credentials(address: str) -> dict[str, str]:
    """What a node needs to log to MLflow; they are secrets, so never through http://."""
    if address.startswith("http"):
        return {}
    names = (name for name in os.environ if name.startswith("MLFLOW_") and is_secret(name))
    return {name: os.environ[name] for name in names}


def _specification(job: Job, placement: Placement, grace_s: float) -> dict[str, Any]:
    """What the driver is to do, without secrets; leaves the probe that the nodes look for."""
    state = job.run.attempt_state(job.attempt)
    probe, token = state / "ray-probe.json", randomness.token_hex(16)
    write_json(probe, {"token": token})
    # Ray names our package by the hash of its content, and each node unpacks it once.
    runtime_env: dict[str, Any] = {"py_modules": [str(Path(tunewright.__file__).parent)]}
    if job.code is not None:
        # Its parent holds nothing else: the folder keeps its name on the node.
        runtime_env["working_dir"] = str(job.code.parent)
    nodes = [node_of(job, rank, 0, placement, grace_s) for rank in range(job.nodes)]
    return {
        "address": placement.address,
        "runtime_env": runtime_env,
        "strategy": placement.strategy,
        "bundle": dict(placement.bundle),
        "probe": str(probe),
        "token": token,
        "interface": job.env_variables.get("NCCL_SOCKET_IFNAME"),
        "grace_s": grace_s,
        "specification": str(state / "ray-job.json"),
        "order": str(state / "ray-order.json"),
        "lock": str(job.run.lock),
        "silence_s": SILENCE_S,
        "nodes": [
            {
                "node": node.rank,
                "argv": list(node.argv),
                "env": dict(node.env),
                "cwd": str(node.cwd),
                "log": str(node.log),
                "exit": str(node.exit),
                "code": job.code.name if job.code else None,
                "deadline_s": job.deadline_s,
            }
            for node in nodes
        ],
    }
