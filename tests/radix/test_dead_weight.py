"""What no vote can accept again goes first, and a cut goes back to the last mark (DESIGN 4 and 5)."""

from __future__ import annotations

import pytest

from hicache.testing.harness import BuildHarness, Harness
from hicache.testing.trees import count_to
from hicache.types import Tier

DEVICE, HOST, STORE = Tier.DEVICE, Tier.HOST, Tier.STORE


def held(cache: Harness, component: str = "full", tier: Tier = DEVICE) -> list[tuple[int, int, int]]:
    """Each run of pages that a tier has, as (first token, begin, end); a state as its node."""
    return sorted(
        (view.tokens[0], view.start, view.start + len(view.tokens))
        for view in cache.core.snapshot()
        if (component, tier) in view.slots
    )


def serve_without_mark(cache: Harness, token: int) -> None:
    """Two pages of four tokens whose state and window are missing: the answer ends inside a page."""
    cache.serve([token] * 10, marks=[])


# ---- the cut -------------------------------------------------------------------------------------------
def test_a_cut_goes_back_to_the_last_mark(build: BuildHarness) -> None:
    cache = build("full+mamba", page_size=4, device=8)
    cache.serve(count_to(16), marks=[8])
    room = cache.make_room("full", DEVICE, 5)
    assert room.free_slots == 6
    assert held(cache) == held(cache, "mamba") == [(1, 0, 8)]
    assert cache.probe(count_to(17)).boundary == 8


def test_a_cut_where_windows_meet_takes_only_what_is_needed(build: BuildHarness) -> None:
    """A whole window ends at every page between two marks that lie close enough."""
    cache = build("full+swa", page_size=4, window=8, device=8)
    cache.serve(count_to(16), marks=[8])
    assert cache.make_room("full", DEVICE, 5).free_slots == 5
    assert cache.probe(count_to(17)).boundary == 12


def test_a_cut_never_leaves_a_part_of_a_window(build: BuildHarness) -> None:
    cache = build("full+swa", page_size=4, window=8, device=8)
    cache.serve(count_to(24), marks=[8])
    assert held(cache, "swa") == [(1, 0, 8), (17, 16, 24)]
    assert cache.make_room("full", DEVICE, 3).free_slots == 4
    assert held(cache) == [(1, 0, 8), (9, 8, 16)]
    assert cache.make_room("full", DEVICE, 5).free_slots == 6
    assert cache.probe(count_to(25)).boundary == 8


def test_what_a_lower_tier_has_is_cut_by_the_page(build: BuildHarness) -> None:
    cache = build("full+mamba", page_size=4, device=8, host=8)
    cache.serve(count_to(16), marks=[8])
    assert cache.make_room("full", DEVICE, 5).free_slots == 5
    assert cache.probe(count_to(17)).boundary == 16


def test_a_cut_in_the_host_goes_back_to_the_last_mark(build: BuildHarness) -> None:
    cache = build("full+mamba", page_size=4, device=8, host=8)
    cache.serve(count_to(16), marks=[8])
    cache.empty("full", DEVICE)
    assert cache.make_room("full", HOST, 5).free_slots == 6
    assert held(cache, "full", HOST) == held(cache, "mamba", HOST) == [(1, 0, 8)]


# ---- the order -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("eviction", ["lru", "lfu", "slru", "priority", "fifo"])
def test_dead_weight_goes_before_anything_that_can_be_reused(build: BuildHarness, eviction: str) -> None:
    cache = build("full+mamba", page_size=4, device=8, eviction=eviction)
    cache.serve([50] * 8, marks=[])
    for _ in range(3):
        serve_without_mark(cache, 60)
    cache.make_room("full", DEVICE, 5)
    assert held(cache) == [(50, 0, 8)]


@pytest.mark.parametrize("eviction", ["mru", "filo"])
def test_a_path_whose_window_is_gone_is_dead_weight(build: BuildHarness, eviction: str) -> None:
    cache = build("full+swa", page_size=4, window=8, device=8, eviction=eviction)
    cache.serve([60] * 8, marks=[])
    cache.empty("swa", DEVICE)
    cache.serve([50] * 8, marks=[])
    cache.make_room("full", DEVICE, 5)
    assert held(cache) == [(50, 0, 8)]


def test_the_newest_goes_first_if_it_is_dead_weight(build: BuildHarness) -> None:
    cache = build("full+mamba", page_size=4, device=8)
    cache.serve([50] * 8, marks=[])
    serve_without_mark(cache, 60)
    assert cache.make_room("full", DEVICE, 5).free_slots == 6
    assert held(cache) == [(50, 0, 8)]


def test_what_a_lease_stands_on_stays(build: BuildHarness) -> None:
    cache = build("full+mamba", page_size=4, device=8)
    cache.serve([50] * 8, marks=[])
    lease = cache.match([60] * 9)
    cache.restore(lease)
    assert cache.reserve_waiting(lease, 8)
    cache.compute(lease, 8)
    cache.insert(lease, mark=False)
    cache.make_room("full", DEVICE, 6)
    assert held(cache) == [(60, 0, 8)]
    cache.release(lease)
    cache.make_room("full", DEVICE, 8)
    assert held(cache) == []


def test_what_marks_hang_on_is_no_dead_weight(build: BuildHarness) -> None:
    cache = build("full+mamba", page_size=4, device=12)
    shared = count_to(8)
    cache.serve([*shared, *[50] * 4], marks=[])
    cache.serve([*shared, *[60] * 4], marks=[])
    serve_without_mark(cache, 70)
    cache.make_room("full", DEVICE, 8)
    assert held(cache) == [(1, 0, 8), (50, 8, 12), (60, 8, 12)]


def test_a_state_whose_window_is_gone_goes_before_older_states(build: BuildHarness) -> None:
    cache = build("full+swa+mamba", page_size=4, window=4, device=8)
    cache.serve([50] * 8, marks=[])
    cache.serve([60] * 8, marks=[])
    cache.serve([50] * 8 + [51], marks=[])
    cache.make_room("swa", DEVICE, 7)
    assert [first for first, _, _ in held(cache, "swa")] == [50]
    lone = next(first for first, _, _ in held(cache, "mamba") if first == 60)
    cache.make_room("mamba", DEVICE, 7)
    assert lone not in [first for first, _, _ in held(cache, "mamba")]


# ---- lower tiers ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("has_store", [False, True])
def test_dead_weight_is_not_copied_down_to_make_room(build: BuildHarness, has_store: bool) -> None:
    cache = build("full+mamba", page_size=4, device=8, host=8, write="write_back", has_store=has_store)
    cache.serve([50] * 8, marks=[])
    serve_without_mark(cache, 60)
    cache.empty("full", DEVICE)
    assert [first for first, _, _ in held(cache, "full", HOST)] == [50]
    cache.empty("full", HOST)
    assert [first for first, _, _ in held(cache, "full", STORE)] == [50] * has_store


def test_dead_weight_goes_first_in_the_host(build: BuildHarness) -> None:
    cache = build("full+mamba", page_size=4, device=8, host=8)
    cache.serve([50] * 8, marks=[])
    serve_without_mark(cache, 60)
    cache.make_room("full", DEVICE, 8)
    assert [first for first, _, _ in held(cache, "full", HOST)] == [50, 60]
    cache.make_room("full", HOST, 6)
    assert [first for first, _, _ in held(cache, "full", HOST)] == [50]


# ---- the count -----------------------------------------------------------------------------------------
def dead(cache: Harness, component: str = "full") -> tuple[int, int, int]:
    """Slots that the core counts as dead weight in L1, L2 and L3."""
    return (
        cache.core.dead_slots(component, DEVICE),
        cache.core.dead_slots(component, HOST),
        cache.core.dead_slots(component, STORE),
    )


def test_what_no_vote_accepts_is_counted_until_it_goes(build: BuildHarness) -> None:
    cache = build("full+mamba", page_size=4, device=8)
    cache.serve([50] * 8, marks=[])
    assert dead(cache) == (0, 0, 0)
    serve_without_mark(cache, 60)
    assert dead(cache) == (2, 0, 0)
    cache.make_room("full", DEVICE, 6)
    assert dead(cache) == (0, 0, 0)


def test_what_a_lease_stands_on_is_not_counted(build: BuildHarness) -> None:
    cache = build("full+mamba", page_size=4, device=8)
    lease = cache.match([60] * 9)
    cache.restore(lease)
    assert cache.reserve_waiting(lease, 8)
    cache.compute(lease, 8)
    cache.insert(lease, mark=False)
    assert dead(cache) == (0, 0, 0)
    cache.release(lease)
    assert dead(cache) == (2, 0, 0)


def test_dead_weight_is_counted_in_every_tier_that_has_it(build: BuildHarness) -> None:
    cache = build("full+mamba", page_size=4, device=8, host=8, write="write_through", has_store=True)
    serve_without_mark(cache, 60)
    cache.persist_all()
    assert dead(cache) == (2, 2, 2)


def test_what_marks_hang_on_is_not_counted(build: BuildHarness) -> None:
    cache = build("full+mamba", page_size=4, device=12)
    shared = count_to(8)
    cache.serve([*shared, *[50] * 4], marks=[])
    cache.serve([*shared, *[60] * 4], marks=[])
    assert dead(cache) == (0, 0, 0)


def test_above_dead_ends_is_counted_once_they_are_gone(build: BuildHarness) -> None:
    cache = build("full+mamba", page_size=4, device=12)
    shared = count_to(8)
    cache.serve([*shared, *[50] * 6], marks=[])
    cache.serve([*shared, *[60] * 6], marks=[])
    assert dead(cache) == (2, 0, 0)
    cache.make_room("full", DEVICE, 10)
    assert dead(cache) == (2, 0, 0)
    assert held(cache) == [(1, 0, 8)]


def test_a_state_whose_window_is_gone_is_counted(build: BuildHarness) -> None:
    cache = build("full+swa+mamba", page_size=4, window=4, device=8)
    cache.serve([60] * 8, marks=[])
    cache.empty("swa", DEVICE)
    assert dead(cache, "mamba") == (1, 0, 0)
    assert dead(cache, "swa") == (0, 0, 0)
    assert dead(cache) == (2, 0, 0)


def test_a_model_that_needs_only_its_path_has_no_dead_weight(build: BuildHarness) -> None:
    cache = build("full", page_size=4, device=8)
    serve_without_mark(cache, 60)
    assert dead(cache) == (0, 0, 0)


def test_a_reset_leaves_no_dead_weight(build: BuildHarness) -> None:
    cache = build("full+mamba", page_size=4, device=8)
    serve_without_mark(cache, 60)
    cache.core.reset()
    assert dead(cache) == (0, 0, 0)
