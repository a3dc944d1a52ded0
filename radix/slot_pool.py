"""The free list of one component in one tier."""

from __future__ import annotations

import numpy as np

from hicache.errors import CapacityError
from hicache.radix.actions import Slots


class SlotPool:
    """Hands out slot numbers ``0 .. capacity - 1``; the most recently freed go out first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._stack = np.arange(capacity - 1, -1, -1, dtype=np.int64)
        self._num_free = capacity

    @property
    def num_free(self) -> int:
        return self._num_free

    def allocate(self, count: int) -> Slots:
        """Take ``count`` slots. Raises ``CapacityError`` if fewer are free; nothing changes then."""
        if count > self._num_free:
            raise CapacityError(
                f"{count} slots asked, {self._num_free} of {self.capacity} free",
                required_slots=count,
                free_slots=self._num_free,
            )
        begin = self._num_free - count
        taken = self._stack[begin : self._num_free][::-1].copy()
        self._num_free = begin
        return taken

    def free(self, slots: Slots) -> None:
        """Give slots back. *Caller guarantees*: they were handed out and nobody holds them."""
        end = self._num_free + len(slots)
        self._stack[self._num_free : end] = slots[::-1]
        self._num_free = end

    def free_slots(self) -> Slots:
        """A copy of the free list, for audits."""
        return self._stack[: self._num_free].copy()
