from __future__ import annotations

from itertools import chain

import pytest

from tunewright.contract.failures import DataError
from tunewright.training.plan import Plan, micro_batches, seed_of

PLAN = Plan(packs=10, packs_per_step=4, steps=6, seed=42)


def test_every_pack_is_seen_once_an_epoch_and_the_last_step_takes_the_rest():
    first = [PLAN.packs_of(step) for step in (1, 2, 3)]
    assert [len(packs) for packs in first] == [4, 4, 2]
    assert sorted(chain(*first)) == list(range(10))


def test_epochs_are_shuffled_differently():
    epochs = [list(chain(*map(PLAN.packs_of, steps))) for steps in ((1, 2, 3), (4, 5, 6))]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]


def test_the_order_is_the_same_on_every_machine_and_in_every_version():
    assert PLAN.packs_of(1) == [5, 1, 2, 6]
    assert seed_of(42, 0, 1) != seed_of(42, 1, 0)


def test_another_seed_gives_another_order():
    assert Plan(10, 4, 6, seed=43).packs_of(1) != PLAN.packs_of(1)


def test_steps_follow_from_epochs_unless_they_are_given(settings):
    name = {"model_name": "./m"}
    assert Plan.of(settings(num_train_epochs=3, **name), packs=5).steps == 9
    assert Plan.of(settings(max_steps=7, num_train_epochs=3, **name), packs=5).steps == 7


def test_no_packs_are_refused(settings):
    with pytest.raises(DataError, match="no rows to train on"):
        Plan.of(settings(model_name="./m"), packs=0)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_ranks_share_a_step_without_loss_and_in_equal_rounds(ranks, size):
    packs = [9, 8, 6, 1, 5, 0, 7]
    dealt = [micro_batches(packs, size, rank, ranks) for rank in range(ranks)]
    assert sorted(p for rank in dealt for some in rank for p in some) == sorted(packs)
    assert len({len(rounds) for rounds in dealt}) == 1
    assert all(len(some) <= size for rank in dealt for some in rank)


def test_a_rank_without_a_pack_gets_an_empty_round():
    assert micro_batches([3], 1, rank=1, ranks=2) == [[]]
