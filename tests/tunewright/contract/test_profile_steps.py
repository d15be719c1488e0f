from __future__ import annotations

import pytest

from tunewright.contract.settings import settings_of

SMALL = {"model_name": "./m", "dataset_name": "d"}


@pytest.mark.parametrize(
    ("given", "steps"),
    [("10-12", range(10, 13)), (7, range(7, 8)), ("7", range(7, 8)), (" 1 - 2 ", range(1, 3))],
)
def test_steps_to_profile(given, steps):
    settings, _ = settings_of("fsdp", {**SMALL, "profile_steps": given})
    assert settings.profiled == steps


def test_unset_is_no_step():
    settings, _ = settings_of("fsdp", {**SMALL, "profile_steps": None})
    assert len(settings.profiled) == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("12-10", "first and the last step to trace, counted from 1, like 10-12 (found '12-10')"),
        ("0-3", "counted from 1"),
        ("ten", "like 10-12"),
        (True, "like 10-12"),
        ([1, 2], "like 10-12"),
        (1.5, "like 10-12"),
        ("1-21", "traces 21 steps; at most 20"),
        ("31-32", "begins at step 31, but the run ends after step 30"),
    ],
)
def test_other_values_are_explained(given, message):
    settings, (problem,) = settings_of("fsdp", {**SMALL, "max_steps": 30, "profile_steps": given})
    assert settings is None
    assert problem.path == "parameters.profile_steps"
    assert message in problem.message
