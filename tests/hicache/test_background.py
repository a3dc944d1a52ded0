"""What goes on without a call: stores that failed are tried again, an idle engine's transfers are booked."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from hicache.clock import ManualClock
from hicache.policy.backoff import Backoff
from hicache.testing.scripted_store import Raise
from hicache.types import Tier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache.tiers.store import StoredPage
    from tests.hicache.conftest import MakeRig, Tokens

T = Callable[..., "Tokens"]


# ---- when to try again -----------------------------------------------------------------------------------------------
def test_each_failure_doubles_the_pause_up_to_the_longest() -> None:
    backoff = Backoff(first_s=1.0, max_s=5.0)
    now_s, pauses = 0.0, []
    for _ in range(5):
        backoff.failed(now_s)
        assert backoff.due_s is not None
        pauses.append(backoff.due_s - now_s)
        assert not backoff.take(backoff.due_s - 0.001)
        now_s = backoff.due_s
        assert backoff.take(now_s)
        assert not backoff.take(now_s)
    assert pauses == [1.0, 2.0, 4.0, 5.0, 5.0]
    backoff.succeeded()
    backoff.failed(now_s)
    assert backoff.due_s == now_s + 1.0


def test_more_failures_do_not_put_the_next_try_off() -> None:
    backoff = Backoff(first_s=1.0)
    backoff.failed(0.0)
    backoff.failed(0.9)
    assert backoff.due_s == 1.0


# ---- stores ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("model", ["full", "full+swa+mamba"])
def test_a_failed_store_is_retried_with_back_off(make_rig: MakeRig, t: T, model: str) -> None:
    """DESIGN 6: while its page is still in L2."""
    clock = ManualClock()
    rig = make_rig(model, host=64, store="scripted", clock=clock)
    rig.store.script("put", Raise(OSError("gone")))
    rig.serve(t(20))
    rig.cache.drain()
    puts = len(rig.store.keys_of("put"))
    assert puts > 0
    for pause_s in (1.0, 2.0, 4.0):
        clock.advance(pause_s - 0.01)
        rig.cache.drain()
        assert len(rig.store.keys_of("put")) == puts
        clock.advance(0.01)
        rig.cache.drain()
        assert len(rig.store.keys_of("put")) > puts
        puts = len(rig.store.keys_of("put"))
    rig.store.unscript()
    clock.advance(8.0)
    rig.cache.drain()
    assert rig.stored(t(20)) == [True] * 5
    rig.check_idle()
    rig.cache.reset()
    assert rig.serve(t(21)).source.total == 20


# ---- an idle engine --------------------------------------------------------------------------------------------------
def test_an_idle_engine_s_pages_reach_l3_all_the_same(make_rig: MakeRig, t: T) -> None:
    """Backup, store, then the child's: each begins when the one before is booked, and nobody calls."""
    rig = make_rig(device=64, host=4, store="scripted", background=True)
    arrived = threading.Event()
    last = rig.keys(t(40))[-1]
    put = rig.store.inner.put

    async def watched(pages: Sequence[StoredPage]) -> list[bool]:
        answers = await put(pages)
        if any(page.key == last for page in pages):
            arrived.set()
        return answers

    rig.store.inner.put = watched  # type: ignore[method-assign]
    with rig.cache.match(t(40)) as lease:
        lease.reserve(40)
        rig.write(lease, t(40), 0, 40)
        lease.release(t(40))
    assert arrived.wait(30)
    rig.cache.drain()
    assert rig.stored(t(40)) == [True] * 10
    rig.check_idle()


def test_closing_ends_the_background_thread(make_rig: MakeRig, t: T) -> None:
    before = threading.active_count()
    rig = make_rig(host=64, store="scripted", background=True)
    rig.serve(t(20))
    rig.cache.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "hicache-keeper"]
    assert threading.active_count() <= before


# ---- ahead of need ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("host", "store", "stays"), [(0, None, 16), (32, None, 8), (32, "scripted", 8)])
def test_l1_gives_up_ahead_of_need_only_what_l2_takes(
    make_rig: MakeRig, t: T, host: int, store: str | None, stays: int
) -> None:
    """Below it there is nothing: what leaves is lost, and would have been a hit until its room is needed."""
    marks = {"device": {"low": 0.25, "high": 0.5}, "host": {"low": 0.25, "high": 0.5}}
    rig = make_rig(device=16, host=host, store=store, policy__watermarks=marks)
    rig.serve(t(64))
    rig.cache.drain()
    rig.cache._runtime.tend()
    rig.check_idle()
    assert rig.resident("full", Tier.DEVICE) == stays


@pytest.mark.parametrize(("store", "stays"), [(None, 16), ("scripted", 8)])
def test_l2_gives_up_ahead_of_need_only_what_l3_takes(
    make_rig: MakeRig, t: T, store: str | None, stays: int
) -> None:
    marks = {"device": {"low": 0, "high": 0}, "host": {"low": 0.25, "high": 0.5}}
    rig = make_rig(device=16, host=16, store=store, policy__watermarks=marks)
    rig.serve(t(64))
    rig.cache.drain()
    rig.cache._runtime.tend()
    rig.check_idle()
    assert rig.resident("full", Tier.HOST) == stays
