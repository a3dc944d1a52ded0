"""The free list of one component in one tier."""

from __future__ import annotations

import numpy as np

from hicache.errors import CapacityError
from hicache.radix.actions import Slots


class SlotPool:
    """Hands out slot numbers ``0 .. total - 1``; the most recently freed go out first.

    ``capacity`` is what is in use; it follows ``limit`` as slots come free.
    """

    def __init__(self, capacity: int) -> None:
        self.total = self.capacity = self.limit = capacity
        self._withheld: list[Slots] = []
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

    def approach_limit(self) -> bool:
        """Withhold free slots beyond ``limit``, or give withheld ones back. True once it is reached."""
        while self.capacity < self.limit:
            chunk = self._withheld.pop()
            num_back = min(len(chunk), self.limit - self.capacity)
            if num_back < len(chunk):
                self._withheld.append(chunk[num_back:])
            self.capacity += num_back
            self.free(chunk[:num_back])
        num_out = min(self.capacity - self.limit, self._num_free)
        if num_out:
            self._withheld.append(self.allocate(num_out))
            self.capacity -= num_out
        return self.capacity == self.limit

    def withheld_slots(self) -> Slots:
        """Slots that are not in use because of the limit."""
        return np.concatenate([np.empty(0, dtype=np.int64), *self._withheld])

    def free_slots(self) -> Slots:
        """A copy of the free list, for audits."""
        return self._stack[: self._num_free].copy()
