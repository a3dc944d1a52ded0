"""``adaptive``: which policy the shadows say does best, and how the turns follow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import hicache
from hicache.policy.session_order import LEAST_WORTHS, SWEEP, SWEEP_LOOKS, Followed, SessionOrder
from hicache.policy.shadows import SHADOW_BLOCKS, Shadows, block_tokens_of, fingerprints, make_order
from hicache.radix.core import core_kind
from hicache.replay.capacity import parse_capacity
from hicache.replay.reference import block_sequences, reference_replay
from hicache.types import LeaseId, SessionId
from hicache.workload import read_trace

CORES = ["python", "rust"] if core_kind()[0] == "rust" else ["python"]
TRACES = Path(hicache.__file__).resolve().parents[1] / "traces"


def one_shots(order: SessionOrder, num: int) -> dict[LeaseId, int]:
    """Requests of a session each, for prompts that are hot for a short time: LRU serves them, sessions do not.

    Returns what each turn is worth at the end.
    """
    worth: dict[LeaseId, int] = {}
    for i in range(num):
        hot = i // 30 * 5 + i * 7 % 5
        tokens = np.concatenate([np.arange(40) + 100 * hot, [7 * i, 8, 9, 10]]).astype(np.int32)
        order.begin(SessionId(i), None, float(i))
        order.end(SessionId(i), LeaseId(i), 0, float(i))
        order.watch(SessionId(i), tokens, len(tokens), 0)
        worth.update(zip(*order.take_ratings(float(i))[:2], strict=True))
    return worth


@pytest.fixture(params=CORES)
def order(request: pytest.FixtureRequest) -> SessionOrder:
    made = make_order("adaptive", request.param, capacity_tokens=400, block_tokens=2)
    assert made is not None
    return made


def test_another_policy_is_followed_once_it_clearly_does_better(order: SessionOrder) -> None:
    assert order.followed == "session"
    one_shots(order, 200)
    assert order.followed in ("recency", "shared", "popular")


class Served:
    """Instead of the tree of blocks: ``recency`` has each prompt whole, the others have nothing."""

    def serve(self, *request: object) -> list[int]:
        num_prompt = request[-1]
        assert isinstance(num_prompt, int)
        return [0, num_prompt, 0, 0]


@pytest.mark.parametrize(
    ("sessions", "expected"), [(1000, 4 * 3), (3, 4 * 3), (2, 4 * 8), (1, 4 * 8)], ids=["all", "3", "2", "1"]
)
def test_a_steady_lead_counts_after_four_batches_of_three_sessions_or_eight_requests(
    monkeypatch: pytest.MonkeyPatch, sessions: int, expected: int
) -> None:
    shadows = Shadows(1000, 2)
    monkeypatch.setattr(shadows, "_tree", Served())
    tokens = np.arange(20, dtype=np.int32)
    num = 1
    while shadows.watch(SessionId(num % sessions), None, 1, tokens, 20, 0) is Followed.SESSION:
        num += 1
    assert num == expected


def end_turns(order: SessionOrder, num: int) -> None:
    """Of a session each, and rated."""
    for i in range(num):
        order.begin(SessionId(i), None, 1.0)
        order.end(SessionId(i), LeaseId(i), 0, 1.0)
    order.take_ratings(1.0)


def leave_session(order: SessionOrder) -> None:
    """Show prompts that another order serves better, until one is followed."""
    at = 0
    while order.followed == "session":
        tokens = np.concatenate([np.arange(40) + 100 * (at // 30 * 5 + at * 7 % 5), [7 * at, 8]])
        order.watch(SessionId(at), tokens.astype(np.int32), len(tokens), 0)
        at += 1


def test_a_change_of_policy_rates_a_bounded_number_of_turns_at_a_time(order: SessionOrder) -> None:
    end_turns(order, 3 * SWEEP)
    leave_session(order)
    told: dict[LeaseId, int] = {}
    while len(told) < 3 * SWEEP:
        leases, worths, _ = order.take_ratings(1.0)
        assert 0 < len(leases) <= SWEEP
        told.update(zip(leases, worths, strict=True))
    assert min(told.values()) >= LEAST_WORTHS[Followed(order.followed)]
    assert order.take_ratings(1.0) == ([], [], [])


def test_what_the_tree_has_nothing_of_does_not_keep_the_rest_from_being_rated(order: SessionOrder) -> None:
    end_turns(order, SWEEP_LOOKS)
    order.bury([LeaseId(i) for i in range(SWEEP_LOOKS - 3)])
    leave_session(order)
    leases, worths, _ = order.take_ratings(1.0)
    assert sorted(leases) == [LeaseId(i) for i in range(SWEEP_LOOKS - 3, SWEEP_LOOKS)]
    assert min(worths) >= LEAST_WORTHS[Followed(order.followed)]


def test_hints_count_whichever_policy_is_followed(order: SessionOrder) -> None:
    one_shots(order, 200)
    order.close(SessionId(199))
    order.expects_return(SessionId(198), 60, 200.0)
    told = dict(zip(*order.take_ratings(200.0)[:2], strict=True))
    assert told[LeaseId(199)] == 0
    order.reopen(SessionId(199))
    assert 0 < dict(zip(*order.take_ratings(200.0)[:2], strict=True))[LeaseId(199)] < told[LeaseId(198)]


def test_without_shadows_nothing_is_watched_and_session_is_followed() -> None:
    order = make_order("session", CORES[-1], capacity_tokens=400, block_tokens=2)
    assert order is not None
    one_shots(order, 200)
    assert order.followed == "session"
    assert make_order("lru", CORES[-1], capacity_tokens=400, block_tokens=2) is None


def test_a_small_cache_is_shadowed_whole_and_of_a_large_one_a_share_of_the_sessions() -> None:
    small = Shadows(SHADOW_BLOCKS * 64, 64)
    assert all(small.samples(SessionId(name)) for name in range(-100, 100))
    large = Shadows(SHADOW_BLOCKS * 64 * 16, 64)
    sampled = sum(large.samples(SessionId(name)) for name in range(16_000))
    assert 900 < sampled < 1100


def test_blocks_are_equal_where_they_and_all_before_them_are() -> None:
    tokens = np.arange(256, dtype=np.int32)
    other = tokens.copy()
    other[64] += 1
    one, two = fingerprints(tokens, 64, 0), fingerprints(other, 64, 0)
    assert one[0] == two[0]
    assert not (one[1:] == two[1:]).any()
    assert not (one == fingerprints(tokens, 64, 1)).any(), "another namespace"
    assert len(fingerprints(tokens[:63], 64, 0)) == 0


@pytest.mark.parametrize(("page_size", "expected"), [(1, 64), (16, 64), (48, 48), (64, 64), (256, 256)])
def test_a_block_is_whole_pages(page_size: int, expected: int) -> None:
    assert block_tokens_of(page_size) == expected


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("cc_agentic_small", "2%"),
        ("cc_agentic_small", "10%"),
        pytest.param("cc_agentic_small", "20%", marks=pytest.mark.slow),
        pytest.param("mooncake_conversation", "5%", marks=pytest.mark.slow),
        pytest.param("mooncake_conversation", "20%", marks=pytest.mark.slow),
    ],
)
def test_adaptive_is_within_half_a_point_of_the_best_policy(name: str, share: str) -> None:
    trace = read_trace(TRACES / f"{name}.jsonl.zst")
    sequences = block_sequences(trace)
    blocks = parse_capacity(share).in_blocks(trace)
    rates = {
        policy: reference_replay(trace, blocks, policy=policy, sequences=sequences).token_hit_rate
        for policy in ("adaptive", "session", "lru", "slru", "lfu")
    }
    assert rates["adaptive"] >= max(rates.values()) - 0.005
    assert rates["adaptive"] >= rates["lru"] - 0.002
