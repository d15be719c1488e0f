"""What travels to the node: the contract, the data path, the recipes and the programs.

Nothing in this package imports Prefect. Importing the package itself imports nothing; the
decorators of a notebook come with their first use: `from tunewright import distributed`.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

_OF_NOTEBOOK = ("distributed", "ray_launch")


def __getattr__(name: str) -> Any:
    """The names of `tunewright.notebook` that stand here too; see `__init__.pyi` for their types.

    Imported by its name only: for the import walls, who imports the contract does not import what
    notebooks need.
    """
    if name not in _OF_NOTEBOOK:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("tunewright.notebook"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_OF_NOTEBOOK])
