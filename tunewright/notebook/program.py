"""How a program of ours is started with the imports of the process that starts it."""

from __future__ import annotations

import os
import sys


def code_of(module: str) -> str:
    """What `python -c` runs to be `module`'s main.

    Modules are found where this process finds them: those beside a script or a notebook, and
    this package, which may be a folder that is on the path only here. PYTHONPATH would put them
    before the standard library, and would reach every Python that a rank starts.
    """
    path = [os.path.abspath(entry) for entry in sys.path]
    return (
        f"import sys; sys.path[:] = {path!r}; from {module} import main; raise SystemExit(main())"
    )
