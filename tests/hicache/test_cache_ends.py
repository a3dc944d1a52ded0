"""A cache is reset, drained, flushed and closed, always within a bound."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hicache.cache import HiCache
from hicache.clock import ManualClock
from hicache.errors import ProtocolError, TierTimeoutError
from hicache.testing.scripted_store import MISS, OK, Raise
from hicache.testing.transfer_rig import engine_threads
from hicache.types import Tier, TierTokens

if TYPE_CHECKING:
    from tests.hicache.conftest import MakeRig, Rig, Tokens

T = Callable[..., "Tokens"]
EVERY = "full+swa+mamba"


@pytest.fixture
def aside() -> Iterator[Callable[..., Future[Any]]]:  # Any: whatever the call gives
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit


def test_after_a_reset_the_cache_is_as_new(make_rig: MakeRig, t: T, model: str) -> None:
    """O-31: the same script gives the same, on the old cache and on a new one."""

    def script(rig: Rig) -> list[tuple[int, int, int]]:
        rows = []
        for prompt in (t(20), t(24), [*t(12), *t(130, 101)], t(25)):
            source = rig.serve(prompt, session="chat").source
            rig.cache.drain()
            rows.append((source.device, source.host, source.store))
        return rows

    rig = make_rig(model, device=24, host=12)
    rig.serve(t(60, 30), session="old")
    rig.cache.reset()
    rig.cache.reset()
    rig.check_idle()
    assert all(count.free == count.capacity for count in rig.cache.stats().pools.values())
    assert len(rig.cache.sessions) == 0
    assert script(rig) == script(make_rig(model, device=24, host=12))


def test_a_reset_keeps_what_l3_has(make_rig: MakeRig, t: T) -> None:
    rig = make_rig(EVERY, host=64, store="scripted")
    rig.serve(t(20))
    rig.cache.drain()
    rig.cache.reset()
    assert rig.cache.probe(t(21)).boundary == 0
    assert rig.serve(t(21)).source == TierTokens(0, 0, 20)


def test_a_reset_with_reads_under_way_leaves_nothing_reserved(make_rig: MakeRig, t: T) -> None:
    """O-31: a prefetch holds host slots, and ends while it is reset; two resets equal one."""
    rig = make_rig(host=8, store="scripted", policy__store_timeout="1s")
    rig.seed_store(t(12))
    gate = rig.store.block("get")
    lease = rig.cache.match(t(13))
    assert gate.reached.wait(20)
    assert rig.free("full", "host") == 5
    rig.cache.reset()
    rig.cache.reset()
    rig.check_idle()
    assert rig.free("full", "host") == 8
    lease.abandon()
    rig.check_idle()
    rig.store.unscript()
    assert rig.serve(t(13)).source == TierTokens(0, 0, 12)


def test_a_reset_never_hands_out_slots_that_a_copy_still_writes(make_rig: MakeRig, t: T) -> None:
    """O-31 and class 1: what does not end in time makes the reset fail, and nothing is changed."""
    rig = make_rig(EVERY, host=64, stepped=True)
    rig.serve_stepped(t(24))
    rig.squeeze_stepped()
    with rig.cache.match(t(25)) as lease:
        rig.cache._runtime.run(rig.cache._runtime.core.load(lease.id).actions)
        with rig.impatient(), pytest.raises(TierTimeoutError, match="under way"):
            rig.cache.reset()
        with rig.stepping():
            assert lease.load() == 24
            assert rig.wrong_pages(lease, t(25)) == 0
        rig.cache.reset()
    rig.check_idle()
    assert rig.free() == 64


@pytest.mark.parametrize("store", ["disk", "memory"])
def test_close_leaves_no_thread_and_no_file(
    make_rig: MakeRig, t: T, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    stores = [{"kind": "disk", "path": "auto", "capacity": "1MiB"} if store == "disk" else {"kind": "memory"}]
    rig = make_rig(EVERY, host=64, tiers__stores=stores)
    rig.serve(t(20))
    rig.cache.drain()
    assert engine_threads() != set()
    assert len(list(tmp_path.iterdir())) == (store == "disk")
    rig.cache.close()
    assert engine_threads() == set()
    assert list(tmp_path.iterdir()) == []
    assert rig.cache.device.nbytes == 0


def test_close_may_be_called_again(make_rig: MakeRig, t: T) -> None:
    rig = make_rig(host=8, store="scripted")
    rig.serve(t(8))
    rig.cache.close()
    rig.cache.close()
    assert [call.operation for call in rig.store.calls].count("close") == 1


CALLS: dict[str, Callable[[HiCache], object]] = {
    "match": lambda cache: cache.match([1, 2]),
    "probe": lambda cache: cache.probe([1, 2]),
    "reset": lambda cache: cache.reset(),
    "poll": lambda cache: cache.poll(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_closed_cache_refuses_service(make_rig: MakeRig, name: str) -> None:
    rig = make_rig(host=8)
    rig.cache.close()
    with pytest.raises(ProtocolError, match="closed"):
        CALLS[name](rig.cache)


def test_numbers_can_be_read_after_close(make_rig: MakeRig, t: T) -> None:
    rig = make_rig(EVERY, host=64, store="scripted")
    rig.serve(t(20))
    rig.cache.close()
    assert rig.cache.stats().requests == 1
    assert rig.cache.audit() == []


def test_close_waits_for_a_slow_store_and_not_for_a_dead_one(make_rig: MakeRig, t: T) -> None:
    rig = make_rig(host=64, store="scripted", policy__store_timeout="200ms", policy__wait_limit="200ms")
    rig.store.block("put")
    rig.serve(t(20))
    rig.cache.close()
    assert engine_threads() == set()


def test_close_without_drain_gives_up_what_is_under_way(make_rig: MakeRig, t: T) -> None:
    rig = make_rig(host=64, store="scripted")  # limits of 20 s: waiting for the store would show
    gate = rig.store.block("put")
    rig.serve(t(20))
    while not gate.reached.is_set():
        rig.cache.poll()
    rig.cache.close(drain=False)
    assert engine_threads() == set()


def test_drain_is_bounded_and_says_whether_all_is_done(make_rig: MakeRig, t: T) -> None:
    rig = make_rig(host=64, store="scripted")
    gate = rig.store.block("put")
    rig.serve(t(20))
    while (
        not gate.reached.is_set()
    ):  # a put that begins while all are impatient would be given up, and drained
        rig.cache.poll()
    with rig.impatient():
        assert not rig.cache.drain()
    gate.release()
    while not rig.cache.drain():
        pass
    assert all(rig.stored(t(20)))


def test_poll_books_what_has_ended(make_rig: MakeRig, t: T) -> None:
    rig = make_rig(host=64, stepped=True)
    rig.serve(t(20))
    assert rig.cache.probe(t(21)).source.host == 0
    rig.to_host.step_all()
    rig.cache.poll()
    assert rig.resident("full", Tier.HOST) == 5
    rig.check_idle()


def test_demotion_runs_ahead_between_the_watermarks(make_rig: MakeRig, t: T) -> None:
    """Below 25 % free, half of the pool is made free; nothing was asked for."""
    marks = {"device": {"low": 0.25, "high": 0.5}, "host": {"low": 0, "high": 0}}
    rig = make_rig(device=16, host=32, policy__watermarks=marks)
    rig.serve(t(48))
    rig.check_idle()
    assert rig.free() == 4
    rig.serve(t(104, 101))
    rig.check_idle()
    assert (rig.free(), rig.resident("full", Tier.HOST)) == (8, 13)
    assert rig.serve(t(49)).source == TierTokens(28, 20, 0)  # its tail went, page by page


def test_time_limits_follow_the_clock_that_was_given(make_rig: MakeRig, t: T) -> None:
    """A store that never answers is given up when the clock says so, not before."""
    clock = ManualClock()
    rig = make_rig(host=64, store="scripted", clock=clock)
    rig.seed_store(t(8))
    gate = rig.store.block("exists")
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(rig.serve(t(9)).source.total))
    thread.start()
    assert gate.reached.wait(20)
    clock.advance(19.0)
    rig.cache._runtime.transfers.clock_moved()
    thread.join(0.05)
    assert thread.is_alive()
    clock.advance(2.0)
    rig.cache._runtime.transfers.clock_moved()
    thread.join(20)
    assert found == [0]
    assert rig.cache.stats().faults["probe_failed"] == 1


def test_flush_says_whether_l3_has_everything(make_rig: MakeRig, t: T) -> None:
    rig = make_rig(EVERY, host=64, store="scripted", policy__write="write_back")
    rig.serve(t(20))
    rig.cache.drain()
    assert rig.stored(t(20)) == [False] * 5
    rig.store.script("put", Raise(OSError(28, "no space")), times=1)
    assert not rig.cache.flush()
    rig.check_idle()
    assert rig.cache.flush()
    assert all(rig.stored(t(20)))
    assert rig.stored(t(20), "mamba")[-1]
    rig.store.script("put", MISS)
    rig.serve(t(40))
    assert not rig.cache.flush()
    rig.check_idle()


def test_a_flush_whose_failed_write_was_tried_again_meanwhile_says_what_is_there_now(
    make_rig: MakeRig, t: T, aside: Callable[..., Future[bool]]
) -> None:
    clock = ManualClock()
    rig = make_rig(host=64, store="scripted", policy__write="write_back", clock=clock)
    rig.serve(t(16))
    rig.serve(t(116, 101))
    rig.cache.drain()
    later, first = rig.keys(t(16))[0], rig.keys(t(116, 101))[0]
    rig.store.script("put", Raise(OSError(5, "cable")), key=first)
    gate = rig.store.block("put", key=later)
    flushing = aside(rig.cache.flush)
    assert gate.reached.wait(60)
    rig.cache.poll()
    assert rig.cache._runtime.num_store_failures == 1
    rig.store.script("put", OK, key=first)
    clock.advance(2.0)
    rig.cache.poll()
    assert rig.cache.stats().faults["store_retries"] == 1
    gate.release()
    assert flushing.result(60)
    assert rig.stored(t(16)) + rig.stored(t(116, 101)) == [True] * 8
    rig.check_idle()


def test_a_retry_that_is_due_during_a_flush_does_not_end_it(
    make_rig: MakeRig, t: T, aside: Callable[..., Future[bool]]
) -> None:
    """L1 is larger than L2, so it takes rounds; nothing fails in any of them."""
    clock = ManualClock()
    rig = make_rig(device=64, host=8, store="scripted", policy__write="write_back", clock=clock)
    rig.cache._runtime._store_backoff.failed(0.0)
    rig.serve(t(160))
    gate = rig.store.block("put", call=1)
    flushing = aside(rig.cache.flush)
    assert gate.reached.wait(60)
    clock.advance(2.0)
    gate.release()
    assert flushing.result(60)
    assert rig.cache.stats().faults["store_retries"] == 1
    assert rig.stored(t(160)) == [True] * 40


def test_a_probe_that_fails_does_not_make_a_flush_fail(make_rig: MakeRig, t: T) -> None:
    rig = make_rig(host=64, store="scripted", policy__write="write_back")
    rig.store.script("exists", Raise(OSError("gone")))
    rig.serve(t(20))
    assert rig.cache._runtime.num_store_failures == 0
    assert rig.cache.flush()
