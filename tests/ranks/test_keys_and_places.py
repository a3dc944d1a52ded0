"""Which pages a rank finds in a store that all share, and which places a configuration allows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from hicache.config import load_config
from hicache.errors import ConfigError
from hicache.ranks.in_process import threads
from hicache.ranks.opening import open_group
from hicache.testing.rank_loads import settings
from hicache.testing.ranks import Rank, Team
from hicache.tiers.disk import DiskStore

if TYPE_CHECKING:
    from pathlib import Path

    from hicache.types import TierTokens

PROMPT = np.arange(1, 42, dtype=np.int32)
NOTHING = np.empty(0, np.int32)
LONG = {"wait_limit": "20s", "store_timeout": "20s"}


def served_from(folder: Path, size: int) -> list[TierTokens]:
    """What a new group of so many ranks finds in the folder that all of them share."""

    def rank(group: object) -> Rank:
        store = DiskStore(folder, capacity_bytes=1 << 20)
        return Rank(group, settings(device=200, host=200, **LONG), store=store)  # type: ignore[arg-type]  # a group

    with Team(size, rank) as team:
        served = team.each(lambda each: each.engine.serve(PROMPT, NOTHING))
        team.each(lambda each: each.cache.drain())
        assert all(each.mismatches == 0 for each in served)
        assert all(member.checker.mismatches == 0 for member in team.members)
        return [each.source for each in served]


def test_ranks_find_what_ranks_of_the_same_geometry_left_and_others_nothing(tmp_path: Path) -> None:
    """The pages of rank 1 of 2 are halves, those of rank 1 of 4 quarters: they never meet under one name."""
    folder = tmp_path / "store"
    assert [each.total for each in served_from(folder, 2)] == [0, 0]
    assert [each.store for each in served_from(folder, 2)] == [40, 40]
    assert [each.total for each in served_from(folder, 4)] == [0, 0, 0, 0]
    assert [each.store for each in served_from(folder, 4)] == [40, 40, 40, 40]
    assert [each.store for each in served_from(folder, 2)] == [40, 40]


@pytest.mark.parametrize(
    ("ranks", "problem"),
    [
        (
            {"tp_size": 4, "tp_rank": 1},
            "the number of ranks is 4 by tp, pp and cp, but the group given says 2",
        ),
        ({"tp_size": 2, "tp_rank": 0}, "this rank is number 0 by tp, pp and cp, but the group given says 1"),
        ({}, "the number of ranks is 1 by tp, pp and cp, but the group given says 2"),
    ],
    ids=["another size", "another rank", "one alone"],
)
def test_a_group_that_is_not_the_configured_one_is_refused(ranks: dict[str, int], problem: str) -> None:
    config = load_config({**settings(), "ranks": ranks}, environ={})
    with pytest.raises(ConfigError, match=problem):
        open_group(config, threads(2)[1])


def test_ranks_without_a_backend_are_each_alone() -> None:
    config = load_config({**settings(), "ranks": {"tp_size": 2}}, environ={})
    assert open_group(config, None).size == 1
