"""The typed settings of the recipes: what `parameters` may hold when the command is ours.

Names are those of Hugging Face's trainers where they have one. A default has its one home here.
`settings_of` also accepts the names that users' files have (`max_seq_len`,
`per_device_batch_size`, `gradient_accumulation_steps`) and turns them into ours.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from tunewright.contract.datasettings import (
    BATCH_NAMES,
    DEFAULT_PACK_TOKENS,
    PATH_PREFIXES,
    DataSettings,
)
from tunewright.contract.failures import Problem, UserError
from tunewright.contract.problems import problems_of, without_empty

MAX_PROFILED = 20
"""Most steps of one trace: each is some 10 MB of it."""


class FsdpSettings(DataSettings):
    """Full fine-tuning with FSDP2: the parameters of tunewright.recipes.fsdp."""

    init: Literal["pretrained", "random"] = Field(
        "pretrained", description="random: only config and tokenizer are read from model_name."
    )
    precision: Literal["auto", "bf16", "fp32", "fp8"] = Field(
        "auto",
        description="Compute type; parameters stay fp32. auto: bf16 where the GPU has it. "
        "fp8 is faster and lossy: the layers' products round their factors to 8 bits (torchao).",
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
    tokens_per_device: int | Literal["auto"] = Field(
        "auto",
        description="Tokens of one micro-batch on one rank. auto: what fits a GPU, found once and "
        "kept by the run; one pack on a CPU.",
    )
    gradient_checkpointing: bool | Literal["auto"] = Field(
        "auto",
        description="Recompute activations in the backward pass to save memory. "
        "auto: only when they do not fit.",
    )
    compile: bool | Literal["auto"] = Field(
        "auto", description="Compile the decoder layers (torch.compile). auto: on a GPU."
    )
    plain: bool = Field(
        False,
        description="Leave out what makes training fast: attention with a mask, whole logits, "
        "nothing compiled. The same numbers up to rounding, to compare with.",
    )
    save_steps: int = Field(200, ge=1, description="Optimizer steps between checkpoints.")
    save_total_limit: int = Field(2, ge=1, description="Sealed checkpoints that are kept.")
    eval_steps: int = Field(200, ge=1, description="Optimizer steps between evaluations.")
    logging_steps: int = Field(1, ge=1, description="Steps between lines of output.")
    profile_steps: str | None = Field(
        None, description="First and last step that are traced with torch.profiler, like 10-12."
    )
    seed: int = Field(42, ge=0, description="Of the order of the rows and of random weights.")
    output_dir: str | None = Field(None, description="The run's model folder; set by the launcher.")
    tokens_path: str | None = Field(None, description="Sealed tokens; set by the launcher.")

    @field_validator("global_batch_tokens", "tokens_per_device")
    @classmethod
    def _batches_are_whole_packs(cls, value: int | str, info: ValidationInfo) -> int | str:
        pack = info.data.get("pack_tokens")
        if isinstance(value, int) and value < 1:
            raise ValueError(f"{info.field_name} is {value}; it must be at least one pack")
        if isinstance(value, int) and pack and value % pack:
            raise ValueError(
                f"{info.field_name} is {value}, which is not a whole number of packs of "
                f"pack_tokens={pack}; nearest: {_nearest_multiple(value, pack)}"
            )
        return value

    @field_validator("profile_steps", mode="before")
    @classmethod
    def _steps_to_profile(cls, value: Any, info: ValidationInfo) -> Any:
        text = str(value).strip()
        found = re.fullmatch(r"(\d+)(?:\s*-\s*(\d+))?", text, re.ASCII)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= first <= last or isinstance(value, bool):
            raise ValueError(
                f"must be the first and the last step to trace, counted from 1, like 10-12 "
                f"(found {value!r})"
            )
        if last - first >= MAX_PROFILED:
            raise ValueError(
                f"traces {last - first + 1} steps; at most {MAX_PROFILED}, since a trace of more "
                "is too large to be looked at"
            )
        steps = info.data.get("max_steps")
        if steps and first > steps:
            raise ValueError(f"begins at step {first}, but the run ends after step {steps}")
        return f"{first}-{last}"

    @property
    def profiled(self) -> range:
        """The steps to trace; empty when none are."""
        first, _, last = (self.profile_steps or "1-0").partition("-")
        return range(int(first), int(last) + 1)

    @property
    def packs_per_step(self) -> int:
        return self.global_batch_tokens // self.pack_tokens

    def compiles(self, on_gpu: bool) -> bool:
        """Whether the decoder layers are compiled on such a device."""
        wanted = on_gpu if self.compile == "auto" else self.compile
        return wanted and not self.plain


class LoraSettings(FsdpSettings):
    """Low-rank adapters on a frozen model: the parameters of tunewright.recipes.lora."""

    learning_rate: float = Field(2e-4, gt=0, description="Highest, after the warm-up.")
    precision: Literal["auto", "bf16", "fp32"] = Field(
        "auto",
        description="Compute type, and that of the frozen weights; adapters stay fp32. "
        "auto: bf16 where the GPU has it.",
    )
    lora_r: int = Field(16, ge=1, description="Rank of the adapters of linear layers.")
    lora_alpha: int = Field(
        32, ge=1, description="An adapter's product is scaled by lora_alpha / its rank."
    )
    lora_dropout: float = Field(
        0.0, ge=0, lt=1, description="Dropout before the adapters; 0 with adapters on experts."
    )
    lora_target_modules: str | list[str] = Field(
        "all-linear",
        min_length=1,
        description="Layers with adapters: the ends of their names, a regular expression, or "
        "all-linear (all but the head).",
    )
    lora_target_parameters: Literal["auto"] | list[str] = Field(
        "auto",
        description="Tensors of stacked experts with adapters, by the ends of their names. "
        "auto: all there are, with all-linear.",
    )
    lora_experts_r: int = Field(8, ge=1, description="Rank of the adapters of each expert.")
    lora_rank_pattern: dict[str, Annotated[int, Field(ge=1)]] = Field(
        default_factory=dict, description="{end of a name, or regular expression: another rank}."
    )
    sharding: Literal["auto", "fsdp", "ddp"] = Field(
        "auto",
        description="fsdp: each rank holds a part of the frozen weights. ddp: each holds all of "
        "them. auto: ddp where they take less than half of a device.",
    )
    merge: bool = Field(
        False, description="Export the whole model, adapters added in, instead of the adapters."
    )


class RayDdpSettings(FsdpSettings):
    """Full fine-tuning with Ray Train and DDP: the parameters of tunewright.recipes.ray_ddp."""

    precision: Literal["auto", "bf16", "fp32"] = Field(
        "auto", description="Compute type; parameters stay fp32. auto: bf16 where the GPU has it."
    )


RECIPES: dict[str, type[FsdpSettings]] = {
    "fsdp": FsdpSettings,
    "lora": LoraSettings,
    "ray_ddp": RayDdpSettings,
}
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
