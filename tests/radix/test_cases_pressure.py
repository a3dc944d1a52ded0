"""Reported failures under pressure: eviction, write policies, pins, reset."""

from __future__ import annotations

import random

import pytest

from hicache.radix.actions import Copy
from hicache.radix.interface import NodeView
from hicache.testing.checks import check_idle, in_host_without_parent
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


def test_a_child_is_never_backed_up_before_its_parent(build: BuildHarness) -> None:
    """O-10: the only host page is pinned when the parent asks, and free when the child does."""
    settings = {"page_size": 4, "device": 16, "host": 1, "has_store": True}
    cache = build(**settings)
    cache.serve([90] * 4, is_idle_after=False)
    cache.complete(next(iter(cache.executor.pending)))
    assert cache.executor.pending, "the store of the host's only page is on its way"

    cache.serve(count_to(4), is_idle_after=False)
    cache.serve(count_to(8), is_idle_after=False)
    assert starts_in(cache, HOST) == {0: 4}, "that is the other request's page"
    cache.complete_all()
    cache.empty("full", HOST)
    assert cache.core.pool_count("full", HOST).free == 1
    cache.serve(count_to(12))
    views = {view.node: view for view in cache.core.snapshot()}
    for view in views.values():
        if ("full", HOST) in view.slots and view.parent is not None:
            above = views[view.parent].slots
            assert ("full", HOST) in above or ("full", STORE) in above, "the parent has a lower copy"
    cache.empty("full", DEVICE)
    assert cache.probe(count_to(13)).boundary == 12


@pytest.mark.parametrize("write", ["write_through", "write_through_selective"])
@pytest.mark.parametrize("host", [1, 2])
def test_a_backup_never_takes_the_room_of_its_own_ancestors(
    build: BuildHarness, host: int, write: str
) -> None:
    """O-10, without L3: L2 is shorter than the path; its tail is refused, its head stays."""
    cache = build(page_size=4, device=16, host=host, write=write)
    for length in (4, 8, 12, 13, 14):
        cache.serve(count_to(length))
        assert in_host_without_parent(cache.core) == []
    cache.empty("full", DEVICE)
    assert cache.probe(count_to(13)).source.host == 4 * host


@pytest.mark.parametrize("host", [1, 2, 4])
def test_a_refill_below_a_device_only_anchor_cannot_break_its_eviction(
    build: BuildHarness, host: int
) -> None:
    """O-10: A is in L1 only, B comes from L3 into L2 below it; then A leaves L1."""
    cache = build(page_size=4, device=4, host=host, has_store=True, write="write_back")
    cache.serve(count_to(4))
    cache.executor.seed_store("full", Namespace(), path_bytes(count_to(8)), range(2))
    cache.learn(count_to(9))
    lease = cache.match(count_to(9))
    assert (lease.found.source.device, lease.found.source.store) == (4, 4)
    cache.fetch(lease)
    cache.complete_all()
    cache.release(lease)
    assert cache.empty("full", DEVICE) == 4
    lease = cache.match(count_to(9))
    assert lease.found.boundary == 8, "all of it is in L3, whatever L2 could keep"
    assert cache.restore(lease).boundary == 8


def test_a_backup_without_room_never_makes_a_host_node_without_pages(build: BuildHarness) -> None:
    """O-25."""
    cache = build(page_size=4, device=4, host=1, write="write_back")
    cache.serve([90] * 4)
    assert cache.empty("full", DEVICE) == 4
    holder = cache.match([90] * 5)
    assert holder.found.source.host == 4, "the host's only page is locked"

    cache.serve(count_to(4))
    dropped = cache.empty("full", DEVICE)
    held = [view for view in cache.core.snapshot() if view.tokens == tuple(count_to(4))]
    assert (dropped, bool(held)) in {(4, False), (3, True)}
    assert cache.probe(count_to(5)).boundary == (0 if dropped == 4 else 4)
    assert cache.restore(holder).boundary == 4


def leaves(views: tuple[NodeView, ...]) -> list[NodeView]:
    """Nodes in L1 without a child in L1, from scratch."""
    here = [view for view in views if ("full", DEVICE) in view.slots]
    parents = {view.parent for view in here}
    return [view for view in here if view.node not in parents]


ORDERS = {
    "lru": lambda view: (view.last_use,),
    "mru": lambda view: (-view.last_use,),
    "lfu": lambda view: (view.num_uses, view.last_use),
}


@pytest.mark.parametrize("eviction", ORDERS)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_eviction_order_is_that_of_a_naive_reference(
    build: BuildHarness, eviction: str, seed: int
) -> None:
    """O-28: every victim is the tail of the leaf that a full scan picks."""
    dice = random.Random(seed)
    cache = build(page_size=2, device=400, eviction=eviction)
    prompts = [[dice.randrange(3) for _ in range(dice.randrange(2, 30))] for _ in range(60)]
    cache.is_checked = False
    for prompt in prompts:
        cache.serve(prompt)
    for prompt in dice.sample(prompts, 20):
        cache.release(cache.match(prompt))
    cache.is_checked = True
    while count := cache.core.pool_count("full", DEVICE).evictable:
        before = cache.core.snapshot()
        victim = min(leaves(before), key=ORDERS[eviction])
        page = victim.slots["full", DEVICE][-1]
        cache.make_room("full", DEVICE, cache.core.pool_count("full", DEVICE).free + 1)
        after = {slot for v in cache.core.snapshot() for slot in v.slots.get(("full", DEVICE), ())}
        gone = {slot for v in before for slot in v.slots["full", DEVICE]} - after
        assert gone == {page}
        assert cache.core.pool_count("full", DEVICE).evictable == count - 1


def test_evicting_costs_evaluations_by_the_victim_and_not_by_the_tree(build: BuildHarness) -> None:
    """O-28: 100 times evict one leaf and insert one."""

    def evaluations(num_leaves: int) -> int:
        cache = build(page_size=64, device=num_leaves, is_checked=False, emit_events=False)
        for leaf in range(num_leaves):
            cache.serve([leaf] * 64)
        assert cache.core.pool_count("full", DEVICE).free == 0
        before = cache.core.counters()["priority_evaluations"]
        for step in range(100):
            assert cache.core.make_room("full", DEVICE, 1).free_slots == 1
            cache.serve([num_leaves + step] * 64)
            assert cache.core.probe(cache.match([step] * 65).tokens).boundary == 0, "oldest first"
        return cache.core.counters()["priority_evaluations"] - before

    assert evaluations(5_000) == evaluations(500) <= 100 * 10


@pytest.mark.parametrize("outcome", ["commit", "abort"])
def test_the_source_of_a_load_stays_until_the_copy_ends(build: BuildHarness, outcome: str) -> None:
    """O-29."""
    cache = build(page_size=4, device=4, host=2)
    cache.serve(count_to(8))
    cache.empty("full", DEVICE)
    lease = cache.match(count_to(9))
    (ticket,) = cache.load(lease).tickets
    cache.release(lease)
    assert cache.make_room("full", HOST, 2).free_slots == 0
    if outcome == "commit":
        cache.complete(ticket)
        again = cache.match(count_to(9))
        assert again.found.source.device == 8
        cache.release(again)
    else:
        cache.abort(ticket)
    check_idle(cache.core, cache.core.snapshot())
    assert cache.make_room("full", HOST, 2).free_slots == 2


def script(cache: Harness) -> list[object]:
    """Some of everything; returns what a caller sees, without numbers that never start again."""
    trace: list[object] = []
    rng = random.Random(5)
    for _ in range(12):
        prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 24))]
        served = cache.serve(prompt, is_idle_after=rng.random() < 0.5)
        trace.append((served.reused, served.found, served.released.published))
        trace += [cache.core.pool_count("full", tier) for tier in (DEVICE, HOST)]
    cache.complete_all()
    for view in cache.core.snapshot():
        trace.append((view.start, view.tokens, dict(view.slots), view.num_uses, view.mark))
    return trace


@pytest.mark.parametrize("model", ["full", "full+swa+mamba"])
def test_after_a_reset_everything_is_as_new(build: BuildHarness, model: str) -> None:
    """O-31."""
    settings = {"page_size": 4, "device": 12, "host": 8, "has_store": True}
    cache = build(model, **settings)
    path = path_bytes(count_to(12))
    cache.executor.seed_store("full", Namespace(), path, range(3))
    cache.learn(count_to(13))
    lease = cache.match(count_to(13))
    cache.fetch(lease)
    cache.serve([80] * 6, is_idle_after=False)
    late = list(cache.core.in_flight())
    assert late

    cache.reset()
    cache.reset()
    assert cache.core.in_flight() == ()
    assert cache.core.snapshot() == ()
    for ticket in late:
        assert cache.core.commit(ticket) == ()
        assert cache.core.abort(ticket, 0) == ()
    cache.check()
    for tier in (DEVICE, HOST):
        count = cache.core.pool_count("full", tier)
        assert count.free == count.capacity

    cache.executor.store.clear()
    assert script(cache) == script(build(model, **settings))


def test_pages_of_a_preempted_request_are_withheld_until_their_copy_ends(build: BuildHarness) -> None:
    """O-38."""
    cache = build(page_size=4, device=2, host=4, write="write_back")
    cache.serve(count_to(8))
    other = cache.match([50] * 8)
    cache.settle(other)
    short = cache.reserve(other, 8)
    assert short.short == {"full": 2}
    assert short.tickets, "the copies that will free them"
    back = cache.match(count_to(9))
    assert back.found.boundary == 8, "still on the device"
    cache.release(back)
    assert cache.reserve_waiting(other, 8)
    cache.compute(other, 8)
    cache.release(other, 8)
    cache.complete_all()
    again = cache.match(count_to(9))
    assert again.found.source.host == 8
    assert cache.restore(again).boundary == 8


def test_a_request_that_comes_back_during_its_backup_is_served(build: BuildHarness) -> None:
    """O-38: published, preempted, admitted again while the copy runs."""
    cache = build("full+mamba", page_size=4, device=6, host=6)
    lease = cache.match(count_to(9))
    cache.reserve(lease, 9)
    cache.compute(lease, 8)
    cache.insert(lease)
    cache.complete_all(lease.waits)
    assert any(isinstance(a, Copy) for a in cache.executor.pending.values()), "backup pending"
    cache.release(lease)
    back = cache.match(count_to(9))
    assert cache.restore(back).boundary == 8
    cache.complete_all()
    cache.reserve(back, 1)
    cache.compute(back, 9)
    cache.release(back, 9)
    cache.complete_all()
    check_idle(cache.core, cache.core.snapshot())


def test_what_leaves_is_the_tail_and_what_stays_is_of_use(build: BuildHarness) -> None:
    """O-47: a chain of three pages, room for one wanted: the last goes, the first two are a hit."""
    cache = build(page_size=4, device=3)
    cache.serve(count_to(12))
    cache.make_room("full", DEVICE, 1)
    assert cache.probe(count_to(13)).boundary == 8


def test_a_chain_inserted_in_pieces_leaves_from_its_tail(build: BuildHarness) -> None:
    """O-47: [1..4], then [5..8]; four pages leave, four are a hit."""
    cache = build(page_size=1, device=8)
    cache.serve(count_to(8), marks=[4])
    cache.make_room("full", DEVICE, 4)
    assert cache.probe(count_to(9)).boundary == 4


def test_using_the_tail_in_l2_keeps_its_head_in_l1_fresh(build: BuildHarness) -> None:
    """O-47: the head served by L1 is as recent as the tail that came from L2."""
    cache = build(page_size=4, device=6, host=8)
    cache.serve(count_to(16))
    cache.make_room("full", DEVICE, 4)  # the tail is in L2 only
    cache.complete_all()
    cache.serve(count_to(1008, start=1001))
    lease = cache.match(count_to(17))
    assert cache.restore(lease).boundary == 16
    cache.release(lease)
    cache.make_room("full", DEVICE, 2)
    cache.complete_all()
    assert cache.probe(count_to(17)).source.device >= 8


def test_a_new_entry_is_the_most_recent(build: BuildHarness) -> None:
    """O-47."""
    cache = build(page_size=4, device=4)
    for first in (1, 1001):
        cache.serve(count_to(first + 7, start=first))
    cache.make_room("full", DEVICE, 2)
    assert cache.probe([*count_to(1008, start=1001), 1]).boundary == 8
    assert cache.probe(count_to(9)).boundary == 0
