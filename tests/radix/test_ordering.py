"""Eviction policies, above all a user's own."""

from __future__ import annotations

import logging

import pytest

from hicache.errors import ConfigError
from hicache.radix.core import make_core
from hicache.radix.ordering import MOST_RANK, ORDERINGS, SLACK, Facts, make_ordering
from hicache.radix.pytree import PyTreeCore
from hicache.testing.harness import BuildHarness, Harness
from hicache.testing.trees import count_to, tree_config
from hicache.types import SessionId, Tier

OWN = "hicache.testing.orderings"


def starts(cache: Harness) -> list[int]:
    """The first token of each prompt that is still there."""
    return sorted(view.tokens[0] for view in cache.core.snapshot() if view.start == 0)


def test_a_policy_named_by_its_path_decides_who_goes_first(build: BuildHarness) -> None:
    cache = build(device=12, eviction=f"{OWN}.UsesOverAge")
    for first in (100, 200, 300):
        cache.serve(count_to(first + 3, start=first))
    cache.serve(count_to(104, start=100))  # the oldest is used twice, so it stays
    cache.make_room("full", Tier.DEVICE, 4)
    assert starts(cache) == [100, 200]


def test_a_policy_that_fails_ranks_as_lru_and_is_reported_once(
    build: BuildHarness, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="hicache.radix.ordering"):
        cache = build(device=12, eviction=f"{OWN}.Broken")
        for first in (100, 200, 300):
            cache.serve(count_to(first + 3, start=first))
        cache.serve(count_to(103, start=100))
        cache.make_room("full", Tier.DEVICE, 8)
    assert starts(cache) == [100]
    assert [record.getMessage().split(" failed on ")[0] for record in caplog.records] == [
        f"policy.eviction: {OWN}.Broken"
    ]


@pytest.mark.parametrize("policy", list(ORDERINGS))
def test_queues_do_not_grow_with_what_has_left_the_tree(policy: str) -> None:
    """A rank that fell is entered anew, and the entry with the old one, far down, does not come up by itself.

    In the Rust core a node is in a queue once at most.
    """
    core = PyTreeCore(tree_config(device=8, host=8, write="write_through", eviction=policy))
    cache = Harness(core)
    for number in range(200):
        prompt = count_to(10 * number + 4, start=10 * number + 1)
        cache.serve(prompt, session=SessionId(number))
        cache.serve(prompt, session=SessionId(number))
        core.rate([max(view.turn for view in core.snapshot())], [5])
    forest = core._forest
    bound = 2 * forest.num_nodes + SLACK
    queues = [queue for of_component in forest.queues for queue in of_component]
    assert max(len(queue) for queue in queues) <= bound < 200
    assert max(len(queue._protected) for queue in queues) <= bound


@pytest.mark.parametrize("rank", [MOST_RANK, -MOST_RANK])
def test_the_greatest_ranks_are_passed_on(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{OWN}.UsesOverAge.rank", lambda self, facts: rank)
    assert make_ordering(f"{OWN}.UsesOverAge").rank(Facts(1, 2, 3)) == rank


@pytest.mark.parametrize("rank", [MOST_RANK + 1, -MOST_RANK - 1, 1.5, None])
def test_a_rank_that_is_none_counts_as_a_failure(rank: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{OWN}.UsesOverAge.rank", lambda self, facts: rank)
    assert make_ordering(f"{OWN}.UsesOverAge").rank(Facts(7, 2, 3)) == 7


@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param(
            "lry",
            "is not a policy; known are adaptive, fifo, filo, lfu, lru, mru, priority, session, slru, tlru, or",
            id="unknown",
        ),
        pytest.param("nowhere.Policy", "cannot load 'nowhere.Policy': No module", id="no-module"),
        pytest.param(f"{OWN}.Nothing", "cannot load .* has no attribute 'Nothing'", id="no-class"),
        pytest.param(
            "hicache.types.Tier", "is not a subclass of hicache.radix.ordering.Ordering", id="other"
        ),
        pytest.param("hicache.radix.ordering.Guarded", "cannot be made without arguments", id="arguments"),
    ],
)
def test_a_policy_that_cannot_be_had_is_refused(core_kind: str, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_core(tree_config(eviction=name), core_kind)
