"""The load of one layer runs while the layers before it compute: what is there when, and every way it can go wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hicache.errors import CapacityError, ProtocolError
from hicache.lease import Lease
from hicache.testing.scripted_store import MISS
from hicache.types import Tier

if TYPE_CHECKING:
    from tests.hicache.conftest import MakeRig, Rig, Tokens

T = Callable[..., "Tokens"]
LATE = OSError("the copy engine refuses")


def in_host(make_rig: MakeRig, tokens: Tokens, model: str = "full", **keywords: object) -> Rig:
    """A stepped cache that has ``tokens`` in L2 alone; L1 is poisoned."""
    rig = make_rig(model, host=64, stepped=True, **keywords)
    rig.serve_stepped(tokens)
    rig.squeeze_stepped()
    for spec in rig.specs:
        rig.cache.device[spec.name].fill_(0xEE)
    return rig


def has_layer(rig: Rig, lease: Lease, tokens: Tokens, layer: int, component: str = "full") -> bool:
    """Whether the reused pages of one layer lie where the lease says, byte for byte."""
    last = lease.reused // rig.page
    slots = lease.slots(component)[:last]
    tensor = rig.cache.device[component][layer]
    expected = rig.stamps(tokens).pages(component, 0, last).reshape(last, -1, tensor.shape[-1])
    return bool((tensor[slots].numpy() == expected[:, layer]).all())


def serve_anew(rig: Rig, lease: Lease, tokens: Tokens) -> None:
    """What an engine does once a load has come to nothing."""
    assert lease.reused == 0
    with rig.stepping():
        lease.reserve(len(tokens))
        rig.write(lease, tokens, 0, len(tokens))
        assert lease.release(tokens).published == len(tokens) // rig.page * rig.page
    rig.check_idle()


# ---- what is there when --------------------------------------------------------------------------------------------
def test_a_layer_of_what_nobody_loaded_is_not_said_to_be_there(make_rig: MakeRig, t: T) -> None:
    rig = in_host(make_rig, t(24))
    with (
        rig.cache.match(t(25)) as lease,
        pytest.raises(ProtocolError, match=r"call load_by_layer or load first"),
    ):
        lease.wait_layer(0)
    with rig.cache.match(t(25, 101)) as lease:
        assert lease.wait_layer(0), "there is nothing to load"


def test_the_first_layer_can_be_read_after_one_layer_s_copies(make_rig: MakeRig, t: T) -> None:
    rig = in_host(make_rig, t(24))
    with rig.cache.match(t(25)) as lease:
        assert lease.load_by_layer() == 24
        assert rig.to_device.num_pending == 2
        assert not has_layer(rig, lease, t(25), 0)
        rig.to_device.step()
        assert lease.wait_layer(0)
        assert has_layer(rig, lease, t(25), 0)
        assert not has_layer(rig, lease, t(25), 1)
        assert rig.cache.stats().pools["full", "device"].in_flight == 6
        rig.to_device.step()
        assert lease.wait_layer(1)
        assert has_layer(rig, lease, t(25), 1)
        rig.check()
    rig.check_idle()


def test_a_wait_for_a_layer_ends_with_that_layer_and_not_before(make_rig: MakeRig, t: T) -> None:
    rig = in_host(make_rig, t(24))
    transfers = rig.cache._runtime.transfers
    with rig.cache.match(t(25)) as lease:
        lease.load_by_layer()
        tickets = lease._restore._landing
        waits = [transfers.wait_layer(tickets, layer, 0) for layer in (0, 1)]
        rig.to_device.step()
        waits += [transfers.wait_layer(tickets, layer, 0) for layer in (0, 1)]
        rig.to_device.step()
        waits += [transfers.wait_layer(tickets, layer, 0) for layer in (0, 1)]
    assert waits == [False, False, True, False, True, True]
    rig.check_idle()


def test_components_of_different_depth_arrive_side_by_side(make_rig: MakeRig, t: T) -> None:
    """``full`` and ``swa`` have two layers, ``draft`` has one, which comes with their last."""
    rig = in_host(make_rig, t(24), "full+draft+swa")
    with rig.cache.match(t(25)) as lease:
        assert lease.load_by_layer() == 24
        order = [item.work._layers.job.component for item in rig.to_device._pending]  # type: ignore[attr-defined]
        assert sorted(order[:2]) == ["full", "swa"]
        assert sorted(order[2:]) == ["draft", "full", "swa"]
        rig.to_device.step_all()
        assert rig.wrong_pages(lease, t(25)) == 0
    rig.check_idle()


def test_every_model_reads_the_right_bytes_layer_by_layer(make_rig: MakeRig, t: T, paged_model: str) -> None:
    """On CPU streams, which run while the engine waits."""
    rig = make_rig(paged_model, host=64)
    rig.serve(t(24))
    rig.squeeze()
    with rig.cache.match(t(40)) as lease:
        assert lease.load_by_layer() == 24
        lease.reserve(16)
        for layer in range(rig.cache._runtime.num_layers()):
            assert lease.wait_layer(layer)
        assert rig.wrong_pages(lease, t(40)) == 0
        rig.write(lease, t(40), 24, 40)
        assert lease.release(t(40)).published == 40
    rig.check_idle()
    with rig.cache.match(t(41)) as lease:
        assert lease.load_by_layer() == 40
        assert rig.wrong_pages(lease, t(41)) == 0


def test_states_are_there_before_it_returns(make_rig: MakeRig, t: T) -> None:
    """A state is claimed as a whole, ahead of all pages."""
    rig = in_host(make_rig, t(24), "full+mamba")
    with rig.cache.match(t(25)) as lease:
        waits = lease._restore._begin_load(by_layer=True)
        works = [item.work for item in rig.to_device._pending]
        assert [work.num_slots for work in works] == [1, 6, 6]
        assert len(waits) == 1, "of the load, only the state is waited for"
        rig.to_device.step()
        with rig.stepping("local"):
            assert lease.load_by_layer() == 24
        assert rig.to_device.num_pending == 2
        rig.to_device.step_all()
        assert lease.wait_layer(2)
        assert rig.wrong_pages(lease, t(25)) == 0
    rig.check_idle()


def test_pages_of_l3_come_first_and_lower_the_reuse_before_anything_computes(make_rig: MakeRig, t: T) -> None:
    rig = make_rig(host=64, stepped=True, store="scripted")
    rig.seed_store(t(24))
    rig.store.script("get", MISS, key=rig.keys(t(24))[4])
    with rig.cache.match(t(25)) as lease:
        assert lease.reused == 24
        assert lease.load_by_layer() == 16
        assert rig.to_device.num_pending == 2
        rig.to_device.step_all()
        assert lease.wait_layer(1)
        assert rig.wrong_pages(lease, t(25)) == 0
        assert lease.source.store == lease.reused
    rig.step_all()
    rig.check_idle()


def test_load_after_it_waits_for_the_rest(make_rig: MakeRig, t: T) -> None:
    rig = in_host(make_rig, t(24))
    with rig.cache.match(t(25)) as lease:
        lease.load_by_layer()
        with rig.stepping():
            assert lease.load() == 24
        assert rig.to_device.num_pending == 0
        assert rig.wrong_pages(lease, t(25)) == 0


def test_two_requests_wait_for_the_layers_of_one_load(make_rig: MakeRig, t: T) -> None:
    rig = in_host(make_rig, t(24))
    with rig.cache.match(t(25)) as first, rig.cache.match(t(30)) as second:
        assert (first.load_by_layer(), second.load_by_layer()) == (24, 24)
        assert rig.to_device.num_pending == 2, "it is copied once"
        rig.to_device.step()
        for lease in (first, second):
            assert lease.wait_layer(0)
            assert has_layer(rig, lease, t(30), 0)
        rig.to_device.step()
        for lease in (first, second):
            assert lease.wait_layer(1)
    rig.check_idle()


# ---- a copy fails ----------------------------------------------------------------------------------------------------
def test_a_late_layer_that_fails_is_told_and_the_request_begins_anew(make_rig: MakeRig, t: T) -> None:
    rig = in_host(make_rig, t(24))
    with rig.cache.match(t(25)) as lease:
        assert lease.load_by_layer() == 24
        lease.reserve(1)
        rig.to_device.step()
        assert lease.wait_layer(0)
        rig.to_device.fail_next(LATE)
        rig.to_device.step()
        assert not lease.wait_layer(1)
        assert (lease.reused, lease.source.total) == (0, 0)
        assert lease.wait_layer(1), "it is said once; there is nothing to wait for any more"
        serve_anew(rig, lease, t(25))
    assert rig.cache.stats().faults["shortened"] == 1
    with rig.stepping():
        assert rig.serve(t(26)).source.total == 24


def test_an_early_layer_that_fails_ends_the_others_unmoved(make_rig: MakeRig, t: T) -> None:
    rig = in_host(make_rig, t(24))
    with rig.cache.match(t(25)) as lease:
        lease.load_by_layer()
        rig.to_device.fail_next(LATE)
        rig.to_device.step_all()
        assert not has_layer(rig, lease, t(25), 1) if lease.reused else True
        assert not lease.wait_layer(0)
        serve_anew(rig, lease, t(25))


def test_what_a_request_reserved_is_its_own_until_it_knows_of_the_failure(make_rig: MakeRig, t: T) -> None:
    """Its engine may still be writing there: nobody else gets these slots before it was told."""
    rig = in_host(make_rig, t(24), device=16)
    lease = rig.cache.match(t(65))
    lease.load_by_layer()
    lease.reserve(40)
    own = set(lease.slots("full")[6:].tolist())
    rig.to_device.fail_next(LATE)
    rig.to_device.step_all()
    rig.cache.poll()
    assert rig.cache.stats().pools["full", "device"].lease_owned == 10
    with rig.cache.match(t(540, 501)) as other:
        other.reserve(24)
        assert own.isdisjoint(other.slots("full").tolist())
        with pytest.raises(CapacityError):
            other.reserve(4)
    assert not lease.wait_layer(0)
    assert rig.cache.stats().pools["full", "device"].lease_owned == 0
    lease.abandon()
    rig.check_idle()


@pytest.mark.parametrize("way", ["checkpoint", "release"])
def test_nothing_is_published_on_a_load_that_failed(make_rig: MakeRig, t: T, way: str) -> None:
    rig = in_host(make_rig, t(24))
    with rig.cache.match(t(40)) as lease:
        lease.load_by_layer()
        lease.reserve(16)
        rig.to_device.fail_next(LATE)
        rig.to_device.step_all()
        done = lease.checkpoint(40) if way == "checkpoint" else lease.release(t(40))
        assert (done.published, done.new_tokens) == (0, 0)
        if way == "checkpoint":
            assert not lease.wait_layer(0), "the engine is told"
    rig.check_idle()
    assert rig.cache.probe(t(41)).boundary == 24


def test_publishing_waits_for_the_last_layer(make_rig: MakeRig, t: T) -> None:
    rig = in_host(make_rig, t(24))
    with rig.cache.match(t(40)) as lease:
        lease.load_by_layer()
        lease.reserve(16)
        rig.write(lease, t(40), 24, 40)
        with rig.stepping():
            assert lease.checkpoint(40).published == 40
        assert rig.to_device.num_pending == 0
    rig.check_idle()


def test_a_load_that_is_too_slow_counts_as_failed_and_keeps_its_slots(make_rig: MakeRig, t: T) -> None:
    rig = in_host(make_rig, t(24))
    with rig.cache.match(t(25)) as lease:
        lease.load_by_layer()
        lease.reserve(1)
        with rig.impatient():
            assert not lease.wait_layer(0)
        assert lease.reused == 0
        assert rig.cache.stats().pools["full", "device"].in_flight == 6
        rig.to_device.step_all()
        assert rig.wrong_payload() == []
        serve_anew(rig, lease, t(25))


def test_an_explanation_names_the_copy(make_rig: MakeRig, t: T) -> None:
    rig = in_host(make_rig, t(24), explain__enabled=True)
    with rig.cache.match(t(25)) as lease:
        lease.load_by_layer()
        rig.to_device.fail_next(LATE)
        rig.to_device.step_all()
        assert not lease.wait_layer(0)
        assert [lost.cause.value for lost in lease.explain().lost][:1] == ["copy_failed"]


# ---- in the middle ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("steps", [0, 1], ids=["before a layer", "after a layer"])
def test_an_exit_leaves_the_slots_to_the_copy_until_the_last_layer_is_done(
    make_rig: MakeRig, t: T, steps: int
) -> None:
    rig = in_host(make_rig, t(24))
    lease = rig.cache.match(t(25))
    lease.load_by_layer()
    lease.reserve(1)
    rig.to_device.step(steps)
    lease.abandon()
    rig.check()
    assert rig.cache.stats().pools["full", "device"].in_flight == 6
    assert rig.cache.stats().pools["full", "host"].in_flight == 6
    rig.step_all()
    rig.check_idle()
    assert rig.free() == 58, "what has arrived stays"


def test_pressure_takes_neither_end_of_a_load_away(make_rig: MakeRig, t: T) -> None:
    rig = in_host(make_rig, t(24), device=16)
    with rig.cache.match(t(25)) as lease:
        lease.load_by_layer()
        rig.to_device.step()
        with rig.cache.match(t(540, 501)) as other:
            other.reserve(40)
            with rig.impatient(), pytest.raises(CapacityError):
                other.reserve(4)
        with rig.cache._runtime.lock:
            room = rig.cache._runtime.core.make_room("full", Tier.HOST, 64)
            rig.cache._runtime.run(room.actions)
        assert rig.resident("full", Tier.HOST) >= 6
        rig.to_device.step()
        assert lease.wait_layer(1)
        assert rig.wrong_pages(lease, t(25)) == 0
    rig.step_all()
    rig.check_idle()


def test_a_reset_waits_for_the_last_layer_and_voids_the_lease(make_rig: MakeRig, t: T) -> None:
    rig = in_host(make_rig, t(24))
    lease = rig.cache.match(t(25))
    lease.load_by_layer()
    rig.to_device.step()
    with rig.stepping():
        rig.cache.reset()
    assert rig.to_device.num_pending == 0
    with pytest.raises(ProtocolError, match="reset"):
        lease.wait_layer(1)
    lease.abandon()
    rig.check_idle()
    assert rig.free() == 64


def test_a_close_in_the_middle_is_quiet(make_rig: MakeRig, t: T) -> None:
    rig = in_host(make_rig, t(24))
    with rig.cache.match(t(25)) as lease:
        lease.load_by_layer()
        rig.to_device.step()
        rig.cache.close(drain=False)
        with pytest.raises(ProtocolError, match="closed"):
            lease.wait_layer(1)


def test_a_prefix_that_another_request_computes_meanwhile_stays_readable(make_rig: MakeRig, t: T) -> None:
    """Both have it: the tree keeps the computed one, the loader reads on where it was told to."""
    rig = in_host(make_rig, t(24))
    loader, computer = rig.cache.match(t(25)), rig.cache.match(t(40))
    computer.reserve(40)
    assert computer.reused == 0
    assert loader.load_by_layer() == 24
    told = loader.slots("full")[:6].copy()
    rig.write(computer, t(40), 0, 40)
    computer.release(t(40))
    rig.step_all()
    assert loader.wait_layer(1)
    with rig.cache.match(t(1040, 901)) as other:  # what is free may be written by anybody
        other.reserve(140)
        taken = other.slots("full")
        rig.cache.device.write_many("full", taken, np.full((len(taken), 32), 0xEE, np.uint8))
        got = rig.cache.device.read_many("full", told)
        assert (got == rig.stamps(t(24)).pages("full", 0, 6)).all()
        rig.check()
    loader.abandon()
    rig.check_idle()
    assert rig.resident("full", Tier.DEVICE) == 10


def test_what_a_new_hold_hears_to_be_gone_reaches_the_sessions(
    make_rig: MakeRig, t: T, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tree names each turn that is over once: whoever asks it first has to pass it on."""
    rig = in_host(make_rig, t(24), device=32, policy__eviction="session")
    with rig.stepping():
        rig.serve(t(540, 500), session="other")
    buried: list[int] = []
    with rig.cache.match(t(25)) as lease:
        lease.load_by_layer()
        rig.cache.admin.clear(session="other")
        monkeypatch.setattr(rig.cache.sessions, "bury", buried.extend)
        with rig.cache._runtime.lock:
            lease._restore._begin_anew("a test")
    assert len(buried) == 1
    rig.step_all()
    rig.check_idle()
