"""The steps of one attempt, from where it goes on to where it ends: the same in our recipes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import torch

from tunewright.contract.settings import FsdpSettings
from tunewright.training.checkpoint import Checkpoints, Found, Progress
from tunewright.training.journal import Journal
from tunewright.training.plan import Plan, seed_of
from tunewright.training.profiler import Profile
from tunewright.training.saving import Saved
from tunewright.training.schedule import learning_rate
from tunewright.training.step import StepResult, Trainer
from tunewright.training.stopping import Stopping
from tunewright.training.timing import compiled_graphs


@dataclass
class Attempt:
    """Takes the steps that are left, evaluates and saves between them, and tells the journal.

    evaluate: the loss of the held-out rows after a step, None where there are none. report: told
    of the progress and of the checkpoints that were sealed since it was last told, by every rank in
    the same steps: those that save, and the last. Where another loop than `steps` takes them, it
    calls `begin`, for each step `before`, `stop` and `after`, and `finish`.
    """

    settings: FsdpSettings
    plan: Plan
    trainer: Trainer
    checkpoints: Checkpoints
    journal: Journal
    profile: Profile
    stopping: Stopping
    evaluate: Callable[[int], float | None]
    report: Callable[[Progress, list[Saved]], None] = lambda progress, sealed: None
    progress: Progress = field(default_factory=Progress)
    _unreported: list[Saved] = field(default_factory=list)
    _graphs: int = field(default_factory=compiled_graphs)

    def steps(self, found: Found) -> Progress:
        """From `found` to the last step of the plan; raises what `after` raises."""
        self.begin(found)
        for step in range(self.progress.step + 1, self.plan.steps + 1):
            with self.before(step):
                result = self.trainer.take(step, self.rate(step), self.stop())
            self.after(step, result)
        return self.finish()

    def begin(self, found: Found) -> None:
        self.progress = found.progress
        if found.path is None:
            self._evaluate()

    def before(self, step: int) -> AbstractContextManager[None]:
        """Inside, the step is taken."""
        # What is random in a step follows from it, so resuming needs no generator's state.
        torch.manual_seed(seed_of(self.settings.seed, step, self.trainer.world.rank))
        return self.profile.step(step)

    def rate(self, step: int) -> float:
        return learning_rate(self.settings, step, self.plan.steps)

    def stop(self) -> bool:
        """This rank's wish to end after the step that is about to be taken."""
        before, self._graphs = self._graphs, compiled_graphs()
        return self.stopping.wanted(self.checkpoints.seconds, before == self._graphs)

    def after(self, step: int, result: StepResult) -> None:
        """A step is done: tell, evaluate and save as it is due.

        Raises OutOfTime near the deadline, when all ranks know that, with this step saved.
        """
        self.progress = self.progress.after(step, result)
        usual = not self.profile.slows(step)
        self.journal.stepped(step, self.rate(step), result, usual=usual)
        last = step == self.plan.steps
        if last or step % self.settings.eval_steps == 0:
            self._evaluate()
        if last or step % self.settings.save_steps == 0:
            self._save(last)
        self._sealed(self.checkpoints.poll())
        if result.stop and not last:
            self._sealed(self.checkpoints.conclude(self.progress))
            raise self.stopping.over(step, self.checkpoints.run.checkpoint(step))

    def finish(self) -> Progress:
        with self.journal.clock.phase("checkpoint"):
            sealed = self.checkpoints.finish()
        self._sealed(sealed)
        self._report()
        return self.progress

    def _evaluate(self) -> None:
        with self.journal.clock.phase("evaluation"):
            loss = self.evaluate(self.progress.step)
        if loss is not None:
            self.progress = replace(self.progress, eval_loss=loss)
        self.journal.evaluated(self.progress)

    def _save(self, last: bool) -> None:
        with self.journal.clock.phase("checkpoint"):
            blocked = self.checkpoints.begin(self.progress, finished=last)
        # Beginning has ended the save before this one.
        self._sealed(self.checkpoints.poll())
        self._report()
        self.journal.saving(self.progress.step, blocked)

    def _sealed(self, saves: list[Saved]) -> None:
        self.journal.saved(saves)
        self._unreported += saves

    def _report(self) -> None:
        self.report(self.progress, self._unreported)
        self._unreported = []
