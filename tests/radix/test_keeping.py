"""Prefixes that are to be kept go last, in every tier and under every policy; and they do go."""

from __future__ import annotations

import pytest

from hicache.radix.keys import as_tokens
from hicache.radix.ordering import ORDERINGS
from hicache.testing.harness import BuildHarness, Harness
from hicache.testing.trees import count_to
from hicache.types import Namespace, SessionId, Tier


def starts(cache: Harness, tier: Tier = Tier.DEVICE) -> list[int]:
    """The first token of each prompt that the tier still has."""
    return sorted(view.tokens[0] for view in cache.core.snapshot() if view.slots.get(("full", tier)))


@pytest.mark.parametrize("policy", list(ORDERINGS))
def test_a_kept_prefix_goes_last_under_every_policy_and_does_go(build: BuildHarness, policy: str) -> None:
    cache = build(device=12, eviction=policy)
    for first in (100, 200, 300):
        cache.serve(count_to(first + 3, start=first), session=SessionId(first))
    kept = as_tokens(count_to(203, start=200))
    assert cache.core.keep(kept) == 4
    cache.make_room("full", Tier.DEVICE, 8)
    assert starts(cache) == [200]
    cache.make_room("full", Tier.DEVICE, 12)
    assert starts(cache) == []


def test_it_counts_no_more_once_that_is_taken_back(build: BuildHarness) -> None:
    cache = build(device=12, eviction="lru")
    for first in (100, 200, 300):
        cache.serve(count_to(first + 3, start=first))
    kept = as_tokens(count_to(103, start=100))
    cache.core.keep(kept)
    cache.core.unkeep(kept)
    cache.make_room("full", Tier.DEVICE, 4)
    assert starts(cache) == [200, 300]


def test_only_the_pages_of_the_prefix_are_kept_of_what_goes_on_from_it(build: BuildHarness) -> None:
    cache = build(device=12, page_size=2, eviction="lru")
    cache.serve(count_to(10))
    assert cache.core.keep(as_tokens(count_to(5))) == 4, "floored to a page"
    cache.serve(count_to(104, start=100))
    cache.make_room("full", Tier.DEVICE, 10)
    assert [view.tokens for view in cache.core.snapshot() if view.tokens] == [(1, 2, 3, 4)]


def test_host_copies_are_kept_too(build: BuildHarness) -> None:
    cache = build(device=12, host=12, write="write_through", eviction="lru")
    for first in (100, 200, 300):
        cache.serve(count_to(first + 3, start=first))
    cache.core.keep(as_tokens(count_to(103, start=100)))
    cache.make_room("full", Tier.DEVICE, 12)
    cache.make_room("full", Tier.HOST, 8)
    assert starts(cache, Tier.HOST) == [100]


def test_what_is_not_there_cannot_be_kept_and_another_namespace_is_another_prefix(
    build: BuildHarness,
) -> None:
    cache = build(device=12, eviction="lru")
    cache.serve(count_to(4))
    assert cache.core.keep(as_tokens(count_to(103, start=100))) == 0
    assert cache.core.keep(as_tokens(count_to(4)), Namespace(salt="b")) == 0
    assert not any(view.is_kept for view in cache.core.snapshot())


def test_a_kept_end_stays_an_end_until_it_is_kept_no_longer(build: BuildHarness) -> None:
    """Two halves that differ in this alone do not become one node; as soon as they are alike they do."""
    cache = build(device=12, eviction="lru")
    cache.serve(count_to(8))
    cache.core.keep(as_tokens(count_to(4)))
    assert [(view.end, view.is_kept) for view in map(_Ends, cache.core.snapshot())] == [(4, True), (8, False)]
    cache.core.unkeep(as_tokens(count_to(4)))
    assert [(view.end, view.is_kept) for view in map(_Ends, cache.core.snapshot())] == [(8, False)]


class _Ends:
    def __init__(self, view: object) -> None:
        self.end = view.start + len(view.tokens)  # type: ignore[attr-defined]  # a NodeView
        self.is_kept: bool = view.is_kept  # type: ignore[attr-defined]  # a NodeView
