"""Teams of ranks with tiny pools."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hicache.ranks.group import RankGroup
from hicache.testing.ranks import Rank, Team

MakeTeam = Callable[..., Team[Rank]]

COMPONENTS: dict[str, dict[str, object]] = {
    "full": {"rule": "path", "layers": 2, "bytes_per_token": 8},
    "swa": {"rule": "window", "window": 8, "layers": 2, "bytes_per_token": 8},
    "mamba": {"rule": "checkpoint", "layers": 3, "state_bytes": 48},
}


def settings(
    model: str = "full", *, device: str = "1200", host: str = "1600", **policy: object
) -> dict[str, Any]:  # Any: what a YAML may hold
    """A configuration's tree: pages of 4 tokens, pools of so many bytes a rank, waits of a twentieth of a second."""
    return {
        "model": {
            "name": "tiny",
            "page_size": 4,
            "components": {name: dict(COMPONENTS[name]) for name in model.split("+")},
        },
        "tiers": {
            "device": {"kind": "cpu", "capacity_per_rank": device},
            "host": {"pinned": False, "capacity_per_rank": host},
        },
        "policy": {
            "write": "write_through",
            "prefetch": {"mode": "wait_complete", "min_tokens": 0},
            "wait_limit": "50ms",
            "store_timeout": "50ms",
            **policy,
        },
    }


@pytest.fixture
def make_team() -> Iterator[MakeTeam]:
    """``make_team(2, settings("full+swa"), seed=1, core="rust")``; closed after the test."""
    teams: list[Team[Rank]] = []

    def make(size: int, tree: dict[str, Any] | None = None, *, timeout_s: float = 30.0, **keywords: Any) -> Team[Rank]:
        def rank(group: RankGroup) -> Rank:
            return Rank(group, settings() if tree is None else tree, **keywords)

        teams.append(Team(size, rank, timeout_s=timeout_s))
        return teams[-1]

    yield make
    for team in teams:
        team.__exit__(None, None, None)


@pytest.fixture
def tree_of() -> Callable[..., dict[str, Any]]:
    """``settings`` of this module."""
    return settings
