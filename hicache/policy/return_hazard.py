"""Learn when turns are come back for, and what waiting for that is worth.

A turn that ended is *open* until its session comes back for it; a turn that the session came back without
is *left*. Each class of turns has a curve over ages: of those that reached an age bin, how many were come
back for within it (a life table; turns still waiting count as far as they have come). From the curve
follows the *index* of an age: over all times one could go on waiting, the best ratio of the chance of a
return to the expected time that is waited. Keeping what has the highest index per second is the best order
for waits that do not influence each other (Gittins).

``rust/hicache-radix/src/return_hazard.rs`` does the same operations in the same order, so that both give
the same numbers; that is why there is neither a logarithm nor an array here.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, repeat

NUM_BINS = 32
LAST_EDGE_S = 7200.0
_EDGE_RATIO = 1.3445524545933207  # 30 steps from one second to two hours
EDGES_S = (0.0, *accumulate(repeat(_EDGE_RATIO, NUM_BINS - 2), float.__mul__, initial=1.0))
"""Where each age bin begins."""
ENDS_S = (*EDGES_S[1:], 2 * LAST_EDGE_S)
_WIDTHS_S = tuple(end - begin for begin, end in pairwise((*EDGES_S, 2 * LAST_EDGE_S)))

PSEUDO_TURNS = 20.0
"""How many turns of the pooled curve a class's own curve is mixed with."""
FIRST_BUILD = 10
"""Turns that have to end before anything is told apart."""
REBUILD_SHARE = 64
"""A class's worths are worked out again once the turns have grown by one in so many."""
STEPS_PER_OCTAVE = 8
LEAST_OCTAVES = -30
"""One return in 2**30 seconds is the lowest there is."""

# Of a class: 16 stop reasons, 9 gaps, 4 counts of turns; or of turns left: 9 gaps, 3 counts of returns to such.
MAX_STOPS = 16
NUM_GAPS = 9
NUM_TURNS = 4
NUM_MET = 3
FIRST_LEFT = MAX_STOPS * NUM_GAPS * NUM_TURNS
NUM_CLASSES = FIRST_LEFT + NUM_GAPS * NUM_MET
_GAP_RATIO = 2.4622888266898326  # 1.3 octaves
_GAP_EDGES_S = tuple(accumulate(repeat(_GAP_RATIO, NUM_GAPS - 3), float.__mul__, initial=2.0 * _GAP_RATIO))
_TURN_EDGES = (2, 3, 5)  # turn 1, 2, 3 to 4, 5 and more
_ROUNDING = (  # where an eighth of an octave is rounded up, of a number from 0.5 to 1
    0.5221368912137069,
    0.5693943173783458,
    0.620928906036742,
    0.6771277734684463,
    0.7384130729697497,
    0.8052451659746271,
    0.8781260801866497,
    0.9576032806985737,
)


def open_class(gap_s: float | None, turns: int, stop: int) -> int:
    """The class of a session's last turn. Args: stop: below ``MAX_STOPS``."""
    return (stop * NUM_GAPS + _gap(gap_s)) * NUM_TURNS + bisect_right(_TURN_EDGES, turns)


def left_class(gap_s: float | None, met: int) -> int:
    """The class of turns left, in a session that came back for ``met`` of those so far."""
    return FIRST_LEFT + min(met, NUM_MET - 1) * NUM_GAPS + _gap(gap_s)


def _gap(gap_s: float | None) -> int:
    return 0 if gap_s is None else 1 + bisect_right(_GAP_EDGES_S, gap_s)


def worth_of(index: float) -> int:
    """Returns per second on a scale of eight steps an octave; at least 1."""
    mantissa, exponent = math.frexp(max(index, 2.0**LEAST_OCTAVES))
    steps = (exponent - 1 - LEAST_OCTAVES) * STEPS_PER_OCTAVE + bisect_right(_ROUNDING, mantissa)
    return max(1, steps)


@dataclass(slots=True)
class _Curve:
    reached: list[int] = field(default_factory=lambda: [0] * NUM_BINS)
    returned: list[int] = field(default_factory=lambda: [0] * NUM_BINS)
    worths: list[int] | None = None  # None: as the pooled one
    due: int = FIRST_BUILD  # how many turns have ended when they are worked out again


class ReturnHazard:
    """Counts by class and age bin; ``worth`` is a table look-up."""

    def __init__(self) -> None:
        self._curves: dict[int, _Curve] = {}
        self._open, self._left = _Curve(), _Curve()
        self._turns = 0

    def end_turn(self) -> None:
        """A turn has ended: what is learnt ages by one."""
        self._turns += 1

    def reach(self, kind: int, age_bin: int) -> None:
        """A waiting turn of the class has reached the bin."""
        self._curve(kind).reached[age_bin] += 1
        self._pool(kind).reached[age_bin] += 1

    def come_back(self, kind: int, age_bin: int) -> None:
        """A session came back for a turn of the class while it was in the bin."""
        self._curve(kind).returned[age_bin] += 1
        self._pool(kind).returned[age_bin] += 1

    def worth(self, kind: int, age_bin: int) -> int:
        """The index as of the last ``refresh`` of the class; see ``worth_of``. Beyond the last bin it is as there."""
        curve = self._curves.get(kind)
        worths = self._pool(kind).worths if curve is None or curve.worths is None else curve.worths
        return 1 if worths is None else worths[min(age_bin, NUM_BINS - 1)]

    def refresh(self, kind: int) -> None:
        """Work out the class's worths anew if enough was learnt since: O(bins)."""
        pool, curve = self._pool(kind), self._curve(kind)
        for stale in (pool, curve):
            if self._turns >= stale.due:
                stale.due = self._turns + 1 + self._turns // REBUILD_SHARE
                stale.worths = _worths(self._hazards(stale, pool))

    def _curve(self, kind: int) -> _Curve:
        return self._curves.setdefault(kind, _Curve())

    def _pool(self, kind: int) -> _Curve:
        return self._open if kind < FIRST_LEFT else self._left

    def _hazards(self, curve: _Curve, pool: _Curve) -> list[float]:
        """Chance of a return within each bin: a class leans on its pool, the pool of turns left on the open's."""
        hazards = []
        most = float(max(self._open.reached[0], 1))
        for age_bin in range(NUM_BINS):
            reached = float(self._open.reached[age_bin])
            pseudo = PSEUDO_TURNS * reached / most
            hazard = float(self._open.returned[age_bin]) / max(reached, 1.0)
            if pool is self._left:
                hazard = _mixed(self._left, age_bin, pseudo, hazard)
            if curve is not pool:
                hazard = _mixed(curve, age_bin, pseudo, hazard)
            hazards.append(min(hazard, 0.999))
        return hazards


def _mixed(curve: _Curve, age_bin: int, pseudo: float, hazard: float) -> float:
    returned, reached = float(curve.returned[age_bin]), float(curve.reached[age_bin])
    return (returned + pseudo * hazard) / max(reached + pseudo, 1e-9)


def _worths(hazards: list[float]) -> list[int]:
    """The index of an age is the steepest way from there in the plane of (time waited, returns).

    That is the first edge of the upper hull of what lies ahead, which is built from the far end.
    """
    waiting = list(accumulate(hazards, lambda share, hazard: share * (1.0 - hazard), initial=1.0))
    ahead_s = [0.0] * (NUM_BINS + 1)
    hull = [NUM_BINS]
    worths = [0] * NUM_BINS
    for age_bin in reversed(range(NUM_BINS)):
        both = (waiting[age_bin] + waiting[age_bin + 1]) / 2.0
        ahead_s[age_bin] = ahead_s[age_bin + 1] + both * _WIDTHS_S[age_bin]
        slopes = (
            (waiting[age_bin] - waiting[to]) / (ahead_s[age_bin] - ahead_s[to]) for to in reversed(hull)
        )
        best = next(slopes)
        for slope in slopes:
            if slope < best:
                break
            best = slope
            hull.pop()
        worths[age_bin] = worth_of(best)
        hull.append(age_bin)
    return worths
