"""The end of a log, without what torchrun adds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunewright.contract import logtail

TORCHRUN = """\
W1201 00:20:34.463000 8738 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process
E1201 00:20:34.464000 8738 torch/distributed/elastic/multiprocessing/api.py:1002] failed \
(exitcode: 1) local_rank: 1 (pid: 8744) of binary: python
Traceback (most recent call last):
  File "run.py", line 1032, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""
RAISED = """\
Traceback (most recent call last):
  File "train.py", line 5, in <module>
    raise {error}("{words}")
{error}: {words}
"""


def of_rank(rank: int, text: str) -> str:
    return "".join(f"[rank{rank}]: {line}\n" for line in text.splitlines())


@pytest.mark.parametrize(
    ("log", "rank", "expected"),
    [
        ("step 1\n" + RAISED.format(error="ValueError", words="mine"), None, "ValueError: mine"),
        (RAISED.format(error="lib.Trouble", words="a: b") + TORCHRUN, 1, "lib.Trouble: a: b"),
        (
            of_rank(1, RAISED.format(error="ValueError", words="first"))
            + of_rank(0, RAISED.format(error="RuntimeError", words="connection closed by peer"))
            + TORCHRUN,
            1,
            "ValueError: first",
        ),
        (
            RAISED.format(error="KeyError", words="x")
            + "\nDuring handling of the above exception, another exception occurred:\n\n"
            + RAISED.format(error="ValueError", words="the last"),
            None,
            "ValueError: the last",
        ),
        ("Traceback (most recent call last):\n  cut", None, None),
        ("no error at all\n" + TORCHRUN, 0, None),
        ("", None, None),
    ],
)
def test_the_error_of_a_log(log, rank, expected):
    assert logtail.error(log.splitlines(), rank) == expected


def test_the_tail_ends_with_what_the_command_said():
    said = [f"line {n}" for n in range(30)]
    assert logtail.tail([*said, *TORCHRUN.splitlines()]).splitlines() == said[-20:]
    # A restart by torchrun is told in the middle.
    again = logtail.tail([*said[:3], *TORCHRUN.splitlines(), *said[3:], *TORCHRUN.splitlines()])
    assert again.endswith("line 28\nline 29")


def test_the_end_of_a_large_log_and_of_none(tmp_path: Path):
    log = tmp_path / "log"
    log.write_text("x" * 100_000 + "\nlast\n")
    assert logtail.last_lines(log)[-1] == "last"
    assert sum(map(len, logtail.last_lines(log))) < 70_000
    assert logtail.last_lines(tmp_path / "none") == []
