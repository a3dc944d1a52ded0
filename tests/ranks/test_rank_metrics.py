"""What one rank says of agreeing with the others: what it costs, and what it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hicache.metrics import CacheCollector
from hicache.testing.rank_loads import settings
from hicache.testing.scripted_store import MISS, Raise

if TYPE_CHECKING:
    from hicache.testing.ranks import Rank
    from hicache.types import PageKey
    from tests.ranks.conftest import MakeTeam

T40 = np.arange(1, 41, dtype=np.int32)
PATIENT: dict[str, Any] = {"wait_limit": "20s", "store_timeout": "20s"}


def numbers(rank: Rank) -> dict[str, float]:
    """The series without labels."""
    collector = CacheCollector(rank.cache.stats, rank.cache.config.model.specs())
    return {
        sample.name.removeprefix("hicache_"): sample.value
        for family in collector.collect()
        for sample in family.samples
        if not sample.labels
    }


def leave_l3_only(rank: Rank) -> None:
    rank.engine.serve(T40, np.empty(0, np.int32))
    assert rank.cache.drain()
    rank.cache.reset()


def reuse(rank: Rank) -> int:
    with rank.cache.match(T40) as lease:
        return int(lease.load())


def key_of(rank: Rank, page: int) -> PageKey:
    return rank.store.keys_of("put")[page]


def test_each_exchange_is_counted_with_its_bytes_and_time(make_team: MakeTeam) -> None:
    team = make_team(2, settings(**PATIENT))
    team.each(leave_l3_only)
    for rank in team.members:
        found = numbers(rank)
        assert found["ranks"] == 2
        assert found["rank_exchanges_total"] == len(rank.group.calls) >= found["rank_agreements_total"] > 0
        assert found["rank_sent_bytes_total"] == 8 * sum(length for length, _ in rank.group.calls)
        assert found["rank_exchange_seconds_total"] > 0


def test_what_another_rank_did_not_get_is_counted_where_it_was_got_for_nothing(make_team: MakeTeam) -> None:
    team = make_team(3, settings(**PATIENT))
    team.each(leave_l3_only)
    second = team.members[1]
    second.store.script("get", MISS, key=key_of(second, 5))
    assert team.each(reuse) == [20, 20, 20]
    taken = [
        (f["rank_shortened_transfers_total"], f["rank_shortened_slots_total"])
        for f in map(numbers, team.members)
    ]
    assert taken == [(1, 4), (0, 0), (1, 4)], "of 9 pages 5 came everywhere"
    assert [numbers(rank)["rank_absent_pages_total"] for rank in team.members] == [0, 0, 0]


@pytest.mark.parametrize(
    ("fault", "reused", "absent"),
    [
        pytest.param("lacks a page", 12, [1, 0], id="another lacks a page"),
        pytest.param("is down", 0, [9, 0], id="another got no answer"),
    ],
)
def test_pages_that_another_rank_s_l3_lacks_are_counted(
    make_team: MakeTeam, fault: str, reused: int, absent: list[int]
) -> None:
    team = make_team(2, settings(**PATIENT))
    team.each(leave_l3_only)

    second = team.members[1]
    if fault == "is down":
        second.store.script("exists", Raise(OSError("gone")))
    else:
        second.store.script("exists", MISS, key=key_of(second, 3))
    assert team.each(reuse) == [reused, reused]
    assert [numbers(rank)["rank_absent_pages_total"] for rank in team.members] == absent
