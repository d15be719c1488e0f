"""The settings of rows: where they are, what they look like, what becomes of them as tokens."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from tunewright.contract.problems import leaves, without_empty

DEFAULT_PACK_TOKENS = 4096

PATH_PREFIXES = ("/", "./", "../", "~")
"""A name that starts with one of these is a path; anything else is a Hub name."""


BATCH_NAMES = (
    "per_device_batch_size",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
)
"""The names by which users' files say the batch."""

USERS_NAMES = (*BATCH_NAMES, "max_seq_len")


class Settings(BaseModel):
    """Typed parameters. Text that is a number counts as one: `2e-5` is text to YAML."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    also_known: ClassVar[tuple[str, ...]] = USERS_NAMES

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
