"""Sealed, sharded checkpoints: written by all ranks together, trusted only when sealed.

    checkpoints/step-00000200/
      .metadata, __<rank>_<i>.distcp   torch's distributed checkpoint: `model.<Hugging Face name>`
                                       (fp32) and `optimizer.<Hugging Face name>.<state>`
      hf/                              config, generation config, tokenizer files of the base model
      manifest.json                    the seal, and how far the run had come

Everything that is no tensor is in the seal. There is no random state to keep: each step seeds the
generators from the run's seed, the step and the rank, and the plan and the learning rate are pure
functions of the step.

A save is a copy in host memory, taken in moments, and a thread that writes it while training goes
on. A thread and no process of its own: copying, hashing and writing large pieces hold neither the
interpreter nor a core for long, and there is nothing to start, to feed or to orphan.
"""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save as write_sharded

from tunewright.contract import rundir
from tunewright.contract.failures import NonFinite, UserError
from tunewright.contract.rundir import RunDir
from tunewright.contract.settings import FsdpSettings
from tunewright.training import fp8
from tunewright.training.base import BaseModel
from tunewright.training.hf_folder import write_hf_folder
from tunewright.training.model import ShardedModel
from tunewright.training.optimizer import state_by_name
from tunewright.training.saving import Peers, Save, Saved, explain
from tunewright.training.staging import HostCopy, shard, share
from tunewright.training.step import StepResult
from tunewright.training.world import PREPARATION_TIMEOUT, World
from tunewright.training.writing import Planner, Writer

KIND = "checkpoint"
HF_FOLDER = "hf"
_ASSUMED_BYTES_PER_S = 250e6
"""Of all ranks together; what a save is taken to last before one was measured."""
_ABANDON_S = 2.0
_OURS = re.compile(r"step-\d{8}")


@dataclass(frozen=True)
class Progress:
    """How far a run has come: steps done, tokens seen by all ranks, the last losses known."""

    step: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    loss: float | None = None
    eval_loss: float | None = None

    def after(self, step: int, result: StepResult) -> Progress:
        return replace(
            self,
            step=step,
            tokens=self.tokens + result.tokens,
            supervised_tokens=self.supervised_tokens + result.supervised_tokens,
            loss=self.loss if result.loss is None else result.loss,
        )


@dataclass(frozen=True)
class Found:
    """Where a run goes on: from a sealed checkpoint, or from the start when there is none.

    caveat: what going on cannot promise, in one line; None where the losses will be the same.
    """

    progress: Progress
    path: Path | None
    caveat: str | None = None


class Checkpoints:
    """The checkpoints of one run; at most one is being written.

    `identity` is what a checkpoint must share with this run for it to be resumed: the data
    fingerprint and the settings that change the plan or the model. `chat_template` is the one
    that the rows were rendered with, if any.

    Host memory: one copy of what the rank writes (fp32 weights and AdamW's state: 12 bytes for each
    parameter, shared among the ranks), pinned for GPUs, taken at the first save and kept. Making,
    entering, `begin`, `finish`, `conclude`, `save` and `resume` are for all ranks together. Leaving
    by an error gives up the save being written.
    """

    def __init__(
        self,
        run: RunDir,
        world: World,
        model: ShardedModel,
        optimizer: Any,
        base: BaseModel,
        identity: Mapping[str, Any],
        settings: FsdpSettings,
        chat_template: str | None,
    ) -> None:
        self.run = run
        self.world = world
        self.model = model
        self.optimizer = optimizer
        self.base = base
        self.identity = dict(identity)
        self.save_dtype = settings.save_dtype
        # How a step is cut decides in what order its sums are taken.
        self._cut = {"world_size": world.size, "tokens_per_device": settings.tokens_per_device}
        self.chat_template = chat_template
        self.keep = settings.save_total_limit
        group = dist.new_group(backend="gloo", timeout=PREPARATION_TIMEOUT)
        self._peers = Peers(group, world.main, world.size)
        self._host: HostCopy | None = None
        self._current: Save | None = None
        self._sealed: list[Saved] = []
        self._newest_step: int | None = None
        self._seconds: float | None = None
        # Nobody can forget it: the optimizer itself waits until the copies have been made.
        optimizer.register_step_pre_hook(lambda *_: self.staged())

    def begin(self, progress: Progress, *, finished: bool) -> float:
        """Copy the state and begin to write it; returns the seconds that training stood.

        Waits for a save that is still being written; raises what went wrong with it.
        """
        started = time.perf_counter()
        self._collect()
        state = share(self._state(), self.world.rank, self.world.size)
        flat = {f"{kind}.{name}": t for kind, part in state.items() for name, t in part.items()}
        if self._host is None:
            self._host = HostCopy(flat, self.world.device)
        host, folder = self._host, self.run.checkpoint(progress.step)
        host.take(flat)
        facts = self._facts(progress, finished)

        def work(abandoned: threading.Event) -> None:
            self._write(folder, state, host, facts, abandoned)

        self._current = Save(progress.step, folder, started, work)
        self._current.blocked = self._current.elapsed()
        return self._current.blocked

    def staged(self) -> None:
        """Before the tensors change: let the changes come after the copies of them.

        The optimizer calls it before each of its steps; whoever else changes weights must too.
        """
        if self._host is not None:
            self._host.hold_changes()

    def poll(self) -> list[Saved]:
        """What has been sealed since this was last asked; raises when a save failed.

        Raises UserError when the disk is full or must not be written.
        """
        if self._current is not None and self._current.wait(0):
            self._collect()
        sealed, self._sealed = self._sealed, []
        return sealed

    def finish(self) -> list[Saved]:
        """Wait for the save that is being written; like `poll`."""
        self._collect()
        return self.poll()

    def conclude(self, progress: Progress, *, finished: bool = False) -> list[Saved]:
        """Finish, with this progress as the newest checkpoint: saved now unless it was."""
        newest = self._current.step if self._current else self._newest_step
        if newest != progress.step:
            self.begin(progress, finished=finished)
        return self.finish()

    def save(self, progress: Progress, *, finished: bool) -> Saved:
        """Write, seal and prune while training stands."""
        self.begin(progress, finished=finished)
        return self.finish()[-1]

    @property
    def seconds(self) -> float:
        """How long until a save begun now would be sealed, with the rest of one being written.

        As long as the last one; before one was measured a careful guess.
        """
        once = self._guess if self._seconds is None else self._seconds
        return once + (max(0.0, once - self._current.elapsed()) if self._current else 0.0)

    def settle(self, within_s: float) -> str:
        """For an ending from outside: let the save being written end if that fits; say which did.

        Any thread may call it, also while the others never return. Changes no state.
        """
        save, why = self._current, ""
        if save is not None:
            left = max(0.0, (self._seconds or 0.0) - save.elapsed())
            if left > within_s or not save.wait(within_s):
                about = f", about {left:.0f} s are left" if left else ""
                why = f"the save of step {save.step} does not fit {within_s:.0f} s{about}; "
        return why + rundir.next_start(self.run.checkpoints)

    def resume(self) -> Found:
        """Load the newest whole checkpoint, for this or another number of ranks.

        Its files are checked against the seal, each rank reading its share of them. Raises
        UserError when it belongs to other data or other settings.
        """
        for path, facts in self.world.on_main(self._sealed_ones):
            if wrong := self._damage(path, facts):
                if self.world.main:
                    print(f"skipped a damaged checkpoint: {wrong[0]}", flush=True)
                    # Nobody else may trust it either: not pruning, not consolidation.
                    (path / rundir.MANIFEST).unlink()
                continue
            self._refuse_other(path, facts)
            load(self._state(), checkpoint_id=path)
            fp8.refresh_scales(self.model.module)
            progress = Progress(**facts["progress"])
            self._newest_step = progress.step
            return Found(progress, path, _caveat(facts, self._cut))
        return Found(Progress(), None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or isinstance(error, NonFinite):
            # Every rank knows of the latter: the save that was begun before is as good as any.
            self._collect()
        elif self._current is not None:
            # A thread that still runs when the interpreter goes down could take it along.
            self._current.abandoned.set()
            self._current.wait(_ABANDON_S)
        if self._host is not None and error is None:
            self._host.release()

    @cached_property
    def _guess(self) -> float:
        parts = share(self._state(), self.world.rank, self.world.size).values()
        size = sum(shard(tensor).nbytes for part in parts for tensor in part.values())
        return size * self.world.size / _ASSUMED_BYTES_PER_S

    def _collect(self) -> None:
        """Wait for the save being written, if any, and take note of how it ended."""
        save = self._current
        if save is None:
            return
        save.wait()  # and only then forget it: `settle` may be looking
        self._current = None
        saved = save.result()
        self._seconds, self._newest_step = saved.seconds, saved.step
        self._sealed.append(saved)

    def _write(
        self,
        folder: Path,
        state: dict[str, Any],
        host: HostCopy,
        facts: Mapping[str, Any],
        abandoned: threading.Event,
    ) -> None:
        """In the thread: write, seal, then prune. Before the seal no reader trusts the folder."""
        if self.world.device.type == "cuda":
            torch.cuda.set_device(self.world.device)  # a new thread begins with the first GPU
        try:
            self._peers.on_main(lambda: _make_room(folder))
            host.wait()
            writer = Writer(folder, abandoned)
            write_sharded(
                state,
                storage_writer=writer,
                planner=Planner(host.tensors),
                process_group=self._peers.group,
            )
            parts = self._peers.gathered(writer.hashes)
            hashes = {name: entry for part in parts for name, entry in part.items()}
            self._peers.on_main(lambda: self._seal(folder, facts, hashes))
        except CheckpointException as error:
            explain(folder, [failure for failure, _ in error.failures.values()], error)
        except OSError as error:
            explain(folder, [error], error)

    def _seal(
        self, folder: Path, facts: Mapping[str, Any], hashes: Mapping[str, dict[str, Any]]
    ) -> None:
        self._describe(folder / HF_FOLDER)
        rundir.seal(folder, facts, hashes)
        prune(self.run.checkpoints, self.keep)

    def _state(self) -> dict[str, Any]:
        return {
            "model": {**self.model.tensors, **self.model.buffers},
            "optimizer": state_by_name(self.model.parameters, self.optimizer),
        }

    def _facts(self, progress: Progress, finished: bool) -> dict[str, Any]:
        return {
            "kind": KIND,
            "step": progress.step,
            "fingerprint": self.identity["data"],
            "finished": finished,
            **self._cut,
            "save_dtype": self.save_dtype,
            "tied": self.model.tied,
            "parameters": self.model.count,
            "base_model": {"name": self.base.name, "revision": self.base.revision},
            "progress": asdict(progress),
            "identity": self.identity,
        }

    def _describe(self, folder: Path) -> None:
        module = self.model.module
        write_hf_folder(folder, self.base.folder, module, self.save_dtype, self.chat_template)

    def _sealed_ones(self) -> list[tuple[Path, dict[str, Any]]]:
        """Folders and seals, the newest first."""
        found = reversed(rundir.sealed_checkpoints(self.run.checkpoints))
        return [(path, rundir.manifest(path) or {}) for _, path in found]

    def _damage(self, path: Path, facts: Mapping[str, Any]) -> list[str]:
        """What is wrong with a checkpoint; the largest files are dealt to the ranks first."""
        files = facts["files"]
        names = sorted(files, key=lambda name: (-files[name]["size"], name))
        mine = {name: files[name] for name in names[self.world.rank :: self.world.size]}
        parts = self.world.gathered(rundir.damage(path, {"files": mine}))
        return [sentence for part in parts for sentence in part]

    def _refuse_other(self, path: Path, facts: Mapping[str, Any]) -> None:
        theirs = facts.get("identity", {})
        changed = [
            f"{name} was {theirs.get(name)!r} and is {value!r}"
            for name, value in self.identity.items()
            if theirs.get(name) != value
        ]
        if changed:
            raise UserError(
                f"{path} belongs to another training: {'; '.join(changed)}. "
                "Put that back, or choose another output_dir to start anew"
            )


def prune(checkpoints: Path, keep: int) -> None:
    """Keep the newest `keep` sealed checkpoints; unsealed ones older than the newest go too."""
    sealed = [path for _, path in rundir.sealed_checkpoints(checkpoints)]
    if not sealed:
        return
    kept = set(sealed[-keep:])
    for path in sorted(checkpoints.iterdir()):
        ours = _OURS.fullmatch(path.name) and path.is_dir()
        if ours and path not in kept and path.name < sealed[-1].name:
            remove(path)


def remove(folder: Path) -> None:
    """Delete a checkpoint, its seal first: a deletion cut short leaves nothing to be trusted."""
    (folder / rundir.MANIFEST).unlink(missing_ok=True)
    if folder.exists():
        shutil.rmtree(folder)


def _make_room(folder: Path) -> None:
    """Remove what an interrupted save left in this place."""
    remove(folder)
    folder.mkdir(parents=True)


def _caveat(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    pairs = [(name, before.get(name, value), value) for name, value in now.items()]
    changed = [f"{name} {old}, now {new}" for name, old, new in pairs if old != new]
    if not changed:
        return None
    return (
        f"saved with {' and '.join(changed)}: the same rows in the same order, but sums are taken "
        "in another order, so losses may differ in their last digits"
    )
