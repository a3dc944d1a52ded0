"""What the payload of each session is worth: hints first, then the learnt chance that it is come back for.

The tree keeps which lease used what last, and frees what is worth least first. Here is decided what each
lease that has ended, a *turn*, is worth, and when that changes: as its age grows from one bin to the next.
Each change is one number for the tree, so a turn costs some thirty of them over its whole life.

::

    end ──> open ───────────── its session comes back for it ──> at work ──> end
              │                                                     │ what this turn did not use
              └─ its session comes back without it ──> left <───────┘
                                                        │ met again: learnt for the class of turns left
    both age: bin 0 ─> bin 1 ─> ... ─> last bin ─> old, until the tree has nothing of it

``rust/hicache-radix/src/session_order.rs`` is the same for the Rust core, to the number.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from importlib import import_module
from typing import NamedTuple, Protocol, cast

from hicache.policy.return_hazard import (
    ENDS_S,
    NUM_BINS,
    STEPS_PER_OCTAVE,
    ReturnHazard,
    left_class,
    open_class,
    worth_of,
)
from hicache.radix.core import EXTENSION
from hicache.radix.interface import MatchResult, Tokens
from hicache.types import (
    DEFAULT_PRIORITY,
    POPULAR_WORTH,
    RECENCY_WORTH,
    SHARED_WORTH,
    LeaseId,
    Regard,
    SessionId,
)

MAX_TURNS = 100_000
"""Turns remembered; beyond that the oldest are forgotten."""
OLD = NUM_BINS
"""Instead of its age bin: a turn that has left the last one, of which the tree has something."""
_LEAVES_S = (*ENDS_S, math.inf)
MAX_BRANCHES = 64
"""Turns of one session that are remembered, at most."""
GAP_WEIGHT = 0.6
"""Of the latest gap in the smoothed one."""
PRIORITY_OCTAVES = 5
"""A session's priority moves its worth by an octave for so many points."""
SWEEP = 64
"""When another policy is followed, so many turns are rated anew at a time,"""
SWEEP_LOOKS = 16 * SWEEP
"""and so many are looked at, at most: of most the tree has nothing any more."""
TOLD_WORTH = 1024
"""Where recency orders, what was told to come back stands above the rest by this."""


class Followed(Enum):
    """What ``adaptive`` orders by; the first until another does better.

    The others are by recency: alone, as ``lru``; with some grace for what more than one session used; or with much.
    """

    SESSION = "session"
    RECENCY = "recency"
    SHARED = "shared"
    POPULAR = "popular"


LEAST_WORTHS = {
    Followed.SESSION: 1,
    Followed.RECENCY: RECENCY_WORTH,
    Followed.SHARED: SHARED_WORTH,
    Followed.POPULAR: POPULAR_WORTH,
}
"""By order, where the worths begin that tell the tree to go by it."""


class Watch(Protocol):
    """What sees some of the requests and says which policy does best (``Shadows``)."""

    hits: tuple[int, ...]

    def samples(self, name: SessionId) -> bool: ...
    def rate(self, lease: LeaseId, worth: int) -> None: ...
    def watch(
        self, name: SessionId, lease: LeaseId | None, worth: int, tokens: Tokens, prompt_len: int, seed: int
    ) -> Followed: ...


class Ratings(NamedTuple):
    """For ``TreeCore.rate``; the last one counts where a lease is named twice."""

    leases: list[LeaseId]
    worths: list[int]
    regards: list[Regard]


class Rated(Protocol):
    """The tree, as far as it concerns sessions."""

    def rate(
        self, leases: Sequence[LeaseId], worths: Sequence[int], regards: Sequence[Regard] | None = None
    ) -> tuple[LeaseId, ...]: ...


@dataclass(slots=True)
class _Turn:
    session: SessionId
    kind: int
    ended_s: float
    age_bin: int = 0
    is_counted: bool = False  # among those of its class that reached the bin
    is_left: bool = False
    is_waiting: bool = True
    is_gone: bool = False  # the tree has nothing of it any more
    is_over: bool = False  # the client has abandoned it
    rated: int = -1
    regard: Regard = Regard.PLAIN  # as it was rated


@dataclass(slots=True)
class _Session:
    turns: list[LeaseId] = field(default_factory=list)  # oldest first; what is open or at work comes last
    at_work: int = 0
    num_turns: int = 0
    num_met: int = 0  # turns left that it came back for
    ended_s: float = 0.0
    gap_s: float | None = None
    priority: int = DEFAULT_PRIORITY
    is_over: bool = False
    is_one_shot: bool = False
    returns_at_s: float | None = None


class SessionOrder:
    """Keeps the worth of turns.

    Times are seconds of one clock; a step back counts as no time passed. Hints for a session that is
    unknown do nothing.

    Args:
        shadows: with ``adaptive``, what says which policy to follow.

    *Thread*: the caller holds the cache's lock.
    """

    def __init__(self, shadows: Watch | None = None) -> None:
        self._shadows = shadows
        self._followed = Followed.SESSION
        # With shadows all turns in the order in which they are rated anew, and how many are to be.
        self._round: deque[LeaseId] = deque()
        self._num_stale = 0
        self._hazard = ReturnHazard()
        self._sessions: dict[SessionId, _Session] = {}
        self._turns: dict[LeaseId, _Turn] = {}
        # By age bin, and for what is old, when each turn leaves it; all spend the same time there, so they come out in
        # order.
        self._timers: list[deque[tuple[float, LeaseId]]] = [deque() for _ in range(NUM_BINS + 1)]
        self._now_s = 0.0
        self._ratings = Ratings([], [], [])

    # ---- turns -------------------------------------------------------------------------------
    def begin(
        self,
        name: SessionId,
        reused: LeaseId | None,
        now_s: float,
        priority: int = DEFAULT_PRIORITY,
        core: Rated | None = None,
    ) -> None:
        """A turn begins, and comes back for the turn ``reused``; the session's others are left by now.

        Args:
            core: the tree, to ``tell`` it before.
        """
        if core is not None:
            self.tell(core, now_s)
        self._pass_time(now_s)
        session = self._sessions.setdefault(name, _Session())
        if session.num_turns and not session.at_work:
            gap_s = self._now_s - session.ended_s
            before = gap_s if session.gap_s is None else session.gap_s
            session.gap_s = GAP_WEIGHT * gap_s + (1.0 - GAP_WEIGHT) * before
        session.at_work += 1
        session.priority = priority
        session.is_over = False
        session.returns_at_s = None
        for lease in session.turns[::-1]:
            turn = self._turns[lease]
            if lease == reused or turn.is_gone:
                self._come_back(turn)
                session.num_met += turn.is_left
                turn.is_waiting = turn.is_left
                if turn.is_gone:  # what it would have met is not known; most come back for their last turn
                    self._forget(lease)
            elif turn.is_waiting and not turn.is_left:
                self._leave(lease, turn, session)

    def end(
        self, name: SessionId, lease: LeaseId, stop: int, now_s: float, core: Rated | None = None
    ) -> None:
        """A turn ended. What is left over of the one that it came back for is a branch left.

        Args:
            stop: why it ended, as a number below ``MAX_STOPS``.
            core: the tree, to ``tell`` it afterwards.
        """
        self._pass_time(now_s)
        session = self._sessions.setdefault(name, _Session())
        session.at_work = max(0, session.at_work - 1)
        for before in session.turns:
            turn = self._turns[before]
            if not turn.is_waiting and not session.at_work:
                self._leave(before, turn, session)
        session.num_turns += 1
        session.ended_s = self._now_s
        session.is_over = session.is_over or session.is_one_shot
        session.is_one_shot = False
        session.turns.append(lease)
        if len(session.turns) > MAX_BRANCHES:
            self._say(session.turns[0], 0, Regard.OVER)
            self._forget(session.turns[0])
        self._hazard.end_turn()
        kind = open_class(session.gap_s, session.num_turns, stop)
        self._hazard.refresh(kind)
        self._turns[lease] = _Turn(name, kind, self._now_s)
        self._enter(lease, self._turns[lease], 0)
        self._forget_excess()
        if self._shadows is not None:
            self._round.append(lease)
            if len(self._round) > 2 * len(self._turns) + SWEEP and not self._num_stale:
                self._round = deque(each for each in self._round if each in self._turns)
        if core is not None:
            self.tell(core, now_s)

    def watch(self, name: SessionId, tokens: Tokens, prompt_len: int, seed: int) -> None:
        """With ``adaptive``: show the session's request that has just ended to the shadows. Else it does nothing.

        Args:
            tokens: prompt and answer.
            seed: stands for the namespace, 0 to 2**64 - 1.
        """
        if self._shadows is None or not self._shadows.samples(name):
            return
        session = self._sessions.get(name)
        lease = session.turns[-1] if session is not None and session.turns else None
        worth = 1 if lease is None else self._learnt(self._turns[lease])
        followed = self._shadows.watch(name, lease, worth, tokens, prompt_len, seed)
        if followed is not self._followed:
            self._followed = followed
            self._num_stale = len(self._round)

    @property
    def followed(self) -> str:
        """The policy by which turns are rated now."""
        return self._followed.value

    @property
    def shadow_hits(self) -> tuple[int, ...]:
        """With ``adaptive`` the blocks that each of ``Followed`` would have hit of the sampled prompts so far."""
        return () if self._shadows is None else self._shadows.hits

    def tell(self, core: Rated, now_s: float) -> None:
        """Tell the tree what has changed until now, and learn from it what is gone."""
        self.bury(core.rate(*self.take_ratings(now_s)))

    def take_ratings(self, now_s: float) -> Ratings:
        """What has changed until now, to be told to the tree."""
        self._pass_time(now_s)
        self._sweep()
        ratings, self._ratings = self._ratings, Ratings([], [], [])
        return ratings

    def _sweep(self) -> None:
        """Rate some of the turns by the policy that is followed now: no call has to rate them all.

        Until a turn's turn comes, what it used leaves before all that is rated by recency.
        """
        num_left = SWEEP
        for _ in range(min(SWEEP_LOOKS, self._num_stale)):
            self._num_stale -= 1
            lease = self._round.popleft()
            turn = self._turns.get(lease)
            if turn is None or turn.is_gone:
                continue
            self._round.append(lease)
            if turn.is_waiting:
                self._rate(lease, turn, self._sessions[turn.session])
            num_left -= 1
            if not num_left:
                break

    def bury(self, leases: Iterable[LeaseId]) -> None:
        """The tree has nothing of these any more. A session may still come back for its last turn."""
        for lease in leases:
            turn = self._turns.get(lease)
            if turn is None:
                continue
            turn.is_gone = True
            if turn.is_left or not turn.is_waiting or turn.age_bin == OLD:
                self._forget(lease)

    def session_of(self, lease: LeaseId) -> SessionId | None:
        """Whose turn it was, if it is remembered."""
        turn = self._turns.get(lease)
        return None if turn is None else turn.session

    # ---- hints -------------------------------------------------------------------------------
    def close(self, name: SessionId) -> None:
        """The session is over: what only it used goes first. A later turn or ``reopen`` takes that back."""
        session = self._sessions.get(name)
        if session is not None:
            session.is_over = True
            self._rate_all(session)

    def one_shot(self, name: SessionId) -> None:
        """The turn that is at work, or the last one, is the session's only one."""
        session = self._sessions.get(name)
        if session is not None:
            session.is_one_shot = session.at_work > 0
            session.is_over = session.is_over or not session.at_work
            self._rate_all(session)

    def reopen(self, name: SessionId) -> None:
        """It is not over after all."""
        session = self._sessions.get(name)
        if session is not None:
            session.is_over = session.is_one_shot = False
            for lease in session.turns:
                self._turns[lease].is_over = False
            self._rate_all(session)

    def abandon_branch(self, name: SessionId) -> None:
        """The session will not go on from its last turn, as after an edit; ``reopen`` takes that back.

        It holds for what is left of that turn: what a later one uses again is that one's.
        """
        session = self._sessions.get(name)
        if session is not None and session.turns:
            self._turns[session.turns[-1]].is_over = True
            self._rate_all(session)

    def expects_return(self, name: SessionId, in_s: float, now_s: float) -> None:
        """The client says when the session comes back; believed until twice that time has passed.

        *Caller guarantees*: ``in_s`` is finite and above 0.
        """
        self._pass_time(now_s)
        session = self._sessions.get(name)
        if session is not None:
            session.is_over = session.is_one_shot = False
            session.returns_at_s = self._now_s + in_s
            self._rate_all(session)

    def clear(self) -> None:
        """Forget all sessions, but not what was learnt."""
        self._sessions.clear()
        self._turns.clear()
        for queue in self._timers:
            queue.clear()
        self._round.clear()
        self._num_stale = 0
        self._ratings = Ratings([], [], [])

    def __len__(self) -> int:
        """Sessions remembered."""
        return len(self._sessions)

    # ---- time --------------------------------------------------------------------------------
    def _pass_time(self, now_s: float) -> None:
        self._now_s = max(self._now_s, now_s)
        for age_bin, queue in enumerate(self._timers):
            while queue and queue[0][0] <= self._now_s:
                _, lease = queue.popleft()
                turn = self._turns.get(lease)
                if turn is not None:
                    self._enter(lease, turn, age_bin + 1)

    def _enter(self, lease: LeaseId, turn: _Turn, age_bin: int) -> None:
        if age_bin == OLD and turn.is_gone:
            self._forget(lease)
            return
        turn.age_bin = age_bin
        turn.is_counted = turn.is_waiting and age_bin != OLD
        queue = self._timers[age_bin]
        queue.append((turn.ended_s + _LEAVES_S[age_bin], lease))
        if len(queue) > 2 * MAX_TURNS:
            self._timers[age_bin] = deque(timer for timer in queue if timer[1] in self._turns)
        if turn.is_counted:
            self._hazard.reach(turn.kind, age_bin)
        if turn.is_waiting:
            self._rate(lease, turn, self._sessions[turn.session])

    def _come_back(self, turn: _Turn) -> None:
        if turn.is_counted:
            self._hazard.come_back(turn.kind, turn.age_bin)
            turn.is_counted = False

    def _leave(self, lease: LeaseId, turn: _Turn, session: _Session) -> None:
        """It counts for the class of turns left from its next bin on: that one it will have been in as a whole."""
        turn.is_left = turn.is_waiting = True
        turn.is_counted = False
        turn.kind = left_class(session.gap_s, session.num_met)
        self._hazard.refresh(turn.kind)
        self._rate(lease, turn, session)

    def _forget(self, lease: LeaseId) -> None:
        turn = self._turns.pop(lease, None)
        if turn is None:
            return
        session = self._sessions[turn.session]
        session.turns.remove(lease)
        if not session.turns and not session.at_work:
            del self._sessions[turn.session]

    def _outlive(self, lease: LeaseId, turn: _Turn) -> None:
        """Forget a turn of which the tree has something, as there are too many: no hint, and no order but that of
        sessions, speaks in that any more, since nobody will rate it again.
        """
        if turn.is_waiting and not turn.is_gone:
            worth = min(turn.rated, self._learnt(turn))
            if worth < turn.rated or turn.regard > Regard.PLAIN:
                self._say(lease, worth, min(turn.regard, Regard.PLAIN))
        self._forget(lease)

    def _forget_excess(self) -> None:
        while len(self._turns) > MAX_TURNS:
            _, lease = next(queue for queue in reversed(self._timers) if queue).popleft()
            turn = self._turns.get(lease)
            if turn is not None:
                self._outlive(lease, turn)

    # ---- worth -------------------------------------------------------------------------------
    def _rate_all(self, session: _Session) -> None:
        for lease in session.turns:
            turn = self._turns[lease]
            if turn.is_waiting:
                self._rate(lease, turn, session)

    def _rate(self, lease: LeaseId, turn: _Turn, session: _Session) -> None:
        if self._shadows is not None:
            self._shadows.rate(lease, self._learnt(turn))
        worth, regard = self._rating(turn, session)
        if (worth, regard) != (turn.rated, turn.regard) and not turn.is_gone:
            turn.rated, turn.regard = worth, regard
            self._say(lease, worth, regard)

    def _say(self, lease: LeaseId, worth: int, regard: Regard) -> None:
        self._ratings.leases.append(lease)
        self._ratings.worths.append(worth)
        self._ratings.regards.append(regard)

    def _learnt(self, turn: _Turn) -> int:
        """What it is worth by sessions if nobody says anything."""
        return min(RECENCY_WORTH - 1, max(1, self._hazard.worth(turn.kind, turn.age_bin)))

    def _rating(self, turn: _Turn, session: _Session) -> tuple[int, Regard]:
        """What it is worth, and how L3 is to regard it: by what was said alone."""
        if session.is_over or turn.is_over:
            return 0, Regard.OVER
        told = 0
        is_old = turn.age_bin == OLD
        if session.returns_at_s is not None and not turn.is_left and not is_old:
            until_s = session.returns_at_s - self._now_s
            told_s = session.returns_at_s - turn.ended_s
            if until_s >= -told_s:
                told = worth_of(1.0 / max(until_s, 1.0))  # one return in so many seconds
        moved = (session.priority - DEFAULT_PRIORITY) * STEPS_PER_OCTAVE // PRIORITY_OCTAVES
        if is_old:
            moved = min(moved, 0)  # what raised it has spoken long enough; what lowered it still holds
        regard = Regard.LOW if moved < 0 else Regard.PLAIN
        if told or (moved > 0 and not turn.is_left):
            regard = Regard.HIGH
        if self._followed is Followed.SESSION:
            worth = max(told, self._hazard.worth(turn.kind, turn.age_bin)) + moved
            return min(RECENCY_WORTH - 1, max(1, worth)), regard
        return LEAST_WORTHS[self._followed] + TOLD_WORTH + moved + TOLD_WORTH * (told > 0), regard


def reused_turn(matched: MatchResult) -> LeaseId | None:
    """The turn that a request comes back for: it shares half of it at least, and not just its beginning."""
    return matched.met if 2 * matched.found.boundary >= matched.met_end else None


def is_continuation(matched: MatchResult, page_size: int) -> bool:
    """Whether the request contains all but the last page of what it met."""
    return matched.met is not None and matched.met_end - matched.found.boundary <= page_size


def make_session_order(core: str) -> SessionOrder:
    """The order for a tree core, ``rust`` or ``python``: the Rust one has the same methods."""
    if core == "python":
        return SessionOrder()
    return cast(SessionOrder, import_module(EXTENSION).RustSessionOrder())
