"""Reported failures of the tree itself: match, split, insert, namespaces, counts."""

from __future__ import annotations

import random

import pytest

from hicache.events import ResidencyChange
from hicache.radix.actions import Copy
from hicache.testing.checks import check_idle
from hicache.testing.harness import BuildHarness, Harness
from hicache.testing.payloads import path_bytes
from hicache.testing.trees import UNEQUAL_NAMESPACES, count_to
from hicache.types import Namespace, Tier

DEVICE, HOST, STORE = Tier.DEVICE, Tier.HOST, Tier.STORE


def slots_in_order(harness: Harness, component: str, tier: Tier) -> list[int]:
    """All slots of a tree without branches, from the root."""
    views = sorted(harness.core.snapshot(), key=lambda view: view.start)
    return [slot for view in views for slot in view.slots.get((component, tier), ())]


def test_a_prefix_computed_again_moves_its_slots_into_the_tree_exactly_once(build: BuildHarness) -> None:
    """O-01."""
    cache = build(device=16, host=16)
    cache.serve(count_to(8))
    assert cache.empty("full", DEVICE) == 16

    lease = cache.match(count_to(8))
    cache.settle(lease)
    assert lease.boundary == 0, "nothing was loaded back"
    cache.reserve(lease, 8)
    slots = list(lease.slots["full"])
    cache.compute(lease, 8)
    released = cache.release(lease, 8)
    cache.complete_all()

    assert (released.adopted_tokens, released.duplicate_tokens, released.new_tokens) == (8, 0, 0)
    assert slots_in_order(cache, "full", DEVICE) == slots
    count = cache.core.pool_count("full", DEVICE)
    assert (count.free, count.evictable) == (8, 8)
    again = cache.match(count_to(9))
    assert cache.core.lease_slots(again.lease, "full").tolist() == slots
    cache.release(again)
    assert cache.empty("full", DEVICE) == 16


@pytest.mark.parametrize(
    ("length", "cap", "reused"),
    [(63, True, 0), (63, False, 0), (64, True, 0), (64, False, 64), (127, True, 64), (65, True, 64)],
)
def test_a_key_is_floored_to_a_page_before_it_descends(
    build: BuildHarness, length: int, cap: bool, reused: int
) -> None:
    """O-02."""
    cache = build(page_size=64, device=8)
    cache.serve(count_to(64))
    lease = cache.match(count_to(length), cap=cap)
    assert lease.found.boundary == reused
    assert [len(view.tokens) for view in cache.core.snapshot()] == [64]
    cache.release(lease)
    assert [len(view.tokens) for view in cache.core.snapshot()] == [64]
    assert cache.empty("full", DEVICE) == 8


@pytest.mark.parametrize(
    ("page_size", "written", "reused"), [(1, 150, 150), (1, 149, 149), (16, 150, 144), (16, 149, 144)]
)
def test_the_second_turn_reuses_prompt_and_answer_as_far_as_written(
    build: BuildHarness, page_size: int, written: int, reused: int
) -> None:
    """O-03."""
    cache = build(page_size=page_size, device=256)
    cache.serve(count_to(100), output=count_to(150, start=101), written=written)
    assert cache.serve(count_to(200)).reused == reused


@pytest.mark.parametrize("writer", UNEQUAL_NAMESPACES)
def test_only_an_equal_namespace_hits(build: BuildHarness, writer: str) -> None:
    """O-05."""
    cache = build(page_size=16, device=4)
    cache.serve(count_to(16), UNEQUAL_NAMESPACES[writer])
    boundaries = {
        reader: cache.probe(count_to(17), namespace).boundary
        for reader, namespace in UNEQUAL_NAMESPACES.items()
    }
    assert boundaries == {**dict.fromkeys(UNEQUAL_NAMESPACES, 0), writer: 16}
    assert cache.match(count_to(17), UNEQUAL_NAMESPACES[writer]).found.boundary == 16


def test_equal_pages_of_different_namespaces_have_different_keys(build: BuildHarness) -> None:
    """O-05."""
    plain, path = build(page_size=16, device=4).executor.keys, path_bytes(count_to(16))
    keys = {plain.of("full", namespace, path) for namespace in UNEQUAL_NAMESPACES.values()}
    assert len(keys) == len(UNEQUAL_NAMESPACES)


def test_looking_up_what_l1_has_never_leaves_a_pin(build: BuildHarness) -> None:
    """O-55."""
    cache = build(page_size=10, device=128, host=128, is_checked=False)
    cache.serve(count_to(1000))
    for _ in range(1000):
        lease = cache.match(count_to(1001))
        assert lease.found.boundary == 1000
        assert cache.plan(lease) == ()
        assert not cache.fetch(lease).tickets
        assert not cache.load(lease).tickets
        cache.release(lease)
    cache.is_checked = True
    cache.check()
    check_idle(cache.core, cache.core.snapshot())
    assert cache.core.pool_count("full", DEVICE).evictable == 100
    assert cache.core.pool_count("full", HOST).evictable == 100
    assert cache.empty("full", DEVICE) == 128


def test_tokens_by_source_sum_to_the_prompt(build: BuildHarness) -> None:
    """O-64: L1 has 48 tokens, L3 has 64, the prompt has 80."""
    cache = build(page_size=16, device=16, host=16, has_store=True, write="write_back")
    cache.serve(count_to(48))
    prompt = count_to(80)
    cache.executor.seed_store("full", Namespace(), path_bytes(count_to(64)), range(4))
    cache.learn(prompt)
    lease = cache.match(prompt)
    assert (lease.found.source.device, lease.found.source.store) == (48, 16)
    assert lease.found.source.host == 0
    settled = cache.restore(lease)
    assert settled.boundary == 64
    assert settled.source == lease.found.source
    assert len(prompt) - settled.boundary == 16


@pytest.mark.parametrize("model", ["full", "full+swa", "full+swa+mamba"])
def test_tokens_by_source_of_fifty_requests_at_once_are_never_negative(
    build: BuildHarness, model: str, seeded_random: random.Random
) -> None:
    """O-64."""
    cache = build(model, page_size=4, device=400, host=20, has_store=True)
    served = [[seeded_random.randrange(2) for _ in range(seeded_random.randrange(1, 24))] for _ in range(50)]
    for prompt in served[::3]:
        cache.serve(prompt)
    leases = [cache.match(prompt) for prompt in served]
    seeded_random.shuffle(leases)
    for lease in leases:
        settled = cache.restore(lease)
        source = settled.source
        assert min(source.device, source.host, source.store) >= 0
        assert source.total == settled.boundary < len(lease.tokens)
        cache.release(lease)
    cache.complete_all()
    check_idle(cache.core, cache.core.snapshot())


def test_a_block_is_known_until_it_has_left_every_tier(build: BuildHarness) -> None:
    """O-68: a consumer replays store(dev), store(host), remove(dev), remove(host)."""
    cache = build(page_size=4, device=4, host=4)
    key = cache.executor.keys.of("full", Namespace(), path_bytes(count_to(4)))[0]
    cache.serve(count_to(4))
    cache.empty("full", DEVICE)
    assert cache.replayed == {(HOST, "full", key)}
    cache.empty("full", HOST)
    assert cache.replayed == set()
    assert [(event.change, event.tier, event.keys) for event in cache.events] == [
        (ResidencyChange.STORED, DEVICE, (key,)),
        (ResidencyChange.STORED, HOST, (key,)),
        (ResidencyChange.REMOVED, DEVICE, (key,)),
        (ResidencyChange.REMOVED, HOST, (key,)),
    ]


def test_a_load_back_announces_parents_first(build: BuildHarness) -> None:
    """O-68."""
    cache = build(page_size=4, device=8, host=8)
    cache.serve(count_to(8))
    cache.serve([*count_to(4), 9, 9, 9, 9])
    keys = cache.executor.keys.of("full", Namespace(), path_bytes(count_to(8)))
    cache.empty("full", DEVICE)
    cache.events.clear()
    lease = cache.match(count_to(9))
    cache.restore(lease)
    stored = [event for event in cache.events if event.tier == DEVICE]
    assert all(event.change is ResidencyChange.STORED for event in stored)
    assert [key for event in stored for key in event.keys] == list(keys)


@pytest.mark.parametrize("model", ["full", "full+swa", "full+mamba"])
def test_a_split_emits_nothing(build: BuildHarness, model: str) -> None:
    """O-68."""
    cache = build(model, page_size=4, window=4, device=8, host=8)
    cache.serve(count_to(8), marks=[])
    before = cache.residency()
    cache.events.clear()
    lease = cache.match([*count_to(4), 9, 9, 9, 9, 9])
    inner = cache.match(count_to(8))
    assert cache.events == []
    assert cache.residency() == before
    cache.release(lease)
    cache.release(inner)


def test_fifty_requests_wait_for_one_load_together(build: BuildHarness) -> None:
    """O-69."""
    cache = build(page_size=100, device=170, host=100)
    shared = count_to(10_000)
    cache.serve(shared)
    cache.empty("full", DEVICE)
    cache.is_checked = False

    leases = [cache.match([*shared, 20_000 + i]) for i in range(50)]
    started = [cache.load(lease) for lease in leases]
    copies = [action for start in started for action in start.actions]
    assert all(isinstance(copy, Copy) for copy in copies)
    assert sum(copy.num_slots for copy in copies if isinstance(copy, Copy)) == 100
    tickets = {copy.ticket for copy in copies if isinstance(copy, Copy)}
    assert all(set(start.tickets) == tickets for start in started)

    other = cache.match([30_000] * 150)
    assert cache.settle(other).boundary == 0
    assert not cache.reserve(other, 150).short, "other requests are admitted meanwhile"
    cache.compute(other, 150)
    cache.release(other, 150)

    for ticket in tickets:
        cache.complete(ticket)
    assert [cache.settle(lease).boundary for lease in leases] == [10_000] * 50
    assert not cache.load(leases[0]).tickets
    for lease in leases:
        cache.release(lease)
    cache.is_checked = True
    cache.check()


def test_a_split_moves_a_running_backup_to_both_fragments(build: BuildHarness) -> None:
    """O-07."""
    cache = build(page_size=64, device=8, host=8)
    cache.serve(count_to(128), is_idle_after=False)
    keys = cache.executor.keys.of("full", Namespace(), path_bytes(count_to(128)))
    assert cache.executor.pending, "the backup is on its way"

    lease = cache.match([*count_to(64), *[7] * 64])
    assert len(cache.core.snapshot()) == 2
    cache.events.clear()
    cache.complete_all()
    held = {view.start: view.slots.get(("full", HOST), ()) for view in cache.core.snapshot()}
    assert {start: len(slots) for start, slots in held.items()} == {0: 1, 64: 1}
    announced = [key for event in cache.events if event.tier == HOST for key in event.keys]
    assert announced == list(keys), "parent first, both of them"

    cache.release(lease)
    check_idle(cache.core, cache.core.snapshot())


def test_a_namespace_is_a_subtree_of_its_own(build: BuildHarness) -> None:
    cache = build(page_size=4, device=16)
    for namespace in (Namespace(), Namespace(salt=""), Namespace(salt="a")):
        cache.serve(count_to(8), namespace)
    views = cache.core.snapshot()
    assert sorted(str(view.namespace) for view in views) == sorted(
        str(namespace) for namespace in (Namespace(), Namespace(salt=""), Namespace(salt="a"))
    )
    assert [len(view.tokens) for view in views] == [8, 8, 8]
