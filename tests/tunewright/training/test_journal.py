"""What a run says of itself: events, lines, and where its time went."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from tunewright.contract.receipt import fold_events
from tunewright.training.checkpoint import Found, Progress
from tunewright.training.journal import Journal, step_line
from tunewright.training.saving import Saved
from tunewright.training.step import StepResult

FLOPS_PER_TOKEN = 6e6
CEILING = 1e9


@pytest.fixture
def told(alone, tmp_path, capsys, monkeypatch):
    """Runs a journal through six steps; returns its events and its lines."""
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    path = tmp_path / "events.jsonl"

    def run(logging_steps: int = 1, slow: int | None = None) -> tuple[list[dict], list[str]]:
        progress = Progress()
        with Journal(path, alone, 1, logging_steps) as journal:
            journal.started(
                Found(progress, None),
                6,
                {"fast_paths": {"compile": False}},
                {},
                flops_per_token=FLOPS_PER_TOKEN,
                ceiling=CEILING,
            )
            with journal.clock.phase("evaluation"):
                time.sleep(0.05)
            journal.evaluated(progress)
            for step in range(1, 7):
                with journal.clock.phase("data"):
                    time.sleep(0.2 if step == 1 else 0.01)
                with journal.clock.phase("forward_backward"):
                    time.sleep(0.3 if step == slow else 0.02)
                result = StepResult(2.0 / step, 1.0, 10, 5)
                progress = progress.after(step, result)
                journal.stepped(step, 1e-4, result, usual=step != slow)
                if step == 4:
                    with journal.clock.phase("checkpoint"):
                        time.sleep(0.1)
                    journal.saving(step, 0.1)
                if step == 5:
                    journal.saved([Saved(4, Path("step-4"), 0.4, 0.1)])
            journal.ended(progress)
        events = [json.loads(line) for line in path.read_text().splitlines()]
        return events, capsys.readouterr().out.splitlines()

    return run


def by_kind(events: list[dict], kind: str) -> list[dict]:
    return [event for event in events if event["event"] == kind]


def test_the_speed_is_that_of_usual_steps(told):
    events, _ = told(slow=3)
    assert [e["counts"] for e in by_kind(events, "step")] == [False, True, False, True, True, True]
    (end,) = by_kind(events, "end")
    assert 150 < end["tokens_per_second_per_gpu"] < 1 / 0.003
    assert end["ceiling_share"] == pytest.approx(
        end["tokens_per_second_per_gpu"] * FLOPS_PER_TOKEN / CEILING
    )


def test_neither_evaluation_nor_saving_is_time_of_a_step(told):
    events, _ = told()
    seconds = [e["seconds"] for e in by_kind(events, "step")]
    assert seconds[0] > 0.2
    assert all(s < 0.1 for s in seconds[1:])
    assert by_kind(events, "step")[4]["seconds_by_phase"]["checkpoint"] >= 0.1


def test_all_time_of_the_process_is_accounted_for(told):
    events, lines = told(slow=3)
    spent = by_kind(events, "end")[0]["seconds_by_phase"]
    assert 0.5 < spent["warm_up"] < 1
    assert 0.04 <= spent["data"] < 0.15, "without the first step's and the slow one's"
    assert 0.08 <= spent["forward_backward"] < 0.25
    assert 0.1 <= spent["checkpoint"] < 0.2
    assert 0.05 <= spent["evaluation"] < 0.15
    assert spent["other"] < 1
    assert spent["start_up"] == pytest.approx(by_kind(events, "start")[0]["seconds"], abs=1e-5)
    table = lines[lines.index(next(x for x in lines if x.startswith("where time went"))) :]
    assert [line[2:28].strip() for line in table[1:]] == [
        "start-up (loading)",
        "warm-up (compile, tracing)",
        "data",
        "forward and backward",
        "checkpoints (blocked)",
        "evaluation",
        "other",
        "total",
    ]
    shares = [float(line.split()[-1]) for line in table[1:]]
    assert sum(shares[:-1]) == pytest.approx(100, abs=0.5)
    assert shares[-1] == 100


def test_a_checkpoint_is_told_when_it_is_sealed(told):
    events, lines = told()
    (event,) = by_kind(events, "checkpoint")
    assert event.items() >= {"step": 4, "seconds": 0.4, "blocked_seconds": 0.1}.items()
    assert "checkpoint after step 4 in 0.4 s, 0.1 s of it blocked: step-4" in lines


def test_the_receipt_is_made_of_it(told):
    events, _ = told()
    facts = fold_events([events])
    assert facts["ceiling_share"] == events[-1]["ceiling_share"]
    assert facts["checkpoints"] == {"count": 1, "seconds": 0.4, "blocked_seconds": 0.1}
    assert facts["seconds_by_phase"].keys() == events[-1]["seconds_by_phase"].keys()
    assert facts["tokens_per_second_per_gpu"] == events[-1]["tokens_per_second_per_gpu"]


def test_an_attempt_cut_short_tells_what_its_steps_did(told):
    """Killed at the end: the same figures, as far as the steps know them."""
    events, _ = told(slow=3)
    whole, cut = fold_events([events]), fold_events([events[:-1]])
    speed = "tokens_per_second_per_gpu"
    assert cut[speed] == pytest.approx(whole[speed])
    spent = cut["seconds_by_phase"]
    assert spent.keys() == whole["seconds_by_phase"].keys() - {"other"}
    assert all(spent[k] == pytest.approx(whole["seconds_by_phase"][k], abs=0.01) for k in spent)


def test_a_line_speaks_for_all_steps_since_the_one_before(told):
    _, lines = told(logging_steps=3)
    shown = [line for line in lines if line.startswith("step ")]
    assert [line.split()[1] for line in shown] == ["3/6", "6/6"]
    first, second = (float(re.search(r"([\d,.]+) tokens/s", line)[1]) for line in shown)
    assert first < 150 < second, "the first line has the slow first step in it"
    assert shown[1].endswith("0:00:00 left")


def test_columns_keep_their_places():
    one = StepResult(11.23456, 123.4, 1, 1)
    other = StepResult(0.5, 0.01, 1, 1)
    lines = [
        step_line(7, 1200, 0.0, one, 9.0, 0.0512, 0.31, None),
        step_line(1200, 1200, 2e-5, other, 1_234_567.0, 0.512, 139.5, 3725.4),
    ]
    assert lines[0] == (
        "step 7/1200     loss 11.2346  lr 0.0e+00  grad  123.40            9 tokens/s"
        "    5.1 % of ceiling    0.31 GiB         - left"
    )
    assert lines[1] == (
        "step 1200/1200  loss  0.5000  lr 2.0e-05  grad    0.01    1,234,567 tokens/s"
        "   51.2 % of ceiling  139.50 GiB   1:02:05 left"
    )
    assert "ceiling" not in step_line(7, 9, 0.0, one, 9.0, None, 0.3, 1.0)
