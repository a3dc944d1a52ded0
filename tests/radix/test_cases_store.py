"""Reported failures of the third tier, as far as the tree decides them."""

from __future__ import annotations

import random

import pytest

from hicache.radix.actions import Fetch, Store
from hicache.testing.checks import check_idle
from hicache.testing.harness import BuildHarness, Harness
from hicache.testing.payloads import path_bytes
from hicache.testing.trees import count_to
from hicache.types import Namespace, TicketId, Tier

DEVICE, HOST, STORE = Tier.DEVICE, Tier.HOST, Tier.STORE


def seed(cache: Harness, length: int, component: str = "full", *, pages: range) -> None:
    cache.executor.seed_store(component, Namespace(), path_bytes(count_to(length)), pages)


def pending_of(cache: Harness, kind: type) -> list[TicketId]:
    return [ticket for ticket, act in cache.executor.pending.items() if isinstance(act, kind)]


def fetched_pages(cache: Harness, actions: tuple[object, ...], length: int) -> list[int]:
    keys = cache.executor.keys.of("full", Namespace(), path_bytes(count_to(length)))
    fetches = [action for action in actions if isinstance(action, Fetch)]
    return [keys.index(key) for fetch in fetches for key in fetch.keys]


@pytest.mark.parametrize("emptied", ["reset", "evicted"])
def test_l3_is_isolated_by_namespace(build: BuildHarness, emptied: str) -> None:
    """O-06."""
    cache = build(page_size=4, device=16, host=16, has_store=True)
    tenant_a = Namespace(salt="A")
    cache.serve(count_to(40), tenant_a)
    cache.persist_all()
    assert len(cache.executor.store) == 10
    if emptied == "reset":
        cache.reset()
    else:
        cache.empty("full", DEVICE)
        cache.empty("full", HOST)
    for namespace, found in ((Namespace(salt="B"), 0), (Namespace(), 0), (tenant_a, 40)):
        cache.learn(count_to(41), namespace)
        assert cache.probe(count_to(41), namespace).boundary == found
        lease = cache.match(count_to(41), namespace)
        assert cache.restore(lease).boundary == found
        cache.release(lease)


def test_a_split_during_a_store_keeps_both_fragments_pinned(build: BuildHarness) -> None:
    """O-08: host of three pages, two of them being stored when the node is split."""
    cache = build(page_size=64, device=8, host=3, has_store=True)
    cache.serve(count_to(128), is_idle_after=False)
    while not pending_of(cache, Store):
        cache.complete(next(iter(cache.executor.pending)))
    lease = cache.match([*count_to(64), *[7] * 64])
    assert len(cache.core.snapshot()) == 2
    cache.make_room("full", DEVICE, 8)
    before = {view.start: view.slots.get(("full", HOST)) for view in cache.core.snapshot()}
    assert cache.make_room("full", HOST, 2).free_slots == 1
    assert {v.start: v.slots.get(("full", HOST)) for v in cache.core.snapshot()} == before
    cache.complete_all()
    assert len(cache.executor.store) == 2
    cache.release(lease)
    check_idle(cache.core, cache.core.snapshot())
    assert cache.empty("full", HOST) == 3


def test_a_request_that_misses_in_l3_allocates_nothing(build: BuildHarness) -> None:
    """O-35."""
    cache = build(page_size=4, device=16, host=8, has_store=True)
    cache.serve([9] * 32)
    cache.empty("full", DEVICE)
    before = cache.core.snapshot()
    count = cache.core.pool_count("full", HOST)
    assert count.free == 0
    for i in range(100):
        prompt = [1000 + i] * 33
        assert cache.learn(prompt).num_keys == 8
        lease = cache.match(prompt)
        assert not cache.fetch(lease).tickets
        assert not cache.load(lease).tickets
        assert cache.settle(lease).boundary == 0
        cache.release(lease)
    assert cache.core.pool_count("full", HOST) == count
    assert [(v.tokens, v.slots) for v in cache.core.snapshot()] == [(v.tokens, v.slots) for v in before]


def test_a_hit_of_k_pages_allocates_exactly_k(build: BuildHarness) -> None:
    """O-35."""
    cache = build(page_size=4, device=16, host=8, has_store=True)
    seed(cache, 32, pages=range(3))
    cache.learn(count_to(33))
    lease = cache.match(count_to(33))
    assert lease.found.boundary == 12
    started = cache.fetch(lease)
    assert fetched_pages(cache, started.actions, 32) == [0, 1, 2]
    assert cache.core.pool_count("full", HOST).free == 5


def test_with_room_for_fewer_pages_the_first_are_fetched(build: BuildHarness) -> None:
    """O-35: contiguous from the start, not all or nothing."""
    cache = build(page_size=4, device=16, host=4, has_store=True)
    cache.serve([9] * 8)
    cache.empty("full", DEVICE)
    holder = cache.match([9] * 9)
    seed(cache, 16, pages=range(4))
    cache.learn(count_to(17))
    lease = cache.match(count_to(17))
    started = cache.fetch(lease)
    assert fetched_pages(cache, started.actions, 16) == [0, 1]
    cache.complete_all()
    cache.load(lease)
    cache.complete_all()
    assert cache.settle(lease).boundary == 8
    assert cache.restore(holder).boundary == 8


def test_a_stub_does_not_hide_l3(build: BuildHarness) -> None:
    """O-37: all tiers had it, L1 and L2 gave it up."""
    cache = build(page_size=4, device=8, host=8, has_store=True)
    cache.serve(count_to(16))
    cache.empty("full", DEVICE)
    cache.empty("full", HOST)
    lease = cache.match(count_to(17))
    assert lease.found.source.store == 16
    assert fetched_pages(cache, cache.fetch(lease).actions, 16) == [0, 1, 2, 3]
    assert cache.restore(lease).boundary == 16

    fresh = build(page_size=4, device=8, host=8, has_store=True, store=cache.executor.store)
    assert fresh.learn(count_to(17)).num_keys == 4
    lease = fresh.match(count_to(17))
    assert fetched_pages(fresh, fresh.fetch(lease).actions, 16) == [0, 1, 2, 3]
    assert fresh.restore(lease).boundary == 16


def test_only_what_l2_lost_is_read_from_l3(build: BuildHarness) -> None:
    """O-37, variant: the first two pages are still in L2."""
    cache = build(page_size=4, device=8, host=8, has_store=True)
    cache.serve(count_to(16))
    cache.empty("full", DEVICE)
    cache.make_room("full", HOST, 6)
    assert [page for page, _ in cache.store_query(count_to(17)).keys["full"]] == [2, 3]
    lease = cache.match(count_to(17))
    assert (lease.found.source.host, lease.found.source.store) == (8, 8)
    assert fetched_pages(cache, cache.fetch(lease).actions, 16) == [2, 3]
    assert cache.restore(lease).boundary == 16


def hot_head(build: BuildHarness) -> Harness:
    """T(512) whose first two pages stay hot on the device while the tail goes down to L3."""
    cache = build(page_size=4, device=140, host=140, has_store=True, write="write_back")
    cache.serve(count_to(512))
    cache.is_checked = False
    for free in range(16, 138, 8):
        cache.make_room("full", DEVICE, free)
        cache.complete_all()
        cache.release(cache.match(count_to(9)))
    for free in range(20, 141, 10):
        while cache.make_room("full", HOST, free).tickets:
            cache.complete_all()
    cache.is_checked = True
    cache.check()
    return cache


def test_no_page_reaches_l3_before_its_predecessors(build: BuildHarness) -> None:
    """O-39: whenever the process dies, what L3 holds is usable from the first page on."""
    cache = hot_head(build)
    assert cache.probe(count_to(9)).source.device >= 8, "the head stayed hot"
    found = cache.executor.keys.of("full", Namespace(), path_bytes(count_to(512)))
    stored = [index for index, key in enumerate(found) if key in cache.executor.store]
    assert stored == list(range(128)), "the tail went down to L3, and took the head along"


def test_a_graceful_flush_leaves_all_pages_in_l3(build: BuildHarness) -> None:
    """O-39: the hot head too; a new process finds 128 pages."""
    cache = hot_head(build)
    cache.persist_all()
    fresh = build(page_size=4, device=140, host=140, has_store=True, store=cache.executor.store)
    fresh.learn(count_to(513))
    assert fresh.probe(count_to(513)).boundary == 512
    lease = fresh.match(count_to(513))
    assert fresh.restore(lease).boundary == 512


@pytest.mark.parametrize("seed", range(4))
def test_a_crash_at_any_moment_leaves_a_usable_prefix_in_l3(build: BuildHarness, seed: int) -> None:
    """O-39: stores in random order, some fail; what is in L3 is closed under parent all the time."""
    dice = random.Random(seed)
    cache = build(page_size=4, device=40, host=12, has_store=True, write="write_back")
    for _ in range(6):
        cache.serve([dice.randrange(2) for _ in range(4 * dice.randrange(4, 20))], is_idle_after=False)
        cache.persist()
        for _ in range(dice.randrange(12)):
            if cache.executor.pending:
                ticket = dice.choice(list(cache.executor.pending))
                (cache.abort if dice.random() < 0.2 else cache.complete)(ticket)
            held = {stamp.tokens for stamp in cache.executor.store.values()}
            assert all(tokens[:-16] in held for tokens in held if len(tokens) > 16)


def test_pages_behind_a_hole_in_l3_are_no_hit(build: BuildHarness) -> None:
    """O-39, crash variant: the first two of 128 pages are missing."""
    cache = build(page_size=4, device=128, host=128, has_store=True)
    seed(cache, 512, pages=range(2, 128))
    cache.learn(count_to(513))
    assert cache.probe(count_to(513)).boundary == 0
    lease = cache.match(count_to(513))
    assert not cache.fetch(lease).tickets


@pytest.mark.parametrize("model", ["full+swa", "full+mamba", "full+swa+mamba"])
def test_a_store_is_issued_only_when_the_page_it_names_as_parent_is_in_l3(
    build: BuildHarness, model: str
) -> None:
    """A window page or state hangs on its path page, which is committed first."""
    cache = build(model, page_size=4, window=8, device=16, host=16, has_store=True)
    cache.serve(count_to(16), marks=[8])
    cache.persist_all()
    assert cache.executor.stored_early == []


def test_write_through_keeps_in_l2_what_waits_for_l3(build: BuildHarness) -> None:
    """Two pages are queued for L3, the first is on its way; L2 is asked for both."""
    cache = build(page_size=4, device=4, host=2, has_store=True)
    cache.serve(count_to(8), is_idle_after=False)
    while not pending_of(cache, Store):
        cache.complete(next(iter(cache.executor.pending)))
    assert cache.make_room("full", HOST, 2).free_slots == 0
    cache.complete_all()
    assert len(cache.executor.store) == 2
    assert cache.empty("full", HOST) == 2


def test_write_back_stores_what_l3_lacks_before_l2_gives_it_up(build: BuildHarness) -> None:
    cache = build(page_size=4, device=4, host=4, has_store=True, write="write_back")
    cache.serve(count_to(8))
    cache.empty("full", DEVICE)
    assert not cache.executor.store
    room = cache.make_room("full", HOST, 4)
    assert room.tickets
    assert room.free_slots == 2
    for _ in range(4):
        cache.complete_all()
        cache.make_room("full", HOST, 4)
    assert len(cache.executor.store) == 2
    assert cache.core.pool_count("full", HOST).free == 4
    assert cache.probe(count_to(9)).source.store == 8


def test_a_failed_store_is_not_believed_to_be_in_l3(build: BuildHarness) -> None:
    cache = build(page_size=4, device=4, host=4, has_store=True)
    cache.serve(count_to(8), is_idle_after=False)
    while not pending_of(cache, Store):
        cache.complete(next(iter(cache.executor.pending)))
    while pending_of(cache, Store):
        cache.abort(pending_of(cache, Store)[0])
    assert not any(tier == STORE for tier, _, _ in cache.replayed)
    check_idle(cache.core, cache.core.snapshot())
    assert cache.probe(count_to(9)).source.device == 8


def test_a_page_that_l3_lost_is_no_longer_believed_in(build: BuildHarness) -> None:
    """abort(fetch, done=k): k pages arrived, page k is not in L3."""
    cache = build(page_size=4, device=8, host=8, has_store=True)
    seed(cache, 16, pages=range(4))
    cache.learn(count_to(17))
    lease = cache.match(count_to(17))
    (ticket,) = cache.fetch(lease).tickets
    cache.abort(ticket, 2)
    assert cache.core.pool_count("full", HOST).free == 6
    assert cache.probe(count_to(17)).boundary == 8
    cache.load(lease)
    cache.complete_all()
    assert cache.settle(lease).boundary == 8


def test_a_fetch_that_timed_out_is_still_believed_in(build: BuildHarness) -> None:
    """abort(fetch, done=k, missing=False): the page may well be there next time."""
    cache = build(page_size=4, device=8, host=8, has_store=True)
    seed(cache, 16, pages=range(4))
    cache.learn(count_to(17))
    lease = cache.match(count_to(17))
    (ticket,) = cache.fetch(lease).tickets
    cache.abort(ticket, 2, missing=False)
    found = cache.probe(count_to(17))
    assert (found.boundary, found.source.host, found.source.store) == (16, 8, 8)
    assert cache.restore(lease).boundary == 16


def test_a_belief_that_proved_wrong_is_dropped(build: BuildHarness) -> None:
    cache = build(page_size=4, device=8, host=8, has_store=True)
    seed(cache, 16, pages=range(4))
    cache.learn(count_to(17))
    assert cache.probe(count_to(17)).boundary == 16
    keys = cache.executor.keys.of("full", Namespace(), path_bytes(count_to(16)))
    cache.executor.lose(keys[1])
    cache.learn(count_to(17))
    assert cache.probe(count_to(17)).boundary == 4


def test_a_belief_about_part_of_a_node_is_dropped_too(build: BuildHarness) -> None:
    """The probe of a shorter prompt asks for the first pages of a node that goes on."""
    cache = build(page_size=4, device=8, host=8, has_store=True)
    seed(cache, 16, pages=range(4))
    cache.learn(count_to(17))
    keys = cache.executor.keys.of("full", Namespace(), path_bytes(count_to(16)))
    cache.executor.lose(keys[1])
    cache.learn(count_to(9))
    assert cache.probe(count_to(9)).boundary == 4
    assert cache.probe(count_to(17)).boundary == 4


def test_beliefs_beyond_the_limit_are_forgotten_oldest_first(build: BuildHarness) -> None:
    cache = build(page_size=4, device=8, host=8, has_store=True, max_stored_pages=4)
    for name in (1, 2, 3):
        cache.executor.seed_store("full", Namespace(), path_bytes([name] * 8), range(2))
        cache.learn([name] * 9)
    assert [cache.probe([name] * 9).boundary for name in (1, 2, 3)] == [0, 8, 8]
    assert len(cache.executor.store) == 6, "the store keeps its bytes"


@pytest.mark.parametrize("model", ["full", "full+swa", "full+mamba"])
def test_what_was_fetched_for_a_request_stays_until_it_is_loaded(build: BuildHarness, model: str) -> None:
    """An open lease locks what it needs in every tier, also where it came to only later."""
    cache = build(model, page_size=4, window=4, device=8, host=8, has_store=True)
    for name in model.split("+"):
        seed(cache, 16, name, pages=range(4))
    cache.learn(count_to(17))
    lease = cache.match(count_to(17))
    cache.complete_all(cache.fetch(lease).tickets)
    for name in model.split("+"):
        cache.make_room(name, HOST, 8)
    found = cache.probe(count_to(17))
    assert (found.boundary, found.source.host) == (16, 16)
    assert cache.restore(lease).boundary == 16


def test_a_load_that_makes_room_never_drops_what_it_is_about_to_load(build: BuildHarness) -> None:
    """L1 and L2 are full: the victim in L1 goes down to L2, and must not push out the fetched pages."""
    cache = build(page_size=4, device=4, host=4, has_store=True, write="write_back")
    seed(cache, 12, pages=range(3))
    cache.serve([70] * 16)
    cache.learn(count_to(13))
    lease = cache.match(count_to(13))
    cache.complete_all(cache.fetch(lease).tickets)
    for _ in range(8):
        cache.complete_all(cache.load(lease).tickets)
    assert cache.settle(lease).boundary == 12
