"""Teams of ranks with tiny pools."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hicache.ranks.group import RankGroup
from hicache.testing.rank_loads import settings
from hicache.testing.ranks import Rank, Team

MakeTeam = Callable[..., Team[Rank]]


@pytest.fixture
def make_team() -> Iterator[MakeTeam]:
    """``make_team(2, settings("full+swa"), seed=1, core="rust")``; closed after the test."""
    teams: list[Team[Rank]] = []

    def make(
        size: int, tree: dict[str, Any] | None = None, *, timeout_s: float = 30.0, **keywords: Any
    ) -> Team[Rank]:
        def rank(group: RankGroup) -> Rank:
            return Rank(group, settings() if tree is None else tree, **keywords)

        teams.append(Team(size, rank, timeout_s=timeout_s))
        return teams[-1]

    yield make
    for team in teams:
        team.close()
