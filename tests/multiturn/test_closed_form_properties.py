"""Any load that fits equals its closed form to the token, whatever its sizes (O-63)."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.config import load_config
from hicache.replay.footprint import roomy_config
from hicache.replay.multiturn import NO_CHECKPOINT, MultiTurnResult, run_multi_turn
from hicache.workload import MultiTurn

EXAMPLES = 15 if os.environ.get("HICACHE_TEST_PROFILE") == "quick" else 200
COMPONENTS = ("full", "full+swa", "full+mamba", "full+swa+mamba", "swa", "mamba", "swa+mamba")
loads = st.builds(
    MultiTurn,
    sessions=st.integers(1, 5),
    turns=st.integers(1, 5),
    user=st.integers(1, 150),
    output=st.integers(0, 80),
)
shared_loads = st.builds(
    MultiTurn,
    sessions=st.integers(1, 4),
    turns=st.integers(1, 3),
    system=st.integers(1, 1400),
    user=st.integers(1, 60),
    output=st.integers(0, 40),
)


def run(load: MultiTurn, components: str, page_size: int, seed: int) -> MultiTurnResult:
    config = load_config(roomy_config(load, components.split("+"), page_size), environ={})
    result = run_multi_turn(load, config, seed=seed)
    assert result.is_sound
    assert len(result.rounds) == load.turns
    counts = result.replay
    assert counts.hit_tokens + counts.computed_tokens == counts.prompt_tokens
    assert counts.refused_requests == 0
    return result


@settings(max_examples=EXAMPLES)
@given(
    load=loads,
    components=st.sampled_from(COMPONENTS),
    page_size=st.sampled_from((1, 3, 16, 64, 512)),
    seed=st.integers(0, 2**32),
)
@pytest.mark.timeout(600)
def test_a_load_without_a_shared_prompt_equals_the_closed_form(
    load: MultiTurn, components: str, page_size: int, seed: int
) -> None:
    result = run(load, components, page_size, seed)
    assert [row.tokens.hit for row in result.rounds] == [row.expected_tokens for row in result.rounds]


@settings(max_examples=EXAMPLES)
@given(
    load=shared_loads,
    components=st.sampled_from(COMPONENTS),
    page_size=st.sampled_from((1, 16, 64)),
    seed=st.integers(0, 2**32),
)
@pytest.mark.timeout(600)
def test_a_shared_prompt_costs_a_hybrid_one_request_and_nobody_else_anything(
    load: MultiTurn, components: str, page_size: int, seed: int
) -> None:
    """O-20: what is short is one request's worth of the system prompt, in the first round, for lack of a mark."""
    result = run(load, components, page_size, seed)
    short = [row.expected_tokens - row.tokens.hit for row in result.rounds]
    most = load.system // page_size * page_size if components != "full" and load.sessions > 1 else 0
    assert 0 <= short[0] <= most
    assert short[1:] == [0] * (load.turns - 1)
    assert result.rounds[0].lost[NO_CHECKPOINT] == short[0]
