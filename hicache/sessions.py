"""Named sessions: who is at work, who may come back.

Membership is knowledge, never a lock. Ordering by it is the business of the eviction policies.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from hicache.clock import Clock
from hicache.errors import ProtocolError

DEFAULT_IDLE_AFTER_S = 60.0
"""With ``idle_after: auto``: where the return rate of chat and agent traffic has clearly fallen
(the traces' idle-time figures: 11 % within the next minute after 40 s, 6 % after 120 s)."""
MAX_NAME_LEN = 1024


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
        self, clock: Clock, *, idle_after_s: float = DEFAULT_IDLE_AFTER_S, expire_after_s: float
    ) -> None:
        self._clock = clock
        self._idle_after_s = idle_after_s
        self._expire_after_s = expire_after_s
        self._sessions: OrderedDict[str, _Session] = OrderedDict()  # oldest use first
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

    def end(self, name: str, *, stop: str = "") -> None:
        """A request of the session has ended, for the reason ``stop``."""
        with self._lock:
            session = self._sessions.get(name)
            if session is None or session.open_leases == 0:
                raise ProtocolError(f"session {name!r} has no open request")
            session.open_leases -= 1
            session.last_stop = stop
            self._touch(name, session)

    def close(self, name: str) -> bool:
        """The client says that the session is over. False if it is unknown.

        A request that is still running finishes as usual.
        """
        with self._lock:
            session = self._sessions.get(name)
            if session is None:
                return False
            session.closed = True
            return True

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


def check_name(name: object) -> None:
    """Raises ``ValueError`` unless ``name`` can name a session."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_LEN:
        raise ValueError(f"a session name is a string of 1 to {MAX_NAME_LEN} characters, got {name!r:.80}")
