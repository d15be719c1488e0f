from __future__ import annotations

import pytest

from tunewright.training.schedule import learning_rate


def rates(settings, steps=10, **more):
    chosen = settings(model_name="./m", learning_rate=1.0, **more)
    return [learning_rate(chosen, step, steps) for step in range(1, steps + 1)]


def test_warm_up_rises_in_equal_parts_to_the_full_rate(settings):
    assert rates(settings, warmup_steps=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_cosine_passes_half_in_the_middle_and_does_not_reach_zero(settings):
    found = rates(settings, steps=9, warmup_steps=1)
    assert found[1 + 4] == pytest.approx(0.5)
    assert found == [found[0], *sorted(found[1:], reverse=True)]
    assert 0 < found[-1] < 0.05


def test_linear_falls_in_equal_parts(settings):
    found = rates(settings, warmup_steps=0, lr_scheduler_type="linear")
    assert found == pytest.approx([1 - k / 10 for k in range(10)])


def test_constant_stays(settings):
    assert set(rates(settings, warmup_steps=2, lr_scheduler_type="constant")[1:]) == {1.0}


def test_warm_up_is_a_share_of_the_steps_unless_it_is_counted(settings):
    assert rates(settings, warmup_ratio=0.25)[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert rates(settings, warmup_ratio=0.25, warmup_steps=1)[0] == 1.0


def test_a_run_shorter_than_its_warm_up(settings):
    assert rates(settings, steps=2, warmup_steps=4) == [0.25, 0.5]
