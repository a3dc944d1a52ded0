"""Named sessions: who is at work, who may come back.

Membership is knowledge, never a lock. Where the eviction policy is ``session``, what happens here also
says what each session's payload is worth; the cache tells the tree with its next call.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from hicache.clock import Clock
from hicache.errors import ProtocolError
from hicache.policy.session_order import Ratings, SessionOrder
from hicache.types import MAX_SESSION_NAME, LeaseId

DEFAULT_IDLE_AFTER_S = 60.0
"""With ``idle_after: auto``: where the return rate of chat and agent traffic has clearly fallen
(the traces' idle-time figures: 11 % within the next minute after 40 s, 6 % after 120 s)."""


class SessionState(StrEnum):
    ACTIVE = "active"
    """A lease is open."""
    WAITING = "waiting"
    """Between turns, and its last turn is recent."""
    IDLE = "idle"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class SessionView:
    """A session as reports see it; times are the clock's seconds."""

    name: str
    state: SessionState
    num_turns: int
    open_leases: int
    last_use_s: float
    last_stop: str


@dataclass(slots=True)
class _Session:
    num_turns: int = 0
    open_leases: int = 0
    last_use_s: float = 0.0
    last_stop: str = ""
    closed: bool = False


class Sessions:
    """The registry. Bounded: what is neither active nor used for ``expire_after_s`` is forgotten.

    *Thread*: any.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        idle_after_s: float = DEFAULT_IDLE_AFTER_S,
        expire_after_s: float,
        order: SessionOrder | None = None,
    ) -> None:
        self._clock = clock
        self._idle_after_s = idle_after_s
        self._expire_after_s = expire_after_s
        self._sessions: OrderedDict[str, _Session] = OrderedDict()  # oldest use first
        self._order = order
        self._lock = threading.Lock()

    def begin(self, name: str) -> None:
        """A request of the session starts. A closed session comes back to life by it."""
        check_name(name)
        with self._lock:
            session = self._sessions.get(name)
            if session is None:
                session = self._sessions[name] = _Session()
            session.closed = False
            session.open_leases += 1
            session.num_turns += 1
            self._touch(name, session)
            self._expire()
            if self._order is not None:
                self._order.begin(name, self._clock.now_s())

    def end(self, name: str | None, *, stop: str = "", lease: LeaseId | None = None) -> None:
        """A request of the session has ended, for the reason ``stop``; None: it named no session."""
        with self._lock:
            if self._order is not None and lease is not None:
                if name is None:
                    self._order.end_unnamed(lease, stop, self._clock.now_s())
                else:
                    self._order.end(name, lease, stop, self._clock.now_s())
            if name is None:
                return
            session = self._sessions.get(name)
            if session is None or session.open_leases == 0:
                raise ProtocolError(f"session {name!r} has no open request")
            session.open_leases -= 1
            session.last_stop = stop
            self._touch(name, session)

    def close(self, name: str) -> bool:
        """The client says that the session is over. False if it is unknown.

        A request that is still running finishes as usual. With the policy ``session`` what only this
        session used leaves first from now on. A later request, or ``reopen``, takes it back.
        """
        with self._lock:
            session = self._sessions.get(name)
            if session is None:
                return False
            session.closed = True
            if self._order is not None:
                self._order.close(name)
            return True

    def reopen(self, name: str) -> bool:
        """Take back ``close`` or ``one_shot``. False if the session is unknown."""
        with self._lock:
            session = self._sessions.get(name)
            if session is None:
                return False
            session.closed = False
            if self._order is not None:
                self._order.reopen(name)
            return True

    def one_shot(self, name: str) -> bool:
        """The client says that the running request (else the last one) is the session's only one.

        False if the session is unknown. Only the policy ``session`` makes something of it.
        """
        with self._lock:
            if name not in self._sessions:
                return False
            if self._order is not None:
                self._order.one_shot(name)
            return True

    def expects_return(self, name: str, in_s: float) -> bool:
        """The client says in how many seconds the session comes back. False if it is unknown.

        Only the policy ``session`` makes something of it, until twice that time has passed.

        Raises:
            ValueError: ``in_s`` is no finite number above 0.
        """
        check_return(in_s)
        with self._lock:
            session = self._sessions.get(name)
            if session is None:
                return False
            session.closed = False
            if self._order is not None:
                self._order.expects_return(name, in_s, self._clock.now_s())
            return True

    def follow(self, order: SessionOrder | None) -> None:
        """Rate sessions for the policy ``session`` from now on, or no more."""
        with self._lock:
            self._order = order

    def last_lease(self, name: str | None) -> LeaseId | None:
        """The lease of the session's last turn that has ended, where the policy wants to know."""
        if name is None or self._order is None:
            return None
        with self._lock:
            return self._order.last_lease(name)

    def take_ratings(self) -> Ratings:
        """What the tree has to be told since the last time, for ``TreeCore.rate``."""
        if self._order is None:
            return Ratings([], [])
        with self._lock:
            return self._order.take_ratings(self._clock.now_s())

    def get(self, name: str) -> SessionView | None:
        with self._lock:
            session = self._sessions.get(name)
            return None if session is None else self._view(name, session)

    def __iter__(self) -> Iterator[SessionView]:
        """All sessions of this moment, least recently used first."""
        with self._lock:
            return iter([self._view(name, session) for name, session in self._sessions.items()])

    def __len__(self) -> int:
        return len(self._sessions)

    def count(self) -> dict[str, int]:
        """Number of sessions by state."""
        counts = dict.fromkeys((state.value for state in SessionState), 0)
        for view in self:
            counts[view.state.value] += 1
        return counts

    def clear(self) -> None:
        with self._lock:
            self._sessions.clear()
            if self._order is not None:
                self._order.clear()

    def _touch(self, name: str, session: _Session) -> None:
        session.last_use_s = self._clock.now_s()
        self._sessions.move_to_end(name)

    def _expire(self) -> None:
        horizon = self._clock.now_s() - self._expire_after_s
        while self._sessions:
            name, session = next(iter(self._sessions.items()))
            if session.last_use_s >= horizon:
                return
            if session.open_leases:
                self._touch(name, session)  # at work for longer than that; look again later
            else:
                del self._sessions[name]

    def _view(self, name: str, session: _Session) -> SessionView:
        if session.open_leases:
            state = SessionState.ACTIVE
        elif session.closed:
            state = SessionState.CLOSED
        elif self._clock.now_s() - session.last_use_s < self._idle_after_s:
            state = SessionState.WAITING
        else:
            state = SessionState.IDLE
        return SessionView(
            name, state, session.num_turns, session.open_leases, session.last_use_s, session.last_stop
        )


def check_return(in_s: object) -> None:
    """Raises ``ValueError`` unless ``in_s`` is a finite number of seconds above 0."""
    is_number = isinstance(in_s, int | float) and not isinstance(in_s, bool)
    if not is_number or not 0 < in_s < float("inf"):  # type: ignore[operator]  # a number by now
        raise ValueError(f"expects_return: in_s is {in_s!r:.80}, expected seconds above 0")


def check_name(name: object) -> None:
    """Raises ``ValueError`` unless ``name`` can name a session."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_SESSION_NAME:
        raise ValueError(
            f"a session name is a string of 1 to {MAX_SESSION_NAME} characters, got {name!r:.80}"
        )
