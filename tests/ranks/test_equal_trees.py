"""Random loads on ranks that each have faults of their own: equal answers, equal trees, the same collectives."""

from __future__ import annotations

import os
import random
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hicache.clock import ManualClock
from hicache.ranks.group import RankGroup
from hicache.testing.rank_loads import random_calls, random_settings, settings
from hicache.testing.ranks import FlakyStream, Rank, Team

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
    # A drain's own limit is 40 ms here.
    drained = (team.each(lambda rank: rank.cache.drain()) for _ in range(1000))
    assert [True] * size in drained
    assert all(member.checker.mismatches == 0 for member in team.members)


def serve(rank: Rank, tokens: NDArray[np.int32]) -> None:
    rank.engine.serve(tokens, np.empty(0, np.int32), stop="end")


@pytest.mark.timeout(300)
def test_ranks_with_unequal_memory_follow_the_same_policy() -> None:
    """Shadows are as large as what all ranks have, not as this one has; else they would come to other verdicts.

    Time is the test's: in real time a busy machine takes as long as sessions live, and nothing is left to decide.
    """
    room, clock = (800, 40_000), ManualClock()

    def make(group: RankGroup) -> Rank:
        policy = {"eviction": "adaptive", "wait_limit": "20s", "store_timeout": "20s"}
        tree = settings("full", device=room[group.rank], host=40, **policy)
        return Rank(group, tree, session_clock=clock)

    with Team(2, make) as team:
        followed = set[str | None]()
        for number in range(320):
            hot = number // 30 * 5 + number * 7 % 5
            prompt = np.concatenate([np.arange(320) + 1000 * hot, np.arange(64) + 10_000_000 + 1000 * number])
            team.each(partial(serve, tokens=prompt.astype(np.int32)))
            clock.advance(0.01)
            states = team.each(Rank.state)
            assert states[0] == states[1], f"request {number}: the trees differ"
            followed.add(team.members[0].cache.sessions.followed)
        assert len(followed) > 1, "nothing was decided here"


def test_a_flaky_stream_reports_a_copy_that_raises_as_any_stream_does() -> None:
    class Broken:
        num_slots = 3

        def run(self, first: int, last: int) -> None:
            raise RuntimeError("no kernel image")

    ends: list[tuple[int, str]] = []
    FlakyStream(random.Random(1)).submit(Broken(), lambda done, error: ends.append((done, str(error))))
    assert ends == [(0, "no kernel image")]
