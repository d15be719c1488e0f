"""Secret values in every form that output shows them in, cut anywhere."""

from __future__ import annotations

import base64
import itertools
import json
import subprocess
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunewright.contract.scrub import MASK, SHORTEST, Scrubber

TOKEN = "hf_Ab1/x+y z'Q\"é\\n"
PEM = "-----BEGIN KEY-----\n" + "\n".join("k" * 60 + str(i) for i in range(5)) + "\nend of it\n"

values = st.text(
    st.characters(min_codepoint=33, max_codepoint=0x2FFF, exclude_categories=["Cs"]),
    min_size=SHORTEST,
    max_size=40,
)


def streamed(secrets: dict[str, str], text: bytes, cuts: list[int]) -> bytes:
    scrubber = Scrubber(secrets)
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    shown = [scrubber.feed(text[a:b]) for a, b in itertools.pairwise(edges)]
    return b"".join([*shown, scrubber.finish()])


def forms(value: str) -> list[bytes]:
    raw = value.encode()
    inside = [
        base64.b64encode(b"user:"[:n] + raw + b":rest") for n in range(4)
    ]  # as in a Basic authorisation header
    texts = [quote(value), quote(value, safe=""), quote_plus(value), repr(value)[1:-1]]
    texts += [json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]]
    encoded = [base64.b64encode(raw), base64.urlsafe_b64encode(raw)]
    return [raw, repr(raw)[2:-1].encode(), *(text.encode() for text in texts), *encoded, *inside]


@given(value=values, cuts=st.lists(st.integers(0, 10_000), max_size=8), data=st.data())
def test_no_form_of_a_value_is_ever_shown(value, cuts, data):
    form = data.draw(st.sampled_from(forms(value)))
    before, after = (data.draw(st.sampled_from([b"", b"token=", b"%\n", b"a a"])) for _ in "ab")
    shown = streamed({"T": value}, before + form + after, cuts)
    assert MASK in shown
    if value.strip("*"):  # a value of asterisks alone looks like the mask
        assert form not in shown


@given(values, st.binary(max_size=200), st.lists(st.integers(0, 10_000), max_size=8))
def test_other_text_passes_unchanged(value, text, cuts):
    scrubber = Scrubber({"T": value})
    if scrubber.feed(text) + scrubber.finish() == text:
        assert streamed({"T": value}, text, cuts) == text
    plain = bytes(byte % 16 for byte in text)  # control bytes, which no form of a value has
    if not any(ord(letter) < 16 for letter in value):
        assert streamed({"T": value}, plain, cuts) == plain


@given(st.lists(values, min_size=1, max_size=4), st.data())
def test_cutting_never_changes_what_is_shown(secrets, data):
    named = {f"T{i}": value for i, value in enumerate(secrets)}
    pieces = st.sampled_from([*secrets, *(v[1:] for v in secrets), *(v[:-1] for v in secrets), " "])
    text = "".join(data.draw(st.lists(pieces, max_size=6))).encode() + b"\n."
    cuts = data.draw(st.lists(st.integers(0, 10_000), max_size=12))
    assert streamed(named, text, cuts) == streamed(named, text, [])


@given(values, st.lists(st.binary(max_size=50), max_size=20))
def test_never_holds_more_than_a_value_can_be_long(value, chunks):
    scrubber = Scrubber({"T": value})
    longest = max(len(form) for form in forms(value)) * 2 + 40
    given_so_far = shown = 0
    for chunk in chunks:
        given_so_far += len(chunk)
        shown += len(scrubber.feed(chunk).replace(MASK, value.encode()))
        assert given_so_far - shown <= longest


def test_output_is_live_when_no_value_can_have_begun():
    scrubber = Scrubber({"T": TOKEN})
    assert scrubber.feed(b"loss 1.5") == b"loss 1.5"
    assert scrubber.feed(b" hf_") == b" "
    assert scrubber.feed(b"home\n") == b"hf_home\n"


def test_a_value_inside_another_does_not_uncover_the_longer_one():
    secrets = {"A": "abcd", "B": "xxabcdyy"}
    for cut in range(9):
        assert streamed(secrets, b"xxabcdyy", [cut]) == MASK
    assert streamed(secrets, b"xxabcd", [3]) in (b"xx" + MASK, MASK)


def test_values_that_overlap_are_masked_together():
    secrets = {"A": "ab12", "B": "b12XXXXXXXX"}
    for cut in range(13):
        assert streamed(secrets, b"-ab12XXXXXXXX-", [cut]) == b"-" + MASK + b"-"


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_value_torn_by_the_end_is_masked_when_more_than_half_came(cut):
    value = "0123456789ab"
    shown = streamed({"T": value}, value[:cut].encode(), [])
    assert shown == (MASK if cut > 6 else value[:cut].encode())


def test_values_too_short_to_tell_from_text_are_left_alone():
    assert Scrubber({"T": "abc", "E": ""}).text("abc is the alphabet") == "abc is the alphabet"


def test_a_value_with_line_ends_is_found_line_by_line_and_wrapped():
    scrubber = Scrubber({"KEY": PEM})
    assert "kkkk" not in scrubber.text("\n".join(f"| {line}" for line in PEM.splitlines()))
    wrapped = subprocess.run(["base64"], input=PEM.encode(), capture_output=True).stdout.decode()
    left = [line for line in scrubber.text(wrapped).splitlines() if "*" not in line]
    assert max(map(len, left), default=0) < 20


def test_a_trailing_line_end_in_the_value_does_not_hide_it():
    assert Scrubber({"T": "s3cret\n"}).text("(s3cret)") == f"({MASK.decode()})"


def test_a_value_that_is_not_utf8_is_masked_too():
    scrubber = Scrubber({"T": b"tok\xe9n-1234".decode("utf-8", "surrogateescape")})
    assert scrubber.feed(b"x tok\xe9n-1234\n") == b"x " + MASK + b"\n"


def test_many_small_writes_with_a_long_value_are_quick():
    scrubber = Scrubber({"KEY": "k" + "0123456789" * 400})
    shown = b"".join(scrubber.feed(b"step 12 loss 3.4 k\n") for _ in range(20_000))
    assert len(shown) == 20_000 * 19
