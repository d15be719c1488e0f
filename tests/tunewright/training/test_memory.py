"""What a GPU takes at once, worked out from peaks; the peaks themselves need a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tunewright.training.memory import Fit, Peaks, agreed, bytes_of, choose, even

GIB = 2**30
PEAKS = Peaks(rest=(4.0 * GIB, 1.0 * GIB), layer=(0.5 * GIB, 0.25 * GIB))
"""Beside weights and optimizer 8 layers take 8 GiB, and 3 GiB for each pack."""


@pytest.fixture
def model():
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(hidden_size=4096))
    return SimpleNamespace(
        layers=range(8),
        count=GIB,
        dtype=torch.bfloat16,
        whole=False,
        module=SimpleNamespace(config=config),
    )


@pytest.mark.parametrize(
    ("most", "needed", "size"),
    [
        (3, 16, 2),  # six of 3 would compute on two packs of nothing
        (4, 16, 4),
        (5, 16, 4),
        (16, 16, 16),
        (5, 7, 4),  # two of 4 compute on one pack of nothing, seven of 1 cost more
        (9, 2, 2),
        (0, 5, 1),
    ],
)
def test_micro_batches_divide_a_ranks_part_of_a_step(most, needed, size):
    assert even(most, needed) == size


def chosen(model, settings, gib, world_size=1, **more):
    made = settings(model_name="./x", pack_tokens=4096, global_batch_tokens=16 * 4096, **more)
    return choose(gib * GIB, PEAKS, model, made, SimpleNamespace(size=world_size))


def test_what_is_chosen_fits_and_one_more_would_not(model, settings):
    fit = chosen(model, settings, gib=21)
    assert (fit.packs, fit.recompute, fit.whole) == (4, False, False)
    assert bytes_of(4, *PEAKS, 8) <= 21 * GIB < bytes_of(5, *PEAKS, 8)


def test_room_to_spare_keeps_the_weights_whole(model, settings):
    assert chosen(model, settings, gib=22).whole  # 2 GiB of bf16 beside 20


def test_activations_are_recomputed_only_where_they_do_not_fit(model, settings):
    fit = chosen(model, settings, gib=13)
    # 8 GiB, for each pack 1 GiB, one layer's 0.25 and eight inputs of 32 MiB.
    assert (fit.packs, fit.recompute) == (2, True)  # 3 fit, but do not divide 16
    assert "with recomputation" in fit.found
    assert not chosen(model, settings, gib=14).recompute


def test_what_the_user_has_set_is_kept(model, settings):
    assert chosen(model, settings, gib=99, tokens_per_device=8192).packs == 2
    assert chosen(model, settings, gib=12, tokens_per_device=8192).recompute
    assert chosen(model, settings, gib=99, gradient_checkpointing=True).recompute
    assert not chosen(model, settings, gib=13, gradient_checkpointing=False).recompute


def test_ranks_that_get_few_packs_take_no_more(model, settings):
    assert chosen(model, settings, gib=99, world_size=8).packs == 2


def test_ranks_agree_on_the_most_careful_of_them():
    one = Fit(4, False, True, "one")
    assert agreed([one, one._replace(whole=False)]).whole is False
    assert agreed([one, one._replace(recompute=True)]).recompute is True
    assert agreed([one, one._replace(packs=2, whole=True)]).packs == 2


def test_a_micro_batch_larger_than_a_ranks_part_of_a_step_is_cut_to_it(model, settings):
    fit = chosen(model, settings, gib=99, world_size=8, tokens_per_device=16 * 4096)
    assert (fit.packs, fit.recompute) == (2, False)
