"""Requests that stop half-way while their payload is on its way down or up (O-38, O-56, O-57, O-66)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hicache.errors import CapacityError
from hicache.testing.scripted_store import Raise
from hicache.types import Tier, TierTokens

if TYPE_CHECKING:
    from tests.hicache.conftest import MakeRig, Rig, Tokens

T = Callable[..., "Tokens"]
EVERY = "full+swa+mamba"


def publish(rig: Rig, tokens: Tokens) -> None:
    """Compute ``tokens`` and publish them, then be preempted: nothing is released."""
    with rig.cache.match(tokens) as lease:
        lease.reserve(len(tokens))
        rig.write(lease, tokens, 0, len(tokens))
        lease.checkpoint(len(tokens))


# ---- preempted while its pages go down (O-38) --------------------------------------------------------------------------
def test_pages_that_are_being_backed_up_are_withheld_until_that_is_done(make_rig: MakeRig, t: T) -> None:
    """R is preempted; R2 wants its pages at once; L2 gets R's bytes all the same."""
    rig = make_rig(device=2, host=8, stepped=True, policy__wait_limit="50ms")
    publish(rig, t(8))
    assert rig.to_host.num_pending == 1
    with rig.cache.match(t(108, 101)) as other:
        with pytest.raises(CapacityError):
            other.reserve(8)
        rig.check()
        rig.to_host.step_all()
        other.reserve(8)
        rig.write(other, t(108, 101), 0, 8)
        rig.check()
    rig.check_idle()
    assert rig.cache.probe(t(9)).source == TierTokens(0, 8, 0)
    assert rig.wrong_payload() == []


def test_a_request_comes_back_while_its_backup_is_pending(make_rig: MakeRig, t: T) -> None:
    rig = make_rig(EVERY, device=16, host=16, stepped=True)
    with rig.stepping("local"):
        publish(rig, t(16))
        assert rig.to_host.num_pending > 0
        assert rig.serve(t(20)).source == TierTokens(16, 0, 0)
        assert rig.serve(t(21)).source == TierTokens(20, 0, 0)
    rig.step_all()
    rig.check_idle()
    with rig.stepping():
        rig.squeeze()
        assert rig.serve(t(22)).source == TierTokens(0, 20, 0)
    rig.check_idle()


def test_pages_that_are_being_stored_stay_in_l2_until_that_is_done(make_rig: MakeRig, t: T) -> None:
    """O-38, O-08: L2 is full of what is on its way to L3; others get no room there, and L3 the right bytes."""
    rig = make_rig(device=8, host=2, store="scripted")
    gate = rig.store.block("put")
    publish(rig, t(8))
    while not gate.reached.is_set():
        rig.cache.poll()
    for number in range(1, 5):
        rig.serve(t(1000 * number + 8, 1000 * number + 1))
    assert rig.cache.stats().pools["full", "host"].free == 0
    rig.check()
    gate.release()
    rig.check_idle()
    assert rig.stored(t(8)) == [True, True]
    assert rig.checker.mismatches == 0
    rig.check_beliefs()
    rig.cache.reset()
    assert rig.serve(t(9)).source == TierTokens(0, 0, 8)


def test_what_waits_for_the_store_of_its_parent_stays_in_l2(make_rig: MakeRig, t: T) -> None:
    """DESIGN 6, write_through: what is queued for L3 does not leave L2 before L3 has it."""
    rig = make_rig(device=8, host=4, store="scripted")
    gate = rig.store.block("put")
    with rig.cache.match(t(16)) as lease:
        lease.reserve(16)
        rig.write(lease, t(16), 0, 8)
        lease.checkpoint(8)
        while not gate.reached.is_set():
            rig.cache.poll()
        rig.write(lease, t(16), 8, 16)
        lease.release(t(16))
    while rig.resident("full", Tier.HOST) < 4:
        rig.cache.poll()
    rig.serve(t(124, 101))  # pushes the tail out of L1, and wants its place in L2
    gate.release()
    rig.check_idle()
    assert rig.stored(t(16)) == [True] * 4


def test_a_store_that_fails_after_its_request_was_preempted_is_not_published(make_rig: MakeRig, t: T) -> None:
    rig = make_rig(device=8, host=8, store="scripted")
    rig.store.script("put", Raise(OSError("gone")))
    publish(rig, t(8))
    rig.check_idle()
    rig.check_beliefs()
    assert rig.stored(t(8)) == [False, False]
    rig.cache.reset()
    assert rig.serve(t(9)).source.total == 0


def test_a_backup_that_fails_leaves_the_payload_where_it_is(make_rig: MakeRig, t: T, model: str) -> None:
    rig = make_rig(model, device=16, host=16, stepped=True)
    for _ in range(20):
        rig.to_host.fail_next(OSError("gone"))
    with rig.stepping():
        publish(rig, t(16))
        rig.serve(t(16))
    rig.to_host._failures.clear()
    rig.check_idle()
    assert rig.cache.stats().faults["to_host_copy"] > 0
    assert all(rig.resident(spec.name, Tier.HOST) == 0 for spec in rig.specs)
    with rig.stepping():
        assert rig.serve(t(17)).source == TierTokens(16, 0, 0)
    rig.step_all()
    rig.check_idle()


@pytest.mark.parametrize("done", range(5))
def test_a_backup_that_stops_half_way_counts_as_far_as_it_came(make_rig: MakeRig, t: T, done: int) -> None:
    rig = make_rig(device=8, host=8, stepped=True, policy__write="write_through_selective")
    with rig.stepping():
        rig.serve(t(16))
    rig.serve(t(17))
    assert rig.to_host.num_pending == 1
    rig.to_host.step_partial(done)
    rig.check_idle()
    assert rig.resident("full", Tier.HOST) == done
    assert rig.wrong_payload() == []


# ---- the order of writing, copying and reusing (O-66) ------------------------------------------------------------------
def test_a_page_is_overwritten_only_after_its_copy_down(make_rig: MakeRig, t: T) -> None:
    """O-66: every copy is stepped late; each page that L2 gets is the one that was computed."""
    rig = make_rig(
        "full+mamba", device={"full": 6, "mamba": 6}, host=64, stepped=True, policy__wait_limit="60s"
    )
    served = 0
    with ThreadPoolExecutor(1) as pool:
        for number in range(1, 9):
            work = pool.submit(rig.engine.serve, t(1000 * number + 16, 1000 * number + 1), t(0))
            while not work.done():
                rig.local.step()
                rig.to_host.step()
            served += work.result().mismatches
            assert rig.wrong_payload() == []
    assert served == 0
    rig.step_all()
    rig.check_idle()


def test_a_request_may_write_its_state_right_after_a_checkpoint(make_rig: MakeRig, t: T) -> None:
    """A state left to the tree is a copy; what the request computes next does not reach it."""
    rig = make_rig("full+mamba", stepped=True)
    lease = rig.cache.match(t(16))
    lease.reserve(16)
    rig.write(lease, t(16), 0, 8)
    with rig.stepping():
        lease.checkpoint(8)
    rig.cache.device.write("mamba", lease.state("mamba"), b"\xee" * 48)
    rig.check()
    assert rig.cache.probe(t(16)).boundary == 8
    lease.abandon()
    rig.check_idle()


def test_a_state_whose_copy_takes_too_long_is_not_left(make_rig: MakeRig, t: T) -> None:
    """The request goes on writing its state, so a copy that runs later is worth nothing, whatever it says."""
    rig = make_rig("full+mamba", stepped=True, policy__wait_limit="50ms")
    lease = rig.cache.match(t(16))
    lease.reserve(16)
    rig.write(lease, t(16), 0, 8)
    lease.checkpoint(8)
    rig.cache.device.write("mamba", lease.state("mamba"), b"\xee" * 48)
    rig.step_all()
    rig.check()
    assert rig.cache.probe(t(16)).boundary == 0
    rig.write(lease, t(16), 8, 16)
    lease.release(t(16))
    rig.check_idle()
    assert rig.cache.probe(t(17)).boundary == 16
    assert rig.cache.stats().faults == {"wait_limit": 1, "local_late": 1}


# ---- staging, and a transfer that failed (O-56, O-57) ------------------------------------------------------------------
def test_three_loads_through_a_queue_for_one_all_end(make_rig: MakeRig, t: T) -> None:
    """O-56: L2 and the queue have room for one of three; the first reader is slow; all end as hit or miss."""
    page_bytes = 4 * 8
    queues = {"store": "1MiB", "prefetch": f"{4 * page_bytes}B"}
    rig = make_rig(device=64, host=4, store="scripted", policy__queues=queues)
    prompts = [t(1000 * number + 16, 1000 * number + 1) for number in range(1, 4)]
    for prompt in prompts:
        rig.seed_store(prompt)
    gate = rig.store.block("get")

    def one(prompt: Tokens) -> int:
        with rig.cache.match(np.append(prompt, 1)) as lease:
            reused = lease.load()
            assert rig.wrong_pages(lease, prompt) == 0
            return reused

    with ThreadPoolExecutor(3) as pool:
        loads = [pool.submit(one, prompt) for prompt in prompts]
        assert gate.reached.wait(20)
        gate.release()
        assert [load.result(20) for load in loads].count(16) >= 1
    rig.check_idle()
    assert rig.free("full", "host") + rig.cache.stats().pools["full", "host"].evictable == 4


@pytest.mark.parametrize("leg", ["store to host", "host to device"])
def test_a_failed_leg_is_never_taken_for_a_loaded_prefix(make_rig: MakeRig, t: T, leg: str) -> None:
    """O-57: each leg fails; the request reuses what was verified, which is nothing, and the error is counted."""
    rig = make_rig(host=64, store="scripted", stepped=True)
    rig.seed_store(t(40))
    if leg == "store to host":
        rig.store.script("get", Raise(OSError("no direct path")))
    else:
        for _ in range(50):
            rig.to_device.fail_next(OSError("no direct path"))
    with rig.stepping():
        served = rig.serve(t(41))
    assert served.source.total == 0
    counted = {"store to host": "fetch_raised", "host to device": "to_device_copy"}
    assert rig.cache.stats().faults[counted[leg]] > 0
    assert rig.cache.stats().faults["shortened"] == 1
    rig.step_all()
    rig.check_idle()
