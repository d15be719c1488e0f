"""Rows of a dataset of the Hub, by Hugging Face's own library, pinned to one commit."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from tunewright.contract.failures import TunewrightError, UserError
from tunewright.data.formats import without_nulls

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


@dataclass(frozen=True)
class HubRows:
    """One split. Downloaded into the library's cache, or streamed when larger than memory.

    commit: what the revision meant when the rows were named; None offline, where the Hub cannot
    be asked and the library's cache decides.
    """

    name: str
    split: str
    revision: str | None
    commit: str | None
    streamed: bool

    @property
    def label(self) -> str:
        return self.name

    def read(self) -> Iterator[tuple[int, Any]]:
        """The rows, numbered from 1; a streamed dataset is fetched anew each time."""
        rows = iter(self._rows)
        number = 0
        while True:
            try:
                row = next(rows, None)
            except Exception as error:  # whatever the library raises becomes one sentence
                raise hub_error(f"dataset {self.name}", error) from error
            if row is None:
                return
            number += 1
            yield number, without_nulls(row)

    def count(self) -> int:
        """How many rows there are; a streamed dataset that does not say is read through."""
        if not self.streamed:
            return len(self._rows)
        known = (self._rows.info.splits or {}).get(self.split)
        return known.num_examples if known else sum(1 for _ in self.read())

    @cached_property
    def _rows(self) -> Any:
        return load(self.name, self.split, self.commit or self.revision, self.streamed)


def hub_rows(name: str, split: str, revision: str | None) -> HubRows:
    """A dataset's split. The revision is resolved to a commit here, nothing else is fetched.

    Raises UserError for a name, revision or library that is not there, TunewrightError when the
    Hub does not answer.
    """
    if not _HUB_NAME.fullmatch(name):
        raise UserError(
            f"dataset_name {name!r} is not a Hub name (owner/name); "
            "a path starts with ./, ../, / or ~"
        )
    if Path(name).exists():
        # The datasets library would quietly read the local one.
        raise UserError(
            f"dataset_name {name!r} is a Hub name, but something of that name lies in "
            f"{Path.cwd()}; write ./{name} for it, or start from another folder"
        )
    _library(name)
    commit, size = (None, 0) if offline() else _resolve(name, revision)
    return HubRows(name, split, revision, commit, size > psutil.virtual_memory().available)


def load(name: str, split: str, revision: str | None, streamed: bool) -> Any:
    """The library's dataset: memory-mapped, or an iterable one when it is streamed."""
    datasets = _library(name)
    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(name, revision=revision, split=split, streaming=streamed)
    except Exception as error:  # whatever the library raises becomes one sentence
        raise hub_error(f"dataset {name}", error) from error


def offline() -> bool:
    """Whether the user forbids to ask the Hub."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")


def hub_error(what: str, error: Exception) -> TunewrightError:
    """What a library of the Hub raised, in one sentence: the user's, or worth another attempt."""
    if isinstance(error, TunewrightError):
        return error
    lines = str(error).strip().splitlines()
    reason = lines[0].rstrip(".") if lines else type(error).__name__
    if any(type(e).__name__ == "GatedRepoError" for e in _chain(error)):
        return UserError(f"{what} is gated; ask for access on the Hub and give a secret HF_TOKEN")
    if offline():
        return UserError(
            f"{what} is not in the local cache and HF_HUB_OFFLINE is set; "
            "unset it, or name a local folder (./, ../, / or ~)"
        )
    if _connection(error):
        return TunewrightError(f"the Hub cannot be reached for {what}: {reason}")
    return UserError(f"cannot load {what} from the Hub: {reason}; check its name and revision")


def _library(name: str) -> Any:
    try:
        return importlib.import_module("datasets")
    except ModuleNotFoundError as error:
        raise UserError(
            f"dataset {name} is on the Hub, which needs the datasets library: "
            "pip install 'tunewright[hub]'"
        ) from error


def _resolve(name: str, revision: str | None) -> tuple[str | None, int]:
    """The commit of a revision, and the bytes of its files as far as the Hub says them."""
    import huggingface_hub

    try:
        facts = huggingface_hub.HfApi().dataset_info(name, revision=revision, files_metadata=True)
    except Exception as error:  # whatever the library raises becomes one sentence
        raise hub_error(f"dataset {name}", error) from error
    return facts.sha, sum(file.size or 0 for file in facts.siblings or [])


def _connection(error: BaseException) -> bool:
    """Whether the network is to blame: no answer, or a server error."""
    for found in _chain(error):
        status = getattr(getattr(found, "response", None), "status_code", None)
        if status is not None:
            return bool(status >= 500 or status == 429)
        names = {kind.__name__ for kind in type(found).__mro__}
        if names & {"ConnectionError", "TransportError", "TimeoutError"}:
            return True
    return False


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
