"""What the payload of each session is worth: hints first, then the learnt chance that it comes back.

The tree keeps which lease used what last, and frees what is worth least first. Here is decided what each
session's last lease is worth, and when that changes: as a session's silence grows from one age bin to the
next. Each change is one number for the tree, so a turn costs about ten of them over its whole life.

::

    begin ──> at work ──end──> open: bin 0 ─> bin 1 ─> ... ─> last bin ─> forgotten
                  ^                     │
                  └────── begin ────────┘   a return: learnt for the class of the turn
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from hicache.policy.return_hazard import NUM_BINS, STEPS_PER_OCTAVE, ReturnHazard
from hicache.types import MOST_WORTH, LeaseId

FIRST_REBUILD = 10
REBUILD_EVERY = 100
"""Turns between two rebuilds of the table; at first it is rebuilt each time their number has doubled."""
MAX_SESSIONS = 100_000
"""Sessions remembered; beyond that the one silent longest is forgotten."""
MAX_BESIDE = 64
"""Leases of one session that count as its last turn, at most."""
GAP_WEIGHT = 0.6
"""Of the latest gap in the smoothed one."""
_NUM_GAPS = 8
_FIRST_GAP_S = 2.0
_GAP_OCTAVES = 1.3
_TURN_EDGES = (2, 3, 5)  # turn 1, 2, 3 to 4, 5 and more


class Ratings(NamedTuple):
    """For ``TreeCore.rate``."""

    leases: list[LeaseId]
    worths: list[int]


@dataclass(slots=True)
class _Session:
    leases: list[LeaseId] = field(default_factory=list)  # of the last turn, and of those beside it
    at_work: int = 0
    is_beside: bool = False  # turns at work began beside each other
    turns: int = 0
    silent_since_s: float = 0.0
    gap_s: float | None = None
    kind: int = 0  # class of the open turn
    age_bin: int = -1  # -1: at work
    age: int = 0  # of the state: a timer set for an earlier one is void
    is_over: bool = False
    is_one_shot: bool = False
    returns_at_s: float | None = None
    rated: int = -1


class SessionOrder:
    """Keeps the worth of sessions.

    Times are seconds of one clock; a step back counts as no time passed.

    *Thread*: the caller holds the cache's lock.
    """

    def __init__(self) -> None:
        self.hazard = ReturnHazard()
        self._sessions: OrderedDict[Hashable, _Session] = OrderedDict()  # longest unused first
        self._timers: list[tuple[float, int, Hashable]] = []
        self._turns = 0
        self._next_rebuild = FIRST_REBUILD
        self._age = 0
        self._now_s = 0.0
        self._ratings: dict[LeaseId, int] = {}

    # ---- turns -------------------------------------------------------------------------------
    def last_lease(self, name: Hashable) -> LeaseId | None:
        """The lease of the session's last turn that has ended."""
        session = self._sessions.get(name)
        return session.leases[-1] if session is not None and session.leases else None

    def begin(self, name: Hashable, now_s: float) -> LeaseId | None:
        """A turn begins; returns the lease of the session's turn before."""
        self._pass_time(now_s)
        session = self._sessions.get(name)
        if session is None:
            session = self._sessions[name] = _Session()
            self._forget_excess()
        if session.age_bin >= 0:
            gap_s = self._now_s - session.silent_since_s
            self.hazard.come_back(session.kind, session.age_bin)
            before = gap_s if session.gap_s is None else session.gap_s
            session.gap_s = GAP_WEIGHT * gap_s + (1 - GAP_WEIGHT) * before
        session.age_bin = -1
        session.is_over = False
        session.returns_at_s = None
        session.is_beside = session.at_work > 0
        session.at_work += 1
        self._set_age(session)
        self._sessions.move_to_end(name)
        return session.leases[-1] if session.leases else None

    def end(self, name: Hashable, lease: LeaseId, stop: str, now_s: float) -> None:
        """A turn ended. What the turn before it used and this one did not is over: an abandoned branch.

        Turns that run beside each other are one turn in this.
        """
        self._pass_time(now_s)
        session = self._sessions.get(name)
        if session is None:  # forgotten while it was at work
            session = self._sessions[name] = _Session()
            self._forget_excess()
        session.at_work = max(0, session.at_work - 1)
        num_over = max(0, len(session.leases) - MAX_BESIDE + 1) if session.is_beside else len(session.leases)
        self._ratings.update(dict.fromkeys(session.leases[:num_over], 0))
        session.leases = [*session.leases[num_over:], lease]
        session.turns += 1
        session.silent_since_s = self._now_s
        session.kind = self.hazard.class_of(_features(session, stop))
        session.rated = -1
        session.is_over = session.is_over or session.is_one_shot
        session.is_one_shot = False
        self._turns += 1
        if self._turns >= self._next_rebuild:
            self.hazard.rebuild()
            self._next_rebuild = min(2 * self._turns, (self._turns // REBUILD_EVERY + 1) * REBUILD_EVERY)
        self._enter(name, session, 0)

    def end_unnamed(self, lease: LeaseId, stop: str, now_s: float) -> None:
        """A request without a session ended: a turn of its own, of which none ever returns."""
        self.end(lease, lease, stop, now_s)

    def take_ratings(self, now_s: float) -> Ratings:
        """What has changed until now, to be told to the tree."""
        self._pass_time(now_s)
        ratings, self._ratings = self._ratings, {}
        return Ratings(list(ratings), list(ratings.values()))

    # ---- hints -------------------------------------------------------------------------------
    def close(self, name: Hashable) -> None:
        """The session is over: what only it used goes first. A later turn or ``reopen`` takes that back."""
        session = self._sessions.get(name)
        if session is not None:
            session.is_over = True
            self._rate(session)

    def one_shot(self, name: Hashable) -> None:
        """The turn that is at work, or the last one, is the session's only one."""
        session = self._sessions.get(name)
        if session is not None:
            session.is_one_shot = session.age_bin < 0
            session.is_over = session.is_over or session.age_bin >= 0
            self._rate(session)

    def reopen(self, name: Hashable) -> None:
        """It is not over after all."""
        session = self._sessions.get(name)
        if session is not None:
            session.is_over = session.is_one_shot = False
            self._rate(session)

    def expects_return(self, name: Hashable, in_s: float, now_s: float) -> None:
        """The client says when the session comes back; believed until twice that time has passed.

        *Caller guarantees*: ``in_s`` is finite and above 0.
        """
        self._pass_time(now_s)
        session = self._sessions.get(name)
        if session is not None:
            session.is_over = session.is_one_shot = False
            session.returns_at_s = self._now_s + in_s
            self._rate(session)

    def clear(self) -> None:
        """Forget all sessions, but not what was learnt."""
        self._sessions.clear()
        self._timers.clear()
        self._ratings.clear()

    def __len__(self) -> int:
        return len(self._sessions)

    # ---- time --------------------------------------------------------------------------------
    def _pass_time(self, now_s: float) -> None:
        self._now_s = max(self._now_s, now_s)
        while self._timers and self._timers[0][0] <= self._now_s:
            _, age, name = heapq.heappop(self._timers)
            session = self._sessions.get(name)
            if session is None or session.age != age:
                continue
            if session.age_bin + 1 < NUM_BINS:
                self._enter(name, session, session.age_bin + 1)
            else:
                del self._sessions[name]  # its payload keeps the worth of the last bin

    def _enter(self, name: Hashable, session: _Session, age_bin: int) -> None:
        session.age_bin = age_bin
        self.hazard.reach(session.kind, age_bin)
        self._set_age(session)
        edges_s = self.hazard.edges_s
        ends_s = edges_s[age_bin + 1] if age_bin + 1 < NUM_BINS else 2 * edges_s[-1]
        heapq.heappush(self._timers, (session.silent_since_s + ends_s, session.age, name))
        self._rate(session)

    def _set_age(self, session: _Session) -> None:
        self._age += 1
        session.age = self._age

    def _forget_excess(self) -> None:
        while len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        if len(self._timers) > 4 * MAX_SESSIONS:
            alive = {session.age for session in self._sessions.values()}
            self._timers = [timer for timer in self._timers if timer[1] in alive]
            heapq.heapify(self._timers)

    # ---- worth -------------------------------------------------------------------------------
    def _rate(self, session: _Session) -> None:
        if session.age_bin < 0:
            return
        worth = self._worth(session)
        if worth != session.rated:
            session.rated = worth
            self._ratings.update(dict.fromkeys(session.leases, worth))

    def _worth(self, session: _Session) -> int:
        if session.is_over:
            return 0
        learnt = self.hazard.worth(session.kind, session.age_bin)
        if session.returns_at_s is None:
            return learnt
        until_s = session.returns_at_s - self._now_s
        told_s = session.returns_at_s - session.silent_since_s
        if until_s < -told_s:
            return learnt
        octaves = 30 - math.log2(max(until_s, 1.0))  # one return in so many seconds
        return min(MOST_WORTH, max(learnt, round(octaves * STEPS_PER_OCTAVE)))


def _features(session: _Session, stop: str) -> Hashable:
    turns = sum(session.turns >= edge for edge in _TURN_EDGES)
    if session.gap_s is None:
        return (-1, turns, stop)
    octaves = math.log2(max(session.gap_s, _FIRST_GAP_S) / _FIRST_GAP_S)
    return (min(_NUM_GAPS - 1, int(octaves / _GAP_OCTAVES)), turns, stop)
