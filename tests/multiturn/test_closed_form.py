"""The multi-turn load equals its closed form, and what is missing is accounted for."""

from __future__ import annotations

import pytest

from hicache.config import HiCacheConfig, device_budget, load_config
from hicache.replay.footprint import roomy_config
from hicache.replay.multiturn import EVICTED, NO_CHECKPOINT, UNEXPLAINED, MultiTurnResult, run_multi_turn
from hicache.workload import MultiTurn

COMBINATIONS = ["full", "full+swa", "full+mamba", "full+swa+mamba", "swa", "mamba"]


def run(load: MultiTurn, components: str, page_size: int, **overrides: object) -> MultiTurnResult:
    source = roomy_config(load, components.split("+"), page_size)
    result = run_multi_turn(load, load_config(source, overrides=overrides, environ={}))
    assert result.replay.stamp_mismatches == 0
    assert result.replay.audit_errors == []
    counts = result.replay
    assert counts.hit_tokens + counts.computed_tokens == counts.prompt_tokens
    return result


def test_components_of_a_roomy_pool_share_it_as_they_do_by_default() -> None:
    config = load_config(
        roomy_config(MultiTurn(sessions=2, turns=2, user=8), ["full", "swa", "mamba"], 64), environ={}
    )
    assert config.tiers.device.split is None
    assert device_budget(config) is not None


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("components", COMBINATIONS)
def test_every_round_equals_the_closed_form_to_the_token(components: str, page_size: int) -> None:
    """Without a shared prompt even a hybrid model reuses all that the rule of one token allows."""
    result = run(MultiTurn(sessions=3, turns=4, user=97, output=53), components, page_size)
    assert [row.tokens.hit for row in result.rounds] == [row.expected_tokens for row in result.rounds]
    assert result.deficit_tokens == 0
    assert result.as_json()["equals_closed_form"] is True
    assert "equal to the closed form" in result.verdict()


def test_a_shared_prompt_is_reused_from_the_second_request_on() -> None:
    result = run(MultiTurn(sessions=4, turns=3, system=500, user=40, output=30), "full", 16)
    assert result.rounds[0].tokens.hit == 3 * 496
    assert result.deficit_tokens == 0


@pytest.mark.parametrize("components", ["full+swa", "full+mamba", "full+swa+mamba", "swa", "mamba"])
def test_a_hybrid_misses_a_new_fork_once_and_says_so(components: str) -> None:
    """O-20: the second request finds the fork without state or window, and leaves them there."""
    result = run(MultiTurn(sessions=5, turns=2, system=2048, user=133, output=20), components, 64)
    first = result.rounds[0]
    assert first.lost == {NO_CHECKPOINT: 2048, "failed or late": 0, "refused": 0, UNEXPLAINED: 0}
    assert first.tokens.hit == first.expected_tokens - 2048
    assert result.rounds[1].tokens.hit == result.rounds[1].expected_tokens


def test_an_answer_is_reused_up_to_its_last_written_token() -> None:
    """O-03: prompt 100, answer 50; the last sampled token has no payload."""
    load = MultiTurn(sessions=1, turns=2, user=100, output=50)
    assert run(load, "full", 1).rounds[1].tokens.hit == 149
    assert run(load, "full", 16).rounds[1].tokens.hit == 144


TOKENS_PER_ROUND, PAGE, CLIENTS, ROUNDS = 64, 16, 20, 9
WORKING_SET_PAGES = CLIENTS * ROUNDS * TOKENS_PER_ROUND // PAGE


def tiers(device_pages: int, host_pages: int | None, *, store: bool) -> HiCacheConfig:
    page_bytes = PAGE * 16
    tree: dict[str, object] = {"device": {"kind": "cpu", "capacity": device_pages * page_bytes}}
    if host_pages is not None:
        tree["host"] = {"capacity": host_pages * page_bytes, "pinned": False}
    if store:
        tree["stores"] = [{"kind": "memory"}]
    return load_config(
        {
            "model": {
                "name": "o63",
                "page_size": PAGE,
                "components": {"full": {"rule": "path", "layers": 2, "bytes_per_token": 16}},
            },
            "tiers": tree,
            "policy": {"write": "write_through"},
        },
        environ={},
    )


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(tiers(2 * WORKING_SET_PAGES, None, store=False), id="L1"),
        pytest.param(tiers(WORKING_SET_PAGES // 10, 2 * WORKING_SET_PAGES, store=False), id="L1+L2"),
        pytest.param(tiers(WORKING_SET_PAGES // 10, WORKING_SET_PAGES // 4, store=True), id="L1+L2+L3"),
    ],
)
def test_late_rounds_hit_what_the_closed_form_says(config: HiCacheConfig) -> None:
    """O-63: with equal growth, round r hits floor(r L / P) P of (r + 1) L tokens, in every hierarchy."""
    load = MultiTurn(sessions=CLIENTS, turns=ROUNDS, user=TOKENS_PER_ROUND)
    result = run_multi_turn(load, config)
    assert result.replay.audit_errors == []
    assert result.replay.stamp_mismatches == 0
    for r, row in enumerate(result.rounds):
        expected = CLIENTS * (r * TOKENS_PER_ROUND // PAGE * PAGE)
        assert row.expected_tokens == expected
        assert row.tokens.hit == expected, result.verdict()
    assert len(result.rounds) == ROUNDS


def test_what_does_not_fit_is_explained_by_evictions() -> None:
    """O-63: with the device alone at a tenth, the deficit is all evictions, to the token."""
    load = MultiTurn(sessions=CLIENTS, turns=ROUNDS, user=TOKENS_PER_ROUND)
    result = run_multi_turn(load, tiers(WORKING_SET_PAGES // 10, None, store=False))
    assert result.deficit_tokens > 0
    lost = sum(sum(row.lost.values()) for row in result.rounds)
    assert lost == result.deficit_tokens
    assert sum(row.lost.get(EVICTED, 0) for row in result.rounds) == lost
    assert result.is_sound
