"""Random loads on ranks that each have faults of their own: equal answers, equal trees, the same collectives."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from hicache.testing.rank_loads import random_calls, random_settings
from hicache.testing.ranks import Rank

if TYPE_CHECKING:
    from tests.ranks.conftest import MakeTeam

RUNS = 4 if os.environ.get("HICACHE_TEST_PROFILE") == "quick" else 16
STEPS = 40


@pytest.mark.timeout(300)
@pytest.mark.parametrize("core", ["python", "rust"])
@pytest.mark.parametrize("seed", range(RUNS))
def test_trees_answers_and_collectives_are_the_same_on_all_ranks(
    make_team: MakeTeam, seed: int, core: str
) -> None:
    size = 2 + seed % 3
    team = make_team(size, random_settings(seed), seed=seed, core=core)
    for number, call in enumerate(random_calls(seed, STEPS)):
        team.each(Rank.break_something)
        answers = team.each(call)
        assert all(answer == answers[0] for answer in answers), f"step {number}: {answers}"
        states = team.each(Rank.state)
        assert all(state == states[0] for state in states), f"step {number}: the trees differ"
        assert team.each(lambda rank: rank.cache.audit()) == [[]] * size, f"step {number}"
        calls = [member.group.calls for member in team.members]
        assert all(each == calls[0] for each in calls), f"step {number}: the collectives differ"
    team.each(Rank.mend)
    assert team.each(lambda rank: rank.cache.drain()) == [True] * size
    assert all(member.checker.mismatches == 0 for member in team.members)
