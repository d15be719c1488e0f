"""Receipts of runs old and new: what they fold to, and how they are shown."""

from __future__ import annotations

from tunewright.contract.receipt import fold_events, markdown, speed, time_table

SPENT = {"start_up": 20.0, "forward_backward": 60.0, "checkpoint": 1.0, "other": 19.0}
OLD = [
    {"event": "start", "step": 0, "world_size": 2, "fast_paths": {"compile": False}},
    {"event": "step", "step": 1, "loss": 2.0, "tokens": 100, "seconds": 0.5},
    {"event": "checkpoint", "step": 1, "path": "x", "seconds": 3.0},
    {"event": "end", "step": 1, "tokens_per_second_per_gpu": 90.0},
]
NEW = [
    {"event": "start", "step": 0, "world_size": 2, "seconds": 20.0, "ceiling_tflops_per_gpu": 700.0,
     "fast_paths": {"attention": "varlen", "compile": True, "recomputation": False}},
    {"event": "step", "step": 1, "loss": 2.0, "tokens": 100, "seconds": 5.0, "counts": False,
     "seconds_by_phase": {"data": 1.0, "evaluation": 2.0}},
    {"event": "step", "step": 2, "loss": 1.0, "tokens": 100, "seconds": 0.5, "counts": True,
     "seconds_by_phase": {"data": 0.25}},
    {"event": "checkpoint", "step": 2, "path": "x", "seconds": 3.0, "blocked_seconds": 0.25},
    {"event": "end", "step": 2, "tokens_per_second_per_gpu": 90.0, "ceiling_share": 0.5,
     "model_tflops_per_gpu": 350.0, "compiled_graphs": 4, "seconds_by_phase": SPENT},
]  # fmt: skip


def receipt_of(facts: dict) -> dict:
    return {
        "run": "llama-7f3a91c2",
        "state": "Completed",
        "workload": {"sha256": "0" * 64},
        "attempts": [],
        "seconds": {"launch": 100.0},
        **facts,
    }


def test_a_run_of_an_older_version_still_folds_and_shows():
    facts = fold_events([OLD])
    assert facts["tokens_per_second_per_gpu"] == 90.0
    assert (facts["ceiling_tflops_per_gpu"], facts["ceiling_share"]) == (None, None)
    assert facts["checkpoints"] == {"count": 1, "seconds": 3.0, "blocked_seconds": 3.0}
    assert (facts["seconds_by_phase"], facts["fast_paths"]) == ({}, {"compile": False})
    page = markdown(receipt_of(facts))
    assert "where time went" not in page
    without = {"checkpoints", "seconds_by_phase", "ceiling_share", "ceiling_tflops_per_gpu"}
    old = receipt_of({k: v for k, v in facts.items() if k not in without})
    assert "| Speed |  |" in markdown(old)


def test_figures_and_time_are_folded_over_attempts():
    facts = fold_events([NEW[:3], NEW])
    assert (facts["ceiling_tflops_per_gpu"], facts["ceiling_share"]) == (700.0, 0.5)
    assert facts["fast_paths"]["compiled_graphs"] == 4
    assert facts["checkpoints"] == {"count": 1, "seconds": 3.0, "blocked_seconds": 0.25}
    assert facts["seconds_by_phase"] == {
        "start_up": 40.0,
        "warm_up": 5.0,
        "data": 0.25,
        "forward_backward": 60.0,
        "checkpoint": 1.0,
        "evaluation": 2.0,
        "other": 19.0,
    }


def test_the_speed_of_an_attempt_cut_short_leaves_out_its_warm_up():
    assert fold_events([NEW[:3]])["tokens_per_second_per_gpu"] == 100.0
    assert fold_events([NEW[:2]])["tokens_per_second_per_gpu"] == 10.0, "better than none"


def test_the_page_shows_where_time_went_and_what_ran():
    page = markdown(receipt_of(fold_events([NEW])))
    assert "| start-up (loading) | 20.0 | 20.0 |" in page
    assert "| checkpoints (blocked) | 1.0 | 1.0 |" in page
    assert "| total | 100.0 | 100.0 |" in page
    assert "| Speed | 350 TFLOP/s, 50.0 % of the measured ceiling of 700 |" in page
    assert "| Fast paths | attention varlen, compile, no recomputation, compiled graphs 4 |" in page
    assert "| Checkpoints | 1 in 3.0 s, 0.2 s of it blocked |" in page


def test_text_for_a_terminal():
    assert list(time_table({})) == []
    assert list(time_table(SPENT)) == [
        "where time went                 seconds      %",
        "  start-up (loading)               20.0   20.0",
        "  forward and backward             60.0   60.0",
        "  checkpoints (blocked)             1.0    1.0",
        "  other                            19.0   19.0",
        "  total                           100.0  100.0",
    ]
    assert speed({"ceiling_share": 0.25}) == "25.0 % of the measured ceiling"
    assert speed({}) == ""
