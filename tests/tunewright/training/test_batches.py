from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.distributed import HashStore

from tunewright.data.store import Pack, SplitArrays, write_store
from tunewright.training.batches import Loader, Shape, batch_of, full_batch, to_batch
from tunewright.training.plan import Plan
from tunewright.training.world import World


def test_each_label_is_predicted_from_the_token_before_it():
    pack = Pack(np.array([5, 6, 7, 8]), np.array([False, True, False, True]), np.array([4]))
    batch = to_batch([pack])
    assert batch.keep.tolist() == [0, 2]
    assert batch.targets.tolist() == [6, 8]


def test_positions_restart_and_a_first_token_is_never_a_label():
    everything = Pack(np.array([5, 6, 7, 8, 9]), np.ones(5, dtype=bool), np.array([2, 3]))
    batch = to_batch([everything, everything])
    assert batch.position_ids.tolist() == [[0, 1, 0, 1, 2] * 2]
    assert batch.targets.tolist() == [6, 8, 9] * 2
    assert batch.borders.tolist() == [0, 2, 5, 7, 10]
    assert (batch.tokens, batch.supervised) == (10, 6)


def test_without_packs_nothing_is_counted_or_learned():
    batch = batch_of(None, [])
    assert (batch.tokens, batch.supervised) == (0, 0)
    assert batch.input_ids.shape == (1, 2)


@pytest.fixture
def store(tmp_path):
    """Three packs of at most 8 tokens; a first token that claims to be a label counts as none."""
    arrays = SplitArrays(
        tokens=np.arange(10, 28, dtype=np.uint16),
        documents=np.array([0, 3, 8, 12, 18]),
        rows=np.array([1, 2, 3, 4]),
        spans=np.array([[1, 3], [0, 5], [2, 3], [4, 6]]),
        span_offsets=np.array([0, 1, 2, 3, 4]),
        packs=np.array([0, 2, 3, 4]),
    )
    facts = {"pack_tokens": 8, "vocabulary": 64, "counts": {"train": {"rows": 4}}}
    return write_store(tmp_path, "few", {"train": arrays}, facts)


def test_a_step_is_counted_without_reading_it(store):
    for packs in ([0], [1, 2], [0, 1, 2, 0]):
        batch = batch_of(store.train, packs)
        assert store.train.counts_of(packs) == (batch.tokens, batch.supervised)


def test_padding_is_documents_of_its_own_that_change_nothing_else(store):
    shape = Shape(tokens=16, longest=5)
    padded, plain = batch_of(store.train, [1, 2], shape), batch_of(store.train, [1, 2])
    assert padded.input_ids.shape == (1, 16)
    assert padded.borders.tolist() == [0, 4, 10, 15, 16]
    assert padded.position_ids[0, 10:].tolist() == [0, 1, 2, 3, 4, 0]
    assert (padded.tokens, padded.longest) == (10, 5)
    assert torch.equal(padded.keep, plain.keep)
    assert torch.equal(padded.targets, plain.targets)
    assert torch.equal(padded.input_ids[:, :10], plain.input_ids)


def test_all_micro_batches_of_a_shape_are_alike(store):
    shape = Shape.of(store, packs=2)
    assert shape == (16, 128)
    rows = [batch_of(store.train, packs, shape) for packs in ([0, 1], [2], [])]
    assert {row.input_ids.shape for row in [*rows, full_batch(shape)]} == {(1, 16)}
    assert rows[2].supervised == rows[2].tokens == 0
    assert full_batch(shape).supervised == 15


def test_the_loader_gives_what_is_there_in_whatever_order_it_is_asked(store):
    plan = Plan(packs=3, packs_per_step=2, steps=6, seed=5)
    world = World(0, 1, torch.device("cpu"), HashStore())
    with Loader(store.train, plan, 1, world, None) as loader:
        for step in (1, 2, 5, 6, 3):
            found = [batch.input_ids for batch in loader.batches(step)]
            expected = [batch_of(store.train, [pack]).input_ids for pack in plan.packs_of(step)]
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
