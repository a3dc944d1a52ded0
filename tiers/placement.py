"""Which units of one allocation the slots of several components lie in.

::

    units    | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |
    full 0   |   | x |   |   |   |   |   |   |     a slot of one unit
    mamba 3  |   |   | x |   |   | x | x |   |     a slot of three, which need not lie together

So a freed slot of any component makes room for any other, and there is nothing to compact. The tree
counts the units, and so knows what fits; where they are is known here alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from hicache.errors import CapacityError, ProtocolError

Units = NDArray[np.int64]
"""int64 [num_slots, units of a slot]."""


class Placement:
    """Gives slots their units and takes them back.

    Args:
        num_units: of the allocation.
        costs: units of a slot, by component; at least 1 each.

    *Thread*: calls must not overlap; the cache's lock sees to that.
    """

    def __init__(self, num_units: int, costs: Mapping[str, int]) -> None:
        self.num_units = num_units
        self.costs = dict(costs)
        self._places = {
            name: np.empty((num_units // cost, cost), dtype=np.int64) for name, cost in costs.items()
        }
        self._is_placed = {name: np.zeros(num_units // cost, dtype=np.bool_) for name, cost in costs.items()}
        self._withheld = np.empty(0, dtype=np.int64)
        self.clear()

    def clear(self) -> None:
        """No slot has a place any more; what is withheld stays so."""
        for is_placed in self._is_placed.values():
            is_placed[:] = False
        free = np.setdiff1d(np.arange(self.num_units), self._withheld)
        self._stack = np.empty(self.num_units, dtype=np.int64)  # the last goes out first
        self._stack[: len(free)] = free[::-1]
        self._num_free = len(free)

    @property
    def num_free(self) -> int:
        """Units that no slot has."""
        return self._num_free

    @property
    def num_withheld(self) -> int:
        """Units kept out of use."""
        return len(self._withheld)

    def num_slots(self, name: str) -> int:
        """As many slots as there could be of the component alone."""
        return len(self._is_placed[name])

    def num_placed(self, name: str) -> int:
        """Slots of the component that have a place."""
        return int(np.count_nonzero(self._is_placed[name]))

    def place(self, name: str, slots: NDArray[np.int64]) -> Units:
        """Give slots their units; those freed last, and in order, so that most lie together.

        *Raises*: ``ProtocolError`` when one has a place already, ``CapacityError`` when units are lacking;
        nothing has changed then.
        """
        is_placed, cost = self._is_placed[name], self.costs[name]
        if is_placed[slots].any():
            raise ProtocolError(f"{name}: slot {int(slots[is_placed[slots]][0])} has a place in L2 already")
        begin = self._num_free - len(slots) * cost
        if begin < 0:
            raise CapacityError(
                f"{name}: {len(slots)} slots of {cost} units asked, {self._num_free} units are free",
                required_slots=len(slots),
                free_slots=self._num_free // cost,
            )
        units = self._stack[begin : self._num_free][::-1].reshape(-1, cost)
        self._num_free = begin
        self._places[name][slots] = units
        is_placed[slots] = True
        return units.copy()

    def units(self, name: str, slots: NDArray[np.int64]) -> Units:
        """Where slots lie. Raises ``ProtocolError`` when one has no place."""
        is_placed = self._is_placed[name][slots]
        if not is_placed.all():
            raise ProtocolError(f"{name}: slot {int(slots[~is_placed][0])} has no place in L2")
        return self._places[name][slots]

    def release(self, name: str, slots: NDArray[np.int64]) -> None:
        """Take the units back. Raises ``ProtocolError`` when a slot has no place; nothing has changed then."""
        units = self.units(name, slots).ravel()
        self._is_placed[name][slots] = False
        self._stack[self._num_free : self._num_free + len(units)] = units[::-1]
        self._num_free += len(units)

    def withhold(self, num_units: int) -> Units:
        """Keep so many units out of use, as far as they are free; int64 [n], those not withheld before.

        The highest go, so that what stays in use lies together.
        """
        free = self._stack[: self._num_free]
        missing = num_units - len(self._withheld)
        if missing < 0:
            self._stack[self._num_free : self._num_free - missing] = self._withheld[missing:]
            self._num_free -= missing
            self._withheld = self._withheld[:missing]
            return np.empty(0, dtype=np.int64)
        chosen = np.sort(free)[max(0, len(free) - missing) :]
        stays = free[~np.isin(free, chosen)]
        self._stack[: len(stays)] = stays
        self._num_free = len(stays)
        self._withheld = np.concatenate([self._withheld, chosen])
        return chosen

    def check_integrity(self) -> list[str]:
        """One sentence for each unit that is not had exactly once; empty when all are."""
        held = [places[self._is_placed[name]].ravel() for name, places in self._places.items()]
        every = np.concatenate([self._stack[: self._num_free], self._withheld, *held])
        times = np.bincount(every, minlength=self.num_units)
        wrong = np.flatnonzero(times != 1)
        return [f"L2: unit {unit} is had {times[unit]} times, not once" for unit in wrong.tolist()]
