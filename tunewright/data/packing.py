"""Documents into packs of at most pack_tokens tokens, over the whole set at once."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Packing(NamedTuple):
    """Which documents lie together. Pack i holds order[offsets[i]:offsets[i + 1]].

    order: int64 [documents], each document once. offsets: int64 [packs + 1].
    """

    order: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]


def pack(lengths: Sequence[int] | npt.NDArray[np.integer], pack_tokens: int) -> Packing:
    """Best fit decreasing; the same input gives the same packs.

    Each length is 1 to pack_tokens. Packs come in the order in which they were opened, so the
    longest documents are in the first ones. Time grows with the documents, not with their square:
    open packs are kept by their free size, of which there are at most pack_tokens.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    outside = np.flatnonzero((sizes < 1) | (sizes > pack_tokens))
    if len(outside):
        first = int(outside[0])
        raise ValueError(f"document {first} has {sizes[first]} tokens, a pack holds {pack_tokens}")
    longest_first = np.argsort(-sizes, kind="stable")
    packs = _assign(sizes[longest_first].tolist(), pack_tokens)
    # Documents of a pack stay in the order in which they were put there.
    by_pack = np.argsort(packs, kind="stable")
    counts = np.bincount(packs, minlength=0)
    return Packing(
        longest_first[by_pack], np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    )


def _assign(lengths: Sequence[int], pack_tokens: int) -> npt.NDArray[np.int64]:
    """The number of the pack of each document; lengths come longest first."""
    numbers = np.empty(len(lengths), dtype=np.int64)
    rooms: list[int] = []  # distinct free sizes of open packs, ascending
    with_room: list[list[int]] = [[] for _ in range(pack_tokens)]  # open packs by free size
    opened = 0
    for document, length in enumerate(lengths):
        tightest = bisect.bisect_left(rooms, length)
        if tightest < len(rooms):
            room = rooms[tightest]
            number = with_room[room].pop()
            if not with_room[room]:
                del rooms[tightest]
        else:
            room, number = pack_tokens, opened
            opened += 1
        numbers[document] = number
        if left := room - length:
            if not with_room[left]:
                bisect.insort(rooms, left)
            with_room[left].append(number)
    return numbers
