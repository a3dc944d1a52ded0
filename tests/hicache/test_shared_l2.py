"""L2 as one budget, with real bytes: every reused page is checked, and every unit is had exactly once."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hicache.config import host_budget, load_config
from hicache.lease import Lease
from hicache.runtime import Runtime
from hicache.testing.scripted_store import MISS
from hicache.tiers.host import HostPool
from hicache.tiers.shared_host import SharedHostPool

if TYPE_CHECKING:
    from tests.hicache.conftest import MakeRig, Rig, Tokens

T = Callable[..., "Tokens"]
MODELS = ["full+swa", "full+mamba", "full+swa+mamba", "swa+wide", "full+draft", "full+swa+wide"]


def shared_rig(make_rig: MakeRig, model: str = "full+swa+mamba", **keywords: Any) -> Rig:  # Any: see Rig
    rig = make_rig(model, **{"device": 28, "host": 36, **keywords}, tiers__host__split="shared")
    assert isinstance(rig.cache.host, SharedHostPool)
    return rig


@pytest.mark.parametrize("write", ["write_through", "write_through_selective", "write_back"])
@pytest.mark.parametrize("model", MODELS)
def test_random_prompts_through_a_shared_l2_come_back_right(
    make_rig: MakeRig, t: T, model: str, write: str, seeded_random: random.Random
) -> None:
    """L1 and L2 hold about two prompts of eight, so everything moves all the time."""
    rig = shared_rig(make_rig, model, host=18, store="scripted", policy__write=write, policy__eviction="lru")
    prompts = [t(1000 * number + 40, 1000 * number + 1) for number in range(1, 9)]
    for _ in range(40):
        first, second = seeded_random.choices(prompts, k=2)
        rig.serve(np.concatenate([first[: seeded_random.randrange(41)], second[:20]]))
    rig.check_idle()
    moved = {row.direction for row in rig.cache.stats().transfers.moved if row.slots}
    assert {"to_host", "to_device"} <= moved


def test_models_of_several_components_share_unless_a_split_is_written(make_rig: MakeRig) -> None:
    rig = make_rig("full+mamba", host=36)
    assert isinstance(rig.cache.host, HostPool)
    assert isinstance(make_rig("full", host=36).cache.host, HostPool)
    tree = rig.config.model_dump(mode="json", exclude_none=True)
    del tree["tiers"]["host"]["split"]
    assert host_budget(load_config(tree, environ={})) is not None


def test_pages_may_have_what_states_leave(make_rig: MakeRig, t: T) -> None:
    """One long prompt: more pages than any share beside as many states would hold."""
    rig = shared_rig(make_rig, "full+mamba", host=16, device=64)
    rig.serve(t(4 * 30))
    rig.cache.drain()
    usage = rig.cache.usage().pools
    assert usage["full", "host"][1] == 30
    assert rig.serve(t(4 * 30 + 1)).source.total == 4 * 30
    assert rig.cache.audit() == []


def test_a_reset_gives_all_units_back(make_rig: MakeRig, t: T) -> None:
    rig = shared_rig(make_rig, store="scripted")
    rig.serve(t(60))
    rig.cache.drain()
    rig.cache.reset()
    host = rig.cache.host
    assert isinstance(host, SharedHostPool)
    assert host.placement.num_free == host.placement.num_units
    assert rig.serve(t(61)).source.store > 0
    rig.check_idle()


def test_a_failing_store_costs_no_unit(make_rig: MakeRig, t: T) -> None:
    """Pages that were to come from L3 and did not leave their places again."""
    rig = shared_rig(make_rig, store="scripted")
    rig.serve(t(40))
    rig.cache.drain()
    rig.cache.reset()
    rig.seed_store(t(40))
    for key in rig.keys(t(40), "mamba"):
        rig.store.script("get", MISS, key=key)
    rig.serve(t(41))
    rig.check_idle()


def test_a_shared_l2_shrinks_and_grows_within_what_it_was_made_with(make_rig: MakeRig, t: T) -> None:
    rig = shared_rig(make_rig, host=64, device=16)
    for number in range(6):
        rig.serve(t(100 * number + 48, 100 * number + 1))
    rig.cache.drain()
    host, capacity = rig.cache.host, rig.config.tiers.host.capacity  # type: ignore[union-attr]  # given
    assert isinstance(host, SharedHostPool)
    assert capacity is not None
    before = rig.cache.usage().pools["full", "host"][0]
    report = rig.cache.admin.set_host_capacity(capacity // 2)
    assert report.is_reached
    assert report.after["full"] <= before // 2
    assert host.placement.num_withheld >= host.placement.num_units // 2 - 1
    rig.check_idle()
    rig.serve(t(48))
    assert rig.cache.admin.set_host_capacity(capacity).after["full"] >= before - 1
    for number in range(6):
        rig.serve(t(100 * number + 48, 100 * number + 1))
    rig.check_idle()


def test_the_audit_finds_a_place_that_nobody_holds(make_rig: MakeRig, t: T) -> None:
    rig = shared_rig(make_rig)
    rig.serve(t(20))
    rig.cache.drain()
    host = rig.cache.host
    assert isinstance(host, SharedHostPool)
    free = int(np.flatnonzero(~host.placement._is_placed["full"])[0])
    host.placement.place("full", np.array([free]))
    assert any("full in HOST" in finding for finding in rig.cache.audit())
    host.placement.release("full", np.array([free]))


def test_what_a_release_frees_gives_up_its_place_before_what_has_ended_is_booked(
    make_rig: MakeRig, t: T, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Booking may hand out just these slots; then the next copy would find them placed already."""
    order: list[str] = []

    def noted(owner: type, name: str, what: str) -> None:
        plain = getattr(owner, name)

        def call(*arguments: Any, **keywords: Any) -> Any:  # Any: whatever is called
            order.append(what)
            return plain(*arguments, **keywords)

        monkeypatch.setattr(owner, name, call)

    rig = shared_rig(make_rig, "full+mamba", host=18)
    with rig.cache.match(t(20)) as lease:
        lease.load()
        lease.reserve(20)
        noted(Lease, "_verified_len", "release")
        noted(Runtime, "run", "run")
        noted(Runtime, "pump", "book")
        lease.release(t(20))
    after = order[order.index("release") :]
    assert after.index("run") < after.index("book")


def test_bytes_in_use_are_each_components_own(make_rig: MakeRig, t: T) -> None:
    rig = shared_rig(make_rig, "full+mamba", host=18)
    rig.serve(t(40))
    rig.cache.drain()
    used = rig.cache.stats().used_bytes
    host = rig.cache.host
    assert isinstance(host, SharedHostPool)
    for name in host.names:
        held = rig.cache.usage().pools[name, "host"][1]
        assert used[name, "host"] == held * host.slot_bytes(name)
    assert 0 < sum(used[name, "host"] for name in host.names) <= host.nbytes
