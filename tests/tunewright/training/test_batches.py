from __future__ import annotations

import numpy as np
import torch

from tunewright.data.store import Pack
from tunewright.training.batches import batch_of, to_batch

CPU = torch.device("cpu")


def test_each_label_is_predicted_from_the_token_before_it():
    pack = Pack(np.array([5, 6, 7, 8]), np.array([False, True, False, True]), np.array([4]))
    batch = to_batch([pack], CPU)
    assert batch.keep.tolist() == [0, 2]
    assert batch.targets.tolist() == [6, 8]


def test_positions_restart_and_a_first_token_is_never_a_label():
    everything = Pack(np.array([5, 6, 7, 8, 9]), np.ones(5, dtype=bool), np.array([2, 3]))
    batch = to_batch([everything, everything], CPU)
    assert batch.position_ids.tolist() == [[0, 1, 0, 1, 2] * 2]
    assert batch.targets.tolist() == [6, 8, 9] * 2
    assert batch.lengths == [2, 3, 2, 3]
    assert (batch.tokens, batch.supervised) == (10, 6)


def test_without_packs_nothing_is_counted_or_learned():
    batch = batch_of(None, [], CPU)
    assert (batch.tokens, batch.supervised) == (0, 0)
    assert batch.input_ids.shape == (1, 2)
