"""A trace of the steps that were asked for."""

from __future__ import annotations

import gzip
import json
import re

import pytest
import torch

from tunewright.contract.rundir import trace_name
from tunewright.training import profiler


@pytest.fixture
def asked(settings):
    """Settings that ask for a trace of these steps."""
    return lambda steps: settings(model_name="unused", profile_steps=steps)


def work(device: torch.device) -> None:
    for _ in range(3):
        matrix = torch.randn(64, 64, device=device)
        torch.mm(matrix, matrix)


def steps_of(path) -> list[str]:
    with gzip.open(path) as file:
        names = {event.get("name", "") for event in json.load(file)["traceEvents"]}
    return sorted(name for name in names if re.fullmatch(r"step \d+", name))


def test_the_steps_asked_for_are_traced_and_no_others(alone, asked, tmp_path, capsys):
    with profiler.of(asked("3-4"), tmp_path / "logs", alone) as profile:
        for step in range(1, 8):
            with profile.step(step):
                work(alone.device)
            work(alone.device)
    path = tmp_path / "logs" / "trace-steps-3-4.json.gz"
    assert steps_of(path) == ["step 3", "step 4"]
    assert [profile.slows(step) for step in range(2, 6)] == [False, True, True, False]
    out = capsys.readouterr().out
    assert f"trace of steps 3 to 4: {path}" in out
    assert not re.search(r"^step \d", out, re.MULTILINE), "a mark is no work of its own"
    if alone.device.type == "cpu":
        (products,) = re.findall(r"^aten::mm .* ([\d.]+)$", out, re.MULTILINE)
        assert float(products) == 4.5, "three in each step, and three between the two"


def test_a_run_that_ends_within_the_steps_leaves_those_it_did(alone, asked, tmp_path):
    with profiler.of(asked("1-9"), tmp_path, alone) as profile:
        for step in (1, 2):
            with profile.step(step):
                work(alone.device)
            work(alone.device)
    assert steps_of(tmp_path / "trace-steps-1-2.json.gz") == ["step 1", "step 2"]


def test_steps_that_never_came_are_told(alone, asked, tmp_path, capsys):
    with profiler.of(asked("8-9"), tmp_path, alone) as profile, profile.step(1):
        pass
    assert "nothing was traced: no step of 8-9 was trained" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_without_the_setting_nothing_happens(alone, asked, tmp_path, capsys):
    with profiler.of(asked(None), tmp_path, alone) as profile, profile.step(1):
        assert not profile.slows(1)
    assert (list(tmp_path.iterdir()), capsys.readouterr().out) == ([], "")


def test_an_error_ends_the_trace_without_one(alone, asked, tmp_path):
    def fails() -> None:
        with profiler.of(asked("1-2"), tmp_path, alone) as profile, profile.step(1):
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert list(tmp_path.iterdir()) == []
    test_a_run_that_ends_within_the_steps_leaves_those_it_did(alone, asked, tmp_path)


def test_a_trace_that_cannot_be_written_costs_the_trace_alone(alone, asked, tmp_path, capsys):
    (tmp_path / "logs").write_text("a file")
    with profiler.of(asked("1"), tmp_path / "logs", alone) as profile, profile.step(1):
        work(alone.device)
    assert "the trace cannot be written, training goes on" in capsys.readouterr().err


def test_its_name_says_the_steps():
    assert trace_name(range(10, 13)) == "trace-steps-10-12.json.gz"
