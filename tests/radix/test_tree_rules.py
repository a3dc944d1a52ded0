"""The tree's own rules: splits, merges, recency, aborted work, re-pointing, misuse (DESIGN 4 and 5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hicache.errors import ConfigError, ProtocolError
from hicache.radix.actions import Free
from hicache.radix.interface import NodeView
from hicache.testing.checked_core import OpenLease
from hicache.testing.checks import check_idle
from hicache.testing.harness import BuildHarness, Harness
from hicache.testing.trees import count_to, tree_config
from hicache.types import LeaseId, TicketId, Tier

DEVICE, HOST, STORE = Tier.DEVICE, Tier.HOST, Tier.STORE


def by_start(cache: Harness) -> dict[int, NodeView]:
    return {view.start: view for view in cache.core.snapshot()}


def test_a_split_hands_both_halves_recency_uses_and_locks(build: BuildHarness) -> None:
    cache = build("full+swa", page_size=4, window=16, device=32)
    cache.serve(count_to(16), marks=[])
    holder = cache.match(count_to(17))
    whole = by_start(cache)[0]
    tick = cache.match([70] * 4)
    cache.release(tick)
    other = cache.match([*count_to(8), 99])
    halves = by_start(cache)
    suffix, prefix = halves[8], halves[0]
    assert suffix.node == whole.node, "the suffix keeps the node's identity"
    assert (suffix.last_use, suffix.num_uses) == (whole.last_use, whole.num_uses)
    assert suffix.locks == whole.locks
    assert {name: count - whole.locks[name] for name, count in prefix.locks.items()} == {
        "full": 1,
        "swa": 1,
    }, "the prefix has the locks of the whole and the other request's"
    assert prefix.num_uses == whole.num_uses + 1, "the other request used it, once more"
    cache.release(other)
    cache.empty("full", DEVICE)
    cache.empty("swa", DEVICE)
    assert cache.settle(holder).boundary == 16, "both halves are still held"


def test_a_foreign_match_never_refreshes_an_untouched_suffix(build: BuildHarness) -> None:
    cache = build(page_size=4, device=16)
    cache.serve(count_to(16))
    before = by_start(cache)[0]
    cache.serve([70] * 16)
    cache.release(cache.match([*count_to(8), 99]))
    tail = max(cache.core.snapshot(), key=lambda view: (view.tokens[-1] == 16, view.start))
    assert tail.last_use == before.last_use or tail.start == 0
    cache.make_room("full", DEVICE, 10)
    assert cache.probe(count_to(17)).boundary == 8, "the cold suffix of the shared node goes first"
    assert cache.probe([70] * 17).boundary == 16


def test_a_split_keeps_states_with_the_suffix(build: BuildHarness) -> None:
    cache = build("full+mamba", page_size=4, device=16)
    cache.serve(count_to(16), marks=[])
    (slots,) = [v.slots["mamba", DEVICE] for v in cache.core.snapshot()]
    cache.match([*count_to(8), 99], cap=False)
    cache.serve([*count_to(8), *[99] * 4], marks=[])
    halves = by_start(cache)
    assert ("mamba", DEVICE) not in halves[0].slots
    assert {v.slots["mamba", DEVICE] for v in cache.core.snapshot() if v.start == 8} > {slots}


@pytest.mark.parametrize("released", [True, False])
def test_chains_that_only_splits_have_cut_are_merged_again(build: BuildHarness, released: bool) -> None:
    cache = build(page_size=4, device=32)
    cache.serve(count_to(16))
    leases = [cache.match([*count_to(end), 99]) for end in (4, 8, 12)]
    assert [len(view.tokens) for view in cache.core.snapshot()] == [4, 4, 4, 4]
    if released:
        for lease in leases:
            cache.release(lease)
        assert [len(view.tokens) for view in cache.core.snapshot()] == [12, 4], "the tail is colder"
        cache.release(cache.match(count_to(17)))
        assert [len(view.tokens) for view in cache.core.snapshot()] == [16]
    else:
        cache.release(leases[1])
        assert [len(view.tokens) for view in cache.core.snapshot()] == [4, 8, 4]


def test_depth_follows_the_branching_and_not_the_number_of_turns(build: BuildHarness) -> None:
    cache = build(page_size=4, device=256)
    history: list[int] = []
    for turn in range(20):
        cache.serve([*history, *[turn] * 12], output=[100 + turn] * 8)
        history += [turn] * 12 + [100 + turn] * 8
    assert len(cache.core.snapshot()) == 1
    assert cache.probe([*history, 0]).boundary == len(history)


def test_branches_are_not_merged(build: BuildHarness) -> None:
    cache = build(page_size=4, device=32)
    cache.serve(count_to(8))
    cache.serve([*count_to(4), 99, 99, 99, 99])
    assert sorted((v.start, len(v.tokens)) for v in cache.core.snapshot()) == [(0, 4), (4, 4), (4, 4)]
    cache.release(cache.match(count_to(9)))
    cache.make_room("full", DEVICE, 30)
    assert [(v.start, len(v.tokens)) for v in cache.core.snapshot()] == [(0, 8)]


def test_a_parent_becomes_a_candidate_when_its_last_child_went(build: BuildHarness) -> None:
    cache = build(page_size=4, device=8)
    cache.serve(count_to(8))
    cache.serve([*count_to(4), 99, 99, 99, 99])
    for left in (7, 8):
        cache.make_room("full", DEVICE, left)
        assert cache.core.pool_count("full", DEVICE).free == left
    assert cache.core.snapshot() == ()


@pytest.mark.parametrize("write", ["write_through", "write_back"])
@pytest.mark.parametrize("model", ["full", "full+swa", "full+mamba"])
def test_an_aborted_load_restores_the_state_from_before(build: BuildHarness, model: str, write: str) -> None:
    cache = build(model, page_size=4, device=8, host=8, write=write)
    cache.serve(count_to(16), marks=[])
    for name in reversed(model.split("+")):
        cache.empty(name, DEVICE)
    lease = cache.match(count_to(17))
    before = [(v.tokens, v.slots) for v in cache.core.snapshot()]
    for ticket in cache.load(lease).tickets:
        cache.abort(ticket)
    assert [(v.tokens, v.slots) for v in cache.core.snapshot()] == before
    cache.release(lease)
    check_idle(cache.core, cache.core.snapshot())


def test_an_aborted_load_keeps_what_had_arrived(build: BuildHarness) -> None:
    cache = build(page_size=4, device=8, host=8)
    cache.serve(count_to(16))
    cache.empty("full", DEVICE)
    lease = cache.match(count_to(17))
    (ticket,) = cache.load(lease).tickets
    cache.abort(ticket, 3)
    assert cache.settle(lease).boundary == 12
    assert cache.core.pool_count("full", DEVICE).free == 5
    assert cache.probe(count_to(17)).source.host == 4


def test_a_duplicate_is_re_pointed_first_and_freed_then(build: BuildHarness) -> None:
    cache = build(page_size=4, device=8)
    leases = [cache.match(count_to(12)) for _ in range(2)]
    for lease in leases:
        cache.reserve(lease, 12)
        cache.compute(lease, 12)
    cache.insert(leases[0], 8)
    own = list(leases[1].slots["full"])
    inserted = cache.insert(leases[1], 8)
    assert (inserted.duplicate_tokens, inserted.adopted_tokens, inserted.new_tokens) == (8, 0, 0)
    freed = [slot for act in inserted.actions if isinstance(act, Free) for slot in act.slots.tolist()]
    assert freed == own[:2]
    assert leases[1].slots["full"] == [*leases[0].slots["full"][:2], own[2]]


def test_publishing_part_of_a_node_splits_it(build: BuildHarness) -> None:
    cache = build(page_size=4, device=16)
    cache.serve(count_to(16))
    lease = cache.match([1, 2, 3])
    lease.tokens = np.array([*count_to(8), 50, 51, 52, 53], dtype=np.int32)
    cache.reserve(lease, 12)
    cache.compute(lease, 12)
    released = cache.release(lease, 12)
    assert (released.duplicate_tokens, released.new_tokens) == (8, 4)
    assert sorted((v.start, len(v.tokens)) for v in cache.core.snapshot()) == [(0, 8), (8, 4), (8, 8)]


def test_abandoning_a_request_frees_what_it_had_reserved(build: BuildHarness) -> None:
    cache = build("full+swa+mamba", page_size=4, device=16)
    lease = cache.match(count_to(16))
    cache.reserve(lease, 16)
    cache.compute(lease, 8)
    cache.insert(lease)
    cache.complete_all()
    cache.compute(lease, 14)
    released = cache.release(lease)
    assert released.published == 8
    check_idle(cache.core, cache.core.snapshot())
    assert cache.probe(count_to(17)).boundary == 8


def test_settling_twice_changes_nothing(build: BuildHarness) -> None:
    cache = build("full+swa+mamba", page_size=4, device=16)
    cache.serve(count_to(16), marks=[])
    lease = cache.match(count_to(17))
    first = cache.restore(lease)
    before = cache.core.snapshot()
    again = cache.core.settle(lease.lease)
    assert (again.boundary, again.source, again.actions) == (first.boundary, first.source, ())
    assert cache.core.snapshot() == before


def test_reserving_is_all_components_or_none(build: BuildHarness) -> None:
    cache = build("full+swa", page_size=4, device={"full": 16, "swa": 2})
    lease = cache.match(count_to(12))
    reserved = cache.reserve(lease, 12)
    assert (reserved.short, reserved.tickets) == ({"swa": 1}, ())
    assert cache.core.pool_count("full", DEVICE).free == 16
    assert not cache.reserve(lease, 8).short


def test_a_freed_slot_is_given_to_one_lease_only(build: BuildHarness) -> None:
    cache = build(page_size=4, device=4)
    first, second = cache.match([1] * 8), cache.match([2] * 8)
    cache.reserve(first, 8)
    cache.reserve(second, 8)
    assert not set(first.slots["full"]) & set(second.slots["full"])
    assert cache.reserve(second, 4).short == {"full": 1}


# ---- misuse ----------------------------------------------------------------------------------
def ended(cache: Harness) -> LeaseId:
    lease = cache.match([5] * 9)
    cache.release(lease)
    return lease.lease


LEASE_CALLS: dict[str, Callable[[Harness, LeaseId], object]] = {
    "plan": lambda cache, lease: cache.core.plan(lease),
    "fetch": lambda cache, lease: cache.core.fetch(lease),
    "load": lambda cache, lease: cache.core.load(lease),
    "settle": lambda cache, lease: cache.core.settle(lease),
    "reserve": lambda cache, lease: cache.core.reserve(lease, 4),
    "insert": lambda cache, lease: cache.core.insert(lease, np.array([5] * 8, dtype=np.int32)),
    "release": lambda cache, lease: cache.core.release(lease),
    "lease_slots": lambda cache, lease: cache.core.lease_slots(lease, "full"),
    "lease_state": lambda cache, lease: cache.core.lease_state(lease, "mamba"),
}


@pytest.mark.parametrize("call", LEASE_CALLS)
@pytest.mark.parametrize("which", ["unknown", "ended", "before reset"])
def test_a_lease_that_is_not_open_is_refused_and_nothing_changes(
    build: BuildHarness, call: str, which: str
) -> None:
    cache = build("full+mamba", page_size=4, device=16, host=16)
    if which == "unknown":
        lease = LeaseId(12_345)
    elif which == "ended":
        lease = ended(cache)
    else:
        lease = cache.match([5] * 9).lease
        cache.reset()
    cache.serve(count_to(16))
    before = cache.core.snapshot()
    with pytest.raises(ProtocolError):
        LEASE_CALLS[call](cache, lease)
    assert cache.core.snapshot() == before
    cache.check()


@pytest.mark.parametrize("report", ["commit", "abort"])
def test_a_ticket_is_reported_exactly_once(build: BuildHarness, report: str) -> None:
    cache = build(page_size=4, device=8, host=8)
    cache.serve(count_to(8), is_idle_after=False)
    (ticket,) = cache.core.in_flight()
    cache.complete(ticket)
    before = cache.core.snapshot()
    for number in (ticket, TicketId(12_345)):
        with pytest.raises(ProtocolError):
            getattr(cache.core, report)(number)
    assert cache.core.snapshot() == before
    cache.check()


@pytest.mark.parametrize("done", [-1, 3, 100])
def test_no_more_slots_can_be_done_than_a_ticket_has(build: BuildHarness, done: int) -> None:
    cache = build(page_size=4, device=8, host=8)
    cache.serve(count_to(8), is_idle_after=False)
    (ticket,) = cache.core.in_flight()
    with pytest.raises(ProtocolError):
        cache.core.abort(ticket, done)
    cache.complete(ticket)
    assert cache.core.pool_count("full", HOST).free == 6


def opened(cache: Harness) -> OpenLease:
    """A lease on 8 reused tokens with 8 more reserved, 4 of them published."""
    cache.serve(count_to(8), marks=[])
    lease = cache.match(count_to(16))
    cache.restore(lease)
    cache.reserve(lease, 8)
    cache.compute(lease, 12)
    cache.insert(lease)
    cache.complete_all()
    return lease


WRONG_TOKENS = {
    "shorter than published": count_to(8),
    "another reused token": [99, *count_to(12, start=2)],
    "another published token": [*count_to(11), 99],
    "more than reserved": count_to(24),
}


@pytest.mark.parametrize("model", ["full", "full+swa", "full+mamba"])
@pytest.mark.parametrize("wrong", WRONG_TOKENS)
@pytest.mark.parametrize("call", ["insert", "release"])
def test_tokens_that_do_not_extend_the_lease_are_refused(
    build: BuildHarness, model: str, wrong: str, call: str
) -> None:
    cache = build(model, page_size=4, device=16)
    lease = opened(cache)
    before = cache.core.snapshot()
    with pytest.raises(ProtocolError):
        getattr(cache.core, call)(lease.lease, np.array(WRONG_TOKENS[wrong], dtype=np.int32))
    assert cache.core.snapshot() == before
    cache.check()
    cache.compute(lease, 16)
    assert cache.release(lease, 16).published == 16


def test_a_negative_reservation_is_refused(build: BuildHarness) -> None:
    cache = build(page_size=4, device=8)
    lease = cache.match(count_to(8))
    with pytest.raises(ProtocolError):
        cache.core.reserve(lease.lease, -1)
    cache.check()


@pytest.mark.parametrize("call", ["make_room", "pool_count", "lease_slots", "lease_state"])
def test_an_unknown_component_is_refused(build: BuildHarness, call: str) -> None:
    cache = build(page_size=4, device=8)
    lease = cache.match(count_to(8))
    arguments = {"make_room": ("swa", DEVICE, 1), "pool_count": ("swa", DEVICE)}
    with pytest.raises(ProtocolError):
        getattr(cache.core, call)(*arguments.get(call, (lease.lease, "swa")))
    cache.check()


@pytest.mark.parametrize("model", ["full", "full+swa+mamba"])
def test_a_reset_empties_everything_and_says_so(build: BuildHarness, model: str) -> None:
    cache = build(model, page_size=4, device=16, host=16, has_store=True)
    cache.serve(count_to(16))
    cache.match(count_to(17))
    cache.reset()
    assert cache.core.snapshot() == ()
    assert cache.replayed == set()
    for name in model.split("+"):
        for tier in (DEVICE, HOST):
            assert cache.core.pool_count(name, tier).free == 16


@pytest.mark.parametrize(
    "broken",
    [
        {"page_size": 0},
        {"page_size": 65_537},
        {"write": "sometimes"},
        {"granularity": "token"},
        {"eviction": "oldest"},
        {"device": 0},
        {"has_store": True},
    ],
    ids=str,
)
def test_a_configuration_that_makes_no_sense_is_refused(core_kind: str, broken: dict[str, Any]) -> None:
    from hicache.radix.core import make_core

    with pytest.raises(ConfigError):
        make_core(tree_config("full", **broken), kind=core_kind)


def test_a_split_lets_the_beliefs_of_the_node_above_be_forgotten(build: BuildHarness) -> None:
    """The state at 4 has no stored state right below it any more once a node without one ends at 8."""
    cache = build("full+mamba", page_size=4, device={"full": 16, "mamba": 4}, host=8, has_store=True)
    cache.serve(count_to(4), marks=[])
    cache.serve(count_to(12), marks=[])
    cache.persist_all()
    cache.empty("mamba", DEVICE)
    cache.empty("mamba", HOST)
    cache.core.learn(np.array(count_to(12), dtype=np.int32), {"full": {2: False}})  # cuts at 8
    assert by_start(cache)[4].slots.keys().isdisjoint({("mamba", STORE)})
    assert cache.core.audit() == []
