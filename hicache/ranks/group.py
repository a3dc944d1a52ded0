"""A group of ranks that can agree on the lowest of their numbers, and nothing else.

Everything else follows from that: the highest (of the negated), whether all are ready (1 or 0), what the
first rank says (the others give ``ABSENT``), whether all gave the same (the lowest and the highest of it).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]

ABSENT = int(np.iinfo(np.int64).max)
"""What a rank gives that has nothing to say."""


class RankGroup(Protocol):
    """The ranks of one model, each with a cache of its own.

    *Caller guarantees*: every rank makes the same calls in the same order, each with as many numbers.

    *Thread*: one at a time; ``lowest`` blocks until all ranks have called it, bounded.
    """

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def lowest(self, numbers: Numbers) -> Numbers:
        """The lowest of all ranks, number by number.

        Args:
            numbers: int64 ``[n]``, C order; may be overwritten.

        Raises:
            RankGroupError: not all ranks came in time, or one has left; no later call succeeds.
        """
        ...

    def close(self) -> None:
        """Leave; what the others wait for fails at once. Idempotent."""
        ...


class SingleGroup:
    """One rank alone: it agrees with itself."""

    rank = 0
    size = 1

    def lowest(self, numbers: Numbers) -> Numbers:
        return numbers

    def close(self) -> None:
        """Nothing to leave."""
