"""Where hybrids can go on from: forks, ends of prompts, exact multiples of the page (O-04, O-20, O-21)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from hicache.config import load_config
from hicache.replay.footprint import roomy_config
from hicache.replay.multiturn import UNEXPLAINED, MultiTurnResult, run_multi_turn
from hicache.replay.result import ReplayResult
from hicache.replay.run import replay
from hicache.workload import MultiTurn, Request
from hicache.workload.records import ArraySource

HYBRIDS = ["full+swa", "full+mamba", "full+swa+mamba"]
Tokens = NDArray[np.int32]


def tokens(begin: int, end: int) -> Tokens:
    return np.arange(begin, end, dtype=np.int32)


def served(components: str, page_size: int, prompts: Sequence[Tokens]) -> tuple[list[int], ReplayResult]:
    """Reused tokens of each prompt, one after the other, in a cache with room for all."""
    load = MultiTurn(sessions=len(prompts), turns=1, user=max(map(len, prompts)))
    config = load_config(roomy_config(load, components.split("+"), page_size), environ={})
    hits: list[int] = []

    def note(so_far: ReplayResult) -> None:
        hits.append(so_far.hit_tokens - sum(hits))

    requests = [
        Request(index, float(index), ArraySource(prompt, 0, len(prompt)), ArraySource(prompt, 0, 0))
        for index, prompt in enumerate(prompts)
    ]
    result = replay(requests, config, on_request=note)
    assert (result.stamp_mismatches, result.audit_errors) == (0, [])
    assert result.hit_tokens + result.computed_tokens == result.prompt_tokens
    return hits, result


@pytest.mark.parametrize("components", HYBRIDS)
@pytest.mark.parametrize("shared", [1500, 1600], ids=["1500 shared", "100 more"])
def test_the_third_request_reuses_what_all_share(components: str, shared: int) -> None:
    """O-20, grid 264: the second finds FULL without a state or window and leaves them at the fork; where
    exactly the prompts part makes no difference.
    """
    system = tokens(1, 1 + shared)
    prompts = [np.concatenate([system, tokens(10_000 * n, 10_000 * n + 700)]) for n in range(1, 9)]
    fork = shared // 264 * 264
    hits, result = served(components, 264, prompts)
    assert hits == [0, 0, *[fork] * 6]
    assert result.blocked_tokens == fork
    stats = result.stats
    assert stats is not None
    assert stats.tree["fork_tokens"] == fork


@pytest.mark.parametrize("components", ["full", *HYBRIDS, "swa", "mamba"])
def test_the_same_prompt_again_and_again_is_reused_up_to_its_last_page(components: str) -> None:
    """O-04: 100 tokens, pages of 64: a state is kept where the cap lets it be used."""
    assert served(components, 64, [tokens(1, 101)] * 4)[0] == [0, 64, 64, 64]


@pytest.mark.parametrize("components", HYBRIDS)
def test_a_prompt_of_whole_pages_is_reused_up_to_the_page_before(components: str) -> None:
    """O-21: states at 256 and 512; never 511, never the whole."""
    assert served(components, 256, [tokens(1, 513), tokens(1, 513), tokens(1, 514)])[0] == [0, 256, 512]


@pytest.mark.parametrize("components", ["full", *HYBRIDS, "swa", "mamba"])
def test_a_prompt_below_a_page_is_never_reused_and_costs_nothing(components: str) -> None:
    hits, result = served(components, 64, [tokens(1, 64)] * 3)
    assert hits == [0, 0, 0]
    assert result.blocked_tokens == 0


@pytest.mark.parametrize("components", ["full+mamba", "full+swa+mamba"])
def test_forks_of_forks_are_found_too(components: str) -> None:
    """A tree of prompts three levels deep: each fork costs one request, then everybody has it."""
    prompts = [
        np.concatenate(
            [tokens(1, 129), tokens(1000 * a, 1000 * a + 128), tokens(10_000 * b, 10_000 * b + 50)]
        )
        for a in (1, 2)
        for b in (1, 2, 3, 4)
    ]
    hits, _ = served(components, 32, prompts)
    #  1.1 new | 1.2 leaves 256 | 256 ... | 2.1 leaves 128 | 2.2 has 128, leaves 256 | 256 ...
    assert hits == [0, 0, 256, 256, 0, 128, 256, 256]


SMALL = {
    "tiers.host": {"capacity": "96KiB", "pinned": False},
    "tiers.stores": [{"kind": "memory"}],
    "policy.write": "write_through",
    "policy.prefetch.min_tokens": 0,
}


def multi_turn(components: str, device: str, **overrides: object) -> MultiTurnResult:
    load = MultiTurn(sessions=6, turns=6, system=0, user=90, output=30)
    config = roomy_config(load, components.split("+"), 16)
    return run_multi_turn(
        load, load_config(config, overrides={"tiers.device.capacity": device, **overrides}, environ={})
    )


@pytest.mark.parametrize(
    ("components", "device", "overrides"),
    [
        ("full", "24KiB", {}),
        ("full", "24KiB", SMALL),
        ("full", "24KiB", {**SMALL, "policy.write": "write_back"}),
        ("full", "24KiB", {**SMALL, "policy.write": "write_through_selective"}),
        ("full+mamba", "900KiB", {}),
        ("full+swa+mamba", "900KiB", {**SMALL, "tiers.host": {"capacity": "1MiB", "pinned": False}}),
    ],
    ids=["L1", "three tiers", "write back", "selective", "hybrid L1", "hybrid three tiers"],
)
def test_every_token_short_of_the_closed_form_has_a_cause(
    components: str, device: str, overrides: dict[str, object]
) -> None:
    """O-63: whatever does not fit, the deficit is the sum of its causes, and nothing is a riddle."""
    result = multi_turn(components, device, **overrides)
    assert result.is_sound
    for row in result.rounds:
        assert sum(row.lost.values()) == row.expected_tokens - row.tokens.hit
        assert min(row.lost.values()) >= 0
        assert row.lost.get(UNEXPLAINED, 0) == 0
    if result.deficit_tokens:
        assert f"{result.deficit_tokens:,} tokens short" in result.verdict()
    else:
        assert "equal to the closed form" in result.verdict()


def test_three_tiers_with_room_below_lose_nothing() -> None:
    """O-63: L1 holds a tenth, L2 a third, L3 the rest, on a slow device pool of pages of 16."""
    result = multi_turn("full", "12KiB", **SMALL)
    assert result.deficit_tokens == 0, result.verdict()
    assert result.replay.store_tokens + result.replay.host_tokens > 0
