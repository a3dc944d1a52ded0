"""L3 declines what is over: no page of it is written, unless something else needs it or somebody comes back for it."""

from __future__ import annotations

import numpy as np
import pytest

from hicache.errors import ConfigError
from hicache.radix.actions import Copy
from hicache.radix.core import make_core
from hicache.testing.harness import BuildHarness, Harness
from hicache.testing.payloads import path_bytes
from hicache.testing.trees import count_to, tree_config
from hicache.types import LeaseId, Namespace, SessionId, Tier

CHAT, OTHER = SessionId(1), SessionId(2)
HEAD, LEFT, RIGHT = count_to(8), [50] * 8, [60] * 8
OVER, WORTH = 0, 9
WRITES = ("write_through", "write_back")


def make(build: BuildHarness, write: str = "write_through", *, model: str = "full") -> Harness:
    return build(
        model,
        page_size=4,
        device=8,
        host=8,
        has_store=True,
        eviction="session",
        write=write,
        store_admission="unless_over",
    )


def serve(cache: Harness, tokens: list[int], session: SessionId) -> LeaseId:
    """One turn; its transfers are under way when this returns."""
    lease = cache.match(tokens, session=session)
    assert not cache.reserve(lease, len(tokens) - lease.boundary).short
    cache.compute(lease, len(tokens))
    cache.release(lease, len(tokens))
    return lease.lease


def empty_l2(cache: Harness) -> None:
    """Have all of L1 and L2 leave as the write policy sees fit."""
    for tier in (Tier.DEVICE, Tier.HOST):
        for component in cache.core.config.device_slots:
            cache.empty(component, tier)


def complete_copies(cache: Harness) -> None:
    """All that is under way but what is being written to L3."""
    cache.complete_all(
        [ticket for ticket, action in cache.executor.pending.items() if isinstance(action, Copy)]
    )


def in_l3(cache: Harness, tokens: list[int]) -> list[bool]:
    """Page by page, what L3 has of a path."""
    keys = cache.executor.keys.of("full", Namespace(), path_bytes(tokens))
    return [key in cache.executor.store for key in keys]


def num_declined(cache: Harness) -> int:
    return cache.core.counters().get("stores_declined", 0)


@pytest.mark.parametrize("write", WRITES)
def test_what_is_over_before_it_was_written_is_not_written(build: BuildHarness, write: str) -> None:
    cache = make(build, write)
    cache.core.rate([serve(cache, count_to(16), CHAT)], [OVER])
    empty_l2(cache)
    assert in_l3(cache, count_to(16)) == [False] * 4
    assert num_declined(cache) == 4


@pytest.mark.parametrize("write", WRITES)
def test_what_is_not_over_is_written(build: BuildHarness, write: str) -> None:
    cache = make(build, write)
    cache.core.rate([serve(cache, count_to(16), CHAT)], [WORTH])
    empty_l2(cache)
    assert in_l3(cache, count_to(16)) == [True] * 4
    assert num_declined(cache) == 0


def test_what_is_over_is_written_where_nothing_is_declined(build: BuildHarness) -> None:
    cache = build(page_size=4, device=8, host=8, has_store=True, eviction="session")
    cache.core.rate([serve(cache, count_to(16), CHAT)], [OVER])
    empty_l2(cache)
    assert in_l3(cache, count_to(16)) == [True] * 4


@pytest.mark.parametrize("write", WRITES)
def test_it_is_written_when_somebody_came_back_for_it(build: BuildHarness, write: str) -> None:
    cache = make(build, write)
    cache.core.rate([serve(cache, count_to(16), CHAT)], [OVER])
    cache.complete_all()
    assert in_l3(cache, count_to(16)) == [False] * 4
    serve(cache, [*count_to(16), *[70] * 4], OTHER)
    empty_l2(cache)
    assert in_l3(cache, [*count_to(16), *[70] * 4]) == [True] * 5


def test_after_a_second_use_as_well(build: BuildHarness) -> None:
    """Selective: the second use queues the pages, and is over before they were written; the third has them written."""
    cache = make(build, "write_through_selective")
    serve(cache, count_to(16), CHAT)
    cache.complete_all()
    second = cache.match([*count_to(16), 70], session=CHAT)
    cache.release(second)
    cache.core.rate([second.lease], [OVER])
    cache.complete_all()
    assert in_l3(cache, count_to(16)) == [False] * 4
    cache.release(cache.match([*count_to(16), 70], session=CHAT))
    cache.complete_all()
    assert in_l3(cache, count_to(16)) == [True] * 4


@pytest.mark.parametrize("write", WRITES)
def test_a_session_that_was_reopened_is_written_with_its_next_turn(build: BuildHarness, write: str) -> None:
    cache = make(build, write)
    chat = serve(cache, count_to(16), CHAT)
    cache.core.rate([chat], [OVER])
    cache.complete_all()
    cache.core.rate([chat], [WORTH])
    serve(cache, count_to(20), CHAT)
    empty_l2(cache)
    assert in_l3(cache, count_to(20)) == [True] * 5


def serve_branches(cache: Harness) -> list[LeaseId]:
    """A chat of two branches, and another that goes on from one: as far as the tree knows the head is the chat's alone,
    for a use is noted where it ends. Returns the chat's turns.
    """
    turns = [serve(cache, [*HEAD, *branch], CHAT) for branch in (LEFT, RIGHT)]
    serve(cache, [*HEAD, *LEFT, *count_to(4)], OTHER)
    return turns


@pytest.mark.parametrize("write", WRITES)
def test_a_prefix_that_others_need_is_written_with_their_suffix(build: BuildHarness, write: str) -> None:
    cache = make(build, write)
    cache.core.rate(serve_branches(cache), [OVER, OVER])
    cache.complete_all()
    if write == "write_back":
        empty_l2(cache)
    assert in_l3(cache, [*HEAD, *LEFT, *count_to(4)]) == [True] * 5
    assert in_l3(cache, [*HEAD, *RIGHT]) == [True, True, False, False]


def test_a_prefix_that_l3_lost_is_written_again_while_l3_has_what_hangs_on_it(build: BuildHarness) -> None:
    cache = make(build, "write_back")
    turns = serve_branches(cache)
    cache.persist_all()
    whole = [*HEAD, *LEFT, *count_to(4)]
    for key in cache.executor.keys.of("full", Namespace(), path_bytes(HEAD)):
        del cache.executor.store[key]
    cache.core.learn(np.array(whole, dtype=np.int32), {"full": {0: False, 1: False}})
    cache.core.rate(turns, [OVER, OVER])
    empty_l2(cache)
    assert in_l3(cache, whole) == [True] * 5


def test_an_earlier_turn_waits_no_longer_when_all_that_follows_is_over(build: BuildHarness) -> None:
    """Turns are rated one by one, the earlier first; none of both is written in the end."""
    cache = make(build)
    cache.core.rate([serve(cache, count_to(8), CHAT), serve(cache, count_to(16), CHAT)], [OVER, OVER])
    empty_l2(cache)
    assert in_l3(cache, count_to(16)) == [False] * 4


def test_what_is_being_written_is_written(build: BuildHarness) -> None:
    """Its ticket is reported as ever, and L2 holds the page until then."""
    cache = make(build)
    chat = serve(cache, count_to(8), CHAT)
    complete_copies(cache)
    assert len(cache.executor.pending) == 1
    cache.core.rate([chat], [OVER])
    cache.make_room("full", Tier.DEVICE, 8)
    cache.make_room("full", Tier.HOST, 8)
    assert cache.core.pool_count("full", Tier.HOST).in_flight == 2
    cache.complete_all()
    assert in_l3(cache, count_to(8)) == [True] * 2


@pytest.mark.parametrize("write", WRITES)
def test_a_kept_prefix_is_written(build: BuildHarness, write: str) -> None:
    cache = make(build, write)
    chat = serve(cache, count_to(16), CHAT)
    cache.core.keep(np.array(count_to(8), dtype=np.int32))
    cache.core.rate([chat], [OVER])
    empty_l2(cache)
    assert in_l3(cache, count_to(16)) == [True, True, False, False]


@pytest.mark.parametrize("write", WRITES)
def test_states_and_windows_are_declined_with_their_path(build: BuildHarness, write: str) -> None:
    cache = make(build, write, model="full+swa+mamba")
    cache.core.rate([serve(cache, count_to(16), CHAT)], [OVER])
    empty_l2(cache)
    assert not cache.executor.store


def test_a_state_that_reaches_l2_when_it_is_over_is_not_written(build: BuildHarness) -> None:
    """Its path was written before."""
    cache = make(build, model="full+mamba")
    chat = serve(cache, count_to(16), CHAT)
    while paths := [t for t, action in cache.executor.pending.items() if action.component == "full"]:
        cache.complete_all(paths)
    cache.core.rate([chat], [OVER])
    cache.complete_all()
    assert in_l3(cache, count_to(16)) == [True] * 4
    assert len(cache.executor.store) == 4


def test_what_l3_refused_is_not_offered_again_once_it_is_over(build: BuildHarness) -> None:
    cache = make(build)
    chat = serve(cache, count_to(8), CHAT)
    complete_copies(cache)
    (ticket,) = cache.executor.pending
    cache.abort(ticket)
    cache.core.rate([chat], [OVER])
    assert cache.core.retry_stores().tickets == ()


def test_persist_writes_it_all_the_same(build: BuildHarness) -> None:
    """Who asks for everything gets everything."""
    cache = make(build)
    cache.core.rate([serve(cache, count_to(16), CHAT)], [OVER])
    cache.complete_all()
    cache.persist_all()
    assert in_l3(cache, count_to(16)) == [True] * 4


def test_it_can_be_switched_on_while_serving(build: BuildHarness) -> None:
    cache = build(page_size=4, device=8, host=8, has_store=True, eviction="session", write="write_back")
    cache.core.rate([serve(cache, count_to(16), CHAT)], [OVER])
    cache.reconfigure(store_admission="unless_over")
    empty_l2(cache)
    assert in_l3(cache, count_to(16)) == [False] * 4


@pytest.mark.parametrize("core", ["python", "rust"])
def test_a_rule_that_does_not_exist_is_refused(core: str) -> None:
    with pytest.raises(ConfigError, match="store_admission: 'some' is not all or unless_over"):
        make_core(tree_config(host=4, has_store=True, store_admission="some"), core)
