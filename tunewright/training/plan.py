"""Which packs make up which optimizer step, and which rank computes what of it.

The plan follows from the settings, the seed and the number of packs alone. How a step is cut into
micro-batches, and over how many ranks, changes neither its packs nor its gradient.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from tunewright.contract.failures import DataError
from tunewright.contract.settings import FsdpSettings


@dataclass(frozen=True)
class Plan:
    """`steps` optimizer steps, counted from 1, over `packs` packs shuffled anew each epoch.

    The last step of an epoch takes the packs that are left: it is smaller when they do not fill a
    step, so that every pack is seen exactly once an epoch. Its loss is still the mean of its own
    supervised tokens.
    """

    packs: int
    packs_per_step: int
    steps: int
    seed: int

    @classmethod
    def of(cls, settings: FsdpSettings, packs: int) -> Plan:
        """The plan for a number of packs; raises DataError when there are none."""
        if packs < 1:
            raise DataError("there are no rows to train on; lower eval_fraction or add rows")
        per_epoch = -(-packs // settings.packs_per_step)
        steps = settings.max_steps or settings.num_train_epochs * per_epoch
        return cls(packs, settings.packs_per_step, steps, settings.seed)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.packs // self.packs_per_step)

    def packs_of(self, step: int) -> list[int]:
        """The packs of a step (1 to `steps`), in order."""
        epoch, place = divmod(step - 1, self.steps_per_epoch)
        first = place * self.packs_per_step
        return list(_shuffled(self.packs, self.seed, epoch)[first : first + self.packs_per_step])


def micro_batches(packs: Sequence[int], size: int, rank: int, ranks: int) -> list[list[int]]:
    """The micro-batches of one rank: `size` packs each, dealt out to the ranks in turn.

    Every rank gets the same number of them, since each is a round of collectives: a rank left
    without a pack gets an empty one.
    """
    dealt = [list(packs[first : first + size]) for first in range(0, len(packs), size)]
    rounds = -(-len(dealt) // ranks)
    places = [round_ * ranks + rank for round_ in range(rounds)]
    return [dealt[place] if place < len(dealt) else [] for place in places]


def seed_of(*parts: int) -> int:
    """A seed below 2**63 that follows from whole numbers, the same on every machine."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@lru_cache(maxsize=2)
def _shuffled(packs: int, seed: int, epoch: int) -> tuple[int, ...]:
    """An order by hash: unlike a library's generator it is the same in every version."""
    return tuple(sorted(range(packs), key=lambda pack: (seed_of(seed, epoch, pack), pack)))
