"""When an attempt must stop to save in time; the ending by a signal is tested with ranks."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from tunewright.contract.failures import FINAL
from tunewright.training.stopping import BlockedTermination, Stopping, Termination


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def first_wanted(stopping: Stopping, clock: Clock, step_s: float, save_s: float) -> float:
    """The moment before the step that is to be the last, when each takes `step_s`."""
    while not stopping.wanted(save_s):
        clock.now += step_s
        assert clock.now < 10_000
    return clock.now


@pytest.mark.parametrize(
    ("step_s", "save_s", "expected"),
    [
        (1.0, 20.0, 58.0),  # 100 - 10 grace - 30 for saving - 2 for this step and another
        (1.0, 0.0, 88.0),
        (25.0, 20.0, 25.0),  # this step ends at 50, another would at 75, later than 60
        (1.0, 500.0, 0.0),
    ],
)
def test_it_stops_while_a_save_still_fits(step_s, save_s, expected):
    clock = Clock()
    stopping = Stopping(deadline=100.0, grace_s=10.0, clock=clock)
    assert first_wanted(stopping, clock, step_s, save_s) == expected


def test_the_longest_time_between_steps_counts(monkeypatch):
    clock = Clock()
    stopping = Stopping(deadline=200.0, grace_s=0.0, clock=clock)
    for clock.now in (0.0, 1.0, 41.0, 42.0, 81.0, 119.0):  # an evaluation of 40 s
        assert not stopping.wanted(0.0)
    clock.now = 121.0
    assert stopping.wanted(0.0)


def test_a_step_that_compiled_says_nothing_about_the_next():
    clock = Clock()
    stopping = Stopping(deadline=300.0, grace_s=10.0, clock=clock)
    assert not stopping.wanted(5.0)
    clock.now = 100.0
    assert not stopping.wanted(5.0, warmed_up=False)
    while not stopping.wanted(5.0):
        clock.now += 2.0
    assert clock.now == 280.0  # 300 - 10 - 7.5 for saving, and 4 for two steps of 2 s


def test_without_a_deadline_it_never_stops():
    clock = Clock()
    clock.now = 1e12
    assert not Stopping(None, 10.0, clock).wanted(1e6)


def test_the_launcher_says_when(monkeypatch):
    for name in ("TUNEWRIGHT_DEADLINE", "TUNEWRIGHT_GRACE_S"):
        monkeypatch.delenv(name, raising=False)
    by_hand = Stopping.of_environment()
    assert (by_hand.deadline, by_hand.grace_s) == (None, 10.0)
    monkeypatch.setenv("TUNEWRIGHT_DEADLINE", "1234.5")
    monkeypatch.setenv("TUNEWRIGHT_GRACE_S", "3")
    told = Stopping.of_environment()
    assert (told.deadline, told.grace_s) == (1234.5, 3.0)


def test_the_ending_is_worth_another_attempt_and_names_the_checkpoint():
    clock = Clock()
    clock.now = 60.0
    error = Stopping(100.0, 10.0, clock).over(7, Path("/run/checkpoints/step-00000007"))
    assert error.failure_class == "timeout"
    assert error.failure_class not in FINAL
    assert str(error) == (
        "stopped after step 7, 40 s before the deadline, to save in time: "
        "/run/checkpoints/step-00000007 is sealed, and starting again goes on from it"
    )


class TestTermination:
    def test_leaving_puts_everything_back_and_leaves_no_thread(self):
        before, threads = signal.getsignal(signal.SIGTERM), threading.active_count()
        with Termination(lambda seconds: "", 10.0, speaks=True):
            assert signal.getsignal(signal.SIGTERM) is not before
        assert signal.getsignal(signal.SIGTERM) is before
        assert threading.active_count() == threads
        assert signal.set_wakeup_fd(-1) == -1

    def test_an_error_inside_goes_on(self):
        with pytest.raises(KeyError), Termination(lambda seconds: "", 10.0, speaks=True):
            raise KeyError

    def test_other_signals_end_nothing(self):
        heard = []
        before = signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
        with Termination(lambda seconds: heard.append("settled"), 10.0, speaks=True):
            signal.raise_signal(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, before)
        assert heard == [1]


def test_where_the_signal_is_blocked_leaving_leaves_no_thread():
    threads = threading.active_count()
    with BlockedTermination(lambda seconds: "", 10.0, speaks=True):
        assert threading.active_count() == threads + 1
    assert threading.active_count() == threads
