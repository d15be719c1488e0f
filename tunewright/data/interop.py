"""A token store as a `datasets.Dataset`, for scripts that are not ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tunewright.contract.failures import UserError

IGNORED = -100
"""The label of a token that nothing is learnt from, as PyTorch and transformers have it."""


def dataset_of(store: Path, split: str) -> Any:
    """The packs of one split, one row each; see Split.to_dataset for the columns.

    The rows are written to the datasets library's cache once; memory stays small whatever the
    size. Raises UserError where the library is missing.
    """
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise UserError(
            "to_dataset needs the datasets library: pip install 'tunewright[hub]'"
        ) from error
    columns = {
        "input_ids": "int32",
        "labels": "int32",
        "position_ids": "int32",
        "seq_lengths": "int32",
    }
    features = datasets.Features(
        {name: datasets.Sequence(datasets.Value(kind)) for name, kind in columns.items()}
    )
    return datasets.Dataset.from_generator(
        rows_of, features=features, gen_kwargs={"store": str(store), "split": split}
    )


def rows_of(store: str, split: str) -> Iterator[dict[str, Any]]:
    """The rows of a split as plain arrays, int32."""
    from tunewright.data.store import TokenStore

    opened = TokenStore.open(store)
    packs = opened.train if split == "train" else opened.eval
    assert packs is not None, "a Split asks for itself"
    for pack in packs:
        starts = np.repeat(np.cumsum(pack.lengths) - pack.lengths, pack.lengths)
        yield {
            "input_ids": pack.input_ids.astype(np.int32),
            "labels": np.where(pack.supervised, pack.input_ids, IGNORED).astype(np.int32),
            "position_ids": (np.arange(len(starts)) - starts).astype(np.int32),
            "seq_lengths": pack.lengths.astype(np.int32),
        }
