"""Which rows are held out for evaluation: a row's content decides, not its place."""

from __future__ import annotations

from collections.abc import Sequence

_SPACE = 1 << 64


def held_out(digests: Sequence[bytes], fraction: float) -> list[bool]:
    """For each row's content hash, whether it is held out.

    The same content is always on the same side, so no duplicate straddles, and rows that are added
    move none that were there. With at least two distinct rows each side gets at least one.
    """
    if fraction <= 0:
        return [False] * len(digests)
    distinct = sorted(set(digests), key=_position)
    chosen = {digest for digest in distinct if _position(digest) < fraction * _SPACE}
    # The first is held out in any case, the last in none.
    chosen = (chosen | set(distinct[:1])) - set(distinct[-1:])
    return [digest in chosen for digest in digests]


def _position(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big")
