import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunewright.contract.failures import DataError
from tunewright.data import leakage
from tunewright.data.examples import Alpaca, Chat, Completion, Message, Text
from tunewright.data.fingerprint import digest_of
from tunewright.data.leakage import RUN, RunIndex, runs_of
from tunewright.data.prepare import prepare

STORY = "the quick brown fox jumps over the lazy dog while seven green parrots watch from above"


def index_of(*examples):
    index = RunIndex()
    index.add([(n, e, digest_of(e)) for n, e in enumerate(examples, 1)], "eval {}".format)
    index.seal()
    return index


def leaks(held, train):
    index = index_of(*held)
    runs, owners = runs_of(train)
    index.look_up(runs, owners + 1)
    keys = np.array([int.from_bytes(digest_of(e)[:8], "big") for e in train], dtype=np.uint64)
    return [tuple(leak) for leak in index.leaks(keys, "train {}".format)]


def test_the_same_row_leaks():
    row = Alpaca("Add.", "1 and 2", "3")
    assert leaks([Text("other"), row], [Text("x"), row]) == [("eval 2", "train 2", "the same row")]


def test_case_and_punctuation_do_not_hide_a_leak():
    found = leaks([Alpaca("Say hello!", "", "Hello.")], [Completion("say HELLO", "hello")])
    assert found == [("eval 1", "train 1", "all of its words")]


def test_thirteen_words_in_a_row_leak_and_twelve_do_not():
    words = STORY.split()
    held = Text(" ".join(["once", *words[:RUN], "and", "then", "nothing"]))
    assert leaks([held], [Text(STORY)]) == [("eval 1", "train 1", "13 words in a row")]
    held = Text(" ".join(["once", *words[: RUN - 1], "and", "then", "nothing"]))
    assert leaks([held], [Text(STORY)]) == []


def test_words_of_two_rows_are_no_run():
    words = STORY.split()
    train = [Text(" ".join(words[:7])), Text(" ".join(words[7:]))]
    assert leaks([Text(STORY)], train) == []


def test_a_system_prompt_and_a_fixed_phrase_are_no_leak():
    system = Message("system", STORY)

    def chat(n):
        return Chat((system, Message("user", f"q{n}"), Message("assistant", f"a{n}", True)))

    assert leaks([chat(0)], [chat(n) for n in range(1, 5)]) == []
    asked = [Text(f"{STORY} number{n}") for n in range(20)]
    assert leaks(asked[:1], asked[1:]) == []
    assert len(leaks(asked[:1], asked[1:6])) == 1


def test_a_row_that_is_in_many_training_rows_leaks_all_the_same():
    assert leaks([Text(STORY)], [Text(f"{STORY} number{n}") for n in range(20)])[0][2] == (
        "all of its words"
    )


def test_rows_without_words_and_no_rows_at_all():
    assert leaks([Text("!!! ???")], [Text("...")]) == []
    assert leaks([], []) == []


@given(
    st.lists(st.text("ab ", max_size=80), max_size=8),
    st.lists(st.text("ab ", max_size=80), max_size=8),
)
def test_runs_are_those_of_a_slow_and_simple_count(held, train):
    def grams(text):
        words = text.split()
        if len(words) < RUN:
            return {tuple(words)} if words else set()
        return {tuple(words[i : i + RUN]) for i in range(len(words) - RUN + 1)}

    seen = [gram for text in train for gram in grams(text)]
    expected = []
    for number, text in enumerate(held, 1):
        counts = [seen.count(gram) for gram in grams(text)]
        whole = bool(counts) and all(counts)
        if whole or any(0 < count <= 10 for count in counts) or Text(text) in map(Text, train):
            expected.append(f"eval {number}")
    assert [leak[0] for leak in leaks([*map(Text, held)], [*map(Text, train)])] == expected


def test_memory_is_bounded_and_leaks_are_found_in_the_sample(monkeypatch):
    monkeypatch.setattr(leakage, "MAX_RUNS", 2000)
    numbers = np.random.default_rng(0).integers(0, 10_000, (100, 200))
    rows = [Text(" ".join(f"w{n}" for n in row)) for row in numbers.tolist()]
    index = index_of(*rows)
    assert index.sampled > 1
    assert len(index._runs) <= 2000
    runs, owners = runs_of(rows[:50])
    index.look_up(runs, owners + 1)
    assert [leak.eval_row for leak in index.leaks(np.zeros(0, np.uint64), str)] == [
        f"eval {n}" for n in range(1, 51)
    ]


def test_leaks_are_reported_with_row_ids_and_stop_over_the_limit(settings, write_rows, tmp_path):
    train = [{"instruction": f"Say {n}.", "output": f"So {n}."} for n in range(20)]
    held = [*train[3:5], *({"instruction": f"Ask {n}.", "output": "No."} for n in range(8))]
    paths = write_rows(train, "train.jsonl"), write_rows(held, "held.jsonl")
    wanted = settings(paths[0], eval_dataset=str(paths[1]))
    words = (
        f"2 of 10 evaluation rows are training rows too, more than max_leakage=0.1 allows: "
        f"{paths[1]} row 1 = {paths[0]} row 4 (the same row); {paths[1]} row 2 = {paths[0]} row 5"
    )
    with pytest.raises(DataError) as caught:
        prepare(wanted, tmp_path / "tokens")
    assert words in str(caught.value)
    allowed = wanted.model_copy(update={"max_leakage": 0.2})
    found = prepare(allowed, tmp_path / "tokens").store.facts["audit"]["leakage"]
    assert (found["leaked"], found["share"], found["eval_rows"]) == (2, 0.2, 10)
    assert found["whole_share"] == 0.2
    # The limit of today holds for tokens that were made before.
    with pytest.raises(DataError, match=r"more than max_leakage=0.1 allows"):
        prepare(wanted, tmp_path / "tokens")


def test_rows_that_share_words_stop_only_where_a_limit_is_set(settings, write_rows, tmp_path):
    shared = "one two three four five six seven eight nine ten eleven twelve thirteen"
    train = [{"instruction": f"Say {n}.", "output": f"So {n}."} for n in range(20)]
    train[7] = {"instruction": f"Begin: {shared}, and then?", "output": "Fourteen."}
    held = [{"instruction": f"Now {shared} and what?", "output": "More."}]
    held += [{"instruction": f"Ask {n}.", "output": "No."} for n in range(3)]
    paths = write_rows(train, "train.jsonl"), write_rows(held, "held.jsonl")
    wanted = settings(paths[0], eval_dataset=str(paths[1]))
    found = prepare(wanted, tmp_path / "tokens").store.facts["audit"]["leakage"]
    assert (found["whole_share"], found["share"]) == (0.0, 0.25)
    strict = wanted.model_copy(update={"max_overlap": 0.2})
    with pytest.raises(DataError, match=r"row 1 = .* row 8 \(13 words in a row\)"):
        prepare(strict, tmp_path / "tokens")
