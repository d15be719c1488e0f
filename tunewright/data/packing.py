"""Documents into packs of at most pack_tokens tokens, over the whole set at once."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def pack(lengths: Sequence[int] | npt.NDArray[np.int64], pack_tokens: int) -> list[list[int]]:
    """Best fit decreasing: indices of documents, one list a pack; the same input, the same packs.

    Each length is 1 to pack_tokens. Packs come in the order in which they were opened, so the
    longest documents are in the first ones.
    """
    packs: list[list[int]] = []
    rooms: list[int] = []  # distinct free sizes of open packs, ascending
    with_room: dict[int, list[int]] = {}  # packs by their free size
    longest_first = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")
    for document in longest_first.tolist():
        length = int(lengths[document])
        if not 0 < length <= pack_tokens:
            raise ValueError(f"document {document} has {length} tokens, a pack holds {pack_tokens}")
        tightest = bisect.bisect_left(rooms, length)
        if tightest < len(rooms):
            room = rooms[tightest]
            number = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[tightest]
        else:
            room, number = pack_tokens, len(packs)
            packs.append([])
        packs[number].append(document)
        if left := room - length:
            if left not in with_room:
                bisect.insort(rooms, left)
            with_room.setdefault(left, []).append(number)
    return packs
