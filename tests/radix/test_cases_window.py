"""Reported failures of sliding windows: frontiers, tombstones, locks, legality."""

from __future__ import annotations

import pytest

from hicache.errors import ProtocolError
from hicache.radix.actions import Fetch
from hicache.radix.rules.window import window_frontier
from hicache.testing.harness import BuildHarness, Harness
from hicache.testing.payloads import path_bytes
from hicache.testing.trees import count_to
from hicache.types import Namespace, Tier

DEVICE, HOST, STORE = Tier.DEVICE, Tier.HOST, Tier.STORE


def pages_with(harness: Harness, component: str, tier: Tier) -> list[int]:
    """Page indices of a tree without branches where a paged component is resident."""
    page_size = harness.config.page_size
    pages: list[int] = []
    for view in harness.core.snapshot():
        if (component, tier) in view.slots:
            first = view.start // page_size
            pages += range(first, first + len(view.tokens) // page_size)
    return sorted(pages)


def locks_by_start(harness: Harness, component: str) -> dict[int, int]:
    return {view.start: view.locks.get(component, 0) for view in harness.core.snapshot()}


def test_a_leaf_cut_at_the_window_edge_is_backed_up_parent_first(build: BuildHarness) -> None:
    """O-09."""
    cache = build("full+swa", page_size=64, window=64, device=16, host=16)
    cache.serve(count_to(256), marks=[])
    assert cache.core.pool_count("full", HOST).free == 16 - 4
    assert cache.core.pool_count("swa", HOST).free == 16 - 1
    cache.empty("full", DEVICE)
    cache.empty("swa", DEVICE)
    found = cache.probe(count_to(257))
    assert (found.boundary, found.source.host) == (256, 256)
    assert found.by_component["swa"].host == 64


def test_a_recovered_tombstone_takes_only_slots_of_the_request(build: BuildHarness) -> None:
    """O-11."""
    cache = build("full+swa", page_size=1, window=4, device={"full": 16, "swa": 8})
    cache.serve(count_to(8), marks=[])
    assert pages_with(cache, "swa", DEVICE) == [4, 5, 6, 7]
    assert cache.core.pool_count("swa", DEVICE).free == 4

    other = cache.match([90, 91, 92, 93, 94])
    cache.reserve(other, 4)
    assert cache.core.pool_count("swa", DEVICE).free == 0
    cache.release(other)

    again = cache.match(count_to(5))
    assert again.found.boundary == 0, "[0,4) has no window payload"
    assert not cache.reserve(again, 4).short
    cache.compute(again, 4)
    released = cache.release(again, 4)
    assert released.duplicate_tokens == 4
    assert pages_with(cache, "swa", DEVICE) == list(range(8))
    assert cache.core.pool_count("swa", DEVICE).free == 0
    assert cache.core.pool_count("full", DEVICE).free == 8
    assert cache.probe(count_to(5)).boundary == 4


@pytest.mark.parametrize(
    ("window", "page_size", "key_len", "boundary", "frontier"),
    [
        (127, 64, 1024, 1024, 896),
        (127, 64, 1023, 960, 832),
        (127, 64, 128, 128, 0),
        (127, 64, 127, 64, 0),
        (4, 16, 40, 32, 16),
    ],
)
def test_the_release_frontier_leaves_the_last_window(
    window: int, page_size: int, key_len: int, boundary: int, frontier: int
) -> None:
    """O-12."""
    assert window_frontier(key_len, window, page_size) == frontier
    assert key_len // page_size * page_size == boundary


@pytest.mark.parametrize(("window", "page_size"), [(127, 64), (4, 16), (1, 1), (64, 64), (5, 1)])
def test_the_live_tail_is_never_shorter_than_the_window(window: int, page_size: int) -> None:
    """O-12."""
    for key_len in range(1, 2049):
        boundary = key_len // page_size * page_size
        frontier = window_frontier(key_len, window, page_size)
        assert frontier % page_size == 0
        assert 0 <= frontier <= boundary
        assert boundary - frontier >= min(window, boundary)


@pytest.mark.parametrize(("window", "page_size"), [(127, 64), (4, 16)])
def test_a_match_right_after_an_insert_reuses_every_whole_page(
    build: BuildHarness, window: int, page_size: int
) -> None:
    """O-12: for every key length, until windows have lain in and across pages in every way."""
    cache = build("full+swa", page_size=page_size, window=window, device=160, is_checked=False)
    longest = 3 * (window + page_size)
    tokens = count_to(longest)
    for key_len in range(1, longest + 1):
        cache.serve(tokens[:key_len], marks=[])
        boundary = key_len // page_size * page_size
        assert cache.probe(tokens[:key_len], cap=False).boundary == boundary
        cache.reset()


def test_locks_of_other_requests_survive_a_lock_that_comes_and_goes(build: BuildHarness) -> None:
    """O-13."""
    cache = build("full+swa+mamba", page_size=1, window=4, device=32)
    cache.serve(count_to(16), marks=[4, 8, 12, 16])
    assert [(view.start, len(view.tokens)) for view in cache.core.snapshot()] == [
        (0, 4), (4, 4), (8, 4), (12, 4),
    ]  # fmt: skip

    first = cache.match([*count_to(16), 99])
    second = cache.match([*count_to(8), 99])
    held = {0: 0, 4: 1, 8: 0, 12: 1}
    assert locks_by_start(cache, "swa") == held
    third = cache.match([*count_to(16), 98])
    cache.restore(third)
    cache.release(third)
    assert locks_by_start(cache, "swa") == held

    cache.empty("swa", DEVICE)
    assert pages_with(cache, "swa", DEVICE) == [4, 5, 6, 7, 12, 13, 14, 15]
    with pytest.raises(ProtocolError):
        cache.core.release(third.lease)
    assert locks_by_start(cache, "swa") == held
    assert cache.restore(first).boundary == 16
    assert cache.restore(second).boundary == 8


def test_an_unfinished_insert_leaves_only_the_live_window(build: BuildHarness) -> None:
    """O-14: what lies before the frontier is a tombstone at once, not when the request ends."""
    cache = build("full+swa", page_size=1, window=128, device=1100)
    lease = cache.match(count_to(1024))
    cache.reserve(lease, 1024)
    for end in (512, 1024):
        cache.compute(lease, end)
        cache.insert(lease, mark=end == 1024)
    assert pages_with(cache, "full", DEVICE) == list(range(1024))
    assert pages_with(cache, "swa", DEVICE) == list(range(896, 1024))
    assert cache.core.pool_count("swa", DEVICE).free == 1100 - 128

    diverging = cache.probe([*count_to(400), *[7] * 10])
    assert (diverging.walked, diverging.boundary, diverging.fork) == (400, 0, 400)
    assert cache.probe(count_to(1025)).boundary == 1024
    cache.release(lease, 1024)
    assert cache.probe(count_to(1025)).boundary == 1024


def test_the_prefetch_is_planned_with_the_cap_of_the_match(build: BuildHarness) -> None:
    """O-15."""
    cache = build("full+swa", page_size=64, window=64, device=8, host=8, has_store=True)
    path = path_bytes(count_to(256))
    cache.executor.seed_store("full", Namespace(), path, range(4))
    cache.executor.seed_store("swa", Namespace(), path, range(4))
    cache.learn(count_to(256))
    lease = cache.match(count_to(256))
    assert lease.found.boundary == 192
    assert [(s.component, s.source, s.first_page, s.last_page) for s in cache.plan(lease)] == [
        ("full", STORE, 0, 3),
        ("swa", STORE, 2, 3),
    ]
    started = cache.fetch(lease)
    fetched = {action.component: action.keys for action in started.actions if isinstance(action, Fetch)}
    assert fetched["swa"] == cache.executor.keys.of("swa", Namespace(), path)[2:3]
    assert fetched["full"] == cache.executor.keys.of("full", Namespace(), path)[:3]
    cache.complete_all()
    assert cache.restore(lease).boundary == 192


ABCDE = [11, 12, 13, 14, 15]


@pytest.mark.parametrize(
    ("present", "query", "boundary"),
    [
        ("DE", "ABCDEx", 5),
        ("DE", "ABCDx", 0),
        ("ABDE", "ABCDx", 2),
        ("ABDE", "ABCDEx", 5),
        ("ABDE", "ABx", 2),
        ("ABDE", "ABCDE", 2),
        ("A", "ABCDEx", 1),
        ("", "ABCDEx", 0),
        ("ABCDE", "ABCDx", 4),
    ],
)
@pytest.mark.parametrize("source", [STORE, HOST])
def test_a_boundary_needs_its_whole_window_and_nothing_before(
    build: BuildHarness, present: str, query: str, boundary: int, source: Tier
) -> None:
    """O-16."""
    cache = build("full+swa", page_size=1, window=2, device=16, host=16, has_store=True)
    path = path_bytes(ABCDE)
    cache.executor.seed_store("full", Namespace(), path, range(5))
    cache.executor.seed_store("swa", Namespace(), path, ["ABCDE".index(c) for c in present])
    tokens = [99 if letter == "x" else ABCDE["ABCDE".index(letter)] for letter in query]
    cache.learn([*ABCDE, 99])
    if source == HOST:
        lease = cache.match(tokens)
        cache.restore(lease)
        cache.release(lease)
        cache.empty("full", DEVICE)
    assert cache.probe(tokens).boundary == boundary
    lease = cache.match(tokens)
    assert lease.found.boundary == boundary
    assert cache.restore(lease).boundary == boundary


@pytest.mark.parametrize(
    ("marks", "query", "boundary"),
    [([2, 5], "ABCDEx", 5), ([2, 5], "ABCDx", 2), ([5], "ABCDx", 0), ([5], "ABCDEx", 5)],
)
def test_a_window_that_inserts_left_behind_is_legal_at_its_marks(
    build: BuildHarness, marks: list[int], query: str, boundary: int
) -> None:
    """O-16, in L1: a mark at AB and one at ABCDE leave A, B, D and E."""
    cache = build("full+swa", page_size=1, window=2, device=16)
    cache.serve(ABCDE, marks=marks)
    left = {page for mark in marks for page in (mark - 2, mark - 1)}
    assert pages_with(cache, "swa", DEVICE) == sorted(left)
    tokens = [99 if letter == "x" else ABCDE["ABCDE".index(letter)] for letter in query]
    assert cache.probe(tokens).boundary == boundary


def test_windows_of_different_width_vote_on_their_own(build: BuildHarness) -> None:
    cache = build("full+swa+wide", page_size=1, window=2, wide=4, device=32)
    cache.serve(count_to(8), marks=[])
    assert pages_with(cache, "swa", DEVICE) == [6, 7]
    assert pages_with(cache, "wide", DEVICE) == [4, 5, 6, 7]
    assert cache.probe(count_to(9)).boundary == 8
    cache.make_room("wide", DEVICE, 29)
    assert cache.probe(count_to(9)).boundary == 0
    assert cache.probe(count_to(9)).fork == 8


def test_an_older_marks_window_stays_until_it_is_evicted(build: BuildHarness) -> None:
    cache = build("full+swa", page_size=2, window=4, device=32)
    cache.serve(count_to(24), marks=[8, 16])
    assert pages_with(cache, "swa", DEVICE) == [2, 3, 6, 7, 10, 11]
    for boundary in (8, 16, 24):
        assert cache.probe([*count_to(boundary), 99]).boundary == boundary
    assert cache.probe([*count_to(12), 99]).boundary == 8


def test_a_chunk_without_a_mark_leaves_no_window_behind(build: BuildHarness) -> None:
    cache = build("full+swa", page_size=2, window=4, device=32)
    lease = cache.match(count_to(24))
    cache.reserve(lease, 24)
    for end in (6, 12, 18):
        cache.compute(lease, end)
        cache.insert(lease, mark=False)
        assert cache.core.pool_count("swa", DEVICE).free == 32 - 2 - (24 - end) // 2
    cache.compute(lease, 24)
    cache.release(lease, 24)
    assert pages_with(cache, "swa", DEVICE) == [10, 11]


def test_a_window_alone_needs_no_path(build: BuildHarness) -> None:
    cache = build("swa", page_size=1, window=2, device=16)
    cache.serve(count_to(8), marks=[4, 8])
    assert pages_with(cache, "swa", DEVICE) == [2, 3, 6, 7]
    assert cache.probe(count_to(9)).boundary == 8
    assert cache.probe([*count_to(6), 99]).boundary == 4
    assert cache.probe([*count_to(3), 99]).boundary == 0
