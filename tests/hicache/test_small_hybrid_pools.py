"""Hybrid models as a newcomer writes them: tiny pools, odd sizes, pages that divide nothing. They work, or say why not."""

from __future__ import annotations

from typing import Any

import pytest

from hicache.config import config_warnings, load_config
from hicache.errors import ConfigError
from hicache.replay.run import replay
from hicache.workload import MultiTurn
from hicache.workload.synthetic import multi_turn

COMPONENTS: dict[str, dict[str, object]] = {
    "full": {"rule": "path", "layers": 2, "bytes_per_token": 66},
    "swa": {"rule": "window", "window": 100, "layers": 3, "bytes_per_token": 33},
    "mamba": {"rule": "checkpoint", "layers": 3, "state_bytes": 4097},
}
CHATS = MultiTurn(sessions=3, turns=6, system=32, user=40, output=24)


def tree(model: str, page_size: int, capacity: str) -> dict[str, Any]:
    components = {name: COMPONENTS[name] for name in model.split("+")}
    return {
        "model": {"name": "m", "page_size": page_size, "components": components},
        "tiers": {"device": {"kind": "cpu", "capacity": capacity}},
    }


@pytest.mark.parametrize("page_size", [1, 16, 48, 64])
@pytest.mark.parametrize("model", ["full+swa", "full+mamba", "full+swa+mamba"])
def test_three_chats_are_reused_in_a_pool_that_holds_them(model: str, page_size: int) -> None:
    """100 KiB had three states, and a hit rate of 0 with not a word."""
    config = load_config(tree(model, page_size, "100KiB"), environ={})
    assert config_warnings(config, environ={}) == []
    result = replay(multi_turn(CHATS), config)
    assert (result.stamp_mismatches, result.audit_errors) == (0, [])
    assert result.token_hit_rate > 0.1


@pytest.mark.parametrize(
    ("model", "page_size", "capacity"),
    [("full+swa", 1, "4KiB"), ("full+mamba", 64, "16KiB"), ("full+swa+mamba", 16, "16KiB")],
)
def test_a_pool_in_which_a_request_leaves_no_room_serves_and_warns(
    model: str, page_size: int, capacity: str
) -> None:
    config = load_config(tree(model, page_size, capacity), environ={})
    assert [line for line in config_warnings(config, environ={}) if "next to nothing is ever reused" in line]
    result = replay(multi_turn(CHATS), config)
    assert (result.stamp_mismatches, result.audit_errors) == (0, [])


@pytest.mark.parametrize("model", ["full+swa", "full+mamba", "full+swa+mamba"])
def test_a_pool_smaller_than_a_window_or_two_states_is_refused_with_what_is_needed(model: str) -> None:
    with pytest.raises(
        ConfigError, match=r"tiers\.device\.capacity .*one request needs .* expected at least"
    ):
        load_config(tree(model, 16, "3KiB"), environ={})
