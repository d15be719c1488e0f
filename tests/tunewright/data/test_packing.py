import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunewright.data.packing import pack


def members(packing):
    order, ends = packing.order.tolist(), packing.offsets.tolist()
    return [order[a:b] for a, b in pairwise(ends)]


@given(st.lists(st.integers(1, 64), max_size=200))
def test_every_document_is_in_one_pack_that_holds_it(lengths):
    packs = members(pack(lengths, 64))
    assert sorted(i for pack in packs for i in pack) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in pack) <= 64 for pack in packs)
    assert packs == members(pack(lengths, 64))


@given(st.lists(st.integers(1, 16), max_size=60))
def test_no_simpler_rule_needs_fewer_packs_by_more_than_one_in_five(lengths):
    first_fit: list[int] = []
    for length in sorted(lengths, reverse=True):
        fits = next((i for i, used in enumerate(first_fit) if used + length <= 16), None)
        if fits is None:
            first_fit.append(length)
        else:
            first_fit[fits] += length
    assert len(members(pack(lengths, 16))) <= 1.2 * len(first_fit) + 1


def test_the_tightest_pack_is_taken():
    assert members(pack([6, 5, 4, 3, 2], 10)) == [[0, 2], [1, 3, 4]]


def test_nothing_at_all():
    assert members(pack([], 10)) == []


def test_packs_of_real_looking_lengths_are_full():
    lengths = np.random.default_rng(0).lognormal(5.2, 0.9, 50_000).clip(8, 2048).astype(int)
    packing = pack(lengths, 8192)
    assert lengths.sum() / ((len(packing.offsets) - 1) * 8192) >= 0.995


def test_time_grows_with_the_documents_not_with_their_square():
    def seconds(documents):
        lengths = np.random.default_rng(1).integers(20, 2000, documents)
        began = time.process_time()
        pack(lengths, 8192)
        return time.process_time() - began

    assert seconds(80_000) < 30 * max(seconds(10_000), 0.005)


@pytest.mark.parametrize("length", [11, 0])
def test_a_document_that_no_pack_holds_is_refused(length):
    with pytest.raises(ValueError, match=f"document 1 has {length} tokens, a pack holds 10"):
        pack([10, length], 10)
