"""Fetch or compute again: whichever is sooner by what was measured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from hicache.clock import ManualClock
from hicache.policy.recompute import (
    MIN_MEASURED_BYTES,
    MIN_MEASURED_TOKENS,
    MIN_PREFILL_TOKENS,
    TRY_EVERY,
    Bandwidth,
    LoadOrRecompute,
    Move,
    Option,
    soonest,
)
from hicache.transfer.jobs import Direction
from hicache.types import Tier, TierTokens

if TYPE_CHECKING:
    from tests.hicache.conftest import MakeRig, Tokens

T = Callable[..., "Tokens"]
MIB = 1 << 20


def move(num_bytes: int, mib_per_s: float, ahead_bytes: int = 0) -> Move:
    return Move(num_bytes, ahead_bytes, Bandwidth(mib_per_s * MIB, 1.0))


def test_the_time_of_a_move_is_that_of_its_bytes_and_of_those_before_them() -> None:
    assert move(10 * MIB, 100).time_s == pytest.approx(0.1)
    assert move(10 * MIB, 100, ahead_bytes=20 * MIB).time_s == pytest.approx(0.3)


@pytest.mark.parametrize("bandwidth", [Bandwidth(), Bandwidth(MIN_MEASURED_BYTES - 1.0, 1000.0)])
def test_what_was_not_measured_takes_no_time(bandwidth: Bandwidth) -> None:
    assert Move(1 << 40, 0, bandwidth).time_s == 0


@pytest.mark.parametrize(
    ("loads_s", "chosen"),
    [
        pytest.param((0.3, 0.1, 0.0), 2048, id="all-of-it"),
        pytest.param((0.5, 0.1, 0.0), 1024, id="without-the-slow-end"),
        pytest.param((0.9, 0.5, 0.0), 0, id="nothing"),
        pytest.param((0.4, 0.2, 0.0), 2048, id="the-deepest-of-equal-ones"),
    ],
)
def test_the_boundary_that_is_ready_first_is_taken(loads_s: tuple[float, ...], chosen: int) -> None:
    """1,024 tokens take 0.2 s to compute."""
    options = [Option(at, load_s) for at, load_s in zip((2048, 1024, 0), loads_s, strict=True)]
    assert options[soonest(options, 3000, 0.2 / 1024)].boundary == chosen


def test_a_state_of_19_mib_is_not_loaded_for_200_tokens() -> None:
    """The deeper boundary has its state in L2, the one 200 tokens before it in L1."""
    deep, near = Option(5200, move(19 * MIB, 800).time_s), Option(5000, 0.0)
    assert soonest([deep, near], 5300, 0.1 / 1024) == 1
    assert soonest([deep, near], 5300, 0.2 / 1024) == 0


def test_without_a_cost_all_is_loaded() -> None:
    decide = LoadOrRecompute(None)
    decide.saw_prefill(10_000, 1.0)
    assert decide.choose([Option(1024, 1e9), Option(0, 0.0)], 2000) == 0


def test_the_cost_is_learnt_from_prefills_that_were_seen() -> None:
    decide = LoadOrRecompute("auto")
    for _ in range(100):
        decide.saw_prefill(1000, 0.3)
    assert decide.per_token_s == pytest.approx(0.0003, rel=1e-3)


@pytest.mark.parametrize(
    ("num_tokens", "seconds"), [(MIN_PREFILL_TOKENS - 1, 10.0), (5000, 0.0), (-5000, 1.0)]
)
def test_a_prefill_that_says_nothing_teaches_nothing(num_tokens: int, seconds: float) -> None:
    decide = LoadOrRecompute("auto")
    for _ in range(1000):
        decide.saw_prefill(num_tokens, seconds)
    assert decide.per_token_s is None


@pytest.mark.parametrize(
    ("num_tokens", "is_known"), [(MIN_MEASURED_TOKENS - 1, False), (MIN_MEASURED_TOKENS, True)]
)
def test_a_little_prefill_is_not_enough_to_know_the_cost(num_tokens: int, is_known: bool) -> None:
    decide = LoadOrRecompute("auto")
    decide.saw_prefill(num_tokens, 1.0)
    assert (decide.per_token_s is not None) == is_known


def test_a_stated_cost_is_not_unlearnt() -> None:
    decide = LoadOrRecompute(0.1)
    decide.saw_prefill(100_000, 1000.0)
    assert decide.per_token_s == 0.1 / 1024


def test_a_slow_tier_is_tried_now_and_then() -> None:
    """Else nothing would ever show that it became faster."""
    decide = LoadOrRecompute(0.001)
    choices = [decide.choose([Option(1024, 10.0), Option(0, 0.0)], 2000) for _ in range(2 * TRY_EVERY)]
    assert [n for n, choice in enumerate(choices, 1) if choice == 0] == [TRY_EVERY, 2 * TRY_EVERY]


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
    rig.cache._runtime.transfers._counters.measured(Direction.FETCH, "full", 2 * MIB, seconds)
    served = rig.serve(t(41))
    assert served.source.total == (40 if seconds < 1 else 0)
    assert served.shortened_tokens == 0
    assert rig.cache.stats().recomputed_tokens == (40 if seconds > 1 else 0)
    assert rig.cache.stats().faults.get("recompute_sooner", 0) == (seconds > 1)
    assert bool(rig.store.keys_of("get")) == (seconds < 1)
    rig.check_idle()
    assert rig.serve(t(41)).source == TierTokens(40, 0, 0)


def test_what_l2_gives_too_late_is_computed(make_rig: MakeRig, t: T) -> None:
    rig = make_rig(device=16, host=64, policy__prefetch={"recompute_per_1024_tokens": "10s"})
    rig.serve(t(40))
    rig.serve(t(1032, 1001))  # fills L1: of the first prompt 4 pages are left there
    near = rig.cache.probe(t(41)).source
    assert (near.total, near.device) == (40, 32)
    rig.cache._runtime.transfers._counters.measured(Direction.TO_DEVICE, "full", 2 * MIB, 1e6)
    served = rig.serve(t(41))
    assert served.source == TierTokens(32, 0, 0)
    assert rig.cache.stats().recomputed_tokens == 8
    rig.check_idle()


@pytest.mark.parametrize(("queued_bytes", "reused"), [(0, 40), (200 * MIB, 0)], ids=["idle", "busy"])
def test_what_is_queued_before_a_fetch_delays_it(
    make_rig: MakeRig, t: T, monkeypatch: pytest.MonkeyPatch, queued_bytes: int, reused: int
) -> None:
    """40 tokens take 0.4 s to compute; the store gives 20 MiB a second."""
    rig = make_rig(
        host=64, store="scripted", policy__prefetch={"min_tokens": 0, "recompute_per_1024_tokens": "10s"}
    )
    rig.serve(t(40))
    assert rig.cache.flush()
    rig.cache.reset()
    transfers = rig.cache._runtime.transfers
    transfers._counters.measured(Direction.FETCH, "full", 2 * MIB, 0.1)
    monkeypatch.setattr(
        transfers, "queued_bytes", {Direction.FETCH: queued_bytes, Direction.TO_DEVICE: 0}.get
    )
    assert rig.serve(t(41)).source.total == reused
    rig.check_idle()


def test_of_a_hybrid_the_state_that_is_near_is_taken(make_rig: MakeRig, t: T) -> None:
    """The full payload loads at once; the deeper state, in L2, does not."""
    rig = make_rig(
        "full+mamba",
        device={"full": 64, "mamba": 4},
        host=64,
        policy__prefetch={"recompute_per_1024_tokens": "10s"},
    )
    rig.serve(t(16))
    rig.serve(t(32))
    rig.serve(t(17))  # its state is the most recent one
    rig.cache.drain()
    with rig.cache._runtime.lock:
        rig.cache._runtime.run(rig.cache._runtime.core.make_room("mamba", Tier.DEVICE, 3).actions)
    rig.cache.drain()
    rig.cache._runtime.transfers._counters.measured(Direction.TO_DEVICE, "mamba", 2 * MIB, 1e6)
    with rig.cache.match(t(33)) as lease:
        assert [choice.boundary for choice in rig.cache._runtime.core.choices(lease.id)] == [16]
        assert (lease.reused, lease.load()) == (16, 16)
        assert rig.wrong_pages(lease, t(33)) == 0
    assert rig.cache.stats().recomputed_tokens == 16
    rig.check_idle()


def test_a_cost_that_is_learnt_comes_from_the_time_between_load_and_checkpoint(
    make_rig: MakeRig, t: T
) -> None:
    clock = ManualClock()
    rig = make_rig(device=1200, clock=clock, policy__prefetch={"recompute_per_1024_tokens": "auto"})
    decide = rig.cache._runtime.recompute
    with rig.cache.match(t(4096)) as lease:
        lease.load()
        lease.reserve(4100)
        for end in (2048, 4096):
            rig.write(lease, t(4096), end - 2048, end)
            clock.advance(1.0)
            lease.checkpoint(end)
            assert decide.per_token_s == pytest.approx(1.0 / 2048)
        clock.advance(1000.0)  # decoding teaches nothing
        rig.write(lease, t(4100), 4096, 4100)
        lease.release(t(4100))
    assert decide.per_token_s == pytest.approx(1.0 / 2048)


@pytest.mark.parametrize("waits_for", ["a layer", "the whole load", "room"])
def test_what_is_waited_for_is_no_time_of_the_engine_s(
    make_rig: MakeRig, t: T, monkeypatch: pytest.MonkeyPatch, waits_for: str
) -> None:
    """Else a slow load would make computing look slow, and be preferred to it."""
    clock = ManualClock()
    rig = make_rig(
        device=520 if waits_for == "room" else 1200,
        host=1200,
        stepped=True,
        clock=clock,
        policy__prefetch={"recompute_per_1024_tokens": "auto"},
        policy__write="write_back",
        policy__wait_limit="1000s",
    )
    runtime = rig.cache._runtime
    rig.serve_stepped(t(24))
    rig.squeeze_stepped()
    if waits_for == "room":
        rig.serve_stepped(t(90_040, 90_001))

    def slowly(*_: object) -> bool:
        clock.advance(50.0)
        rig.step_all()
        return True

    with rig.cache.match(t(2080)) as lease:
        with rig.stepping() if waits_for == "room" else contextlib.nullcontext():
            assert (lease.load() if waits_for == "room" else lease.load_by_layer()) == 24
        monkeypatch.setattr(runtime.transfers, "wait", slowly)
        monkeypatch.setattr(runtime.transfers, "wait_layer", slowly)
        lease.reserve(2056)
        if waits_for == "a layer":
            assert lease.wait_layer(1)
        rig.write(lease, t(2080), 24, 2080)
        clock.advance(1.0)
        lease.checkpoint(2080)
        assert clock.now_s() >= 51.0, "something was waited for"
        assert runtime.recompute.per_token_s == pytest.approx(1.0 / 2056)
    rig.step_all()
    rig.check_idle()
