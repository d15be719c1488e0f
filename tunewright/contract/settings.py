"""The typed settings of the recipes: what `parameters` may hold when the command is ours.

Names are those of Hugging Face's trainers where they have one. A default has its one home here.
`settings_of` also accepts the names that users' files have (`max_seq_len`,
`per_device_batch_size`, `gradient_accumulation_steps`) and turns them into ours.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from tunewright.contract.failures import Problem, UserError
from tunewright.contract.problems import leaves, problems_of, without_empty

DEFAULT_PACK_TOKENS = 4096
PATH_PREFIXES = ("/", "./", "../", "~")
"""A name that starts with one of these is a path; anything else is a Hub name."""

BATCH_NAMES = (
    "per_device_batch_size",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
)
"""The names by which users' files say the batch."""
_USERS_NAMES = (*BATCH_NAMES, "max_seq_len")


class Settings(BaseModel):
    """Typed parameters. Text that is a number counts as one: `2e-5` is text to YAML."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    also_known: ClassVar[tuple[str, ...]] = _USERS_NAMES

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, value: Any) -> Any:
        return without_empty(value)

    @field_validator("*", mode="before")
    @classmethod
    def _numbers_are_no_bools(cls, value: Any, info: ValidationInfo) -> Any:
        kinds = leaves(cls.model_fields[str(info.field_name)].annotation)
        if isinstance(value, bool) and bool not in kinds and {int, float} & {*kinds}:
            raise ValueError(f"must be a number (found {str(value).lower()})")
        return value


Format = Literal["auto", "alpaca", "messages", "sharegpt", "prompt_completion", "text"]


class DatasetSource(Settings):
    """One of several sources of rows."""

    name: str = Field(min_length=1, description="Like dataset_name.")
    revision: str | None = Field(None, description="Branch, tag or commit on the Hub.")
    split: str = Field("train", description="Like dataset_split.")
    weight: float = Field(1.0, gt=0, description="How often each of its rows is taken.")
    format: Format = "auto"
    columns: dict[str, str] | None = None


class DataSettings(Settings):
    """Which rows become which tokens.

    What changes the tokens is part of their fingerprint; names, paths and limits that only stop a
    run are not.
    """

    model_name: str = Field(
        min_length=1, description="Hub name, or a folder (./, ../, / or ~) with the model."
    )
    model_revision: str | None = Field(None, description="Branch, tag or commit of a Hub model.")
    datasets: list[DatasetSource] | None = Field(
        None,
        min_length=1,
        description="Several sources instead of dataset_name, mixed by weight.",
    )
    dataset_name: str | None = Field(
        None,
        validate_default=True,
        min_length=1,
        description="Hub name, or a file, glob or folder of rows; name:split[:1000] takes a part.",
    )
    dataset_revision: str | None = Field(
        None, description="Branch, tag or commit of a Hub dataset."
    )
    dataset_split: str = Field(
        "train", description="Split of a Hub dataset, or of a folder that has several."
    )
    format: Format = Field("auto", description="Shape of a row; auto: found and named.")
    columns: dict[str, str] | None = Field(
        None, description="Names of columns that differ: {the shape's name: the data's name}."
    )
    template: Literal["auto", "alpaca", "chat", "builtin"] = Field(
        "auto",
        description="How a row becomes text: the Alpaca text, the tokenizer's chat template, or "
        "ours. auto: Alpaca text for Alpaca rows, else chat, else ours where there is none.",
    )
    chat_template: str | None = Field(
        None, min_length=1, description="A Jinja chat template to use instead, as text or a path."
    )
    train_on: Literal["responses", "all", "last_response"] = Field(
        "responses", description="Which tokens are supervised."
    )
    on_bad_row: Literal["fail", "drop"] = Field(
        "fail", description="A row without an answer, or of another shape: stop, or drop and count."
    )
    max_dropped: float = Field(
        0.1, ge=0, le=1, description="Share of rows that may be dropped before the run stops."
    )
    on_too_long: Literal["truncate", "drop", "split", "fail"] = Field(
        "truncate", description="A row of more than max_length tokens."
    )
    max_length: int = Field(2048, ge=8, description="Longest row, in tokens.")
    pack_tokens: int = Field(
        DEFAULT_PACK_TOKENS, ge=8, validate_default=True, description="Tokens of a pack of rows."
    )
    eval_fraction: float = Field(
        0.0, ge=0, lt=1, description="Share of the rows held out for evaluation, by content hash."
    )
    eval_dataset: str | None = Field(None, description="Rows for evaluation, like dataset_name.")
    max_leakage: float = Field(
        0.1, ge=0, le=1, description="Share of evaluation rows that may also be training rows."
    )
    max_overlap: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Share of evaluation rows that may have 13 words in a row with a training row.",
    )

    # Rules between fields stand at the later one, so that they are checked beside other problems.
    @field_validator("pack_tokens")
    @classmethod
    def _packs_hold_a_row(cls, value: int, info: ValidationInfo) -> int:
        longest = info.data.get("max_length", 0)
        if value < longest:
            raise ValueError(
                f"pack_tokens is {value} but max_length is {longest}; "
                "raise pack_tokens or lower max_length, a row must fit in a pack"
            )
        return value

    @field_validator("dataset_name")
    @classmethod
    def _one_origin(cls, value: str | None, info: ValidationInfo) -> str | None:
        several = info.data.get("datasets")
        if value and several:
            raise ValueError("dataset_name and datasets are both set; keep one")
        if not value and not several and "datasets" in info.data:
            raise ValueError("is required (or datasets, for several); add it")
        return value

    @field_validator("eval_dataset")
    @classmethod
    def _one_evaluation(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value and info.data.get("eval_fraction"):
            raise ValueError(
                "eval_fraction and eval_dataset are both set; remove one, "
                "rows for evaluation come from one place"
            )
        return value


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
    learning_rate: float = Field(2e-5, gt=0, description="Highest, after the warm-up.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's; not on norms and biases.")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's first moment.")
    adam_beta2: float = Field(0.95, ge=0, lt=1, description="AdamW's second moment.")
    adam_epsilon: float = Field(1e-8, gt=0, description="AdamW's epsilon.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are clipped to this norm.")
    lr_scheduler_type: Literal["cosine", "linear", "constant"] = Field(
        "cosine", description="How the learning rate goes down after the warm-up."
    )
    warmup_steps: int | None = Field(None, ge=0, description="Steps to the full learning rate.")
    warmup_ratio: float = Field(0.03, ge=0, le=1, description="Used when warmup_steps is unset.")
    max_steps: int | None = Field(None, ge=1, description="Optimizer steps; else num_train_epochs.")
    num_train_epochs: int = Field(1, ge=1, description="Passes over the data.")
    global_batch_tokens: int = Field(
        16 * DEFAULT_PACK_TOKENS,
        ge=1,
        validate_default=True,
        description="Tokens of one optimizer step, all ranks.",
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
    logging_steps: int = Field(1, ge=1, description="Steps between lines of output.")
    seed: int = Field(42, ge=0, description="Of the order of the rows and of random weights.")
    output_dir: str | None = Field(None, description="The run's model folder; set by the launcher.")
    tokens_path: str | None = Field(None, description="Sealed tokens; set by the launcher.")

    @field_validator("global_batch_tokens", "tokens_per_device")
    @classmethod
    def _batches_are_whole_packs(cls, value: int | None, info: ValidationInfo) -> int | None:
        pack = info.data.get("pack_tokens")
        if value is not None and pack and value % pack:
            raise ValueError(
                f"{info.field_name} is {value}, which is not a whole number of packs of "
                f"pack_tokens={pack}; nearest: {_nearest_multiple(value, pack)}"
            )
        return value

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
    translated, problems = _translate(parameters, accelerators)
    try:
        settings = model.model_validate(translated)
    except ValidationError as error:
        seen = {problem.path for problem in problems}
        more = [_as_given(p, parameters) for p in problems_of(error, model, ["parameters"])]
        return None, problems + [problem for problem in more if problem.path not in seen]
    return (None if problems else settings), problems


def load_settings(recipe: str, parameters: Mapping[str, Any]) -> FsdpSettings:
    """The settings of a recipe for the recipe itself; raises UserError with every problem."""
    # By hand there is no workload: the processes that were started are the accelerators.
    accelerators = int(os.environ.get("WORLD_SIZE") or 1)
    settings, problems = settings_of(recipe, parameters, accelerators)
    if settings is None:
        raise UserError("\n".join(f"{path}: {message}" for path, message in problems))
    return settings


def is_path(name: str) -> bool:
    """Whether a name in a recipe's parameters means a path rather than a Hub name."""
    return name.startswith(PATH_PREFIXES) or name in (".", "..")


def _translate(
    parameters: Mapping[str, Any], accelerators: int
) -> tuple[dict[str, Any], list[Problem]]:
    """The users' names turned into ours, and what is wrong with them."""
    found, problems = without_empty(dict(parameters)), []
    given = [name for name in BATCH_NAMES if name in found]
    for one, other in (("max_seq_len", "max_length"), BATCH_NAMES[:2]):
        if one in found and other in found:
            problems.append(_both(one, other, "they mean the same, keep one"))
    if given and "global_batch_tokens" in found:
        problems.append(_both(given[0], "global_batch_tokens", "keep one way to say the batch"))
    if "max_seq_len" in found:
        found["max_length"] = found.pop("max_seq_len")
    if not given:
        return found, problems
    factors = {name: found.pop(name) for name in given}
    factors["max_length"] = found.get("max_length", DataSettings.model_fields["max_length"].default)
    wrong = [name for name, factor in factors.items() if _positive(factor) is None]
    problems += [_not_positive(name, factors[name]) for name in wrong if name != "max_length"]
    if not wrong and not problems:
        found |= _batch(
            math.prod(_positive(f) or 0 for f in factors.values()) * accelerators, found
        )
    return found, problems


def _batch(total: int, found: Mapping[str, Any]) -> dict[str, int]:
    """The batch in tokens; with packs of the rows' length where the usual ones do not fit it."""
    length = _positive(found.get("max_length")) or DataSettings.model_fields["max_length"].default
    usual = total % DEFAULT_PACK_TOKENS == 0 and length <= DEFAULT_PACK_TOKENS
    packs = {} if usual or "pack_tokens" in found else {"pack_tokens": length}
    return {"global_batch_tokens": total, **packs}


def _both(one: str, other: str, way_out: str) -> Problem:
    return Problem(f"parameters.{one}", f"{one} and {other} are both set; {way_out}")


def _not_positive(name: str, value: Any) -> Problem:
    message = f"must be a whole number of at least 1 (found {value!r})"
    return Problem(f"parameters.{name}", message)


def _positive(value: Any) -> int | None:
    """A whole number of at least 1, also as text; None for anything else."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    whole = not isinstance(value, bool) and number >= 1 and number.is_integer()
    return int(number) if whole else None


def _nearest_multiple(value: int, unit: int) -> int:
    return max(1, round(value / unit)) * unit


def _as_given(problem: Problem, parameters: Mapping[str, Any]) -> Problem:
    """Name the user's key where the value came from it."""
    name = problem.path.removeprefix("parameters.")
    aliases = {"max_length": ("max_seq_len",), "global_batch_tokens": BATCH_NAMES}.get(name, ())
    theirs = next((alias for alias in aliases if alias in parameters), None)
    if theirs is None or name in parameters:
        return problem
    return Problem(f"parameters.{theirs}", problem.message)
