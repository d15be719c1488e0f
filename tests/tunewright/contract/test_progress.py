from __future__ import annotations

import pytest

from tunewright.contract.progress import line_of, percent_of, step_of, trained_percent


def test_the_line_of_a_step_tells_how_far_the_training_is():
    assert step_of(3, 120) == "step 3/120  "
    assert trained_percent(f"{step_of(3, 120)}  loss 2.1") == 2.5
    assert trained_percent(step_of(120, 120)) == 100


@pytest.mark.parametrize(
    "line", ["step 5/4", "step 0/4", "step 1/0", "a step 1/2", "step one/2", "step 1/2x", ""]
)
def test_other_lines_tell_nothing_of_it(line):
    assert trained_percent(line) is None


def test_a_progress_line_is_read_back():
    assert percent_of(line_of(34.12, "tokenizing")) == 34.1
    assert percent_of("progress: 101 % x") is None
    assert percent_of("step 1/2") is None
