"""Marks: spare ones are as fresh as their path; a prompt that cannot fit with its mark displaces nothing."""

from __future__ import annotations

import pytest

from hicache.errors import ConfigError
from hicache.radix.core import make_core
from hicache.testing.harness import BuildHarness, Harness
from hicache.testing.trees import count_to, tree_config
from hicache.types import Tier

DEVICE = Tier.DEVICE


def states(cache: Harness) -> list[tuple[int, int]]:
    """Last token and end of each node with a state on the device."""
    return sorted(
        (view.tokens[-1], view.start + len(view.tokens))
        for view in cache.core.snapshot()
        if ("mamba", DEVICE) in view.slots
    )


# ---- spare marks ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("spacing", "kept"), [(8, [(8, 8), (12, 12), (16, 16)]), (0, [(12, 12), (16, 16), (60, 8)])]
)
def test_a_spare_mark_is_as_fresh_as_the_path_through_it(
    build: BuildHarness, spacing: int, kept: list[tuple[int, int]]
) -> None:
    cache = build("full+mamba", page_size=4, device=8, mark_spacing=spacing)
    cache.serve(count_to(12), marks=[8])
    cache.serve([60] * 8, marks=[])
    cache.serve(count_to(16), marks=[])
    assert len(states(cache)) == 4
    cache.make_room("mamba", DEVICE, 5)
    assert states(cache) == kept


def test_a_match_refreshes_the_spare_marks_on_its_way_at_once(build: BuildHarness) -> None:
    """While the request runs nothing locks them, and room is made for it first of all."""
    cache = build("full+mamba", page_size=4, device=8, mark_spacing=8)
    cache.serve(count_to(12), marks=[8])
    cache.serve([60] * 8, marks=[])
    lease = cache.match(count_to(17))
    assert lease.boundary == 12
    cache.make_room("mamba", DEVICE, 6)
    assert states(cache) == [(8, 8), (12, 12)]
    cache.release(lease)


@pytest.mark.parametrize("published_at_release", [True, False])
def test_where_room_for_marks_alone_is_short_spare_ones_go_before_the_end(
    build: BuildHarness, published_at_release: bool
) -> None:
    """The path stays, so they insure nothing. ``test_shared_budget.py`` has the other case."""
    cache = build("full+mamba", page_size=4, device=8, mark_spacing=8)
    cache.serve(count_to(12), marks=[8])
    lease = cache.match(count_to(21))
    cache.restore(lease)
    for end in (16, 20):
        assert cache.reserve_waiting(lease, end - lease.reserved)
        cache.compute(lease, end)
        if end == 16 or not published_at_release:
            cache.insert(lease)
    cache.release(lease, 20 if published_at_release else None)
    cache.complete_all()
    assert [end for _, end in states(cache)] == [8, 12, 16, 20]
    for kept in ([8, 16, 20], [16, 20], [20]):  # 12 is not spare
        cache.make_room("mamba", DEVICE, 8 - len(kept))
        assert [end for _, end in states(cache)] == kept


def test_a_mark_that_is_not_spare_goes_by_its_own_last_use(build: BuildHarness) -> None:
    cache = build("full+mamba", page_size=4, device=8, mark_spacing=8)
    cache.serve(count_to(12), marks=[4])
    cache.serve([60] * 8, marks=[])
    cache.serve(count_to(16), marks=[])
    cache.make_room("mamba", DEVICE, 5)
    assert states(cache) == [(12, 12), (16, 16), (60, 8)]


def test_the_window_of_a_spare_mark_is_as_fresh_as_its_path(build: BuildHarness) -> None:
    cache = build("full+swa", page_size=4, window=4, device=8, mark_spacing=8)
    cache.serve(count_to(16), marks=[8])
    cache.serve([60] * 4, marks=[])
    cache.release(cache.match(count_to(17)))
    cache.make_room("swa", DEVICE, 6)
    assert cache.probe([60] * 5).boundary == 0
    cache.make_room("full", DEVICE, 6)
    assert cache.probe(count_to(17)).boundary == 8


@pytest.mark.parametrize("spacing", [-4, 6])
def test_a_spacing_that_is_no_whole_number_of_pages_is_refused(core_kind: str, spacing: int) -> None:
    with pytest.raises(ConfigError, match="mark_spacing"):
        make_core(tree_config("full+mamba", page_size=4, mark_spacing=spacing), core_kind)


# ---- admission -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("model", ["full+mamba", "full+swa", "full+swa+mamba"])
def test_a_prompt_that_cannot_fit_with_its_mark_displaces_nothing(build: BuildHarness, model: str) -> None:
    cache = build(model, page_size=4, device=4)
    cache.serve([50] * 8, marks=[])
    before = cache.core.snapshot()
    lease = cache.match([60] * 17)
    cache.restore(lease)
    reserved = cache.reserve(lease, 4)  # its first chunk would fit
    assert reserved.short["full"] == 5 - 2
    assert reserved.tickets == ()
    cache.release(lease)
    assert cache.core.snapshot() == before


def test_a_prompt_that_just_fits_is_served(build: BuildHarness) -> None:
    cache = build("full+mamba", page_size=4, device=4)
    cache.serve([50] * 8, marks=[])
    assert cache.serve([60] * 16, marks=[]).was_served
    assert cache.probe([60] * 17).boundary == 16


def test_only_the_window_has_to_fit_of_a_window(build: BuildHarness) -> None:
    cache = build("full+swa", page_size=4, window=8, device={"full": 8, "swa": 3})
    lease = cache.match([60] * 32)
    cache.restore(lease)
    for end in range(4, 33, 4):
        assert cache.reserve_waiting(lease, end - lease.reserved)
        cache.compute(lease, end)
        cache.insert(lease)
    cache.release(lease)
    assert cache.probe([60] * 33).boundary == 32


def test_path_payload_alone_is_kept_as_far_as_it_goes(build: BuildHarness) -> None:
    cache = build("full", page_size=4, device=4)
    lease = cache.match([60] * 32)
    cache.restore(lease)
    assert not cache.reserve(lease, 16).short


# ---- windows -------------------------------------------------------------------------------------------
def test_a_pause_without_a_mark_leaves_no_window(build: BuildHarness) -> None:
    """Nor does it as a copy in L2, where everything written is backed up at once."""
    cache = build("full+swa", page_size=4, window=4, device=16, host=16)
    lease = cache.match([60] * 33)
    cache.restore(lease)
    for end, mark in ((8, False), (16, True), (24, False), (32, True)):
        assert cache.reserve_waiting(lease, end - lease.reserved)
        cache.compute(lease, end)
        cache.insert(lease, mark=mark)
    cache.release(lease)
    cache.complete_all()
    for tier in (DEVICE, Tier.HOST):
        kept = [(v.start, v.start + len(v.tokens)) for v in cache.core.snapshot() if ("swa", tier) in v.slots]
        assert sorted(kept) == [(12, 16), (28, 32)]


@pytest.mark.parametrize("is_fork", [True, False])
def test_a_window_at_a_fork_stays_without_a_mark(build: BuildHarness, is_fork: bool) -> None:
    """The request that shows the fork computes its window anyway, so the next one that diverges there finds it."""
    cache = build("full+swa", page_size=4, window=4, device=32)
    if is_fork:
        cache.serve([*count_to(8), *[50] * 8], marks=[])
    lease = cache.match([*count_to(8), *[60] * 9])
    cache.restore(lease)
    for end in (8, 16):
        assert cache.reserve_waiting(lease, end - lease.reserved)
        cache.compute(lease, end)
        cache.insert(lease, mark=False)
    cache.release(lease)
    assert cache.probe([*count_to(8), 70]).boundary == (8 if is_fork else 0)
