"""Policy against policy against the bound, and what a share of a load's footprint comes to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from hicache.config import device_slots, host_slots, load_config
from hicache.errors import ConfigError
from hicache.replay.bound import ClairvoyantBound
from hicache.replay.compare import compare_policies, parse_shares, path_bound
from hicache.replay.footprint import footprint_slots, share_of, tight_config
from hicache.replay.late_turns import LateTurns
from hicache.workload import MultiTurn, closed_form

LOAD = MultiTurn(sessions=5, turns=5, system=64, user=90, output=30, shuffled=True)


def blocks(*ids: int) -> NDArray[np.int32]:
    return np.array(ids, dtype=np.int32)


@pytest.mark.parametrize(
    ("looked_up", "capacity", "hits"),
    [
        (None, 3, 3),
        ([2, 2], 3, 2),  # the last block is computed each time
        ([2, 2], 1, 1),
        ([3, 0], 3, 0),
        ([0, 3], 3, 3),  # what the first request looks up finds nothing anyway
    ],
)
def test_only_what_is_looked_up_can_be_hit(looked_up: Sequence[int] | None, capacity: int, hits: int) -> None:
    bound = ClairvoyantBound([blocks(1, 2, 3), blocks(1, 2, 3)], looked_up)
    assert bound.hit_blocks(capacity) == hits


def test_no_room_is_held_for_a_block_that_is_computed_again() -> None:
    """The second request computes 2; so all room may go to 9, which the third looks up."""
    sequences = [blocks(1, 2), blocks(8, 9), blocks(1, 2), blocks(8, 9)]
    assert ClairvoyantBound(sequences, [2, 2, 1, 2]).hit_blocks(3) == 3
    assert ClairvoyantBound(sequences).hit_blocks(3) == 3
    assert ClairvoyantBound(sequences, [2, 2, 0, 2]).hit_blocks(2) == 2


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_with_room_for_everything_the_bound_is_the_closed_form(page_size: int) -> None:
    hits = path_bound(LOAD, page_size).hit_blocks(10**9) * page_size
    assert hits == sum(row.hit_tokens for row in closed_form(LOAD, page_size, last_token_written=False))


@pytest.mark.parametrize("components", ["full", "full+mamba"])
def test_no_policy_beats_the_bound_and_room_makes_all_equal_to_it(components: str) -> None:
    names = components.split("+")
    found = compare_policies(LOAD, names, 16, policies=["lru", "session", "mru"], shares=[0.3, 0.6, 4])
    assert found.is_sound
    assert not found.is_interrupted
    assert [row.share for row in found.rows] == [0.3, 0.6, 4]
    for row in found.rows:
        assert row.bound_hit_rate is not None
        for result in row.by_policy.values():
            assert result.replay.token_hit_rate <= row.bound_hit_rate
    tight, _, roomy = found.rows
    assert roomy.bound_hit_rate == pytest.approx(found.closed_form_hit_rate)
    assert tight.bound_hit_rate is not None
    assert tight.bound_hit_rate < found.closed_form_hit_rate
    if components == "full":
        for result in roomy.by_policy.values():
            assert result.replay.token_hit_rate == pytest.approx(found.closed_form_hit_rate)


def test_a_model_without_a_path_has_no_bound() -> None:
    found = compare_policies(LOAD, ["mamba"], 16, policies=["lru"], shares=[1])
    assert found.rows[0].bound_hit_rate is None


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("components", ["full", "full+swa", "full+mamba", "full+swa+mamba"])
def test_a_share_of_the_footprint_comes_to_just_these_slots(components: str, page_size: int) -> None:
    names = components.split("+")
    load = MultiTurn(sessions=60, turns=9, user=200, output=100)
    footprint = footprint_slots(load, names, page_size)
    assert footprint["full"] == 60 * -(-9 * 300 // page_size)
    tree = tight_config(load, names, page_size, device_share=0.05, host_share=0.5)
    config = load_config(tree, environ={})
    assert device_slots(config) == share_of(footprint, 0.05, page_size)
    assert host_slots(config) == share_of(footprint, 0.5, page_size)
    assert device_slots(config)["full"] == -(-footprint["full"] // 20)


@pytest.mark.parametrize("word", ["", "0", "-5%", "nan", "inf", "x", "2000%"])
def test_a_share_that_is_none_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="--capacities: "):
        parse_shares(f"10%,{word}")


@pytest.mark.parametrize("components", ["full", "full+swa", "full+mamba", "full+swa+mamba"])
def test_late_turns_lose_nothing_with_a_twentieth_in_l1(components: str) -> None:
    """The stated benchmark, smaller: 24 chats of 20 turns, half of the footprint in L2, the rest in L3."""
    load = MultiTurn(sessions=24, turns=20, user=40, output=24, shuffled=True, stride=5, every_turn_from=16)
    found = LateTurns(load, 32, 18, store={"kind": "memory"}).run(components)
    assert found.result.is_sound
    assert found.is_reached, found.result.verdict()
    late = found.late
    assert late["device"] + late["host"] + late["store"] + late["computed"] == late["prompt"]
    assert late["store"] > late["device"]


def test_late_turns_that_fall_short_are_not_reached() -> None:
    load = MultiTurn(sessions=24, turns=8, user=40, output=24, shuffled=True)
    found = LateTurns(load, 32, 6, host_share=0.1, store=None).run("full")
    assert found.result.is_sound
    assert not found.is_reached
    assert found.share_of_closed_form < 0.9
