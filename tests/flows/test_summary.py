"""What the command line says of a finished run."""

from __future__ import annotations

from flows.launcher import summary

RECEIPT = {
    "run": "tiny-0a1b2c3d",
    "state": "Completed",
    "reason": None,
    "data": None,
    "steps": 6,
    "world_size": 2,
    "first_loss": 2.0,
    "last_loss": 1.0,
    "attempts": [],
    "seconds": {"total": 40.0},
    "folder": "/runs/tiny-0a1b2c3d",
}


def test_a_receipt_without_figures_is_told_without_them():
    lines = list(summary(RECEIPT))
    assert not any("speed" in line or "where time went" in line for line in lines)


def test_speed_checkpoints_and_time_are_told():
    figures = {
        "tokens_per_second_per_gpu": 12345.6,
        "ceiling_share": 0.4512,
        "checkpoints": {"count": 2, "seconds": 10.0, "blocked_seconds": 0.51},
        "seconds_by_phase": {"start_up": 10.0, "forward_backward": 30.0},
    }
    lines = list(summary(RECEIPT | figures))
    assert (
        "  speed       12,346 tokens/s per GPU or process (45.1 % of the measured ceiling)" in lines
    )
    assert "  checkpoints 2 in 10.0 s, 0.5 s of it blocked" in lines
    assert "      forward and backward             30.0   75.0" in lines
    total = lines.index("      total                            40.0  100.0")
    assert lines.index("  time        40.0 s") < total
