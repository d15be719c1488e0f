"""What a run's folder tells of its attempts."""

from __future__ import annotations

import json

import pytest

from tasks import attempts
from tasks.targets.job import Ending
from tunewright.contract import rundir
from tunewright.contract.receipt import events, fold_events, markdown

WELL = Ending(None, None, "", ())
BADLY = Ending({"class": "unknown", "node": 0, "rank": None, "message": "m"}, None, "", ())


@pytest.fixture
def attempt(run_dir):
    """One attempt: where it began, the steps it did, and whether a checkpoint came of it."""

    def make(start: int, last: int, saved: int | None = None, ending: Ending | None = BADLY):
        number = attempts.next_number(run_dir)
        attempts.begin(run_dir, number)
        told = [{"event": "start", "step": start}]
        told += [{"event": "step", "step": s, "loss": 9.0 - s} for s in range(start + 1, last + 1)]
        path = run_dir.events(number)
        path.parent.mkdir(parents=True)
        path.write_text("".join(json.dumps(event) + "\n" for event in told))
        if saved is not None:
            place = run_dir.checkpoint(saved)
            place.mkdir(parents=True, exist_ok=True)
            (place / "x").touch()
            rundir.seal(place)
        if ending is not None:
            attempts.conclude(run_dir, number, ending)
        return number

    return make


def test_numbers_go_on(run_dir, attempt):
    assert [attempt(0, 1), attempt(0, 1)] == [1, 2]
    assert attempts.next_number(run_dir) == 3


def test_one_attempt_is_no_lack_of_progress(run_dir, attempt):
    assert attempts.without_progress(run_dir) is None
    attempt(0, 7)
    assert attempts.without_progress(run_dir) is None


@pytest.mark.parametrize(
    ("first", "second", "stuck"),
    [
        ((0, 7), (0, 7), True),
        ((0, 7, 5), (5, 7), True),
        ((0, 7, 5), (5, 8), False),
        ((0, 7, 5), (5, 7, 6), False),
        ((0, 7), (0, 5), False),
        ((0, 0), (0, 0), False),
        ((0, 5, 5), (5, 5), False),
        ((0, 7), (0, 0), False),
    ],
)
def test_two_that_trained_to_the_same_step_without_a_newer_checkpoint(
    run_dir, attempt, first, second, stuck
):
    attempt(*first)
    attempt(*second)
    found = attempts.without_progress(run_dir)
    assert (found is not None) == stuck
    assert not stuck or found == "two attempts in a row ended at step 7 without a newer checkpoint"


def test_only_the_last_two_count(run_dir, attempt):
    attempt(0, 7)
    attempt(0, 7)
    attempt(0, 8)
    assert attempts.without_progress(run_dir) is None


def test_a_checkpoint_that_is_not_sealed_is_no_progress(run_dir, attempt):
    attempt(0, 7, 5)
    run_dir.checkpoint(6).mkdir()
    attempt(5, 7)
    assert attempts.without_progress(run_dir)
    assert attempts.newest_step(run_dir) == 5


def test_whether_the_command_did_its_work(run_dir, attempt):
    assert not attempts.ended_well(run_dir)
    attempt(0, 1, ending=WELL)
    assert attempts.ended_well(run_dir)
    attempts.begin(run_dir, 2)
    assert not attempts.ended_well(run_dir)


def test_what_the_receipt_tells(run_dir, attempt):
    attempt(0, 7, 5)
    attempt(5, 9, ending=None)
    told, together = attempts.of_run(run_dir)
    assert [(t["attempt"], t["resumed_from_step"], t["last_step"]) for t in told] == [
        (1, 0, 7),
        (2, 5, 9),
    ]
    assert told[0]["failure"] == BADLY.failure
    assert told[1]["failure"]["class"] == "infrastructure", "nobody was there to tell its end"
    assert attempts.of_run(run_dir, running=True)[0][1]["failure"] is None, "it is going on"
    assert (together["steps"], together["first_loss"], together["last_loss"]) == (9, 8.0, 0.0)


def test_an_attempt_left_by_a_signal_is_no_lost_one(run_dir, attempt):
    attempt(0, 7, ending=None)
    attempts.conclude_interrupted(run_dir, 1)
    (told,), _ = attempts.of_run(run_dir)
    assert (told["failure"], told["stopped_by"]) == (None, "interrupted")
    assert told["ended"] is not None
    assert not attempts.ended_well(run_dir)


def test_speed_is_known_without_an_end_and_steps_without_loss_are_left_out():
    start = {"event": "start", "step": 0, "world_size": 2}
    steps = [
        {"event": "step", "step": n, "loss": loss, "tokens": 100, "seconds": 0.5}
        for n, loss in ((1, None), (2, 3.0), (3, None))
    ]
    facts = fold_events([[start, *steps]])
    assert facts["tokens_per_second_per_gpu"] == 100.0
    assert (facts["steps"], facts["first_loss"], facts["last_loss"]) == (3, 3.0, 3.0)
    done = {"event": "end", "step": 3, "tokens_per_second_per_gpu": 90.0}
    nothing_left = {"event": "end", "step": 3, "tokens_per_second_per_gpu": None}
    facts = fold_events([[start, *steps, done], [start, nothing_left]])
    assert facts["tokens_per_second_per_gpu"] == 90.0
    assert facts["base_model"] == {"name": None, "revision": None, "parameters": None}


def test_torn_and_foreign_lines_of_events_are_left_out(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event": "step", "step": 1, "loss": 2.0}\n5\n[]\n\xff\n{"event": "st')
    assert events(path) == [{"event": "step", "step": 1, "loss": 2.0}]
    assert events(tmp_path / "none") == []


def test_a_step_that_was_repeated_counts_once_with_its_last_loss():
    def step(number, loss):
        return {"event": "step", "step": number, "loss": loss}

    facts = fold_events([[step(1, 5.0), step(2, 4.0)], [step(2, 3.0), step(3, 2.0)]])
    assert (facts["steps"], facts["first_loss"], facts["last_loss"]) == (3, 5.0, 2.0)
    assert fold_events([])["first_loss"] is None


def test_steps_that_never_came_from_the_platform_are_unknown(home):
    """Of an attempt that was cancelled where the volume is not mounted, and the workspace away."""
    run = rundir.RunDir(home / "Volumes/main/default/runs/tiny-0a1b2c3d")
    attempts.begin(run, 1)
    attempts.conclude_interrupted(run, 1)
    (told,), together = attempts.of_run(run)
    assert (told["resumed_from_step"], told["last_step"], together["steps"]) == (None, None, None)
    known = {"state": "Cancelled", "run": run.name, "workload": {"sha256": "0"}, "seconds": {}}
    page = markdown({**known, "attempts": [told], **together})
    assert "| 1 | step unknown | unknown | interrupted |" in page
