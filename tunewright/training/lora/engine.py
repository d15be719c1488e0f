"""TRL's SFTTrainer over our packs, plan and step.

The loop, its order of events and DDP are those of TRL, transformers and accelerate. What a step
computes is `tunewright.training.step`, as in the other recipes: one round of the loop is one
optimizer step of the plan, whatever number of micro-batches that takes on this rank. So the loss is
the mean over all supervised tokens of a step, on all ranks, and rows come from the token store.

A sharded model comes here sharded, and accelerate is to leave it as it is, as one to evaluate: it
would load the whole of it on every rank first, or wrap what is sharded in DDP.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer

from tunewright.contract.settings import LoraSettings
from tunewright.training.lora.model import AdaptedModel
from tunewright.training.schedule import learning_rate
from tunewright.training.step import StepResult, Trainer

# Ours is on already. Newer versions have another name for it, and TRL's default is True.
_NAMES = {field.name for field in fields(SFTConfig)}
_CHECKPOINTING = next(
    name for name in ("activation_checkpointing", "gradient_checkpointing") if name in _NAMES
)


@dataclass(frozen=True)
class Course:
    """What happens around the steps: `before` a step is entered, `after` is told its result.

    Steps count from 1; `done` of `steps` were taken by earlier attempts. `stop` is this rank's wish
    to end after the step that begins.
    """

    done: int
    steps: int
    before: Callable[[int], Any]
    after: Callable[[int, StepResult], None]
    stop: Callable[[], bool]


class AdapterTrainer(SFTTrainer):  # type: ignore[misc]
    """Takes the steps that are left of a plan; `train()` raises what a step or `after` raises."""

    def __init__(
        self,
        model: AdaptedModel,
        optimizer: torch.optim.Optimizer,
        steps: Trainer,
        settings: LoraSettings,
        course: Course,
        folder: Path,
    ) -> None:
        self.steps = steps
        self.settings = settings
        self.course = course
        self.result: StepResult | None = None
        super().__init__(
            model=model.peft,
            args=_arguments(settings, course, folder, steps.world.device),
            train_dataset=Dataset.from_dict({"step": range(course.done + 1, course.steps + 1)}),
            data_collator=_step_of,
            processing_class=_no_tokenizer(),
            optimizers=(optimizer, None),
            callbacks=[_Around(self)],
        )
        self.remove_callback(PrinterCallback)
        if model.sharded:
            prepare = partial(self.accelerator.prepare_model, evaluation_mode=True)
            self.accelerator.prepare_model = prepare

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Numbers of steps; the step itself takes its packs, which are made ahead of it."""
        return DataLoader(self.train_dataset, batch_size=1, collate_fn=self.data_collator)

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> LambdaLR:
        settings, course = self.settings, self.course

        def factor(taken: int) -> float:
            step = min(course.done + taken + 1, course.steps)
            return learning_rate(settings, step, course.steps) / settings.learning_rate

        self.lr_scheduler = LambdaLR(optimizer or self.optimizer, factor)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Gradients of a whole step, clipped, over all its micro-batches and ranks."""
        model.train()
        if model is not self.model and self.steps.model.through is None:
            # DDP reduces the gradients of what is called through it.
            self.steps.model = replace(self.steps.model, through=model)
        self.result = self.steps.gradients(inputs["step"], self.course.stop())
        return torch.tensor(self.result.loss or 0.0, device=self.args.device)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> float | None:
        return self.result.grad_norm if self.result else None

    def floating_point_ops(self, inputs: Any) -> int:
        """Counted by the journal."""
        return 0


class _Around(TrainerCallback):  # type: ignore[misc]
    """Puts a Course around the steps of the loop."""

    def __init__(self, trainer: AdapterTrainer) -> None:
        self.trainer = trainer
        self.course = trainer.course
        self._entered = ExitStack()
        self._updating = ExitStack()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        state.global_step = self.course.done

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._entered.enter_context(self.course.before(state.global_step + 1))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._updating.enter_context(self.trainer.steps.clock.phase("optimizer"))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._updating.close()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._entered.close()
        assert self.trainer.result is not None
        self.course.after(state.global_step, self.trainer.result)


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, the libraries keep what they say of each other to themselves; afterwards accelerate
    forgets this world."""
    loggers = [logging.getLogger(name) for name in ("accelerate", "transformers", "trl")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def _arguments(
    settings: LoraSettings, course: Course, folder: Path, device: torch.device
) -> SFTConfig:
    """Everything that is done elsewhere turned off: saving, evaluating, logging, clipping."""
    off: dict[str, Any] = {_CHECKPOINTING: False}
    return SFTConfig(
        output_dir=str(folder),
        max_steps=course.steps,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        learning_rate=settings.learning_rate,
        max_grad_norm=0.0,
        seed=settings.seed,
        bf16=False,
        use_cpu=device.type == "cpu",
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,
        **off,
        router_aux_loss_coef=0.0,
        dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=False,
        save_strategy="no",
        eval_strategy="no",
        logging_strategy="no",
        logging_nan_inf_filter=False,
        report_to="none",
        disable_tqdm=True,
        log_level="error",
    )


def _step_of(rows: list[dict[str, int]]) -> dict[str, int]:
    return rows[0]


def _no_tokenizer() -> PreTrainedTokenizerFast:
    """TRL asks for one; the rows are tokens already."""
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel()))
