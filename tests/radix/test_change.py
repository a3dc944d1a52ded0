"""What an operator changes while a tree serves: payload cleared, pools resized, policies exchanged."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hicache.errors import ConfigError, ProtocolError
from hicache.events import Cause
from hicache.testing.harness import BuildHarness, Harness
from hicache.testing.trees import count_to
from hicache.types import DEFAULT_NAMESPACE, Namespace, Tier

DEVICE, HOST, STORE = Tier.DEVICE, Tier.HOST, Tier.STORE
TENANT = Namespace(salt="a")


def reusable(cache: Harness, tokens: list[int], namespace: Namespace = DEFAULT_NAMESPACE) -> int:
    return cache.probe(tokens, namespace, cap=False).boundary


def num_free(cache: Harness, tier: Tier, component: str = "full") -> int:
    return cache.core.free_slots(component, tier)[1]


# ---- clear ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("model", ["full", "full+swa", "full+mamba", "full+swa+mamba", "swa", "mamba"])
def test_clearing_everything_leaves_nothing_in_any_tier_and_counts_it(
    build: BuildHarness, model: str
) -> None:
    cache = build(model, page_size=4, device=32, host=32, has_store=True)
    cache.serve(count_to(16))
    cache.serve(count_to(123, start=100), TENANT)
    cache.persist_all()
    held = cache.residency()
    cleared = cache.clear()
    assert sum(cleared.removed.values()) == len(held)
    assert (cleared.kept, cleared.tickets) == (0, ())
    assert cache.core.snapshot() == ()
    assert cache.executor.store == {}
    for name in cache.config.device_slots:
        assert (num_free(cache, DEVICE, name), num_free(cache, HOST, name)) == (32, 32)


def test_clearing_is_told_with_a_cause_of_its_own(build: BuildHarness) -> None:
    cache = build(page_size=4, device=32, host=32, has_store=True)
    cache.serve(count_to(8))
    first = len(cache.events)
    cache.clear()
    assert {event.cause for event in cache.events[first:]} == {Cause.CLEAR}
    assert cache.core.counters()["left_device_clear_full"] == 2
    assert cache.core.counters()["left_store_clear_full"] == 2


def test_clearing_a_namespace_spares_the_others(build: BuildHarness) -> None:
    cache = build(page_size=4, device=32, host=32, has_store=True)
    for namespace in (Namespace(), TENANT):
        cache.serve(count_to(8), namespace)
    cleared = cache.clear(TENANT)
    assert cleared.removed == {("full", DEVICE): 2, ("full", HOST): 2, ("full", STORE): 2}
    assert reusable(cache, count_to(8), TENANT) == 0
    assert reusable(cache, count_to(8)) == 8
    assert len(cache.executor.store) == 2


def test_clearing_a_prefix_takes_its_last_page_and_all_below_and_spares_what_is_before(
    build: BuildHarness,
) -> None:
    cache = build(page_size=4, device=64, host=64, has_store=True)
    shared = count_to(12)
    cache.serve([*shared, *[50] * 8])
    cache.serve([*shared, *[60] * 8])
    cleared = cache.clear(Namespace(), [*shared, *[50] * 4, 50])
    assert cleared.removed == {("full", DEVICE): 2, ("full", HOST): 2, ("full", STORE): 2}
    assert reusable(cache, [*shared, *[50] * 8]) == 12
    assert reusable(cache, [*shared, *[60] * 8]) == 20
    assert cache.clear(Namespace(), shared).removed["full", DEVICE] == 3
    assert reusable(cache, [*shared, *[60] * 8]) == 8


def test_clearing_a_path_alone_takes_what_leads_nowhere_else(build: BuildHarness) -> None:
    cache = build(page_size=4, device=64, host=64, has_store=True)
    shared = count_to(8)
    mine, other = [*shared, *[50] * 16], [*shared, *[60] * 8]
    cache.serve(mine)
    cache.serve(other)
    cleared = cache.clear(Namespace(), mine, alone=True)
    assert cleared.removed["full", DEVICE] == 4
    assert (reusable(cache, mine), reusable(cache, other)) == (8, 16)
    cache.clear(Namespace(), other, alone=True)
    assert cache.core.snapshot() == ()


def test_clearing_what_the_tree_does_not_know_changes_nothing(build: BuildHarness) -> None:
    cache = build(page_size=4, device=32)
    cache.serve(count_to(8))
    before = cache.core.snapshot()
    assert cache.clear(Namespace(), [9] * 4).removed == {}
    assert cache.clear(Namespace(), [*count_to(8), *[9] * 4]).removed == {}
    assert cache.clear(TENANT).removed == {}
    with pytest.raises(ProtocolError, match="a prefix of 3 tokens is less than a page of 4"):
        cache.clear(Namespace(), [1, 2, 3])
    assert cache.core.snapshot() == before


def test_what_a_lease_holds_is_kept_until_it_ends(build: BuildHarness) -> None:
    cache = build("full+swa", page_size=4, device=32, host=32, window=4)
    cache.serve(count_to(16))
    lease = cache.match(count_to(17))
    cleared = cache.clear()
    assert cleared.kept > 0
    assert cache.restore(lease).boundary == 16
    cache.release(lease)
    cache.clear()
    assert cache.core.snapshot() == ()


def test_what_a_transfer_touches_is_cleared_once_it_has_ended(build: BuildHarness) -> None:
    cache = build(page_size=4, device=32, host=32, has_store=True)
    cache.serve(count_to(8), is_idle_after=False)
    cleared = cache.clear()
    assert cleared.kept == 2
    assert set(cleared.tickets) == set(cache.executor.pending)
    while cleared.tickets:
        cache.complete_all(cleared.tickets)
        cleared = cache.clear()
    assert cache.core.snapshot() == ()
    assert cache.executor.store == {}


def test_without_l3_nothing_is_believed_of_it_and_nothing_is_learnt(build: BuildHarness) -> None:
    cache = build(page_size=4, device=32, host=32, has_store=True)
    cache.serve(count_to(8))
    cache.empty("full", DEVICE)
    cache.empty("full", HOST)
    assert reusable(cache, count_to(8)) == 8
    cache.core.forget_store()
    cache.check()
    assert cache.core.snapshot() == ()
    cache.reconfigure(has_store=False)
    array = cache.match(count_to(9)).tokens
    cache.core.learn(array, {"full": {0: True, 1: True}})
    assert reusable(cache, count_to(8)) == 0
    cache.reconfigure(has_store=True)
    cache.learn(count_to(9))
    assert reusable(cache, count_to(8)) == 8


# ---- resize --------------------------------------------------------------------------------------
def test_a_pool_shrinks_by_what_goes_first_and_grows_again(build: BuildHarness) -> None:
    cache = build(page_size=4, device=16, host=8)
    cache.serve(count_to(16))
    cache.serve(count_to(115, start=100))
    assert num_free(cache, HOST) == 0
    cache.resize("full", HOST, 5)
    assert cache.core.pool_count("full", HOST).capacity == 5
    assert cache.core.free_slots("full", HOST) == (5, 0)
    held = {slot for view in cache.core.snapshot() for slot in view.slots.get(("full", HOST), ())}
    assert set(cache.core.withheld_slots("full", HOST).tolist()) == set(range(8)) - held
    cache.empty("full", DEVICE)
    assert reusable(cache, count_to(16)) == 4
    assert reusable(cache, count_to(115, start=100)) == 16
    cache.resize("full", HOST, 8)
    assert cache.core.free_slots("full", HOST) == (8, 3)
    assert cache.core.withheld_slots("full", HOST).tolist() == []


def test_a_pool_shrinks_further_as_slots_come_free(build: BuildHarness) -> None:
    cache = build(page_size=4, device=8)
    cache.serve(count_to(16))
    lease = cache.match(count_to(17))
    cache.resize("full", DEVICE, 2)
    assert cache.core.pool_count("full", DEVICE).capacity == 4
    cache.release(lease)
    cache.make_room("full", DEVICE, 2)
    assert cache.core.pool_count("full", DEVICE).capacity == 2
    cache.reset()
    assert cache.core.free_slots("full", DEVICE) == (2, 2)


@pytest.mark.parametrize("slots", [0, 9, -1])
def test_a_pool_has_no_more_than_it_was_made_with(build: BuildHarness, slots: int) -> None:
    cache = build(page_size=4, device=8)
    with pytest.raises(ProtocolError, match=f"full in DEVICE: {slots} slots asked, 1 to 8 can be had"):
        cache.resize("full", DEVICE, slots)


# ---- policies ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("eviction", "survivor"),
    [("mru", 0), ("lfu", 1), ("fifo", 2), ("priority", 0), ("session", 2), ("slru", 1)],
)
def test_what_is_there_already_leaves_in_the_new_policys_order(
    build: BuildHarness, eviction: str, survivor: int
) -> None:
    """Three prompts: the first with the highest priority, the second used twice, the third youngest."""
    cache = build(page_size=4, device=12)
    prompts = [count_to(100 * n + 15, start=100 * n) for n in (1, 2, 3)]
    cache.serve(prompts[0], priority=90)
    cache.serve(prompts[1])
    cache.serve([*prompts[1], 1])
    cache.serve(prompts[2])
    if eviction == "slru":
        cache.reconfigure(eviction=eviction)
        cache.serve([*prompts[1], 1])  # a hit under the policy that protects hits
        cache.serve([7] * 4)
        cache.clear(Namespace(), [7] * 4)
    else:
        cache.reconfigure(eviction=eviction)
    cache.make_room("full", DEVICE, 8)
    assert [reusable(cache, prompt) for prompt in prompts].index(16) == survivor


def test_paused_writes_begin_nothing_and_end_what_was_begun(build: BuildHarness) -> None:
    cache = build(page_size=4, device=32, host=32, has_store=True)
    cache.serve(count_to(8), is_idle_after=False)
    cache.reconfigure(pauses_writes=True)
    cache.complete_all()
    assert len(cache.executor.store) == 2
    cache.serve(count_to(108, start=100))
    assert num_free(cache, HOST) == 30
    cache.reconfigure(pauses_writes=False)
    cache.serve(count_to(108, start=100))
    assert num_free(cache, HOST) == 28
    assert len(cache.executor.store) == 4


def test_another_shape_is_refused_and_changes_nothing(build: BuildHarness) -> None:
    cache = build(page_size=4, device=32)
    before = cache.core.config
    with pytest.raises(ProtocolError, match="can change while a tree serves"):
        cache.core.reconfigure(replace(before, page_size=8))
    with pytest.raises(ConfigError, match="is not a policy"):
        cache.core.reconfigure(replace(before, eviction="best"))
    assert cache.core.config == before
