"""Learn when sessions come back, and what waiting for them is worth.

A turn that ended is *open* until its session returns. Each class of turns has a curve over ages: of the
turns that reached an age bin, how many returned within it (a life table; turns still open count as far
as they have come). From the curve follows the *index* of an age: over all times one could go on waiting,
the best ratio of the chance of a return to the expected time that is waited. Keeping what has the highest
index per second is the best order for waits that do not influence each other (Gittins).
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
from numpy.typing import NDArray

NUM_BINS = 32
FIRST_EDGE_S = 1.0
LAST_EDGE_S = 7200.0
PSEUDO_TURNS = 20.0
"""How many turns of the pooled curve a class's own curve is mixed with."""
MAX_CLASSES = 256
STEPS_PER_OCTAVE = 8
_SLOWEST_OCTAVES = 30  # an index below one return in 2**30 seconds is the lowest there is
POOLED = 0


class ReturnHazard:
    """Counts by class and age bin; ``worth`` is a table look-up.

    Bin 0 begins at age 0; ``edges_s[k]`` is where bin ``k`` begins.
    """

    def __init__(self) -> None:
        self.edges_s: list[float] = [0.0, *np.geomspace(FIRST_EDGE_S, LAST_EDGE_S, NUM_BINS - 1).tolist()]
        self._width_s = np.diff([*self.edges_s, 2 * LAST_EDGE_S])
        self._classes: dict[Hashable, int] = {}
        self._reached = np.zeros((MAX_CLASSES, NUM_BINS))
        self._returned = np.zeros((MAX_CLASSES, NUM_BINS))
        self._worth: list[list[int]] = [[1] * NUM_BINS]

    def class_of(self, features: Hashable) -> int:
        """The class of turns with these features; beyond ``MAX_CLASSES`` the pooled one."""
        known = self._classes.get(features)
        if known is None:
            if len(self._classes) + 1 >= MAX_CLASSES:
                return POOLED
            known = self._classes[features] = len(self._classes) + 1
        return known

    def reach(self, turns: int, age_bin: int) -> None:
        """An open turn of the class has reached the bin."""
        self._reached[turns, age_bin] += 1

    def come_back(self, turns: int, age_bin: int) -> None:
        """The session of an open turn of the class returned while it was in the bin."""
        self._returned[turns, age_bin] += 1

    def worth(self, turns: int, age_bin: int) -> int:
        """The index as of the last ``rebuild``, on a scale of eight steps an octave; at least 1."""
        known = turns if turns < len(self._worth) else POOLED  # a class that came after the rebuild
        return self._worth[known][age_bin]

    def rebuild(self) -> None:
        """Work the table out anew: O(classes x bins^2) in NumPy, a few milliseconds at most."""
        used = len(self._classes) + 1
        index = self._index(self._hazards(used))
        scaled = (np.log2(np.maximum(index, 2.0**-_SLOWEST_OCTAVES)) + _SLOWEST_OCTAVES) * STEPS_PER_OCTAVE
        self._worth = np.maximum(1, np.rint(scaled)).astype(np.int64).tolist()

    def _hazards(self, used: int) -> NDArray[np.float64]:
        reached, returned = self._reached[:used], self._returned[:used]
        all_reached, all_returned = reached.sum(axis=0), returned.sum(axis=0)
        pooled = all_returned / np.maximum(all_reached, 1.0)
        pseudo = PSEUDO_TURNS * all_reached / max(all_reached[0], 1.0)
        mixed = (returned + pseudo * pooled) / np.maximum(reached + pseudo, 1e-9)
        return np.asarray(np.clip(mixed, 0.0, 0.999))

    def _index(self, hazards: NDArray[np.float64]) -> NDArray[np.float64]:
        index = np.zeros_like(hazards)
        for first in range(NUM_BINS):
            ahead = hazards[:, first:]
            left = np.cumprod(1 - ahead, axis=1)  # still open at each bin's end
            there = np.concatenate([np.ones((len(ahead), 1)), left[:, :-1]], axis=1)  # and at its begin
            chance = 1 - left
            waited_s = np.cumsum((there + left) / 2 * self._width_s[first:], axis=1)
            index[:, first] = (chance / waited_s).max(axis=1)
        return index
