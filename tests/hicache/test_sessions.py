"""Named sessions: their states, their turns, their end; knowledge, never a lock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hicache.clock import ManualClock
from hicache.errors import CapacityError, ProtocolError
from hicache.policy.return_hazard import ENDS_S
from hicache.policy.session_order import SessionOrder
from hicache.radix.interface import MatchResult, ProbeResult
from hicache.sessions import DEFAULT_IDLE_AFTER_S, Sessions, SessionState
from hicache.types import LeaseId, Regard, SessionId, Tier, TierTokens

if TYPE_CHECKING:
    from tests.hicache.conftest import MakeRig, Rig, Tokens

T = Callable[..., "Tokens"]


# ---- the registry ----------------------------------------------------------------------------------------------------
@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


@pytest.fixture
def sessions(clock: ManualClock) -> Sessions:
    return Sessions(clock, idle_after_s=60.0, expire_after_s=1800.0)


def state(sessions: Sessions, name: str) -> SessionState | None:
    view = sessions.get(name)
    return None if view is None else view.state


def turn(sessions: Sessions, name: str, stop: str = "") -> None:
    sessions.begin(name)
    sessions.end(name, stop=stop)


def test_a_session_is_active_then_waiting_then_idle(clock: ManualClock, sessions: Sessions) -> None:
    assert state(sessions, "a") is None
    sessions.begin("a")
    assert state(sessions, "a") == SessionState.ACTIVE
    clock.advance(1e6)
    assert state(sessions, "a") == SessionState.ACTIVE
    sessions.end("a", stop="end_turn")
    assert state(sessions, "a") == SessionState.WAITING
    clock.advance(59.9)
    assert state(sessions, "a") == SessionState.WAITING
    clock.advance(0.1)
    assert state(sessions, "a") == SessionState.IDLE
    sessions.begin("a")
    assert state(sessions, "a") == SessionState.ACTIVE


def test_a_view_tells_turns_open_leases_last_use_and_why_it_stopped(
    clock: ManualClock, sessions: Sessions
) -> None:
    turn(sessions, "a", "tool_call")
    clock.advance(5)
    sessions.begin("a")
    sessions.begin("a")
    view = sessions.get("a")
    assert view is not None
    assert (view.name, view.num_turns, view.open_leases) == ("a", 3, 2)
    assert (view.last_use_s, view.last_stop) == (1005.0, "tool_call")


def test_a_closed_session_comes_back_by_another_turn(sessions: Sessions) -> None:
    turn(sessions, "a")
    assert sessions.close("a")
    assert state(sessions, "a") == SessionState.CLOSED
    sessions.begin("a")
    assert state(sessions, "a") == SessionState.ACTIVE
    sessions.end("a")
    assert state(sessions, "a") == SessionState.WAITING


def test_a_session_closed_in_mid_turn_is_closed_when_the_turn_ends(sessions: Sessions) -> None:
    sessions.begin("a")
    assert sessions.close("a")
    assert state(sessions, "a") == SessionState.ACTIVE
    sessions.end("a")
    assert state(sessions, "a") == SessionState.CLOSED


def test_closing_an_unknown_session_is_told_and_harmless(sessions: Sessions) -> None:
    assert not sessions.close("never seen")
    assert len(sessions) == 0


def test_a_turn_that_never_began_cannot_end(sessions: Sessions) -> None:
    with pytest.raises(ProtocolError, match="no open request"):
        sessions.end("a")
    turn(sessions, "a")
    with pytest.raises(ProtocolError, match="no open request"):
        sessions.end("a")
    view = sessions.get("a")
    assert view is not None
    assert view.open_leases == 0


@pytest.mark.parametrize("hint", ["close", "reopen", "one_shot", "abandon_branch"])
def test_a_hint_for_an_unknown_session_is_told_and_harmless(sessions: Sessions, hint: str) -> None:
    assert not getattr(sessions, hint)("never seen")
    assert not sessions.expects_return("never seen", 5)
    assert len(sessions) == 0


@pytest.mark.parametrize(("hint", "arguments"), [("reopen", ()), ("expects_return", (30.0,))])
def test_a_closed_session_is_open_again_when_the_client_says_so(
    sessions: Sessions, hint: str, arguments: tuple[float, ...]
) -> None:
    turn(sessions, "a")
    sessions.close("a")
    assert getattr(sessions, hint)("a", *arguments)
    assert state(sessions, "a") == SessionState.WAITING


@pytest.mark.parametrize(
    "in_s", [0, -1, float("nan"), float("inf"), 10**400, "soon", True, None, np.float32("nan"), np.int64(0)]
)
def test_a_return_at_no_time_is_refused(sessions: Sessions, in_s: object) -> None:
    turn(sessions, "a")
    sessions.close("a")
    with pytest.raises(ValueError, match="expects_return: in_s is"):
        sessions.expects_return("a", in_s)  # type: ignore[arg-type]  # on purpose
    assert state(sessions, "a") == SessionState.CLOSED


@pytest.mark.parametrize("in_s", [1, 0.5, 1e308, np.int64(5), np.float32(5)])
def test_a_return_in_any_kind_of_number_is_believed(inferring: Sessions, in_s: float) -> None:
    turn(inferring, "a")
    assert inferring.expects_return("a", in_s)


@pytest.mark.parametrize("name", ["", "x" * 1025, "x" * 10_000], ids=["empty", "too long", "of 10 kB"])
def test_a_bad_name_is_refused(sessions: Sessions, name: str) -> None:
    with pytest.raises(ValueError, match="session name"):
        sessions.begin(name)
    assert len(sessions) == 0


def test_sessions_are_listed_least_recently_used_first(clock: ManualClock, sessions: Sessions) -> None:
    for name in "abc":
        turn(sessions, name)
        clock.advance(1)
    turn(sessions, "a")
    assert [view.name for view in sessions] == ["b", "c", "a"]


def test_what_is_silent_for_too_long_is_forgotten_unless_it_is_at_work(
    clock: ManualClock, sessions: Sessions
) -> None:
    turn(sessions, "silent")
    sessions.begin("at work")
    clock.advance(1000)
    turn(sessions, "recent")
    clock.advance(801)
    turn(sessions, "new")
    assert {view.name for view in sessions} == {"at work", "recent", "new"}
    sessions.end("at work")
    assert state(sessions, "at work") == SessionState.WAITING


def test_the_registry_is_bounded_though_a_session_stays_at_work(
    clock: ManualClock, sessions: Sessions
) -> None:
    """One endless request at the old end of the list keeps nobody else in it."""
    sessions.begin("endless")
    for number in range(1000):
        turn(sessions, f"session {number}")
        clock.advance(100)
    assert len(sessions) <= 1 + 19
    assert state(sessions, "endless") == SessionState.ACTIVE


def test_counts_name_every_state(clock: ManualClock, sessions: Sessions) -> None:
    turn(sessions, "idle")
    clock.advance(60)
    turn(sessions, "closed")
    sessions.close("closed")
    turn(sessions, "waiting")
    sessions.begin("active")
    assert sessions.count() == {"active": 1, "waiting": 1, "idle": 1, "closed": 1}


def test_the_registry_is_bounded_though_nobody_has_been_silent_for_long(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hicache.sessions.MAX_SESSIONS", 10)
    sessions.begin("at work")
    for number in range(100):
        turn(sessions, f"session {number}")
    assert len(sessions) <= 11
    assert state(sessions, "at work") == SessionState.ACTIVE
    assert state(sessions, "session 99") == SessionState.WAITING


# ---- sessions that are inferred --------------------------------------------------------------------------------------
def matched(lease: int, *, met: int | None = None, met_end: int = 0, boundary: int = 0) -> MatchResult:
    found = ProbeResult(boundary, boundary, TierTokens(), {}, None)
    return MatchResult(LeaseId(lease), found, (), None if met is None else LeaseId(met), met_end)


def serve_matched(sessions: Sessions, name: str | None, result: MatchResult) -> SessionId:
    number = sessions.begin(name, result)
    assert number is not None
    sessions.end(name, lease=result.lease, number=number)
    return number


@pytest.fixture
def inferring(clock: ManualClock) -> Sessions:
    return Sessions(clock, expire_after_s=1800.0, order=SessionOrder(), page_size=4)


def test_a_request_that_contains_all_but_the_last_page_of_an_earlier_one_continues_it(
    inferring: Sessions,
) -> None:
    first = serve_matched(inferring, None, matched(0))
    assert serve_matched(inferring, None, matched(1, met=0, met_end=12, boundary=8)) == first
    assert serve_matched(inferring, None, matched(2, met=1, met_end=20, boundary=20)) == first
    assert serve_matched(inferring, None, matched(3, met=2, met_end=40, boundary=32)) != first
    assert len(inferring) == 0, "only named ones are listed"


def test_a_request_without_a_session_never_continues_one_that_has_a_name(inferring: Sessions) -> None:
    named = serve_matched(inferring, "a", matched(0))
    other = serve_matched(inferring, None, matched(1, met=0, met_end=8, boundary=8))
    assert named >= 0 > other
    assert serve_matched(inferring, "a", matched(2, met=1, met_end=8, boundary=8)) == named


class RatedLeases:
    """What a tree would be told."""

    def __init__(self) -> None:
        self.leases: list[LeaseId] = []

    def rate(
        self, leases: Sequence[LeaseId], worths: Sequence[int], regards: Sequence[Regard] | None = None
    ) -> tuple[LeaseId, ...]:
        assert len(leases) == len(worths)
        self.leases += leases
        return ()


def test_a_request_without_a_session_is_rated_though_it_began_under_a_policy_that_follows_none(
    clock: ManualClock, sessions: Sessions
) -> None:
    """Else the tree would take what it left for the most that there is, for ever."""
    number = sessions.begin(None, matched(7))
    assert number is None
    sessions.follow(SessionOrder())
    core = RatedLeases()
    sessions.end(None, lease=LeaseId(7), number=number, core=core)
    assert core.leases == [LeaseId(7)]


def test_a_session_that_was_forgotten_comes_back_as_a_new_one(
    clock: ManualClock, inferring: Sessions
) -> None:
    first = serve_matched(inferring, "a", matched(0))
    clock.advance(1801)
    serve_matched(inferring, "b", matched(1))
    expected = inferring.number_of("a")
    assert expected != first
    assert serve_matched(inferring, "a", matched(2)) == expected


def test_clear_forgets_all(sessions: Sessions) -> None:
    turn(sessions, "a")
    sessions.clear()
    assert (len(sessions), list(sessions)) == (0, [])


# ---- sessions of a cache ---------------------------------------------------------------------------------------------
def test_a_lease_is_a_turn(make_rig: MakeRig, t: T) -> None:
    clock = ManualClock()
    rig = make_rig(session_clock=clock)
    rig.serve(t(8), t(112, 101), session="chat", stop="tool_call")
    view = rig.cache.sessions.get("chat")
    assert view is not None
    assert (view.state, view.num_turns, view.last_stop) == (SessionState.WAITING, 1, "tool_call")
    with rig.cache.match(t(8), session="chat"):
        assert rig.cache.stats().sessions["active"] == 1
    clock.advance(DEFAULT_IDLE_AFTER_S)
    assert rig.cache.stats().sessions["idle"] == 1


def test_times_of_sessions_come_from_the_configuration(make_rig: MakeRig, t: T) -> None:
    clock = ManualClock()
    rig = make_rig(session_clock=clock, sessions={"idle_after": "10s", "expire_after": "1m"})
    rig.serve(t(8), session="a")
    clock.advance(10)
    assert rig.cache.stats().sessions["idle"] == 1
    clock.advance(51)
    rig.serve(t(8), session="b")
    assert [view.name for view in rig.cache.sessions] == ["b"]


def test_a_session_is_known_as_long_as_ages_are_told_apart(make_rig: MakeRig, t: T) -> None:
    clock = ManualClock()
    rig = make_rig(session_clock=clock)
    rig.serve(t(8), session="a")
    number = rig.cache.sessions.number_of("a")
    clock.advance(ENDS_S[-1])
    rig.serve(t(8), session="b")
    assert rig.cache.sessions.number_of("a") == number
    clock.advance(1)
    rig.serve(t(8), session="b")
    assert rig.cache.sessions.number_of("a") != number


def test_a_session_that_is_closed_in_mid_turn_ends_its_turn_as_usual(make_rig: MakeRig, t: T) -> None:
    """O-26: no crash, the audit clean, the turn's bytes right and kept."""
    rig = make_rig("full+swa+mamba", host=64)
    rig.serve(t(12), session="chat")
    with rig.cache.match(t(20), session="chat") as lease:
        lease.load()
        assert rig.cache.sessions.close("chat")
        rig.check()
        lease.reserve(8)
        rig.write(lease, t(20), 12, 20)
        lease.checkpoint(20)
        rig.check()
        lease.release(t(20))
    rig.check_idle()
    assert rig.cache.stats().sessions["closed"] == 1
    assert rig.serve(t(21), session="other").source.total == 20


def test_idle_sessions_never_keep_a_request_out(make_rig: MakeRig, t: T) -> None:
    """O-26: a pool of 100, five idle sessions of 20, a request of 40 is admitted; two of them lose data."""
    rig = make_rig(device=100, page_size=1)
    for number in range(5):
        rig.serve(t(1000 * number + 20, 1000 * number + 1), session=f"session {number}")
    assert rig.free() == 0
    rig.serve(t(10_040, 10_001), session="new")
    rig.check_idle()
    left = [rig.cache.probe(t(1000 * number + 21, 1000 * number + 1)).boundary for number in range(5)]
    assert left == [0, 0, 20, 20, 20]


def test_what_is_at_work_is_never_taken(make_rig: MakeRig, t: T) -> None:
    """Only open leases hold payload; when all is held, the request is told, and nothing is lost."""
    rig = make_rig(device=8)
    rig.serve(t(16), session="a")
    rig.serve(t(116, 101), session="b")
    held: list[Rig | object] = []
    with rig.cache.match(t(17), session="a") as first, rig.cache.match(t(117, 101), session="b") as second:
        held += [first, second]
        with rig.cache.match(t(204, 201), session="c") as third:
            with pytest.raises(CapacityError):
                third.reserve(4)
            rig.check()
        assert rig.wrong_pages(first, t(17)) == 0
        assert rig.wrong_pages(second, t(117, 101)) == 0
    rig.check_idle()
    rig.serve(t(204, 201), session="c")


def test_two_turns_of_one_session_may_run_at_once(make_rig: MakeRig, t: T) -> None:
    rig = make_rig()
    with rig.cache.match(t(8), session="chat"), rig.cache.match(t(108, 101), session="chat"):
        view = rig.cache.sessions.get("chat")
        assert view is not None
        assert view.open_leases == 2
    view = rig.cache.sessions.get("chat")
    assert view is not None
    assert (view.open_leases, view.num_turns) == (0, 2)


def test_requests_without_a_session_leave_no_trace_in_the_registry(make_rig: MakeRig, t: T) -> None:
    rig = make_rig()
    rig.serve(t(8))
    assert len(rig.cache.sessions) == 0


# ---- the policy "session" --------------------------------------------------------------------------------------------
def left_of(rig: Rig, t: T, *firsts: int) -> list[int]:
    """How much of each prompt of 16 tokens is still there."""
    return [rig.cache.probe(t(first + 16, first)).boundary for first in firsts]


@pytest.mark.parametrize("core", ["python", "rust"])
def test_a_closed_session_makes_room_first_in_every_tier(
    make_rig: MakeRig, t: T, monkeypatch: pytest.MonkeyPatch, core: str
) -> None:
    monkeypatch.setenv("HICACHE_CORE", core)
    rig = make_rig(device=12, host=12, policy__eviction="session", policy__write="write_back")
    firsts = range(1, 701, 100)
    for first in firsts:
        rig.serve(t(first + 15, first), session=f"session {first}")
        rig.cache.sessions.close("session 201")
    rig.check_idle()
    lost = [first for first in firsts if left_of(rig, t, first) != [16]]
    assert lost == [201]


def test_a_session_that_was_reopened_is_treated_as_the_others(make_rig: MakeRig, t: T) -> None:
    rig = make_rig(device=12, policy__eviction="session")
    for first in (1, 101, 201):
        rig.serve(t(first + 15, first), session=f"session {first}")
    rig.cache.sessions.close("session 201")
    rig.cache.sessions.reopen("session 201")
    rig.serve(t(316, 301), session="session 301")
    assert left_of(rig, t, 1, 101, 201, 301) == [0, 16, 16, 16]


def test_an_abandoned_branch_leaves_first(make_rig: MakeRig, t: T) -> None:
    rig = make_rig(device=12, policy__eviction="session")
    for first in (1, 101, 201):
        rig.serve(t(first + 15, first), session=f"session {first}")
    assert rig.cache.sessions.abandon_branch("session 201")
    rig.serve(t(316, 301), session="session 301")
    assert left_of(rig, t, 1, 101, 201, 301) == [16, 16, 0, 16]


@pytest.mark.parametrize("core", ["python", "rust"])
def test_a_higher_priority_keeps_a_session_longer(
    make_rig: MakeRig, t: T, monkeypatch: pytest.MonkeyPatch, core: str
) -> None:
    monkeypatch.setenv("HICACHE_CORE", core)
    rig = make_rig(device=12, policy__eviction="session")
    for first, priority in ((1, 100), (101, 50), (201, 50)):
        with rig.cache.match(t(first + 15, first), session=f"session {first}", priority=priority) as lease:
            lease.reserve(15)
            rig.write(lease, t(first + 15, first), 0, 15)
            lease.release(t(first + 15, first), written=15)
    rig.serve(t(316, 301), session="session 301")
    assert left_of(rig, t, 1, 101, 201, 301) == [12, 8, 12, 16], "the middle one is the oldest of its worth"
    rig.check_idle()


@pytest.mark.parametrize("core", ["python", "rust"])
def test_turns_of_an_inferred_session_share_nothing(
    make_rig: MakeRig, t: T, monkeypatch: pytest.MonkeyPatch, core: str
) -> None:
    monkeypatch.setenv("HICACHE_CORE", core)
    rig = make_rig(device=32, policy__eviction="session")
    for length in (16, 24, 32):
        rig.serve(t(length))
    views = rig.cache._runtime.core.snapshot()
    assert views
    assert not any(view.is_shared for view in views)
    rig.serve([*t(8), *t(208, 201)])
    assert any(view.is_shared for view in rig.cache._runtime.core.snapshot())


def test_requests_without_a_session_are_ordered_too(make_rig: MakeRig, t: T) -> None:
    rig = make_rig(device=12, policy__eviction="session")
    rig.serve(t(16))
    for first in (101, 201):
        rig.serve(t(first + 15, first), session=f"session {first}")
    rig.serve(t(316, 301))
    rig.check_idle()
    assert left_of(rig, t, 1, 101, 201, 301) == [0, 16, 16, 16]
    assert len(rig.cache.sessions) == 2


def test_what_is_closed_when_nothing_else_is_left_still_serves(make_rig: MakeRig, t: T) -> None:
    """A hint orders; nothing is freed at once, and the bytes stay right."""
    rig = make_rig("full+swa+mamba", device=12, host=32, policy__eviction="session")
    rig.serve(t(16), session="a")
    rig.cache.sessions.close("a")
    assert rig.serve(t(20), session="a").source.total == 16
    rig.check_idle()


def test_a_reset_forgets_what_sessions_were_worth(make_rig: MakeRig, t: T) -> None:
    rig = make_rig(device=12, policy__eviction="session")
    rig.serve(t(16), session="a")
    rig.cache.reset()
    rig.serve(t(16), session="a")
    rig.serve(t(116, 101), session="b")
    rig.check_idle()
    assert left_of(rig, t, 1, 101) == [16, 16]


def test_the_last_session_that_used_a_prefix_decides_what_it_is_worth(make_rig: MakeRig, t: T) -> None:
    """O-27: T(8) is used by two sessions, A and B by one each; what only the closed one used goes first."""
    rig = make_rig(device=16, policy__eviction="session")
    head, a, b = t(8), t(104, 101), t(204, 201)
    rig.serve([*head, *a], session="S1")
    rig.serve([*head, *b], session="S2")
    rig.serve([*t(4), *t(308, 301)], session="S3")  # splits T(8); both halves keep both users
    rig.serve(t(1028, 1001), session="S4")  # fills the pool: 2 + 1 + 1 + 2 + 7 pages of 16
    assert rig.resident("full", Tier.DEVICE) == 13
    rig.cache.sessions.close("S1")
    rig.serve(t(2016, 2001), session="S5")  # three pages are free, a fourth is A's
    assert rig.cache.probe([*head, *a, 1]).boundary == 8
    assert rig.cache.probe([*head, *b, 1]).boundary == 12
    rig.cache.sessions.close("S2")
    rig.serve(t(3008, 3001), session="S6")  # B and the half of T that S3 does not use
    assert rig.cache.probe([*head, *b, 1]).boundary == 4
    assert rig.cache.probe([*t(4), *t(308, 301), 1]).boundary == 12
    rig.check_idle()


def test_a_request_that_ends_after_its_session_was_closed_is_no_use_for_ever(make_rig: MakeRig, t: T) -> None:
    """O-27."""
    rig = make_rig(device=8, policy__eviction="session")
    with rig.cache.match(t(8), session="S1") as lease:
        lease.reserve(8)
        rig.write(lease, t(8), 0, 8)
        rig.cache.sessions.close("S1")
        lease.release(t(8))
    rig.serve(t(1024, 1001), session="S2")  # six pages: the pool is full
    rig.serve(t(2008, 2001), session="S3")
    assert rig.cache.probe(t(9)).boundary == 0
    assert rig.cache.probe([*t(1024, 1001), 1]).boundary == 24
    rig.check_idle()
