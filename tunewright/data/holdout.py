"""Which rows are held out for evaluation: a row's content decides, and nothing else."""

from __future__ import annotations

_SPACE = 1 << 64


def is_held_out(digest: bytes, fraction: float) -> bool:
    """Whether a row with this content hash (16 bytes) is held out.

    The same content is always on the same side: no duplicate straddles, and rows that are added
    move none that were there. A larger fraction holds out the same rows and more.
    """
    return int.from_bytes(digest[:8], "big") < fraction * _SPACE
