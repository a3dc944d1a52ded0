"""What a lease could settle for instead of what it found."""

from __future__ import annotations

import pytest

from hicache.errors import ProtocolError
from hicache.radix.interface import MAX_CHOICES, PlanStep
from hicache.testing.harness import BuildHarness, Harness
from hicache.testing.trees import count_to
from hicache.types import Tier

DEVICE, HOST, STORE = Tier.DEVICE, Tier.HOST, Tier.STORE


def in_three_tiers(build: BuildHarness) -> Harness:
    """A path of six pages of four tokens: two in L1, two in L2, two in L3."""
    cache = build(page_size=4, device=8, host=8, has_store=True)
    cache.serve(count_to(24))
    cache.persist_all()
    cache.make_room("full", DEVICE, 6)
    cache.make_room("full", HOST, 6)  # duplicates of L1 go first
    cache.complete_all()
    return cache


def test_each_end_is_a_choice_with_what_it_needs_moved(build: BuildHarness) -> None:
    cache = in_three_tiers(build)
    lease = cache.match(count_to(25))
    host, store = PlanStep("full", HOST, 2, 4), PlanStep("full", STORE, 4, 6)
    choices = [(choice.boundary, choice.steps) for choice in cache.core.choices(lease.lease)]
    assert choices == [(24, (host, store)), (16, (host,)), (8, ())]
    assert cache.core.plan(lease.lease) == (host, store)
    cache.release(lease)


@pytest.mark.parametrize(("boundary", "num_moved"), [(24, 4), (16, 2), (8, 0)])
def test_a_lease_gets_what_it_was_lowered_to_and_no_more_is_moved(
    build: BuildHarness, boundary: int, num_moved: int
) -> None:
    cache = in_three_tiers(build)
    lease = cache.match(count_to(25))
    cache.core.lower(lease.lease, boundary)
    assert sum(step.num_slots for step in cache.core.plan(lease.lease)) == num_moved
    lease.found = cache.core.probe(lease.tokens[: boundary + 1])
    assert cache.restore(lease).boundary == boundary
    assert cache.reserve_waiting(lease, 24 - boundary)
    cache.compute(lease, 24)
    cache.release(lease, 24)
    assert cache.probe(count_to(25)).boundary == 24


def test_a_lease_may_settle_for_nothing(build: BuildHarness) -> None:
    cache = in_three_tiers(build)
    lease = cache.match(count_to(25))
    cache.core.lower(lease.lease, 0)
    assert cache.core.plan(lease.lease) == ()
    assert cache.core.settle(lease.lease).boundary == 0
    cache.core.release(lease.lease)
    assert cache.core.audit() == []


def test_what_a_lowered_lease_does_not_use_may_leave(build: BuildHarness) -> None:
    cache = build(page_size=4, device=8, host=0)
    cache.serve(count_to(16))
    other = cache.match([*count_to(8), 99])
    cache.release(other)
    lease = cache.match(count_to(17))
    assert cache.make_room("full", DEVICE, 8).free_slots == 4
    cache.core.lower(lease.lease, 8)
    lease.found = cache.core.probe(lease.tokens[:9])
    lease.near.clear()
    assert cache.make_room("full", DEVICE, 8).free_slots == 6
    cache.release(lease)


def test_a_hybrid_may_only_settle_for_marks(build: BuildHarness) -> None:
    cache = build("full+mamba", page_size=4, device=16, host=16)
    cache.serve(count_to(24), marks=[8])
    cache.complete_all()
    cache.empty("mamba", DEVICE)
    lease = cache.match(count_to(25))
    assert [choice.boundary for choice in cache.core.choices(lease.lease)] == [24, 8, 0]
    with pytest.raises(ProtocolError, match="cannot settle for 16 tokens"):
        cache.core.lower(lease.lease, 16)
    assert [step.component for step in cache.core.plan(lease.lease)] == ["mamba"]
    cache.release(lease)


def test_of_many_the_deepest_are_compared_and_the_one_that_needs_nothing(build: BuildHarness) -> None:
    cache = build("full+mamba", page_size=4, device=64, host=64)
    cache.serve(count_to(160), marks=range(4, 161, 4))
    cache.complete_all()
    cache.empty("mamba", DEVICE)
    lease = cache.match(count_to(161))
    boundaries = [choice.boundary for choice in cache.core.choices(lease.lease)]
    assert boundaries == [*range(160, 160 - 4 * (MAX_CHOICES - 1), -4), 0]
    cache.release(lease)


def test_a_settled_lease_has_no_choice_left(build: BuildHarness) -> None:
    cache = in_three_tiers(build)
    lease = cache.match(count_to(25))
    cache.restore(lease)
    assert cache.core.choices(lease.lease) == ()
    with pytest.raises(ProtocolError, match="has settled"):
        cache.core.lower(lease.lease, 0)
    cache.release(lease)
