"""What ``priority``, ``slru`` and ``tlru`` keep, on both cores."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from hicache.radix.keys import as_tokens
from hicache.testing.harness import BuildHarness, Harness
from hicache.testing.trees import count_to
from hicache.types import (
    MAX_PRIORITY,
    POPULAR_WORTH,
    RECENCY_WORTH,
    SHARED_WORTH,
    LeaseId,
    SessionId,
    Tier,
)


def starts(cache: Harness) -> list[int]:
    """The first token of each prompt that is still there."""
    return sorted(view.tokens[0] for view in cache.core.snapshot() if view.start == 0)


def kept_len(cache: Harness, first: int) -> int:
    """How many tokens are left of the prompt that begins with ``first``."""
    return cache.core.probe(as_tokens(count_to(first + 99, start=first)), cap=False).boundary


def hit(cache: Harness, first: int) -> None:
    """Reuse the four tokens from ``first`` on, whole, and publish nothing."""
    lease = cache.match(count_to(first + 3, start=first), cap=False)
    assert cache.restore(lease).boundary == 4
    cache.release(lease)


# ---- priority --------------------------------------------------------------------------------
def test_the_lowest_priority_goes_first_and_among_equals_the_oldest(build: BuildHarness) -> None:
    cache = build(device=16, eviction="priority")
    for first, priority in ((100, 50), (200, 10), (300, 90), (400, 10)):
        cache.serve(count_to(first + 3, start=first), priority=priority)
    order = []
    for _ in range(4):
        before = starts(cache)
        cache.make_room("full", Tier.DEVICE, 16 - 4 * (len(before) - 1))
        order += sorted(set(before) - set(starts(cache)))
    assert order == [200, 400, 100, 300]


def test_what_a_request_of_high_priority_used_keeps_it_when_a_lower_one_comes(build: BuildHarness) -> None:
    cache = build(device=24, eviction="priority")
    cache.serve(count_to(104, start=100), priority=90)
    cache.serve(count_to(104, start=100), priority=10)
    cache.serve(count_to(204, start=200), priority=50)
    cache.make_room("full", Tier.DEVICE, 19)
    assert starts(cache) == [100]


def test_a_shared_prefix_has_the_priority_of_its_highest_request(build: BuildHarness) -> None:
    cache = build(device=24, eviction="priority")
    cache.serve([1, 2, 3, 4, 10, 11], priority=90)
    cache.serve([1, 2, 3, 4, 20, 21], priority=0)
    cache.serve(count_to(303, start=300), priority=50)
    cache.make_room("full", Tier.DEVICE, 18)  # two tails and the other prompt: 2 + 4
    assert starts(cache) == [1]
    assert cache.core.probe(as_tokens([1, 2, 3, 4, 10, 11]), cap=False).boundary == 6


@pytest.mark.parametrize("priority", [-1, MAX_PRIORITY + 1, 2**70, 1.5, "high", True])
def test_a_priority_that_is_none_is_refused_and_changes_nothing(
    build: BuildHarness, priority: object
) -> None:
    cache = build(eviction="priority")
    cache.serve(count_to(4))
    before = (cache.core.snapshot(), cache.core.counters())
    with pytest.raises(ValueError, match="priority: expected a whole number of 0 to 100, got"):
        cache.core.match(as_tokens(count_to(4)), priority=priority)  # type: ignore[arg-type]  # on purpose
    assert (cache.core.snapshot(), cache.core.counters()) == before


# ---- slru ------------------------------------------------------------------------------------
def test_what_was_hit_outlasts_any_scan(build: BuildHarness) -> None:
    cache = build(device=20, eviction="slru")
    cache.serve(count_to(104, start=100))
    cache.serve(count_to(105, start=100))
    for first in range(1000, 9000, 100):
        cache.serve(count_to(first + 4, start=first))
    assert kept_len(cache, 100) >= 5
    assert len(starts(cache)) >= 3


def test_more_than_four_fifths_are_never_protected(build: BuildHarness) -> None:
    cache = build(device=20, eviction="slru")
    for first in (100, 200, 300, 400, 500):
        cache.serve(count_to(first + 3, start=first))
        hit(cache, first)
    assert sum(len(view.tokens) for view in cache.core.snapshot() if view.is_protected) == 20
    cache.make_room("full", Tier.DEVICE, 4)
    assert starts(cache) == [200, 300, 400, 500]
    cache.serve(count_to(603, start=600))
    cache.make_room("full", Tier.DEVICE, 4)
    assert starts(cache) == [200, 300, 400, 500], "one that nobody came back for goes before those hit"


def test_what_lost_protection_stands_where_its_last_use_puts_it(build: BuildHarness) -> None:
    cache = build(device=20, eviction="slru")
    cache.serve(count_to(903, start=900))  # never hit, and older than all others
    for first in (100, 200, 300, 800):
        cache.serve(count_to(first + 3, start=first))
        hit(cache, first)  # in the end 16 of 20 are protected: just what may be
    cache.make_room("full", Tier.DEVICE, 4)
    assert starts(cache) == [100, 200, 300, 800]
    assert all(view.is_protected for view in cache.core.snapshot())
    cache.serve(count_to(703, start=700))
    hit(cache, 700)
    hit(cache, 100)
    cache.make_room("full", Tier.DEVICE, 4)
    assert starts(cache) == [100, 300, 700, 800], "200 was hit longest ago"


def test_protection_goes_with_the_tail_that_is_cut(build: BuildHarness) -> None:
    cache = build(device=10, eviction="slru")
    for _ in range(2):
        cache.serve(count_to(10))
    cache.make_room("full", Tier.DEVICE, 3)
    assert cache.core.probe(as_tokens(count_to(10)), cap=False).boundary == 7
    assert cache.core.audit() == []


def test_what_was_hit_stays_protected_when_it_moves_from_a_small_first_tier_to_the_second(
    build: BuildHarness,
) -> None:
    """Five prompts that were hit are more than four fifths of L1, and less than that of L2."""
    cache = build(device=8, host=32, write="write_back", eviction="slru")
    hot = range(100, 600, 100)
    for first in (*hot, *range(1000, 2000, 100)):
        cache.make_room("full", Tier.DEVICE, 4)
        cache.complete_all()
        cache.serve(count_to(first + 3, start=first))
        if first in hot:
            hit(cache, first)
    assert set(hot) <= set(starts(cache))


# ---- tlru ------------------------------------------------------------------------------------
def test_the_ends_of_all_conversations_go_before_the_rest_of_any(build: BuildHarness) -> None:
    cache = build(device=30, eviction="tlru", tail_tokens=4)
    for first in (100, 200, 300):
        cache.serve(count_to(first + 9, start=first))
    cache.make_room("full", Tier.DEVICE, 6)
    assert [kept_len(cache, first) for first in (100, 200, 300)] == [6, 8, 10]
    cache.make_room("full", Tier.DEVICE, 12)
    assert [kept_len(cache, first) for first in (100, 200, 300)] == [6, 6, 6]
    cache.make_room("full", Tier.DEVICE, 14)
    assert [kept_len(cache, first) for first in (100, 200, 300)] == [4, 6, 6], "then as lru does"


def test_the_end_of_a_conversation_that_went_on_is_spare_no_more(build: BuildHarness) -> None:
    cache = build(device=40, eviction="tlru", tail_tokens=4)
    cache.serve(count_to(109, start=100))
    cache.serve(count_to(209, start=200))
    cache.serve(count_to(115, start=100))
    cache.make_room("full", Tier.DEVICE, 14 + 8)
    assert [kept_len(cache, first) for first in (100, 200)] == [12, 6]


def test_a_tail_smaller_than_a_page_is_none(build: BuildHarness) -> None:
    cache = build(device=6, page_size=4, eviction="tlru", tail_tokens=3)
    for first in (100, 200, 300):
        cache.serve(count_to(first + 7, start=first))
    cache.make_room("full", Tier.DEVICE, 2)
    assert starts(cache) == [200, 300]


@pytest.mark.parametrize("model", ["full+swa", "full+mamba"])
def test_a_model_that_needs_a_mark_at_its_end_keeps_ends_as_lru_does(build: BuildHarness, model: str) -> None:
    cache = build(model, device=30, eviction="tlru", tail_tokens=4)
    for first in (100, 200, 300):
        cache.serve(count_to(first + 9, start=first))
    cache.make_room("full", Tier.DEVICE, 6)
    assert [kept_len(cache, first) for first in (200, 300)] == [10, 10]


# ---- session ---------------------------------------------------------------------------------
def last_lease(cache: Harness) -> LeaseId:
    """Leases are numbered from 0, one a match."""
    return LeaseId(cache.core.counters()["matches"] - 1)


def serve_rated(cache: Harness, first: int, worth: int) -> LeaseId:
    """Serve a prompt of four tokens, and say what keeping it is worth."""
    cache.serve(count_to(first + 3, start=first))
    cache.core.rate([last_lease(cache)], [worth])
    return last_lease(cache)


def test_what_is_worth_least_goes_first_and_among_equals_the_oldest(build: BuildHarness) -> None:
    cache = build(device=16, eviction="session")
    for first, worth in ((100, 5), (200, 1), (300, 9), (400, 1)):
        serve_rated(cache, first, worth)
    order = []
    for left in (3, 2, 1, 0):
        before = starts(cache)
        cache.make_room("full", Tier.DEVICE, 16 - 4 * left)
        order += sorted(set(before) - set(starts(cache)))
    assert order == [200, 400, 100, 300]


def test_a_rating_that_falls_or_rises_counts_at_once(build: BuildHarness) -> None:
    cache = build(device=12, eviction="session")
    leases = [serve_rated(cache, first, worth) for first, worth in ((100, 1), (200, 2), (300, 3))]
    cache.core.rate([leases[2], leases[0]], [0, 7])
    cache.make_room("full", Tier.DEVICE, 4)
    assert starts(cache) == [100, 200]
    cache.make_room("full", Tier.DEVICE, 8)
    assert starts(cache) == [100]


def test_what_is_not_rated_stays_longest_and_orders_as_lru(build: BuildHarness) -> None:
    cache = build(device=12, eviction="session")
    cache.serve(count_to(103, start=100))
    cache.serve(count_to(203, start=200))
    serve_rated(cache, 300, 60_000)
    cache.make_room("full", Tier.DEVICE, 4)
    assert starts(cache) == [100, 200]
    cache.make_room("full", Tier.DEVICE, 8)
    assert starts(cache) == [200]


def test_a_prefix_that_sessions_share_is_worth_more_than_that_of_one(build: BuildHarness) -> None:
    cache = build(device=24, eviction="session")
    serve_rated(cache, 500, 10)
    for tail in ([10, 11], [20, 21]):
        cache.serve([1, 2, 3, 4, *tail])
        cache.core.rate([last_lease(cache)], [8])
    cache.make_room("full", Tier.DEVICE, 20)
    assert starts(cache) == [1]
    assert [view.is_shared for view in cache.core.snapshot()] == [True]


def test_a_session_does_not_share_with_its_own_turns(build: BuildHarness) -> None:
    cache = build(device=24, eviction="session")
    cache.serve(count_to(6), session=SessionId(7))
    result = cache.core.match(as_tokens(count_to(6)), session=SessionId(7))
    cache.core.release(result.lease)
    assert not any(view.is_shared for view in cache.core.snapshot())
    result = cache.core.match(as_tokens(count_to(6)), session=SessionId(8))
    cache.core.release(result.lease)
    assert any(view.is_shared for view in cache.core.snapshot())


def test_a_request_that_names_no_session_goes_on_with_what_it_contains_but_for_a_page(
    build: BuildHarness,
) -> None:
    cache = build(device=24, page_size=2, eviction="session")
    cache.serve(count_to(8))
    cache.serve([*count_to(6), 50, 51])
    assert not any(view.is_shared for view in cache.core.snapshot())
    cache.serve([*count_to(4), 60, 61])
    assert any(view.is_shared for view in cache.core.snapshot())


def test_a_match_names_the_turn_that_it_met_and_how_far_that_goes_on(build: BuildHarness) -> None:
    cache = build(device=24, eviction="session")
    first = serve_rated(cache, 1, 5)
    length = cache.core.snapshot()[0].start + len(cache.core.snapshot()[0].tokens)
    matched = cache.core.match(as_tokens([1, 2, 99]), session=SessionId(1))
    assert (matched.met, matched.met_end, matched.found.boundary) == (first, length, 2)
    cache.core.release(matched.lease)
    matched = cache.core.match(as_tokens([99, 1]))
    assert (matched.met, matched.met_end) == (None, 0)
    cache.core.release(matched.lease)


def test_rating_tells_which_turns_are_over(build: BuildHarness) -> None:
    cache = build(device=8, eviction="session")
    first = serve_rated(cache, 1000, 3)
    second = serve_rated(cache, 2000, 5)
    assert cache.core.rate([], []) == ()
    cache.make_room("full", Tier.DEVICE, 8)
    unknown = LeaseId(10**9)
    assert cache.core.rate([unknown], [1]) == (first, second, unknown)
    assert cache.core.rate([], []) == ()


def test_only_turns_of_which_something_is_left_are_remembered(build: BuildHarness) -> None:
    cache = build(device=8, eviction="session")
    for first in range(1000, 9000, 100):
        serve_rated(cache, first, 3)
    turns = {view.turn for view in cache.core.snapshot()}
    assert len(turns) == 2
    cache.core.rate([LeaseId(0), LeaseId(10**9), LeaseId(-5)], [1, 1, 1])
    assert cache.core.audit() == []


@pytest.mark.parametrize("worths", [[-1], [65536], [1, 2], []])
def test_ratings_that_are_none_are_refused_and_change_nothing(build: BuildHarness, worths: list[int]) -> None:
    cache = build(device=8, eviction="session")
    lease = serve_rated(cache, 100, 3)
    serve_rated(cache, 200, 2)
    with pytest.raises(ValueError, match="worth"):
        cache.core.rate([lease], worths)
    cache.make_room("full", Tier.DEVICE, 4)
    assert starts(cache) == [100]


# ---- adaptive --------------------------------------------------------------------------------
def test_turns_rated_for_recency_leave_as_lru_has_it_and_after_those_of_less_worth(
    build: BuildHarness,
) -> None:
    cache = build(device=16, eviction="adaptive")
    for first, worth in ((100, RECENCY_WORTH), (200, 500), (300, RECENCY_WORTH), (400, 900)):
        serve_rated(cache, first, worth)
    order = []
    for left in (3, 2, 1, 0):
        before = starts(cache)
        cache.make_room("full", Tier.DEVICE, 16 - 4 * left)
        order += sorted(set(before) - set(starts(cache)))
    assert order == [200, 400, 100, 300]


def serve_once_each(cache: Harness, numbers: Iterable[int], worth: int) -> None:
    """Prompts that nothing is shared with, each of a session of its own; the oldest leave a full tier."""
    for number in numbers:
        cache.make_room("full", Tier.DEVICE, 8)
        cache.serve(count_to(number * 10 + 3, start=number * 10), session=SessionId(number))
        cache.core.rate([last_lease(cache)], [worth])


@pytest.mark.parametrize(
    ("worth", "num_after", "is_there"),
    [
        pytest.param(RECENCY_WORTH, 6, False, id="no grace"),
        pytest.param(SHARED_WORTH, 6, True, id="some grace"),
        pytest.param(SHARED_WORTH, 40, False, id="which ends"),
        pytest.param(POPULAR_WORTH, 80, True, id="much grace"),
        pytest.param(POPULAR_WORTH, 250, False, id="which ends, too"),
    ],
)
def test_what_sessions_share_stays_for_some_ages_of_the_rest_and_no_longer(
    build: BuildHarness, worth: int, num_after: int, is_there: bool
) -> None:
    cache = build(device=16, eviction="adaptive")
    serve_once_each(cache, range(100, 180), worth)  # how old the rest gets is known by then
    for session in (1, 2):
        cache.make_room("full", Tier.DEVICE, 8)
        cache.serve(count_to(4), session=SessionId(session))
        cache.core.rate([last_lease(cache)], [worth])
    serve_once_each(cache, range(200, 200 + num_after), worth)
    assert (1 in starts(cache)) is is_there


@pytest.mark.parametrize("worth", [SHARED_WORTH, POPULAR_WORTH], ids=["some grace", "much grace"])
def test_what_sessions_share_has_grace_at_once_where_recency_did_not_order_before(
    build: BuildHarness, worth: int
) -> None:
    cache = build(device=16, eviction="adaptive")
    serve_once_each(cache, range(100, 180), 500)
    for session in (1, 2):
        cache.make_room("full", Tier.DEVICE, 8)
        cache.serve(count_to(4), session=SessionId(session))
    cache.core.rate([last_lease(cache)], [worth])
    serve_once_each(cache, range(200, 206), worth)
    assert 1 in starts(cache)


# ---- admission -------------------------------------------------------------------------------
@pytest.mark.parametrize(("admission", "there"), [("all", 100), ("ranked", 200)])
def test_a_full_host_tier_declines_what_would_leave_it_first(
    build: BuildHarness, admission: str, there: int
) -> None:
    """Worth 9 is in L2, then 1 leaves L1."""
    cache = build(device=8, host=4, write="write_back", eviction="session", admission=admission)
    for first, worth in ((200, 9), (100, 1)):
        serve_rated(cache, first, worth)
        cache.make_room("full", Tier.DEVICE, 8)
        cache.complete_all()
    views = [view for view in cache.core.snapshot() if view.slots.get(("full", Tier.HOST))]
    assert [view.tokens[0] for view in views] == [there]
