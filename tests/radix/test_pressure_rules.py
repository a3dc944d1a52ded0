"""What leaves a tier first, and where it goes: write policies, granularity, cascades (DESIGN 5 and 6)."""

from __future__ import annotations

import numpy as np
import pytest

from hicache.radix.keys import as_tokens
from hicache.testing.checks import in_host_without_parent
from hicache.testing.harness import BuildHarness, Harness
from hicache.testing.payloads import path_bytes
from hicache.testing.trees import count_to
from hicache.types import Namespace, Tier

DEVICE, HOST, STORE = Tier.DEVICE, Tier.HOST, Tier.STORE


def starts_in(harness: Harness, tier: Tier, component: str = "full") -> dict[int, int]:
    """Tokens of a tree without branches that a tier holds, by node start."""
    return {
        view.start: len(view.tokens) for view in harness.core.snapshot() if (component, tier) in view.slots
    }


def test_host_copies_leave_suffix_first(build: BuildHarness) -> None:
    """All of it is on the device too; a prefix that descendants share is as fresh as the freshest."""
    cache = build(page_size=4, device=16, host=16)
    shared = count_to(8)
    for tail in (50, 60, 70):
        cache.serve([*shared, *[tail] * 8])
    cache.release(cache.match([*shared, *[50] * 8, 1]))
    for free in range(9, 17):
        cache.make_room("full", HOST, free)
        assert in_host_without_parent(cache.core) == []


@pytest.mark.parametrize("count", [1, 10])
def test_ten_pages_short_takes_exactly_ten(build: BuildHarness, count: int) -> None:
    """Granularity is the page: the oldest leaf has 300."""
    cache = build(device=300 + 50)
    cache.serve(count_to(300))
    cache.serve([*[800] * 50])
    lease = cache.match([900] * (count + 1))
    assert not cache.reserve(lease, count).short
    kept = sorted(len(v.tokens) for v in cache.core.snapshot() if ("full", DEVICE) in v.slots)
    assert kept == [50, 300 - count]


def test_leaf_granularity_takes_the_whole_leaf(build: BuildHarness) -> None:
    cache = build(device=350, granularity="leaf")
    cache.serve(count_to(300))
    cache.serve([800] * 50)
    lease = cache.match([900] * 11)
    assert not cache.reserve(lease, 10).short
    assert [len(v.tokens) for v in cache.core.snapshot()] == [50]


def test_what_is_locked_never_leaves(build: BuildHarness) -> None:
    cache = build(page_size=4, device=8)
    cache.serve(count_to(16))
    cache.serve([60] * 16)
    lease = cache.match(count_to(17))
    assert cache.empty("full", DEVICE) == 4
    assert cache.probe(count_to(17)).boundary == 16
    assert cache.settle(lease).boundary == 16
    other = cache.match([70] * 21)
    reserved = cache.reserve(other, 21)
    assert (reserved.short, reserved.tickets) == ({"full": 2}, ())
    cache.release(lease)
    assert not cache.reserve(other, 21).short


def test_write_through_backs_up_at_once(build: BuildHarness) -> None:
    cache = build(page_size=4, device=8, host=8)
    cache.serve(count_to(8))
    assert starts_in(cache, HOST) == {0: 8}


def test_selective_backs_up_at_the_second_use(build: BuildHarness) -> None:
    cache = build(page_size=4, device=8, host=8, write="write_through_selective")
    cache.serve(count_to(8))
    assert starts_in(cache, HOST) == {}
    cache.serve(count_to(9))
    assert starts_in(cache, HOST) == {0: 8}


def test_selective_drops_what_was_used_once(build: BuildHarness) -> None:
    cache = build(page_size=4, device=8, host=8, write="write_through_selective")
    cache.serve(count_to(8))
    room = cache.make_room("full", DEVICE, 8)
    assert (room.free_slots, room.tickets) == (8, ())
    assert cache.core.snapshot() == ()


def test_write_back_backs_up_on_eviction_and_frees_at_the_commit(build: BuildHarness) -> None:
    cache = build(page_size=4, device=8, host=8, write="write_back")
    cache.serve(count_to(8))
    assert starts_in(cache, HOST) == {}
    room = cache.make_room("full", DEVICE, 7)
    assert room.free_slots == 6
    assert len(room.tickets) == 1
    assert cache.probe(count_to(9)).source.device == 8, "still there while it is copied"
    cache.complete(room.tickets[0])
    assert cache.core.pool_count("full", DEVICE).free == 7
    found = cache.probe(count_to(9)).source
    assert (found.device, found.host) == (4, 4)


def test_an_aborted_demotion_leaves_the_page_where_it_was(build: BuildHarness) -> None:
    cache = build(page_size=4, device=8, host=8, write="write_back")
    cache.serve(count_to(8))
    before = cache.core.snapshot()
    room = cache.make_room("full", DEVICE, 8)
    for ticket in room.tickets:
        cache.abort(ticket)
    assert [(v.tokens, v.slots) for v in cache.core.snapshot()] == [(v.tokens, v.slots) for v in before]
    assert cache.core.pool_count("full", HOST).free == 8


@pytest.mark.parametrize("write", ["write_through", "write_through_selective", "write_back"])
def test_host_copies_of_what_l1_has_go_first(build: BuildHarness, write: str) -> None:
    """A duplicate goes before anything that lives only in L2, however old that is."""
    cache = build(page_size=4, device=8, host=4, write=write)
    old, new = count_to(8), [70] * 8
    for prompt in (old, [*old, 1]):
        cache.serve(prompt)
    cache.empty("full", DEVICE)
    assert cache.probe([*old, 2]).source.host == 8
    if write == "write_back":
        cache.serve(new)
        cache.empty("full", DEVICE)
        lease = cache.match([*new, 1])
        cache.restore(lease)
        cache.release(lease)
    else:
        for prompt in (new, [*new, 1]):
            cache.serve(prompt)
    assert cache.probe([*new, 2]).source.device == 8
    assert cache.core.pool_count("full", HOST).free == 0
    cache.make_room("full", HOST, 2)
    assert cache.probe([*old, 2]).source.host == 8
    assert cache.probe([*new, 2]).source.device == 8


def test_l2_only_tails_leave_by_recency(build: BuildHarness) -> None:
    cache = build(page_size=4, device=8, host=4)
    cache.serve([1] * 8)
    cache.serve([2] * 8)
    cache.release(cache.match([1] * 9))
    cache.empty("full", DEVICE)
    cache.make_room("full", HOST, 1)
    assert (cache.probe([1] * 9).boundary, cache.probe([2] * 9).boundary) == (8, 4)
    cache.make_room("full", HOST, 3)
    assert (cache.probe([1] * 9).boundary, cache.probe([2] * 9).boundary) == (4, 0)


@pytest.mark.parametrize("write", ["write_through", "write_back"])
def test_windows_and_states_leave_l1_with_their_path(build: BuildHarness, write: str) -> None:
    """A cascade: demoted if a lower tier has or gets a copy."""
    cache = build("full+swa+mamba", page_size=4, window=4, device=8, host=8, write=write)
    cache.serve(count_to(8), marks=[])
    assert cache.empty("full", DEVICE) == 8
    assert cache.core.pool_count("swa", DEVICE).free == 8
    assert cache.core.pool_count("mamba", DEVICE).free == 8
    found = cache.probe(count_to(9))
    assert (found.boundary, found.source.host) == (8, 8)


def test_windows_and_states_leave_with_the_last_of_their_path(build: BuildHarness) -> None:
    cache = build("full+swa+mamba", page_size=4, window=4, device=8, host=8)
    cache.serve(count_to(8), marks=[])
    cache.empty("full", DEVICE)
    cache.empty("full", HOST)
    for component in ("full", "swa", "mamba"):
        assert cache.core.pool_count(component, HOST).free == 8
        assert cache.core.pool_count(component, DEVICE).free == 8
    assert cache.core.snapshot() == ()


def test_a_window_is_evicted_on_its_own_and_leaves_the_path(build: BuildHarness) -> None:
    cache = build("full+swa", page_size=4, window=4, device=8)
    cache.serve(count_to(16), marks=[8])
    assert cache.empty("swa", DEVICE) == 8
    assert cache.core.pool_count("full", DEVICE).free == 4
    assert cache.probe(count_to(17)).fork == 16


def test_a_window_hit_refreshes_only_the_pages_it_needs(build: BuildHarness) -> None:
    cache = build("full+swa", page_size=4, window=4, device=8)
    cache.serve(count_to(16), marks=[8])
    cache.serve([60] * 8, marks=[])
    cache.release(cache.match([*count_to(8), 9]))
    cache.make_room("swa", DEVICE, 6)
    assert cache.probe(count_to(17)).boundary == 8, "the window at 16 was the oldest"
    cache.make_room("swa", DEVICE, 7)
    assert cache.probe([60] * 9).boundary == 0
    assert cache.probe(count_to(17)).boundary == 8


def drained(cache: Harness, component: str, tier: Tier, rounds: int = 30) -> int:
    """Free slots when room is asked for as the interface says: wait for the tickets, ask again."""
    capacity = cache.core.pool_count(component, tier).capacity
    for _ in range(rounds):
        room = cache.make_room(component, tier, capacity)
        if not room.tickets:
            return room.free_slots
        cache.complete_all(room.tickets)
    raise AssertionError(f"still waiting after {rounds} rounds")


@pytest.mark.parametrize("write", ["write_through", "write_through_selective", "write_back"])
@pytest.mark.parametrize("host", [1, 2, 3])
@pytest.mark.parametrize("model", ["full", "full+swa", "full+mamba"])
@pytest.mark.parametrize("has_store", [True, False])
def test_a_pool_without_locks_can_always_be_emptied(
    build: BuildHarness, model: str, write: str, host: int, has_store: bool
) -> None:
    """No pin may make a pool unable to progress: a path longer than L2, with everything unlocked."""
    settings = {"device": 8, "host": host, "has_store": has_store, "write": write}
    cache = build(model, page_size=1, window=1, **settings)
    for prompt in ([0, 0, 0, 0], [0, 0, 1, 1, 1]):
        cache.serve(prompt)
    for tier in (DEVICE, HOST):
        for name in model.split("+"):
            capacity = cache.core.pool_count(name, tier).capacity
            assert drained(cache, name, tier) == capacity


def test_room_names_the_transfer_that_it_waits_for(build: BuildHarness) -> None:
    """A state on its way down keeps its path page in L2; whoever wants the page waits for the state."""
    cache = build("full+mamba", page_size=1, device={"full": 4, "mamba": 2}, host=2, write="write_back")
    cache.serve([0, 0], marks=[1])
    cache.make_room("full", DEVICE, 4)
    assert cache.executor.pending
    assert drained(cache, "full", HOST) == 2


def test_a_window_never_outlives_one_of_its_two_paths(build: BuildHarness) -> None:
    """The draft model's path has no L2 and leaves L1 while a store of the other path pins the node."""
    settings = {"device": 4, "host": {"full": 4, "swa": 4}, "has_store": True, "write": "write_back"}
    cache = build("full+draft+swa", page_size=4, window=4, **settings)
    cache.serve(count_to(4), marks=[])
    cache.make_room("swa", DEVICE, 4)
    cache.complete_all()
    cache.persist()
    cache.complete(next(iter(cache.executor.pending)))
    assert cache.executor.pending, "the store is on its way"
    cache.make_room("draft", DEVICE, 4)
    cache.complete_all()
    cache.empty("draft", DEVICE)
    assert all(("swa", HOST) not in view.slots for view in cache.core.snapshot())


def test_a_window_never_outlives_its_path_while_it_is_stored(build: BuildHarness) -> None:
    """The path is in L1 and L3 and leaves L1; its window is in L2 alone and on its way to L3."""
    settings = {"device": 4, "host": {"swa": 2}, "has_store": True, "write": "write_back"}
    cache = build("full+swa", page_size=4, window=4, **settings)
    cache.serve(count_to(4), marks=[])
    cache.executor.seed_store("full", Namespace(), path_bytes(count_to(4)), [0])
    cache.core.learn(as_tokens(count_to(4)), {"full": {0: True}})
    cache.make_room("swa", DEVICE, 4)
    cache.complete_all()
    cache.make_room("swa", HOST, 2)
    assert cache.executor.pending, "the window is being stored"
    cache.make_room("full", DEVICE, 4)
    cache.complete_all()
    assert cache.empty("full", DEVICE) == 4
    assert all(("swa", HOST) not in view.slots for view in cache.core.snapshot())


@pytest.mark.parametrize("write", ["write_through", "write_through_selective", "write_back"])
def test_a_match_counts_as_a_use_in_every_write_mode(build: BuildHarness, write: str) -> None:
    cache = build(page_size=4, device=8, host=8, write=write)
    cache.serve(count_to(8))
    before = cache.core.snapshot()[0].num_uses
    cache.release(cache.match(count_to(9)))
    assert cache.core.snapshot()[0].num_uses == before + 1


def test_a_page_that_l3_lost_is_written_again_though_what_hangs_below_is_there(
    build: BuildHarness,
) -> None:
    cache = build("full", page_size=4, device=16, host=16, has_store=True)
    cache.serve(count_to(12))
    cache.persist_all()
    first, lost, last = cache.executor.keys.of("full", Namespace(), path_bytes(count_to(12)))
    del cache.executor.store[lost]
    cache.core.learn(np.array(count_to(12), dtype=np.int32), {"full": {1: False}})
    cache.serve(count_to(13))
    assert {first, lost, last} <= cache.executor.store.keys()
