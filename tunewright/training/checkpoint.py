"""Sealed, sharded checkpoints: written by all ranks together, trusted only when sealed.

    checkpoints/step-00000200/
      .metadata, __<rank>_<i>.distcp   torch's distributed checkpoint: `model.<Hugging Face name>`
                                       (fp32) and `optimizer.<Hugging Face name>.<state>`
      hf/                              config, generation config, tokenizer files of the base model
      manifest.json                    the seal, and how far the run had come

Everything that is no tensor is in the seal. There is no random state to keep: each step seeds the
generators from the run's seed, the step and the rank, and the plan and the learning rate are pure
functions of the step.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tunewright.contract import rundir
from tunewright.contract.failures import UserError
from tunewright.contract.rundir import RunDir
from tunewright.contract.settings import FsdpSettings
from tunewright.training.hf_folder import write_hf_folder
from tunewright.training.model import BaseModel, ShardedModel
from tunewright.training.optimizer import state_by_name
from tunewright.training.step import StepResult
from tunewright.training.world import World

KIND = "checkpoint"
HF_FOLDER = "hf"
_USERS_ERRORS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EEXIST,
}


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
    """Where a run goes on: from a sealed checkpoint, or from the start when there is none."""

    progress: Progress
    path: Path | None


class Checkpoints:
    """The checkpoints of one run.

    `identity` is what a checkpoint must share with this run for it to be resumed: the data
    fingerprint and the settings that change the plan or the model. `chat_template` is the one
    that the rows were rendered with, if any.
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
        self.chat_template = chat_template
        self.keep = settings.save_total_limit

    def save(self, progress: Progress, *, finished: bool) -> Path:
        """Write, seal, then prune. An interrupted save leaves a folder that no reader trusts.

        Raises UserError when the disk is full or must not be written.
        """
        folder = self.run.checkpoint(progress.step)
        try:
            self._make_room(folder)
            save(self._state(), checkpoint_id=folder)
            hashes = self._hash_own_files(folder)
            if self.world.main:
                self._describe(folder / HF_FOLDER)
                rundir.seal(folder, self._facts(progress, finished), hashes)
                prune(self.run.checkpoints, self.keep)
        except CheckpointException as error:
            _explain(folder, [failure for failure, _ in error.failures.values()], error)
        except OSError as error:
            _explain(folder, [error], error)
        dist.barrier()
        return folder

    def resume(self) -> Found:
        """Load the newest whole checkpoint, for this or another number of ranks.

        Raises UserError when it belongs to other data or other settings.
        """
        found = self.world.on_main(self._newest)
        if found is None:
            return Found(Progress(), None)
        path, facts = found
        self._refuse_other(path, facts)
        load(self._state(), checkpoint_id=path)
        return Found(Progress(**facts["progress"]), path)

    def _state(self) -> dict[str, Any]:
        return {
            "model": {
                **{name: p.detach() for name, p in self.model.parameters.items()},
                **self.model.buffers,
            },
            "optimizer": state_by_name(self.model.parameters, self.optimizer),
        }

    def _facts(self, progress: Progress, finished: bool) -> dict[str, Any]:
        return {
            "kind": KIND,
            "step": progress.step,
            "fingerprint": self.identity["data"],
            "finished": finished,
            "world_size": self.world.size,
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

    def _make_room(self, folder: Path) -> None:
        """Remove what an interrupted save left in this place."""
        if self.world.main:
            remove(folder)
            folder.mkdir(parents=True)
        dist.barrier()

    def _hash_own_files(self, folder: Path) -> dict[str, dict[str, Any]]:
        """Hashes of all ranks' files; each rank reads its own."""
        mine = [path.name for path in folder.glob(f"__{self.world.rank}_*.distcp")]
        parts = self.world.gathered(rundir.hash_files(folder, mine))
        return {name: entry for part in parts for name, entry in part.items()}

    def _newest(self) -> tuple[Path, dict[str, Any]] | None:
        for _, path in reversed(rundir.sealed_checkpoints(self.run.checkpoints)):
            facts = rundir.manifest(path) or {}
            if not (wrong := rundir.damage(path, facts)):
                return path, facts
            print(f"skipped a damaged checkpoint: {wrong[0]}", flush=True)
        return None

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
    for path in sorted(checkpoints.glob("step-*")):
        if path not in kept and path.name < sealed[-1].name:
            remove(path)


def remove(folder: Path) -> None:
    """Delete a checkpoint, its seal first: a deletion cut short leaves nothing to be trusted."""
    (folder / rundir.MANIFEST).unlink(missing_ok=True)
    if folder.exists():
        shutil.rmtree(folder)


def _explain(folder: Path, failures: list[BaseException], cause: BaseException) -> NoReturn:
    for failure in failures:
        if isinstance(failure, OSError) and failure.errno in _USERS_ERRORS:
            raise UserError(
                f"cannot write the checkpoint {folder}: {failure.strerror}; "
                "free some space there, or set output_dir to a folder that can be written"
            ) from cause
    raise RuntimeError(f"the checkpoint {folder} could not be written: {failures[0]}") from cause
