"""The free list of one component in one tier, and the budget it draws on."""

from __future__ import annotations

import numpy as np

from hicache.errors import CapacityError
from hicache.radix.actions import Slots


class Budget:
    """Units of room in one tier: one pool's own, or shared by the pools of several components.

    ``capacity`` is what is in use; it follows ``limit`` as units come free. ``num_touched`` are the units of all
    slots that were handed out since their memory last went back: what the slots' memory takes.
    """

    def __init__(self, total: int) -> None:
        self.total = self.capacity = self.limit = self.num_free = total
        self.num_touched = 0

    def approach_limit(self) -> bool:
        """Use fewer units, as far as they are free, or more. True once the limit is reached."""
        step = max(self.limit - self.capacity, -self.num_free)
        self.capacity += step
        self.num_free += step
        return self.capacity == self.limit


class SlotPool:
    """Hands out slot numbers from 0 on; the most recently freed go out first.

    Args:
        budget: what the slots take their room from. Where pools share it, a number names a slot and not a
            place: there are as many as the whole budget would hold.
        cost: units of one slot.

    ::

        own budget      [ withheld by the limit | free, the top goes out first ]
        shared budget   [ all free; how many may go out, the budget says       ]
                        [ untouched               | touched, free now          ]
    """

    def __init__(self, budget: Budget, cost: int = 1, *, is_shared: bool = False) -> None:
        self.budget = budget
        self.cost = cost
        self.is_shared = is_shared
        self.total = budget.total // cost
        self._stack = np.arange(self.total - 1, -1, -1, dtype=np.int64)
        self._height = self._lowest = self.total

    @property
    def capacity(self) -> int:
        """Slots that the room in use holds, whoever has it."""
        return self.budget.capacity // self.cost

    @property
    def num_free(self) -> int:
        return self.budget.num_free // self.cost

    @property
    def num_held(self) -> int:
        """Slots handed out."""
        return self.total - self._height

    def allocate(self, count: int) -> Slots:
        """Take ``count`` slots. Raises ``CapacityError`` if fewer are free; nothing changes then."""
        if count > self.num_free:
            raise CapacityError(
                f"{count} slots asked, {self.num_free} of {self.capacity} free",
                required_slots=count,
                free_slots=self.num_free,
            )
        begin = self._height - count
        taken = self._stack[begin : self._height][::-1].copy()
        self._height = begin
        self.budget.num_free -= count * self.cost
        if begin < self._lowest:
            self.budget.num_touched += (self._lowest - begin) * self.cost
            self._lowest = begin
        return taken

    def free(self, slots: Slots) -> None:
        """Give slots back. *Caller guarantees*: they were handed out and nobody holds them."""
        end = self._height + len(slots)
        self._stack[self._height : end] = slots[::-1]
        self._height = end
        self.budget.num_free += len(slots) * self.cost

    def take_touched(self) -> Slots:
        """Free slots that were handed out since they were last named here; their memory goes back now."""
        touched = self._stack[self._lowest : self._height].copy()
        self.budget.num_touched -= len(touched) * self.cost
        self._lowest = self._height
        return touched

    def withheld_slots(self) -> Slots:
        """Slots that are not in use because of the limit; none where the budget is shared."""
        return self._stack[: self._num_withheld].copy()

    def free_slots(self) -> Slots:
        """A copy of the free list, for audits."""
        return self._stack[self._num_withheld : self._height].copy()

    @property
    def _num_withheld(self) -> int:
        return 0 if self.is_shared else self.total - self.capacity
