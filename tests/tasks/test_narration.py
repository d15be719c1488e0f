"""What the lines of a command become in the run's log and in its progress bar."""

from __future__ import annotations

import logging

from tasks.launch import _narrator


def test_the_lines_of_steps_are_told_and_move_the_bar(caplog):
    heard: list[float] = []
    say = _narrator(2, heard.append)
    with caplog.at_level(logging.INFO, logger="tunewright"):
        say(0, "step 1/20   loss 2.0")
        say(0, "evaluation after step 1  loss 2.1")
        say(1, "step 20/20  loss 1.0")
    assert heard == [5, 100]
    assert [record.message for record in caplog.records] == [
        "[node 0] step 1/20   loss 2.0",
        "[node 0] evaluation after step 1  loss 2.1",
        "[node 1] step 20/20  loss 1.0",
    ]
