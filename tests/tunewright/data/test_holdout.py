from hypothesis import given
from hypothesis import strategies as st

from tunewright.data.examples import Alpaca
from tunewright.data.fingerprint import digest_of
from tunewright.data.holdout import is_held_out
from tunewright.data.prepare import prepare

rows = st.lists(st.binary(min_size=16, max_size=16), max_size=60)


@given(rows, rows, st.floats(0, 0.999))
def test_rows_that_are_added_move_none(before, added, fraction):
    def sides(digests):
        return {digest: is_held_out(digest, fraction) for digest in digests}

    assert sides(before).items() <= sides([*added, *before]).items()


@given(st.binary(min_size=16, max_size=16), st.floats(0, 0.999), st.floats(0, 0.999))
def test_a_larger_fraction_holds_out_the_same_rows_and_more(digest, one, other):
    assert is_held_out(digest, min(one, other)) <= is_held_out(digest, max(one, other))


def test_about_the_wanted_share_is_held_out():
    digests = [digest_of(Alpaca("Count.", "", str(n))) for n in range(5000)]
    assert 430 < sum(is_held_out(digest, 0.1) for digest in digests) < 570
    assert not any(is_held_out(digest, 0) for digest in digests)


def documents(split, tokenizer):
    found = set()
    for pack in split:
        ends = pack.lengths.cumsum().tolist()
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            found.add(tokenizer.decode(pack.input_ids[start:end].tolist()))
    return found


def test_sides_stay_when_rows_are_added_and_duplicates_never_straddle(
    settings, write_rows, tmp_path, demo
):
    def row(n):
        return {"instruction": f"Double {n}.", "output": f"It is {2 * n}."}

    def both(numbers):
        path = write_rows([row(n) for n in numbers])
        store = prepare(settings(path, eval_fraction=0.3, max_leakage=1), tmp_path / "t").store
        return documents(store.train, demo), documents(store.eval, demo)

    train, held = both(range(40))
    more_train, more_held = both([*range(20, 80), *range(40), *range(10)])
    assert train <= more_train
    assert held <= more_held
    assert more_train.isdisjoint(more_held)
    assert len(more_train) + len(more_held) == 80
