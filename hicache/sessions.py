"""Named sessions: who is at work, who may come back.

Membership is knowledge, never a lock. Where the eviction policy is ``adaptive`` or ``session``, what happens here also
says what each session's payload is worth; the cache tells the tree with its next call. Requests that name
no session have one inferred there: what contains all but the last page of an earlier one goes on with it.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from hicache.clock import Clock, checked_seconds
from hicache.errors import ProtocolError
from hicache.policy.return_hazard import MAX_STOPS
from hicache.policy.session_order import Rated, SessionOrder, is_continuation, reused_turn
from hicache.radix.interface import MatchResult, Tokens
from hicache.radix.keys import namespace_seed
from hicache.types import (
    DEFAULT_NAMESPACE,
    DEFAULT_PRIORITY,
    MAX_SESSION_NAME,
    MAX_SESSIONS,
    LeaseId,
    Namespace,
    SessionId,
)

DEFAULT_IDLE_AFTER_S = 60.0
"""With ``idle_after: auto``: where the return rate of chat and agent traffic has clearly fallen
(the traces' idle-time figures: 11 % within the next minute after 40 s, 6 % after 120 s)."""


class SessionState(StrEnum):
    """Where a session stands between its turns."""

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
    number: SessionId
    num_turns: int = 0
    open_leases: int = 0
    last_use_s: float = 0.0
    last_stop: str = ""
    closed: bool = False


class Sessions:
    """The registry. Bounded: what is neither active nor used for ``expire_after_s`` is forgotten.

    Args:
        order: what sessions are worth, where the policy wants to know.
        page_size: of the tree, in tokens.

    *Thread*: any.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        idle_after_s: float = DEFAULT_IDLE_AFTER_S,
        expire_after_s: float,
        order: SessionOrder | None = None,
        page_size: int = 1,
    ) -> None:
        self._clock = clock
        self._idle_after_s = idle_after_s
        self._expire_after_s = expire_after_s
        self._sessions: OrderedDict[str, _Session] = OrderedDict()  # oldest use first
        self._order = order
        self._page_size = page_size
        self._next_named = 0
        self._next_inferred = -1
        self._stops: dict[str, int] = {"": 0}
        self._hints: Counter[tuple[str, bool]] = Counter()
        self._lock = threading.Lock()

    def number_of(self, name: str | None) -> SessionId | None:
        """What the tree calls the session; of one that is new, what ``begin`` will call it."""
        if name is None:
            return None
        session = self._sessions.get(name)
        return SessionId(self._next_named) if session is None else session.number

    def begin(
        self,
        name: str | None,
        matched: MatchResult | None = None,
        priority: int = DEFAULT_PRIORITY,
        core: Rated | None = None,
    ) -> SessionId | None:
        """A request of the session starts. A closed session comes back to life by it.

        Args:
            name: None for a request that names no session.
            matched: what it found.
            core: the tree, to be told what sessions are worth by now, where the policy wants to know.

        Returns:
            the session's number, for ``end``; None where nobody asks for it.
        """
        if name is not None:
            check_name(name)
        with self._lock:
            number = None if name is None else self._begin(name)
            if priority != DEFAULT_PRIORITY:
                self._hints["priority", True] += 1
            if self._order is None or matched is None:
                return number
            if number is None:
                number = self._infer(self._order, matched)
            self._order.begin(number, reused_turn(matched), self._clock.now_s(), priority, core)
            return number

    def _begin(self, name: str) -> SessionId:
        session = self._sessions.get(name)
        if session is None:
            session = self._sessions[name] = _Session(SessionId(self._next_named))
            self._next_named += 1
        session.closed = False
        session.open_leases += 1
        session.num_turns += 1
        self._touch(name, session)
        self._expire()
        return session.number

    def _infer(self, order: SessionOrder, matched: MatchResult) -> SessionId:
        """The inferred session that the request goes on with, else a new one; never one that has a name."""
        if matched.met is not None and is_continuation(matched, self._page_size):
            met = order.session_of(matched.met)
            if met is not None and met < 0:
                return met
        return self._new_inferred()

    def _new_inferred(self) -> SessionId:
        self._next_inferred -= 1
        return SessionId(self._next_inferred)

    def end(
        self,
        name: str | None,
        *,
        stop: str = "",
        lease: LeaseId | None = None,
        number: SessionId | None = None,
        core: Rated | None = None,
    ) -> None:
        """A request of the session has ended, for the reason ``stop``; None: it named no session.

        Args:
            number: what ``begin`` returned.
            core: the tree, to be told what sessions are worth now, where the policy wants to know.
        """
        with self._lock:
            if stop:
                self._hints["stop", True] += 1
            if self._order is not None and lease is not None:
                if number is None:  # it began under a policy that follows no sessions
                    number = self._new_inferred()
                self._order.end(number, lease, self._stop_number(stop), self._clock.now_s(), core)
            if name is None:
                return
            session = self._sessions.get(name)
            if session is None or session.open_leases == 0:
                raise ProtocolError(f"session {name!r} has no open request")
            session.open_leases -= 1
            session.last_stop = stop
            self._touch(name, session)

    def watch(self, number: SessionId | None, tokens: Tokens, prompt_len: int, namespace: Namespace) -> None:
        """With the policy ``adaptive``: show what a request that has ended was about to the shadows.

        Args:
            number: what ``begin`` returned.
            tokens: prompt and answer, as far as their payload was written.
        """
        if self._order is None or number is None:
            return
        seed = 0
        if namespace != DEFAULT_NAMESPACE:
            seed = int.from_bytes(namespace_seed(b"", namespace)[:8], "little")
        with self._lock:
            self._order.watch(number, tokens, prompt_len, seed)

    @property
    def followed(self) -> str | None:
        """The policy that turns are rated by now; None unless the eviction policy is about sessions."""
        order = self._order
        return None if order is None else order.followed

    def close(self, name: str) -> bool:
        """The client says that the session is over. False if it is unknown.

        A request that is still running finishes as usual. With ``adaptive`` and ``session`` what only this
        session used leaves first from now on. A later request, or ``reopen``, takes it back.
        """
        with self._lock:
            session = self._hinted("close", name)
            if session is None:
                return False
            session.closed = True
            if self._order is not None:
                self._order.close(session.number)
            return True

    def reopen(self, name: str) -> bool:
        """Take back ``close``, ``one_shot`` or ``abandon_branch``. False if the session is unknown."""
        with self._lock:
            session = self._hinted("reopen", name)
            if session is None:
                return False
            session.closed = False
            if self._order is not None:
                self._order.reopen(session.number)
            return True

    def abandon_branch(self, name: str) -> bool:
        """The client says that the session will not go on from its last turn, as after an edit.

        False if the session is unknown. Only ``adaptive`` and ``session`` make something of it: what only that
        turn used leaves first, also once an edited turn has used the rest. ``reopen`` takes it back, and so does a
        request that goes on from there after all.
        """
        with self._lock:
            session = self._hinted("abandon_branch", name)
            if session is not None and self._order is not None:
                self._order.abandon_branch(session.number)
            return session is not None

    def one_shot(self, name: str) -> bool:
        """The client says that the running request (else the last one) is the session's only one.

        False if the session is unknown. Only ``adaptive`` and ``session`` make something of it.
        """
        with self._lock:
            session = self._hinted("one_shot", name)
            if session is not None and self._order is not None:
                self._order.one_shot(session.number)
            return session is not None

    def expects_return(self, name: str, in_s: float) -> bool:
        """The client says in how many seconds the session comes back. False if it is unknown.

        Only ``adaptive`` and ``session`` make something of it, until twice that time has passed.

        Raises:
            ValueError: ``in_s`` is no finite number above 0.
        """
        seconds = checked_seconds("expects_return: in_s", in_s)
        with self._lock:
            session = self._hinted("expects_return", name)
            if session is None:
                return False
            session.closed = False
            if self._order is not None:
                self._order.expects_return(session.number, seconds, self._clock.now_s())
            return True

    def hints(self) -> dict[tuple[str, bool], int]:
        """How often each kind of hint came, and whether for a session that was known."""
        with self._lock:
            return dict(self._hints)

    def _hinted(self, kind: str, name: str) -> _Session | None:
        if not isinstance(name, str):
            raise ValueError(f"a session name is a string, got {name!r:.80}")
        session = self._sessions.get(name)
        self._hints[kind, session is not None] += 1
        return session

    def bury(self, leases: Iterable[LeaseId]) -> None:
        """The tree has said, outside of ``begin`` and ``end``, that it has nothing of these any more."""
        if self._order is not None:
            with self._lock:
                self._order.bury(leases)

    def follow(self, order: SessionOrder | None) -> None:
        """Rate sessions for the policies ``session`` and ``adaptive`` from now on, or no more."""
        with self._lock:
            self._order = order

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

    def _stop_number(self, stop: str) -> int:
        """The first reasons that come are told apart, all others are one."""
        if stop not in self._stops and len(self._stops) < MAX_STOPS - 1:
            self._stops[stop] = len(self._stops)
        return self._stops.get(stop, MAX_STOPS - 1)

    def _expire(self) -> None:
        horizon = self._clock.now_s() - self._expire_after_s
        while self._sessions:
            name, session = next(iter(self._sessions.items()))
            if session.last_use_s >= horizon:
                break
            self._drop(name, session)
        for _ in range(2):  # two for each that came: those at work, which stay, do not let it grow
            if len(self._sessions) > MAX_SESSIONS:
                self._drop(*next(iter(self._sessions.items())))

    def _drop(self, name: str, session: _Session) -> None:
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
    if not isinstance(name, str) or not 0 < len(name) <= MAX_SESSION_NAME:
        raise ValueError(
            f"a session name is a string of 1 to {MAX_SESSION_NAME} characters, got {name!r:.80}"
        )
