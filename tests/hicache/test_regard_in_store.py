"""What clients say of a prefix or a session orders L3, too: kept prefixes, priorities, returns that are announced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hicache.clock import ManualClock
from hicache.testing.scripted_store import ScriptedStore
from hicache.tiers.disk import DiskStore
from hicache.tiers.framing import HEADER_BYTES
from hicache.tiers.memory import MemoryStore
from hicache.tiers.store import Store

if TYPE_CHECKING:
    from tests.hicache.conftest import MakeRig, Rig, Tokens

    T = Callable[..., Tokens]

CHAT_PAGES, NUM_CHATS = 4, 5
PAGE_BYTES = HEADER_BYTES + 4 * 8
DISK_PAGE_BYTES = 1024
"""With its slot and its place in the journal."""


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


@pytest.fixture(params=["memory", "disk"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """Of five chats, or a little less."""
    num_pages = NUM_CHATS * CHAT_PAGES
    if request.param == "memory":
        return MemoryStore(num_pages * PAGE_BYTES)
    return DiskStore(tmp_path / "l3", num_pages * DISK_PAGE_BYTES)


@pytest.fixture(params=["python", "rust"])
def rig(
    request: pytest.FixtureRequest,
    make_rig: MakeRig,
    monkeypatch: pytest.MonkeyPatch,
    store: Store,
    clock: ManualClock,
) -> Rig:
    """L1 of two chats, L2 of one and a half."""
    monkeypatch.setenv("HICACHE_CORE", str(request.param))
    return make_rig(device=9, host=6, policy__eviction="session", store=store, session_clock=clock)


def chat(rig: Rig, t: T, number: int, priority: int = 50) -> None:
    """A chat of its own; all of it is in L3 when this returns."""
    turn(rig, tokens_of(t, number), f"chat {number}", priority)


def turn(rig: Rig, tokens: Tokens, session: str, priority: int) -> None:
    with rig.cache.match(tokens, session=session, priority=priority) as lease:
        lease.load()
        lease.reserve(len(tokens) - lease.reused)
        rig.write(lease, tokens, lease.reused, len(tokens))
        lease.release(tokens)
    assert rig.cache.flush()


def tokens_of(t: T, number: int) -> Tokens:
    return t(100 * number + 16, 100 * number + 1)


def flood(rig: Rig, t: T, first: int) -> None:
    """So many other chats that L3 could hold no more beside them."""
    for number in range(first, first + 2 * NUM_CHATS):
        chat(rig, t, number)


def left(rig: Rig, t: T, number: int) -> int:
    """How many pages of a chat L3 has."""
    return sum(rig.stored(tokens_of(t, number)))


# ---- prefixes that are kept --------------------------------------------------------------------
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kept_prefix_outlives_a_flood_of_other_sessions_in_l3(rig: Rig, t: T, when: str) -> None:
    system = tokens_of(t, 1)[:8]
    if when == "before":
        rig.cache.keep(system, for_s=3600)
    chat(rig, t, 1)
    if when == "after":
        rig.cache.keep(system, for_s=3600)
    flood(rig, t, 10)
    assert rig.stored(tokens_of(t, 1)) == [True, True, False, False]


@pytest.mark.parametrize("how", ["unkeep", "time", "reset"])
def test_a_prefix_that_is_kept_no_longer_goes_as_the_others_do(
    rig: Rig, t: T, clock: ManualClock, how: str
) -> None:
    chat(rig, t, 1)
    system = tokens_of(t, 1)[:8]
    rig.cache.keep(system, for_s=3600)
    flood(rig, t, 10)
    if how == "unkeep":
        assert rig.cache.unkeep(system)
    elif how == "time":
        clock.advance(3600)
    else:
        rig.cache.reset()  # the tree has nothing of it any more, so it could not take that back later
    flood(rig, t, 30)
    assert left(rig, t, 1) == 0


def test_a_kept_prefix_is_no_pin(rig: Rig, t: T) -> None:
    """L3 is full of what is to be kept: the least recently used of it makes room."""
    for number in range(2 * NUM_CHATS):
        chat(rig, t, number)
        rig.cache.keep(tokens_of(t, number), for_s=3600)
    assert left(rig, t, 0) == 0
    assert left(rig, t, 2 * NUM_CHATS - 1) == CHAT_PAGES


@pytest.mark.parametrize("policy", ["lru", "priority"])
def test_a_prefix_is_kept_under_a_policy_that_follows_no_sessions(
    make_rig: MakeRig, t: T, policy: str
) -> None:
    store = MemoryStore(NUM_CHATS * CHAT_PAGES * PAGE_BYTES)
    rig = make_rig(device=9, host=6, policy__eviction=policy, store=store)
    chat(rig, t, 1)
    chat(rig, t, 2, priority=100)
    rig.cache.keep(tokens_of(t, 1), for_s=3600)
    flood(rig, t, 10)
    assert (left(rig, t, 1), left(rig, t, 2)) == (CHAT_PAGES, 0)


# ---- sessions ----------------------------------------------------------------------------------
def test_a_session_outlives_one_of_lower_priority(rig: Rig, t: T) -> None:
    """Whichever was there first: 0 goes before 50, and 50 before 100."""
    chat(rig, t, 1, priority=100)
    chat(rig, t, 2)
    chat(rig, t, 3, priority=0)
    lives = []
    for number in range(10, 10 + 2 * NUM_CHATS):
        chat(rig, t, number)
        lives.append([left(rig, t, each) > 0 for each in (1, 2, 3)])
    assert [True, True, False] in lives
    assert lives[-1] == [True, False, False]
    for number in range(30, 30 + 2 * NUM_CHATS):
        chat(rig, t, number, priority=100)
    assert left(rig, t, 1) == 0, "it is a preference and no pin"


def test_a_session_that_is_awaited_outlives_others_until_it_is_believed_no_more(
    rig: Rig, t: T, clock: ManualClock
) -> None:
    chat(rig, t, 1)
    rig.cache.sessions.expects_return("chat 1", in_s=600)
    flood(rig, t, 10)
    assert left(rig, t, 1) == CHAT_PAGES
    clock.advance(1300)
    flood(rig, t, 30)
    assert left(rig, t, 1) == 0


def test_a_high_priority_holds_in_l3_for_hours_and_not_for_ever(rig: Rig, t: T, clock: ManualClock) -> None:
    chat(rig, t, 1, priority=100)
    clock.advance(3600)
    flood(rig, t, 10)
    assert left(rig, t, 1) == CHAT_PAGES
    clock.advance(4 * 3600)
    flood(rig, t, 30)
    assert left(rig, t, 1) == 0


# ---- what is said, and how often ---------------------------------------------------------------
@pytest.mark.parametrize("core", ["python", "rust"])
def test_l3_is_told_nothing_of_sessions_of_which_nothing_is_said(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, t: T, core: str
) -> None:
    monkeypatch.setenv("HICACHE_CORE", core)
    store = ScriptedStore()
    rig = make_rig(device=9, host=6, policy__eviction="session", store=store)
    for _ in range(2):
        for number in range(3):
            chat(rig, t, number)
    assert rig.cache._runtime.transfers.drain(10.0)
    assert {call.operation for call in store.calls} & {"over", "low", "plain", "high", "kept"} == set()


@pytest.mark.parametrize("core", ["python", "rust"])
def test_a_session_of_high_priority_that_goes_on_is_told_of_once(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, t: T, core: str
) -> None:
    """Its next turn takes over what it reuses as it is."""
    monkeypatch.setenv("HICACHE_CORE", core)
    store = ScriptedStore()
    rig = make_rig(device=64, host=64, policy__eviction="session", store=store)
    for length in (8, 16, 24):
        turn(rig, t(length), "chat", 100)
    assert rig.cache._runtime.transfers.drain(10.0)
    told = [(call.operation, len(call.keys)) for call in store.calls if call.operation in ("plain", "high")]
    assert sum(count for _, count in told) == 6
    assert {operation for operation, _ in told} == {"high"}
