import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunewright.data.packing import pack


@given(st.lists(st.integers(1, 64), max_size=200))
def test_every_document_is_in_one_pack_that_holds_it(lengths):
    packs = pack(lengths, 64)
    assert sorted(i for members in packs for i in members) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in members) <= 64 for members in packs)
    assert packs == pack(lengths, 64)


def test_the_tightest_pack_is_taken():
    assert pack([6, 5, 4, 3, 2], 10) == [[0, 2], [1, 3, 4]]


def test_packs_of_real_looking_lengths_are_full():
    lengths = np.random.default_rng(0).integers(20, 1500, 20_000)
    packs = pack(lengths, 4096)
    assert lengths.sum() / (len(packs) * 4096) > 0.99


def test_a_document_larger_than_a_pack_is_refused():
    with pytest.raises(ValueError, match="document 1 has 11 tokens, a pack holds 10"):
        pack([10, 11], 10)
