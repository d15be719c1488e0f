"""The typed settings of the recipes: what `parameters` may hold when the command is ours.

Names are those of Hugging Face's trainers where they have one. A default has its one home here.
`settings_of` also accepts the names that users' files have (`max_seq_len`,
`per_device_batch_size`, `gradient_accumulation_steps`) and turns them into ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tunewright.contract.failures import Problem, UserError
from tunewright.contract.problems import nearest, problems_of

DEFAULT_PACK_TOKENS = 4096
PATH_PREFIXES = ("/", "./", "../", "~")
"""A name that starts with one of these is a path; anything else is a Hub name."""

_BATCH_NAMES = ("per_device_batch_size", "per_device_train_batch_size")
_USERS_NAMES = (*_BATCH_NAMES, "gradient_accumulation_steps", "max_seq_len")


class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DataSettings(Settings):
    """Which rows become which tokens. Everything here is part of the fingerprint of the tokens."""

    model_name: str = Field(description="Hub name, or a folder (./, ../, / or ~) with the model.")
    model_revision: str | None = Field(None, description="Branch, tag or commit of a Hub model.")
    dataset_name: str = Field(description="Hub name, or a file or folder of rows.")
    dataset_revision: str | None = Field(
        None, description="Branch, tag or commit of a Hub dataset."
    )
    dataset_split: str = Field("train", description="Split of a Hub dataset.")
    format: Literal["auto", "alpaca", "messages"] = Field(
        "auto", description="Shape of a row: instruction/input/output, or a list of messages."
    )
    template: Literal["auto", "alpaca", "chat"] = Field(
        "auto",
        description="How a row becomes text: the Alpaca text, or the tokenizer's chat template "
        "(ours where it has none). auto: Alpaca text for Alpaca rows, chat for messages.",
    )
    train_on: Literal["responses", "all"] = Field(
        "responses", description="Which tokens are supervised."
    )
    on_bad_row: Literal["fail", "drop"] = Field(
        "fail", description="A row without an answer, or of another shape: stop, or drop and count."
    )
    on_too_long: Literal["truncate", "drop", "fail"] = Field(
        "truncate", description="A row of more than max_length tokens."
    )
    max_length: int = Field(2048, ge=8, description="Longest row, in tokens.")
    pack_tokens: int = Field(DEFAULT_PACK_TOKENS, ge=8, description="Tokens of a pack of rows.")
    eval_fraction: float = Field(
        0.0, ge=0, lt=1, description="Share of the rows held out for evaluation, by content hash."
    )
    eval_dataset: str | None = Field(None, description="Rows for evaluation, like dataset_name.")

    @model_validator(mode="after")
    def _packs_hold_a_row(self) -> Self:
        if self.pack_tokens < self.max_length:
            raise ValueError(
                f"pack_tokens is {self.pack_tokens} but max_length is {self.max_length}; "
                "raise pack_tokens or lower max_length, a row must fit in a pack"
            )
        if self.eval_fraction and self.eval_dataset:
            raise ValueError(
                "eval_fraction and eval_dataset are both set; remove one, "
                "rows for evaluation come from one place"
            )
        return self


class FsdpSettings(DataSettings):
    """Full fine-tuning with FSDP2: the parameters of tunewright.recipes.fsdp."""

    init: Literal["pretrained", "random"] = Field(
        "pretrained", description="random: only config and tokenizer are read from model_name."
    )
    precision: Literal["auto", "bf16", "fp32"] = Field(
        "auto", description="Compute type; parameters stay fp32. auto: bf16 where the GPU has it."
    )
    save_dtype: Literal["bfloat16", "float16", "float32"] = Field(
        "bfloat16", description="Type of the weights in the exported model."
    )
    learning_rate: float = Field(2e-5, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.95, ge=0, lt=1)
    adam_epsilon: float = Field(1e-8, gt=0)
    max_grad_norm: float = Field(1.0, gt=0)
    lr_scheduler_type: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int | None = Field(None, ge=0)
    warmup_ratio: float = Field(0.03, ge=0, le=1, description="Used when warmup_steps is unset.")
    max_steps: int | None = Field(None, ge=1, description="Optimizer steps; else num_train_epochs.")
    num_train_epochs: int = Field(1, ge=1)
    global_batch_tokens: int = Field(
        16 * DEFAULT_PACK_TOKENS, ge=1, description="Tokens of one optimizer step, all ranks."
    )
    tokens_per_device: int | None = Field(
        None, ge=1, description="Tokens of one micro-batch on one rank; unset: one pack."
    )
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass to save memory."
    )
    save_steps: int = Field(200, ge=1, description="Optimizer steps between checkpoints.")
    save_total_limit: int = Field(2, ge=1, description="Sealed checkpoints that are kept.")
    eval_steps: int = Field(200, ge=1, description="Optimizer steps between evaluations.")
    logging_steps: int = Field(1, ge=1)
    seed: int = Field(42, ge=0)
    output_dir: str | None = Field(None, description="The run's model folder; set by the launcher.")
    tokens_path: str | None = Field(None, description="Sealed tokens; set by the launcher.")

    @model_validator(mode="after")
    def _batches_are_whole_packs(self) -> Self:
        for name in ("global_batch_tokens", "tokens_per_device"):
            value = getattr(self, name)
            if value is not None and value % self.pack_tokens:
                raise ValueError(
                    f"{name} is {value}, which is not a whole number of packs of "
                    f"pack_tokens={self.pack_tokens}; nearest: "
                    f"{_nearest_multiple(value, self.pack_tokens)}"
                )
        return self

    @property
    def packs_per_step(self) -> int:
        return self.global_batch_tokens // self.pack_tokens

    @property
    def packs_per_micro_batch(self) -> int:
        return (self.tokens_per_device or self.pack_tokens) // self.pack_tokens


RECIPES: dict[str, type[FsdpSettings]] = {"fsdp": FsdpSettings}
"""Settings of each recipe, by the name in `tunewright.recipes.<name>`."""


def settings_of(
    recipe: str, parameters: Mapping[str, Any], accelerators: int = 1
) -> tuple[FsdpSettings | None, list[Problem]]:
    """The settings of a recipe, or every problem with its path below `parameters`.

    `accelerators` is what the workload asks for: the users' per-device names are turned into
    global_batch_tokens with it, so that the batch does not depend on where the run happens.
    """
    model = RECIPES[recipe]
    try:
        translated = _translate(parameters, accelerators)
    except UserError as error:
        return None, [Problem("parameters", str(error))]
    try:
        return model.model_validate(translated), []
    except ValidationError as error:
        found = problems_of(error, model, ["parameters"])
        return None, [_with_users_names(problem, model) for problem in found]


def load_settings(recipe: str, parameters: Mapping[str, Any]) -> FsdpSettings:
    """The settings of a recipe for the recipe itself; raises UserError with every problem."""
    settings, problems = settings_of(recipe, parameters)
    if settings is None:
        raise UserError("\n".join(f"{path}: {message}" for path, message in problems))
    return settings


def is_path(name: str) -> bool:
    """Whether a name in a recipe's parameters means a path rather than a Hub name."""
    return name.startswith(PATH_PREFIXES) or name in (".", "..")


def _translate(parameters: Mapping[str, Any], accelerators: int) -> dict[str, Any]:
    """Users' names into ours; values that are not plain numbers are left for pydantic to name."""
    found = dict(parameters)
    if "max_seq_len" in found:
        if "max_length" in found:
            raise UserError("max_seq_len and max_length are both set; they mean the same, keep one")
        found["max_length"] = found.pop("max_seq_len")
    batch_names = [name for name in _BATCH_NAMES if name in found]
    if not batch_names and "gradient_accumulation_steps" not in found:
        return found
    if "global_batch_tokens" in found:
        given = [
            *batch_names,
            *(["gradient_accumulation_steps"] if "gradient_accumulation_steps" in found else []),
        ]
        raise UserError(
            f"global_batch_tokens and {' and '.join(given)} are both set; "
            "keep one way to say the batch"
        )
    if len(batch_names) == 2:
        raise UserError(f"{' and '.join(batch_names)} mean the same; keep one")
    rows = _positive(
        found.pop(batch_names[0], 1) if batch_names else 1, batch_names[0] if batch_names else ""
    )
    accumulation = _positive(
        found.pop("gradient_accumulation_steps", 1), "gradient_accumulation_steps"
    )
    length = _positive(
        found.get("max_length", DataSettings.model_fields["max_length"].default), "max_length"
    )
    found["global_batch_tokens"] = total = rows * accumulation * accelerators * length
    if "pack_tokens" not in found and (total % DEFAULT_PACK_TOKENS or length > DEFAULT_PACK_TOKENS):
        found["pack_tokens"] = length
    return found


def _positive(value: Any, name: str) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = 0
    if number < 1 or isinstance(value, bool) or number != float(value):
        raise UserError(f"{name} must be a whole number of at least 1 (found {value!r})")
    return number


def _nearest_multiple(value: int, unit: int) -> int:
    return max(1, round(value / unit)) * unit


def _with_users_names(problem: Problem, model: type[BaseModel]) -> Problem:
    """Let the suggestion for an unknown key know the users' names too."""
    if not problem.message.startswith("unknown key;"):
        return problem
    known = {*model.model_fields, *_USERS_NAMES}
    return Problem(problem.path, f"unknown key; {nearest(problem.path.split('.')[-1], known)}")
