"""Following a growing log."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.targets.guardian import Follower
from tasks.targets.job import ending_of


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "node-0.log"


@pytest.fixture
def write(log: Path):
    def append(text: str) -> None:
        with log.open("a", newline="") as file:
            file.write(text)

    return append


def test_whole_lines_come_as_they_are_written(log, write, clock):
    follower = Follower(log, clock=clock)
    assert list(follower.lines()) == [], "there is no log yet"
    write("a\nb")
    assert list(follower.lines()) == ["a"]
    write("c\n\nd")
    assert list(follower.lines()) == ["bc", ""]
    assert list(follower.lines(ended=True)) == ["d"]
    assert list(follower.lines(ended=True)) == []


def test_it_begins_where_the_log_ends_or_where_it_is_told(log, write, clock):
    write("before\n")
    late, early = Follower(log, clock=clock), Follower(log, start=0, clock=clock)
    write("after\n")
    assert list(late.lines()) == ["after"]
    assert list(early.lines()) == ["before", "after"]


def test_a_redrawn_line_shows_its_last_state(log, write, clock):
    follower = Follower(log, clock=clock)
    write("10%|#\r50%|##\r100%|###\nwindows\r\n")
    assert list(follower.lines()) == ["100%|###", "windows"]


def test_a_progress_bar_is_shown_while_it_runs_now_and_then(log, write, clock):
    follower = Follower(log, clock=clock)
    write("\r 1%|#\r 2%|#\r 3")
    assert list(follower.lines()) == [" 2%|#"], "the newest whole state"
    write("%|#\r 4%|#\r 5%")
    assert list(follower.lines()) == [], "not so soon again"
    clock.now += 5
    write("|#\r 6%|#\r")
    assert list(follower.lines()) == [" 6%|#"]
    write("\r100%|#####\ndone\n")
    assert list(follower.lines()) == ["100%|#####", "done"]


def test_a_bar_that_never_ends_a_line_takes_no_memory(log, write, clock):
    follower = Follower(log, clock=clock)
    for step in range(100):
        write(f"\r{step:5}|" + "#" * 1000)
        list(follower.lines())
    assert len(follower._rest) < 2100
    assert list(follower.lines(ended=True)) == ["   99|" + "#" * 1000]


def test_a_line_without_end_is_shown_in_pieces(log, write, clock):
    follower = Follower(log, clock=clock)
    write("x" * 200_000)
    assert {len(line) for line in follower.lines()} == {4000}
    assert len(follower._rest) < 70_000


def test_much_output_comes_by_and_by(log, write, clock):
    follower = Follower(log, clock=clock)
    write("x" * 99 + "\n" + ("y" * 99 + "\n") * 100_000)
    first = len(list(follower.lines()))
    assert first < 60_000
    assert first + len(list(follower.lines(ended=True))) == 100_001


def test_a_folder_in_its_place_is_an_empty_log(tmp_path, clock):
    assert list(Follower(tmp_path, start=0, clock=clock).lines(ended=True)) == []


# How the nodes' endings make one


def node(number: int, failure_class=None, stopped_by=None, ended=0.0) -> dict:
    failure = None
    if failure_class:
        failure = {"class": failure_class, "node": number, "rank": None, "message": "m"}
    return {
        "node": number, "failure": failure, "stopped_by": stopped_by, "ended": ended,
        "tail": f"tail {number}",
    }  # fmt: skip


def test_all_well():
    assert ending_of([node(0), node(1)]).well


def test_the_first_failure_names_the_cause():
    ending = ending_of([node(0, "unknown", ended=5.0), node(1, "unknown", ended=4.0)])
    assert (ending.failure["node"], ending.tail) == (1, "tail 1")


def test_a_known_class_says_more_than_an_earlier_unknown():
    ending = ending_of([node(0, "unknown", ended=4.0), node(1, "oom", ended=5.0)])
    assert ending.failure["class"] == "oom"


def test_peers_that_were_stopped_are_no_reason():
    ending = ending_of([node(0, None, "peer"), node(1, "data")])
    assert (ending.failure["node"], ending.stopped_by) == (1, None)
    assert not ending.well


@pytest.mark.parametrize("reason", ["cancel", "interrupted", "timeout"])
def test_a_stop_is_not_well(reason):
    ending = ending_of([node(0, None, reason), node(1)])
    assert (ending.stopped_by, ending.well) == (reason, False)
