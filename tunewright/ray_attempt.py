"""One attempt on a Ray cluster that is connected to: places, actors, outcomes.

One actor per node, each in its bundle of a placement group. Secrets go out as arguments of an
actor call, which Ray keeps in memory. Nothing here is detached or restarted by Ray: when the
driver ends, however, the actors end, and the guardians of their commands with them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tunewright.contract.failures import TunewrightError, UserError
from tunewright.contract.rundir import read_json
from tunewright.ray_node import RayNode

_LOOK_S = 120.0
_POLL_S = 0.2
_SAY_AGAIN_S = 60.0
_AFTER_GRACE_S = 15.0
"""How much longer than its grace a guardian may take until we believe that it is gone."""

Reason = Callable[[], str | None]
"""Why to stop, or None."""


class ClusterFailed(TunewrightError):
    """The cluster did not do what was asked; another attempt may help."""

    failure_class = "infrastructure"


class Attempt:
    """One attempt on the nodes of a cluster that is connected to."""

    def __init__(self, specification: Mapping[str, Any], reason: Reason) -> None:
        self.spec = specification
        self.nodes: list[dict[str, Any]] = specification["nodes"]
        self.reason = reason
        self.grace_s = float(specification["grace_s"])
        self.places: list[dict[str, Any]] = []
        self.actors: list[Any] = []
        self.lost: dict[int, tuple[float, str]] = {}
        """When Ray lost a node, and its words."""
        self.outcomes: dict[int, dict[str, Any]] = {}
        self._told: str | None = None
        self._stopped_at: float | None = None
        self._failed_at: float | None = None

    def run(self) -> None:
        """Place the nodes, run their commands to the end, tell each outcome."""
        import ray
        from ray.util import remove_placement_group

        group = self._group()
        try:
            if self._await_place(group) and self._look(self._start(group)):
                running = self._begin()
                emit("started")
                while len(self.outcomes) < len(self.nodes):
                    self._collect(running)
                    self._decide()
        finally:
            # A cluster that is gone has nothing left to give back.
            with suppress(Exception):
                for actor in self.actors:
                    ray.kill(actor)
                remove_placement_group(group)

    def _group(self) -> Any:
        from ray.util import placement_group

        bundles = [dict(self.spec["bundle"]) for _ in self.nodes]
        return placement_group(bundles, strategy=self.spec["strategy"])

    def _await_place(self, group: Any) -> bool:
        """Until the cluster has room; False when we are told to stop before."""
        said = time.monotonic() - _SAY_AGAIN_S + 2
        while not group.wait(timeout_seconds=1):
            if self.reason():
                return False
            if time.monotonic() > said + _SAY_AGAIN_S:
                said = time.monotonic()
                emit("waiting", message=self._wish())
        return True

    def _wish(self) -> str:
        import ray

        wanted = " and ".join(f"{n:g} {kind}" for kind, n in self.spec["bundle"].items())
        alive = [node for node in ray.nodes() if node["Alive"]]
        return (
            f"waiting for room on the Ray cluster: {len(self.nodes)} nodes with {wanted} each; "
            f"it has {len(alive)} nodes"
        )

    def _start(self, group: Any) -> list[Any]:
        """An actor in each bundle; returns what each of them will tell of its place."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        remote = ray.remote(RayNode)
        for node in self.nodes:
            place = PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=node["node"]
            )
            options = remote.options(
                num_cpus=self.spec["bundle"].get("CPU", 0),
                num_gpus=self.spec["bundle"].get("GPU", 0),
                scheduling_strategy=place,
                # `run` blocks, and `stop` must get through.
                max_concurrency=4,
                max_restarts=0,
                max_task_retries=0,
            )
            self.actors.append(options.remote())
        seen = (self.spec["probe"], self.spec["interface"])
        pairs = zip(self.actors, self.nodes, strict=True)
        return [actor.look.remote(seen[0], node["node"], seen[1]) for actor, node in pairs]

    def _look(self, looks: list[Any]) -> bool:
        """Where the nodes are, once every one has answered; False when told to stop before.

        Raises UserError when the run's folder is not the same on all of them.
        """
        import ray

        deadline, waiting = time.monotonic() + _LOOK_S, list(looks)
        while waiting:
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_POLL_S)
            if self.reason():
                return False
            if waiting and time.monotonic() > deadline:
                raise ClusterFailed(
                    f"{len(waiting)} of {len(looks)} Ray nodes did not set up our code within "
                    f"{_LOOK_S:.0f} s; see the cluster's runtime_env logs"
                )
        self.places = ray.get(looks)
        self._check_folder()
        emit("placed", nodes=self.places)
        return True

    def _check_folder(self) -> None:
        probe = Path(self.spec["probe"])
        for rank, place in enumerate(self.places):
            read = place["token"] == self.spec["token"]
            if read and read_json(Path(f"{probe}.node-{rank}")):
                continue
            verb = "written" if read else "read"
            where = f"the Ray node {place['address']} ({place['host']})"
            raise UserError(not_shared(probe.parent, verb, where))

    def _begin(self) -> dict[Any, int]:
        """Start every node's command; {what will tell its outcome: its number}."""
        first = self.places[0]
        common = {"MASTER_ADDR": first["address"], "MASTER_PORT": str(first["port"])}
        lacking = [p["host"] for p in self.places if not p["interface"]]
        if lacking:
            name = self.spec["interface"]
            emit("note", message=f"NCCL_SOCKET_IFNAME={name} is no interface of {lacking[0]}; "
                 "leaving the choice to NCCL")  # fmt: skip
        running = {}
        for actor, node in zip(self.actors, self.nodes, strict=True):
            env = {**node["env"], **common}
            if lacking:
                env.pop("NCCL_SOCKET_IFNAME", None)
            specification = {**node, "env": env, "grace_s": self.grace_s}
            running[actor.run.remote(specification, self.spec["secrets"])] = node["node"]
        return running

    def _collect(self, running: dict[Any, int]) -> None:
        """Take the outcomes that came; a node that Ray lost may still have told its own."""
        import ray

        if running:
            ready, _ = ray.wait(list(running), timeout=_POLL_S)
            for reference in ready:
                rank = running.pop(reference)
                try:
                    told = ray.get(reference)
                except ray.exceptions.RayError as error:
                    self.lost[rank] = (time.monotonic(), sentence(error))
                    continue
                self._conclude(rank, told or self._gone(rank, "the guardian was killed"))
        else:
            time.sleep(_POLL_S)
        for rank, (when, words) in list(self.lost.items()):
            told = read_json(Path(self.nodes[rank]["exit"]))
            if told is not None or self._past(when, _AFTER_GRACE_S):
                del self.lost[rank]
                self._conclude(rank, self._after_loss(rank, told, words))

    def _after_loss(self, rank: int, told: dict[str, Any] | None, words: str) -> dict[str, Any]:
        """What the guardian wrote, unless all it knows is that its actor was gone."""
        if told is not None and told["stopped_by"] != "parent died":
            return told
        lost = self._gone(rank, f"the command was lost: {words}")
        return {**told, **lost, "tail": told["tail"]} if told else lost

    def _gone(self, rank: int, words: str) -> dict[str, Any]:
        place = self.places[rank]
        message = f"on the Ray node {place['address']} ({place['host']}) {words}"
        failure = {"class": "infrastructure", "node": rank, "rank": None, "message": message}
        return {
            "node": rank,
            "exit_code": 137,
            "stopped_by": None,
            "failure": failure,
            "tail": "",
            "survivors": [],
            "ended": time.time(),
        }

    def _conclude(self, rank: int, outcome: dict[str, Any]) -> None:
        self.outcomes[rank] = outcome
        if outcome["exit_code"] or outcome["failure"]:
            self._failed_at = self._failed_at or time.monotonic()
        emit("outcome", outcome=outcome)

    def _decide(self) -> None:
        """Stop all when the flow says so, or when a node failed and its peers had their grace."""
        failed_at = self._failed_at or next((when for when, _ in self.lost.values()), None)
        peer = failed_at is not None and self._past(failed_at)
        reason = self.reason() or ("peer" if peer else None)
        if reason and self._told is None:
            self._told, self._stopped_at = reason, time.monotonic()
            for actor in self.actors:
                actor.stop.remote(reason)
        if self._stopped_at is not None and self._past(self._stopped_at, 2 * _AFTER_GRACE_S):
            for rank in set(range(len(self.nodes))) - set(self.outcomes):
                self._conclude(
                    rank, self._gone(rank, "the command did not end when it was told to")
                )

    def _past(self, moment: float, more_s: float = 0.0) -> bool:
        return time.monotonic() > moment + self.grace_s + more_s


def emit(event: str, **facts: Any) -> None:
    """One event for the flow."""
    pass_on(json.dumps({"event": event, **facts}))


def pass_on(line: str) -> None:
    """A line for the flow. When it is gone nobody reads it, and there is still work to end."""
    with suppress(BrokenPipeError):
        print(line, flush=True)


def sentence(error: BaseException) -> str:
    """The first line of Ray's words that says something."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line for line in lines if line), type(error).__name__)


def not_shared(folder: Path, verb: str, where: str) -> str:
    """That a folder of the run is another one there, and the way out."""
    return (
        f"output_dir is not shared: {folder} cannot be {verb} on {where} as it is where the flow "
        "runs; set parameters.output_dir (or TUNEWRIGHT_HOME) to a folder that this machine and "
        "every Ray node mount"
    )
