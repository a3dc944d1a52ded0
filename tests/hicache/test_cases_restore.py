"""Users' reports about restoring (O-18, O-22, O-23, O-29, O-36, O-37, O-55, O-58, O-69), on real bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hicache.lease import Lease
from hicache.testing.scripted_store import MISS, Raise
from hicache.testing.stepped_stream import SteppedStream
from hicache.types import Tier, TierTokens

if TYPE_CHECKING:
    from tests.hicache.conftest import MakeRig, Rig, Tokens

T = Callable[..., "Tokens"]
EVERY = "full+swa+mamba"


@pytest.fixture
def aside() -> Iterator[Callable[..., Future[Any]]]:  # Any: whatever the call gives
    """Run a call in a thread of its own: ``aside(lease.load)``."""
    with ThreadPoolExecutor(64) as pool:
        yield pool.submit


def on_host(make_rig: MakeRig, model: str, tokens: Tokens, **settings: Any) -> Rig:  # Any: see Rig
    """A stepped rig with ``tokens`` in L2 and nothing in L1."""
    rig = make_rig(model, **{"host": 64, "stepped": True} | settings)
    rig.serve_stepped(tokens)
    rig.squeeze_stepped()
    return rig


def until_pending(stream: Any, copies: int = 1) -> None:  # Any: a stepped stream
    while stream.num_pending < copies:
        pass


# ---- a load that fails (O-18, O-29, O-57) ----------------------------------------------------------------------------
@pytest.mark.parametrize("stream", ["to_device", "local"], ids=["the copies up", "the claim of the state"])
@pytest.mark.parametrize("model", ["full+mamba", EVERY])
def test_a_load_that_fails_leaves_no_state_and_reuses_nothing(
    make_rig: MakeRig, t: T, model: str, stream: str
) -> None:
    """O-18: no slot whose copy never ran is ever read."""
    rig = on_host(make_rig, model, t(256), device=128, host=128)
    free = rig.free("mamba")
    failing: SteppedStream = getattr(rig, stream)
    for _ in range(100):
        failing.fail_next(OSError("no room in the staging pool"))
    with rig.cache.match(t(257)) as lease:
        assert lease.reused == 256
        with rig.stepping():
            assert lease.load() == 0
        assert (lease.source, lease.reused) == (TierTokens(), 0)
        failing._failures.clear()
        lease.reserve(257)
        rig.cache.device.write("mamba", lease.state("mamba"), b"\xee" * 48)
        rig.write(lease, t(257), 0, 257)
        lease.release(t(257))
    rig.step_all()
    rig.check_idle()
    assert free - rig.free("mamba") <= 1 + rig.resident("mamba", Tier.DEVICE)
    assert rig.cache.stats().faults["shortened"] == 1
    with rig.stepping():
        assert rig.serve(t(258)).source.total == 256
    rig.check_idle()


def test_a_copy_that_fails_once_is_tried_again(make_rig: MakeRig, t: T) -> None:
    rig = on_host(make_rig, EVERY, t(24))
    rig.to_device.fail_next(OSError("once"))
    with rig.stepping():
        assert rig.serve(t(25)).source.host == 24
    assert rig.cache.stats().faults == {"to_device_copy": 1}


@pytest.mark.parametrize("done", range(7))
def test_a_copy_that_stops_half_way_is_used_as_far_as_it_came(make_rig: MakeRig, t: T, done: int) -> None:
    """Class 3: bytes count once they have arrived, page by page, and not one more."""
    rig = on_host(make_rig, "full", t(24))
    with rig.cache.match(t(25)) as lease, ThreadPoolExecutor(1) as pool:
        loading = pool.submit(lease.load)
        until_pending(rig.to_device)
        rig.to_device.step_partial(done)
        while not loading.done():  # the load begins once more with the rest; that fails at once
            rig.to_device.fail_next(OSError("gone"))
            rig.to_device.step()
        assert loading.result() == 4 * done
        assert rig.wrong_pages(lease, t(25)) == 0
    rig.step_all()
    rig.check_idle()


def test_a_state_that_cannot_be_had_means_no_reuse(make_rig: MakeRig, t: T) -> None:
    """O-18, no room: all state slots belong to other requests; the payload stays where it is."""
    rig = make_rig("full+mamba", device={"full": 64, "mamba": 3}, host=64)
    rig.serve(t(24))
    rig.squeeze()
    others = [rig.cache.match([number]) for number in range(100, 103)]
    for other in others:
        other.reserve(1)
    assert rig.free("mamba") == 0
    with rig.cache.match(t(25)) as lease:
        assert lease.load() == 0
    for other in others:
        other.abandon()
    rig.check_idle()
    assert rig.serve(t(25)).source.total == 24


@pytest.mark.parametrize("wait", ["load", "reserve"])
def test_a_claim_that_does_not_end_in_time_is_not_reused(make_rig: MakeRig, t: T, wait: str) -> None:
    """O-18: the state has not arrived when the wait is over; the copy keeps its slot until it ends."""
    rig = make_rig("full+mamba", stepped=True)
    with rig.stepping():
        rig.serve(t(24))
    lease = rig.cache.match(t(25))
    with rig.impatient():
        if wait == "load":
            assert lease.load() == 0
        lease.reserve(25)
    assert (lease.reused, lease.source, len(lease.slots("full"))) == (0, TierTokens(), 7)
    rig.write(lease, t(25), 0, 25)
    before = rig.cache.device.read("mamba", lease.state("mamba"))
    rig.step_all()  # now the claim runs; it must not write into the state that the request uses
    assert rig.cache.device.read("mamba", lease.state("mamba")) == before
    lease.release(t(25))
    rig.step_all()
    rig.check_idle()
    assert rig.cache.stats().faults == {"wait_limit": 1, "shortened": 1}


def test_the_source_of_a_load_is_held_until_it_has_ended(
    make_rig: MakeRig, t: T, aside: Callable[..., Future[int]]
) -> None:
    """O-29: L2's two pages are being read; whoever wants them now gets none, and no exception."""
    rig = on_host(make_rig, "full", t(8), device=8, host=2)
    lease = rig.cache.match(t(9))
    loading = aside(lease.load)
    until_pending(rig.to_device)
    assert rig.serve(t(108, 101)).source.total == 0  # its backup finds no room
    assert rig.to_host.num_pending == 0
    assert rig.cache.stats().pools["full", "host"].free == 0
    rig.to_device.step_all()
    assert loading.result(20) == 8
    assert rig.wrong_pages(lease, t(9)) == 0
    lease.abandon()
    rig.check_idle()
    rig.serve_stepped(t(109, 101))
    rig.check_idle()
    assert rig.resident("full", Tier.HOST) == 2
    with rig.cache.match(t(110, 101)) as again:
        assert again.source == TierTokens(8, 0, 0)


def test_a_request_that_gives_up_does_not_free_what_is_being_copied(
    make_rig: MakeRig, t: T, aside: Callable[..., Future[int]]
) -> None:
    """Class 1: the target of a copy belongs to the copy until it has ended."""
    rig = on_host(make_rig, EVERY, t(24), device=8, host=16)
    lease = rig.cache.match(t(25))
    loading = aside(lease.load)
    until_pending(rig.to_device, 3)
    lease.abandon()
    other = rig.cache.match(t(108, 101))
    other.reserve(8)
    rig.write(other, t(108, 101), 0, 8)
    assert rig.cache.device.num_slots("full") - rig.free("full") == 6 + 2
    rig.to_device.step_all()
    with pytest.raises(Exception, match="released already"):
        loading.result(20)
    other.release(t(108, 101))
    rig.step_all()
    rig.check_idle()


# ---- hybrids out of L3 (O-22, O-23, O-36, O-58) ------------------------------------------------------------------------
def in_l3(make_rig: MakeRig, tokens: Tokens, model: str, **pages: range | tuple[int, ...]) -> Rig:
    """A rig whose L3 has these pages of each component; states go by the page they follow."""
    rig = make_rig(model, device=64, host=64, store="scripted")
    for component, wanted in pages.items():
        rig.seed_store(tokens, component, wanted)
    return rig


TABLE = [
    (3, (3,), (3,), 3),
    (3, (3,), (2,), 0),
    (3, (1, 3), (1, 2), 1),
    (2, (1, 3), (1, 3), 1),
    (3, (2,), (2,), 2),
    (3, (), (1,), 0),
]


@pytest.mark.parametrize(("full", "window", "states", "right"), TABLE)
def test_the_boundary_is_the_deepest_that_all_accept(
    make_rig: MakeRig, t: T, full: int, window: tuple[int, ...], states: tuple[int, ...], right: int
) -> None:
    """O-22: an intersection of endpoints, not the least of each one's greatest; a window of one page."""
    rig = make_rig(EVERY, window=4, device=64, host=64, store="scripted")
    rig.seed_store(t(12), "full", range(full))
    rig.seed_store(t(12), "swa", [end - 1 for end in window])
    rig.seed_store(t(12), "mamba", [end - 1 for end in states])
    assert rig.serve(t(13)).source.total == 4 * right
    rig.check_idle()


@pytest.mark.parametrize(("states", "right"), [((), 0), ((1,), 8), ((1, 3), 16)])
def test_l3_promises_only_what_every_component_can_restore(
    make_rig: MakeRig, t: T, states: tuple[int, ...], right: int
) -> None:
    """O-23: FULL of 16 is there, and a state here and there."""
    rig = in_l3(make_rig, t(16), "full+mamba", full=range(4), mamba=states)
    with rig.cache.match(t(17)) as lease:
        assert lease.reused == right
        assert lease.load() == right
    rig.check_idle()


@pytest.mark.parametrize("fault", [MISS, Raise(OSError("gone"))], ids=["miss", "raise"])
def test_a_state_that_cannot_be_read_moves_the_boundary_back(make_rig: MakeRig, t: T, fault: Any) -> None:
    """O-23: the state at 16 is in L3 and its read fails."""
    rig = in_l3(make_rig, t(16), "full+mamba", full=range(4), mamba=(1, 3))
    rig.store.script("get", fault, key=rig.keys(t(16), "mamba")[3])
    assert rig.serve(t(17)).source.total == (8 if fault is MISS else 0)
    rig.check_idle()


FAILED = [
    ({"full": 5}, 16),
    ({"full": 5, "mamba": 3}, 0),
    ({"full": 5, "swa": 3}, 0),
    ({"swa": 7}, 16),
    ({"swa": 6}, 16),
    ({"mamba": 7}, 16),
    ({"full": 0}, 0),
    ({}, 32),
]


@pytest.mark.parametrize(("failing", "right"), FAILED)
def test_a_failed_read_in_a_hybrid_falls_back_to_the_state_before(
    make_rig: MakeRig, t: T, failing: dict[str, int], right: int
) -> None:
    """O-58: F pages 0..7, a window of 8, states at 16 and 32; equal page numbers of components do not mix."""
    rig = in_l3(make_rig, t(32), EVERY, full=range(8), swa=(2, 3, 6, 7), mamba=(3, 7))
    for component, page in failing.items():
        rig.store.script("get", MISS, key=rig.keys(t(32), component)[page])
    assert rig.serve(t(33)).source.total == right
    rig.check_idle()


def test_a_missing_page_ends_the_hit_and_frees_what_was_taken_for_the_rest(make_rig: MakeRig, t: T) -> None:
    """O-36: pages 1 and 2 come, 3 does not; the host slots of 3 and 4 are back."""
    rig = in_l3(make_rig, t(16), "full", full=range(4))
    rig.store.script("get", MISS, key=rig.keys(t(16))[2])
    with rig.cache.match(t(17)) as lease:
        assert lease.load() == 8
        assert rig.free("full", "host") == 64 - 2
        assert rig.wrong_pages(lease, t(17)) == 0
    rig.check_idle()


# ---- what is left in the tree does not hide L3 (O-37) ------------------------------------------------------------------
def test_a_stub_is_no_obstacle_to_reading_l3(make_rig: MakeRig, t: T) -> None:
    """O-37: out of L1, then out of L2: four reads, as in a fresh process."""
    rig = make_rig(device=8, host=4, store="scripted")
    rig.serve(t(16))
    rig.check_idle()
    rig.serve(t(116, 101))
    rig.check_idle()
    rig.serve(t(216, 201))
    rig.check_idle()
    with rig.cache.match(t(17)) as lease:
        assert lease.source == TierTokens(0, 0, 16)
        assert lease.load() == 16
        assert rig.wrong_pages(lease, t(17)) == 0
    assert rig.store.keys_of("get") == list(rig.keys(t(16)))
    rig.check_idle()


def test_only_what_l2_lacks_is_read(make_rig: MakeRig, t: T) -> None:
    """O-37: pages 1 and 2 are still in L2: exactly 3 and 4 are read."""
    rig = make_rig(device=8, host=16, store="scripted")
    rig.serve(t(8))
    rig.squeeze()
    rig.seed_store(t(16))
    with rig.cache.match(t(17)) as lease:
        assert lease.source == TierTokens(0, 8, 8)
        assert lease.load() == 16
        assert rig.wrong_pages(lease, t(17)) == 0
    assert rig.store.keys_of("get") == list(rig.keys(t(16)))[2:]
    rig.check_idle()


# ---- looked up, never used (O-55) ----------------------------------------------------------------------------------------
def test_what_was_looked_up_and_never_used_is_not_held(make_rig: MakeRig, t: T) -> None:
    """O-55: L2 has it, L1 has it: nothing is to be loaded, and after a thousand times nothing is pinned."""
    rig = make_rig(host=64)
    rig.serve(t(40))
    rig.check_idle()
    before = rig.cache.stats()
    for number in range(1000):
        with rig.cache.match(t(41)) as lease:
            assert lease.plan() == ()
            if number % 2:
                lease.load()
    after = rig.cache.stats()
    rig.check_idle()
    assert after.pools == before.pools
    assert after.pools["full", "device"].evictable == 10
    assert [row.slots for row in after.transfers.moved] == [10]


# ---- one load for many (O-69) --------------------------------------------------------------------------------------------
def test_one_load_serves_all_who_wait_for_it_and_holds_up_nobody_else(
    make_rig: MakeRig, t: T, aside: Callable[..., Future[int]]
) -> None:
    """O-69: 50 requests share 10,000 tokens that only L2 has."""
    rig = on_host(make_rig, "full", t(10_000), page_size=64, device=400, host=200)
    leases = [rig.cache.match(np.append(t(9_984), 20_000 + number)) for number in range(50)]
    loads = [aside(lease.load) for lease in leases]
    until_pending(rig.to_device)
    other = rig.cache.match(t(100_064, 100_001))
    assert other.load() == 0
    other.reserve(64)
    rig.write(other, t(100_064, 100_001), 0, 64)
    other.release(t(100_064, 100_001))
    assert not any(load.done() for load in loads)
    assert rig.to_device.num_pending == 1
    rig.to_device.step()
    assert [load.result(20) for load in loads] == [9_984] * 50
    assert rig.to_device.num_pending == 0
    for lease in leases:
        assert lease.source == TierTokens(0, 9_984, 0)
        lease.abandon()
    rig.step_all()
    rig.check_idle()
    assert [row.slots for row in rig.cache.stats().transfers.moved if row.direction == "to_device"] == [156]


def test_who_comes_second_waits_for_the_same_fetch(
    make_rig: MakeRig, t: T, aside: Callable[..., Future[int]]
) -> None:
    """O-69 for L3: the second joins the read; the first gives up and does not take it away."""
    rig = in_l3(make_rig, t(40), "full", full=range(10))
    gate = rig.store.block("get")
    first: Lease = rig.cache.match(t(41))
    assert gate.reached.wait(20)
    second = rig.cache.match([*t(40), 99])
    loading = aside(second.load)
    first.abandon()
    gate.release()
    assert loading.result(20) == 40
    second.abandon()
    assert len(rig.store.keys_of("get")) == 10
    rig.check_idle()
