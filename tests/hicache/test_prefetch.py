"""How long a request waits for L3, what it asks for, and that nothing is left of those who gave up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from hicache.clock import ManualClock
from hicache.policy.prefetch import PrefetchMode, PrefetchPolicy
from hicache.policy.watermarks import Watermark
from hicache.types import TierTokens

if TYPE_CHECKING:
    from tests.hicache.conftest import MakeRig, Rig, Tokens

T = Callable[..., "Tokens"]
MODES = pytest.mark.parametrize("mode", list(PrefetchMode), ids=str)


# ---- the policy (O-32) -----------------------------------------------------------------------------------------------
def policy(mode: PrefetchMode, **settings: float) -> PrefetchPolicy:
    return PrefetchPolicy(mode, wait_limit_s=settings.pop("wait_limit_s", 120.0), **settings)  # type: ignore[arg-type]  # floats


@pytest.mark.parametrize(
    ("tokens", "limit_s"),
    [(0, 2.0), (1024, 2.1), (4096, 2.4), (286_720, 30.0), (1_048_576, 30.0)],
)
def test_the_time_limit_grows_with_the_fetch_up_to_a_ceiling(tokens: int, limit_s: float) -> None:
    assert policy(PrefetchMode.TIMEOUT).limit_s(tokens) == pytest.approx(limit_s)


@MODES
@pytest.mark.parametrize("path_done", [False, True], ids=["path running", "path done"])
@pytest.mark.parametrize("side_done", [False, True], ids=["side running", "side done"])
@pytest.mark.parametrize("late", [False, True], ids=["in time", "late"])
def test_who_stops_waiting_when(mode: PrefetchMode, path_done: bool, side_done: bool, late: bool) -> None:
    """O-32, 24 cells: a side transfer (window, state) that is pending never hides the time limit."""
    clock = ManualClock()
    began_s = clock.now_s()
    clock.advance(2.4 if late else 2.3)
    stops = policy(mode).should_stop(
        done=path_done and side_done, elapsed_s=clock.now_s() - began_s, num_tokens=4096
    )
    done = path_done and side_done
    right = {
        PrefetchMode.BEST_EFFORT: True,
        PrefetchMode.WAIT_COMPLETE: done,
        PrefetchMode.TIMEOUT: done or late,
    }
    assert stops == right[mode]


def test_even_wait_complete_does_not_wait_for_ever() -> None:
    assert policy(PrefetchMode.WAIT_COMPLETE, wait_limit_s=30.0).should_stop(
        done=False, elapsed_s=30.0, num_tokens=10**9
    )


# ---- the policy at work ----------------------------------------------------------------------------------------------
def in_l3(
    make_rig: MakeRig, tokens: Tokens, mode: str = "wait_complete", **settings: Any
) -> Rig:  # Any: see Rig
    prefetch = {"mode": mode, "min_tokens": 0} | settings.pop("prefetch", {})
    rig = make_rig(host=64, store="scripted", policy__prefetch=prefetch, **settings)
    rig.seed_store(tokens)
    return rig


def test_best_effort_takes_what_has_arrived(make_rig: MakeRig, t: T) -> None:
    rig = in_l3(make_rig, t(40), "best_effort")
    with rig.cache.match(t(41)) as lease:
        assert rig.cache.drain()
        assert lease.load() == 40
    rig.check_idle()


def test_best_effort_never_waits(make_rig: MakeRig, t: T) -> None:
    """O-32: the store hangs, its limit is 20 s; the load returns all the same."""
    rig = in_l3(make_rig, t(40), "best_effort")
    gate = rig.store.block("get")
    with rig.cache.match(t(41)) as lease:
        assert gate.reached.wait(20)
        assert lease.load() == 0
        assert not gate._is_released
    assert rig.cache.stats().faults == {"prefetch_stopped": 1, "shortened": 1}
    gate.release()
    rig.check_idle()
    assert rig.serve(t(41)).source == TierTokens(0, 40, 0)  # what was under way still arrived


def test_wait_complete_waits_until_all_is_there(make_rig: MakeRig, t: T) -> None:
    rig = in_l3(make_rig, t(40))
    gate = rig.store.block("get")
    with rig.cache.match(t(41)) as lease, ThreadPoolExecutor(1) as pool:
        loading = pool.submit(lease.load)
        assert gate.reached.wait(20)
        assert not loading.done()
        gate.release()
        assert loading.result(20) == 40
    rig.check_idle()


@pytest.mark.parametrize("mode", ["timeout", "wait_complete"])
def test_a_time_limit_ends_the_wait_whatever_is_pending(make_rig: MakeRig, t: T, mode: str) -> None:
    """O-32: the path has arrived, a side transfer hangs (the store's own limit is 20 s): it ends at the limit."""
    prefetch = {"mode": mode, "min_tokens": 0, "timeout_base": "50ms", "timeout_per_1024_tokens": "0s"}
    rig = make_rig(
        "full+mamba", host=64, store="scripted", policy__prefetch=prefetch, policy__wait_limit="50ms"
    )
    rig.seed_store(t(40))
    rig.seed_store(t(40), "mamba", range(9, 10))
    gate = rig.store.block("get", key=rig.keys(t(40), "mamba")[9])
    with rig.cache.match(t(41)) as lease:
        assert lease.reused == 40
        assert lease.load() == 0
        assert not gate._is_released
    gate.release()
    rig.check_idle()


def test_the_time_limit_counts_from_the_match(make_rig: MakeRig, t: T) -> None:
    """A request that was queued for longer than the limit does not wait at all."""
    clock = ManualClock()
    rig = in_l3(make_rig, t(40), "timeout", clock=clock)
    gate = rig.store.block("get")
    with rig.cache.match(t(41)) as lease:
        assert gate.reached.wait(20)
        clock.advance(2.1)
        assert lease.load() == 0
    gate.release()
    rig.check_idle()


@pytest.mark.parametrize(("length", "asked"), [(40, 0), (44, 0), (45, 11), (80, 19)])
def test_short_tails_are_not_asked_of_l3(make_rig: MakeRig, t: T, length: int, asked: int) -> None:
    """With min_tokens 44 it takes 11 whole pages, the last token not counted."""
    rig = in_l3(make_rig, t(80), prefetch={"min_tokens": 44})
    source = rig.serve(t(length)).source
    assert len(rig.store.keys_of("exists")) == asked
    assert source.store == 4 * asked


# ---- what is asked (O-24, O-15) --------------------------------------------------------------------------------------
@pytest.mark.parametrize("cuts", [(16,), (8, 16), (4, 8, 12, 16)], ids=["16", "8+8", "4+4+4+4"])
def test_exactly_the_missing_pages_are_asked_for_and_read(
    make_rig: MakeRig, t: T, cuts: tuple[int, ...]
) -> None:
    """O-24: two pages on the device; the probe asks for keys 3 and 4, however the writer's tree was cut."""
    writer = make_rig(host=64, store="scripted")
    for end in cuts:
        writer.serve([*t(end), 77])
        writer.check_idle()
    rig = in_l3(make_rig, t(0), policy__write="write_through_selective")
    blobs = [writer.store.inner.raw(key) for key in writer.keys(t(16))]
    assert all(blobs)
    rig.serve(t(8))
    rig.seed_store(t(16))
    asked = len(rig.store.keys_of("exists"))
    assert rig.serve(t(17)).source == TierTokens(8, 0, 8)
    assert tuple(rig.store.keys_of("exists")[asked:]) == rig.keys(t(16))[2:]
    assert tuple(rig.store.keys_of("get")) == rig.keys(t(16))[2:]
    assert writer.keys(t(16)) == rig.keys(t(16))
    rig.check_idle()


def test_a_prefix_that_shrinks_between_probe_and_match_is_read_from_l3_too(make_rig: MakeRig, t: T) -> None:
    """O-24: two pages were on the device when L3 was asked, none when the match came."""
    rig = make_rig(device=4, host=4, store="scripted")
    rig.serve(t(8))
    rig.check_idle()
    rig.seed_store(t(16))
    gate = rig.store.block("exists", key=rig.keys(t(16))[3])
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(rig.serve, t(17))
        assert gate.reached.wait(20)
        rig.serve(t(116, 101))  # takes the whole of L1 and L2
        rig.cache.drain()
        assert rig.cache.probe(t(9)).source.device == 0
        gate.release()
        assert serving.result(20).source.total == 16
    rig.check_idle()


def test_a_prefetch_is_planned_with_the_cap_of_the_match(make_rig: MakeRig, t: T) -> None:
    """O-15: N a multiple of the page; the boundary is a page less, and exactly its window is read."""
    rig = make_rig("full+swa", device=16, host=16, store="scripted", page_size=64, window=64)
    rig.seed_store(t(256))
    rig.seed_store(t(256), "swa")
    assert rig.serve(t(256)).source == TierTokens(0, 0, 192)
    read = set(rig.store.keys_of("get"))
    assert read == {rig.keys(t(256), "swa")[2], *rig.keys(t(256))[:3]}
    rig.check_idle()


@pytest.mark.parametrize("component", ["swa", "mamba"])
def test_what_arrives_before_its_path_is_not_read_twice(make_rig: MakeRig, t: T, component: str) -> None:
    """The small read of a window or state mostly ends before the large one of its path."""
    rig = make_rig(f"full+{component}", host=64, store="scripted")
    rig.serve(t(40))
    assert rig.cache.flush()
    rig.cache.reset()
    gate = rig.store.block("get", key=rig.keys(t(40))[0])
    with rig.cache.match(t(41)) as lease:
        key = rig.keys(t(40), component)[9]
        while key not in rig.store.keys_of("get") or len(rig.cache._runtime.transfers.outstanding()) > 1:
            rig.cache.poll()
        rig.cache.poll()
        gate.release()
        assert lease.load() == 40
    assert rig.store.keys_of("get").count(key) == 1
    rig.check_idle()


def test_a_load_takes_as_many_rounds_as_it_needs(make_rig: MakeRig, t: T) -> None:
    """60 pages come up through an L2 of 4, behind others that go down through it: nothing failed, so nothing is lost."""
    rig = make_rig(device=64, host=4, store="scripted", policy__write="write_back")
    rig.serve(t(240))
    rig.serve(t(1240, 1001))
    assert rig.serve(t(241)).source == TierTokens(16, 0, 224)
    assert rig.cache.stats().faults == {}
    rig.check_idle()


# ---- room in the queue (O-33) ----------------------------------------------------------------------------------------
PAGE_BYTES = 4 * 8


def test_requests_served_one_after_another_all_get_their_full_hit(make_rig: MakeRig, t: T) -> None:
    """O-33: the limit has room for 4 of 24 fetches; nothing is lost by having been served before."""
    prompts = [t(1000 * number + 60, 1000 * number + 1) for number in range(1, 25)]
    queues = {"store": "1MiB", "prefetch": f"{4 * 15 * PAGE_BYTES + 20}B"}
    rig = make_rig(device=400, host=400, store="scripted", policy__queues=queues)
    for prompt in prompts:
        rig.seed_store(prompt)
    for prompt in prompts:
        assert rig.serve([*prompt, 1]).source.store == 60
    rig.check_idle()


def test_a_fetch_that_found_the_queue_full_begins_when_there_is_room(make_rig: MakeRig, t: T) -> None:
    """O-33: 24 at once, at most 4 under way; "not now" is not "never"."""
    prompts = [t(1000 * number + 60, 1000 * number + 1) for number in range(1, 25)]
    limit = 4 * 15 * PAGE_BYTES + 20
    queues = {"store": "1MiB", "prefetch": f"{limit}B"}
    rig = make_rig(device=400, host=400, store="scripted", policy__queues=queues)
    for prompt in prompts:
        rig.seed_store(prompt)
    gate = rig.store.block("get")
    arrived = threading.Barrier(25)
    most = 0

    def one(prompt: Tokens) -> int:
        with rig.cache.match([*prompt, 1]) as lease:
            arrived.wait(20)
            return lease.load()

    with ThreadPoolExecutor(24) as pool:
        results = [pool.submit(one, prompt) for prompt in prompts]
        arrived.wait(20)
        assert rig.cache.stats().transfers.fetch_queue.jobs == 4
        gate.release()
        while not all(result.done() for result in results):
            most = max(most, rig.cache.stats().transfers.fetch_queue.used_bytes)
        assert [result.result() for result in results] == [60] * 24
    assert most <= limit
    assert rig.cache.stats().faults["fetch_queue_full"] >= 20
    rig.check_idle()


def test_a_fetch_larger_than_the_whole_queue_is_given_up(make_rig: MakeRig, t: T) -> None:
    queues = {"store": "1MiB", "prefetch": f"{9 * PAGE_BYTES}B"}
    rig = in_l3(make_rig, t(40), policy__queues=queues)
    assert rig.serve(t(41)).source.total == 0
    assert rig.serve(t(36, 1)).source.device == 32  # computed meanwhile
    rig.check_idle()


def test_a_full_queue_holds_up_nobody_who_does_not_want_to_wait(make_rig: MakeRig, t: T) -> None:
    queues = {"store": "1MiB", "prefetch": f"{10 * PAGE_BYTES}B"}
    rig = in_l3(make_rig, t(40), "best_effort", policy__queues=queues)
    rig.seed_store(t(140, 101))
    gate = rig.store.block("get")
    first = rig.cache.match(t(41))
    assert gate.reached.wait(20)
    assert rig.serve(t(141, 101)).source.total == 0
    assert rig.cache.stats().faults["fetch_queue_full"] == 1
    gate.release()
    assert rig.cache.drain()
    assert first.load() == 40
    first.abandon()
    rig.check_idle()


# ---- nothing is left of those who gave up (O-30) ---------------------------------------------------------------------
def abort_before_the_probe(rig: Rig, tokens: Tokens) -> None:
    with pytest.raises(ValueError, match="session"):
        rig.cache.match(tokens, session="")


def abort_during_the_probe(rig: Rig, tokens: Tokens) -> None:
    gate = rig.store.block("exists")

    async def ask() -> None:
        task = asyncio.ensure_future(rig.cache.amatch(tokens))
        assert await asyncio.to_thread(gate.reached.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(ask())


def abort_before_the_read(rig: Rig, tokens: Tokens) -> None:
    rig.cache.match(tokens).abandon()


def abort_during_the_read(rig: Rig, tokens: Tokens) -> None:
    gate = rig.store.block("get")
    lease = rig.cache.match(tokens)
    assert gate.reached.wait(20)
    lease.abandon()


def abort_while_it_waits_for_the_read(rig: Rig, tokens: Tokens) -> None:
    gate = rig.store.block("get")

    async def load() -> None:
        async with await rig.cache.amatch(tokens) as lease:
            await lease.aload()

    async def cancel() -> None:
        task = asyncio.ensure_future(load())
        assert await asyncio.to_thread(gate.reached.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())


def abort_after_the_read(rig: Rig, tokens: Tokens) -> None:
    lease = rig.cache.match(tokens)
    assert rig.cache.drain()
    lease.abandon()


def abort_after_the_load(rig: Rig, tokens: Tokens) -> None:
    with rig.cache.match(tokens) as lease:
        lease.load()


def abort_with_an_exception(rig: Rig, tokens: Tokens) -> None:
    with pytest.raises(ZeroDivisionError), rig.cache.match(tokens):
        raise ZeroDivisionError


def abort_after_a_read_that_failed(rig: Rig, tokens: Tokens) -> None:
    from hicache.testing.scripted_store import Raise

    rig.store.script("get", Raise(OSError("gone")))
    with rig.cache.match(tokens) as lease:
        lease.load()


def abort_by_a_reset(rig: Rig, tokens: Tokens) -> None:
    rig.cache.match(tokens)
    rig.cache.reset()


ABORTS = {
    name.removeprefix("abort_"): function
    for name, function in list(globals().items())
    if name.startswith("abort_")
}


@pytest.mark.parametrize("name", ABORTS)
def test_a_request_that_gives_up_leaves_no_reservation(make_rig: MakeRig, t: T, name: str) -> None:
    """O-30: ten times in the same state; then a fetch that needs the whole queue is admitted."""
    queues = {"store": "1MiB", "prefetch": f"{25 * PAGE_BYTES}B"}
    rig = in_l3(make_rig, t(0), policy__queues=queues)
    for number in range(1, 11):
        prompt = t(1000 * number + 41, 1000 * number + 1)
        rig.seed_store(prompt)
        ABORTS[name](rig, prompt)
        rig.store.unscript()
        rig.check_idle()
    counts = rig.cache.stats().pools["full", "host"]
    assert counts.free + counts.evictable == counts.capacity
    rig.seed_store(t(100))
    assert rig.serve(t(101)).source.store == 100
    rig.check_idle()


# ---- watermarks ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("free", "wanted"), [(0, 20), (9, 20), (10, None), (15, None), (100, None)], ids=str)
def test_demotion_begins_below_the_low_mark_and_aims_at_the_high_one(free: int, wanted: int | None) -> None:
    assert Watermark(0.1, 0.2).wanted_free(free_slots=free, capacity_slots=100) == wanted


@pytest.mark.parametrize("free", [0, 1, 100])
def test_no_marks_no_demotion(free: int) -> None:
    assert Watermark().wanted_free(free_slots=free, capacity_slots=100) is None
    assert Watermark(0.1, 0.2).wanted_free(free_slots=0, capacity_slots=0) is None


def test_in_a_tiny_pool_one_slot_is_something() -> None:
    assert Watermark(0.1, 0.2).wanted_free(free_slots=0, capacity_slots=3) == 1
