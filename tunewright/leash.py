"""A command that ends with whoever started it:

    python -m tunewright.leash WORD ...        with a pipe as stdin that its parent keeps open

It ends when the command does, or when the pipe breaks, however the parent dies; then every process
below it is ended at once, also those that left their parents. For daemons that keep nothing.
"""

from __future__ import annotations

import select
import subprocess
import sys

from tunewright.contract import processes

_POLL_S = 0.1


def main(words: list[str]) -> int:
    """Run the command; returns its exit code (128 + n for signal n)."""
    processes.adopt_orphans()
    command = subprocess.Popen(words, stdin=subprocess.DEVNULL)
    while command.poll() is None and not select.select([sys.stdin], [], [], _POLL_S)[0]:
        continue
    processes.end_descendants(0, lambda: None)
    code = command.wait()
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
