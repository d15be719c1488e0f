import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunewright.data.documents import Document, fitted
from tunewright.data.examples import BadRow

BOS = 7


def document(length, *spans):
    return Document(1, np.arange(100, 100 + length, dtype=np.uint16), spans)


def supervised(found):
    return [int(i) for d in found.documents for a, b in d.spans for i in d.ids[a:b]]


def test_a_row_that_fits_is_left_alone():
    row = document(10, (4, 10))
    found = fitted(row, 10, "truncate", None)
    assert found.documents == [row]
    assert found.how == "whole"


def test_an_answer_loses_its_end():
    found = fitted(document(20, (4, 20)), 10, "truncate", None)
    assert found.how == "cut"
    assert found.documents[0].ids.tolist() == list(range(100, 110))
    assert found.documents[0].spans == ((4, 10),)


def test_later_turns_are_cut_away():
    found = fitted(document(20, (3, 5), (8, 12), (14, 20)), 10, "truncate", None)
    assert (found.how, found.documents[0].spans) == ("cut", ((3, 5), (8, 10)))


def test_a_prompt_that_would_push_the_answer_out_loses_its_beginning():
    found = fitted(document(30, (27, 30)), 10, "truncate", None)
    assert found.how == "prompt cut"
    assert found.documents[0].ids.tolist() == list(range(120, 130))
    assert supervised(found) == [127, 128, 129]


def test_of_a_long_answer_behind_a_long_prompt_half_the_length_is_kept():
    found = fitted(document(60, (30, 60)), 10, "truncate", None)
    assert len(found.documents[0].ids) == 10
    assert supervised(found) == [130, 131, 132, 133, 134]


def test_the_bos_stays_when_the_prompt_is_cut():
    row = document(30, (27, 30))
    row.ids[0] = BOS
    found = fitted(row, 10, "truncate", BOS)
    assert found.documents[0].ids.tolist() == [BOS, *range(121, 130)]


def test_split_pieces_are_the_row_and_start_anew():
    found = fitted(document(25, (4, 8), (9, 25)), 10, "split", None)
    assert found.how == "split"
    assert [d.ids.tolist() for d in found.documents] == [
        list(range(100, 110)), list(range(110, 120)), list(range(120, 125)),
    ]  # fmt: skip
    # The first token of a piece has nothing that predicts it.
    assert [d.spans for d in found.documents] == [((4, 8), (9, 10)), ((1, 10),), ((1, 5),)]


def test_a_piece_without_an_answer_is_left_out():
    found = fitted(document(30, (22, 30)), 10, "split", None)
    assert [d.ids[0] for d in found.documents] == [120]


@pytest.mark.parametrize("policy", ["drop", "fail"])
def test_long_rows_that_are_not_wanted(policy):
    with pytest.raises(BadRow, match=r"too long \(11 tokens\)"):
        fitted(document(11, (4, 11)), 10, policy, None)


@pytest.mark.parametrize("policy", ["truncate", "split", "drop", "fail"])
def test_a_row_without_a_supervised_token_is_bad_whatever_its_length(policy):
    for length in (5, 50):
        with pytest.raises(BadRow, match="no supervised token"):
            fitted(document(length), 10, policy, None)


@given(
    st.integers(9, 60), st.data(), st.sampled_from(["truncate", "split"]), st.sampled_from([8, 13])
)
def test_whatever_is_cut_something_is_learnt_and_nothing_new(length, data, policy, most):
    start = data.draw(st.integers(1, length - 2))
    end = data.draw(st.integers(start + 1, length))
    row = document(length, (start, end))
    found = fitted(row, most, policy, None)
    assert all(0 < len(piece.ids) <= most for piece in found.documents) or policy == "split"
    kept = supervised(found)
    assert kept == sorted(set(kept))
    assert set(kept) <= set(range(100 + start, 100 + end))
    if policy == "truncate":
        assert len(kept) >= min(end - start, most // 2)
