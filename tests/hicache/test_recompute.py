"""Fetch or compute again: whichever is sooner by what was measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from hicache.policy.recompute import MIN_MEASURED_BYTES, TRY_EVERY, Bandwidth, LoadOrRecompute
from hicache.transfer.jobs import Direction
from hicache.types import TierTokens

if TYPE_CHECKING:
    from tests.hicache.conftest import MakeRig, Tokens

T = Callable[..., "Tokens"]
MIB = 1 << 20


@pytest.mark.parametrize(
    ("num_bytes", "ahead_bytes", "num_tokens", "fetched"),
    [
        (10 * MIB, 0, 1024, True),  # 0.1 s to fetch, 0.2 s to compute
        (30 * MIB, 0, 1024, False),
        (10 * MIB, 20 * MIB, 1024, False),  # its turn comes too late
        (30 * MIB, 0, 2048, True),
    ],
)
def test_the_sooner_way_is_taken(num_bytes: int, ahead_bytes: int, num_tokens: int, fetched: bool) -> None:
    decide = LoadOrRecompute(per_1024_tokens_s=0.2)
    assert fetched == decide.should_fetch(
        num_tokens=num_tokens,
        num_bytes=num_bytes,
        ahead_bytes=ahead_bytes,
        bandwidth=Bandwidth(100.0 * MIB, 1.0),
    )


@pytest.mark.parametrize("bandwidth", [Bandwidth(), Bandwidth(MIN_MEASURED_BYTES - 1.0, 1000.0)])
def test_what_was_not_measured_is_fetched(bandwidth: Bandwidth) -> None:
    decide = LoadOrRecompute(per_1024_tokens_s=0.001)
    assert decide.should_fetch(num_tokens=1, num_bytes=MIB, ahead_bytes=0, bandwidth=bandwidth)


def test_without_a_stated_cost_l3_is_always_asked() -> None:
    decide = LoadOrRecompute(None)
    assert decide.should_fetch(num_tokens=1, num_bytes=MIB, ahead_bytes=0, bandwidth=Bandwidth(MIB, 1e9))


def test_a_slow_store_is_tried_now_and_then() -> None:
    """Else nothing would ever show that it became faster."""
    decide = LoadOrRecompute(per_1024_tokens_s=0.001)
    tries = [
        decide.should_fetch(num_tokens=1, num_bytes=MIB, ahead_bytes=0, bandwidth=Bandwidth(MIB, 10.0))
        for _ in range(2 * TRY_EVERY)
    ]
    assert [n for n, fetched in enumerate(tries, 1) if fetched] == [TRY_EVERY, 2 * TRY_EVERY]


@pytest.mark.parametrize("model", ["full", "full+swa+mamba"])
@pytest.mark.parametrize("seconds", [0.1, 1e6])
def test_a_request_computes_what_l3_gives_too_late(
    make_rig: MakeRig, t: T, model: str, seconds: float
) -> None:
    rig = make_rig(
        model,
        host=64,
        store="scripted",
        policy__prefetch={"min_tokens": 0, "recompute_per_1024_tokens": "10s"},
    )
    rig.serve(t(40))
    assert rig.cache.flush()
    rig.cache.reset()
    rig.cache._runtime.transfers._counters.measured(Direction.FETCH, 2 * MIB, seconds)
    served = rig.serve(t(41))
    assert served.source.total == (40 if seconds < 1 else 0)
    assert rig.cache.stats().faults.get("recompute_sooner", 0) == (seconds > 1)
    assert bool(rig.store.keys_of("get")) == (seconds < 1)
    rig.check_idle()
    assert rig.serve(t(41)).source == TierTokens(40, 0, 0)
