"""L1 as one budget, with real bytes: every reused page is checked, and memory stays within the budget."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hicache.cache import HiCache
from hicache.config import device_budget, load_config
from hicache.errors import CapacityError, ConfigError
from hicache.explain import LossCause
from hicache.replay.simulated import SimulatedEngine
from hicache.testing.residency import resident_bytes
from hicache.tiers.device import DevicePool
from hicache.tiers.shared_device import SharedDevicePool
from hicache.types import Tier

if TYPE_CHECKING:
    from tests.hicache.conftest import MakeRig, Rig, Tokens

T = Callable[..., "Tokens"]
MODELS = ["full+swa", "full+mamba", "full+swa+mamba", "swa+wide", "full+draft", "full+swa+wide"]


def shared_rig(make_rig: MakeRig, model: str = "full+swa+mamba", **keywords: Any) -> Rig:  # Any: see Rig
    rig = make_rig(model, **{"device": 18, **keywords}, tiers__device__split="shared")
    assert isinstance(rig.cache.device, SharedDevicePool)
    return rig


@pytest.mark.parametrize("write", ["write_through", "write_back"])
@pytest.mark.parametrize("model", MODELS)
def test_random_prompts_through_a_shared_l1_come_back_right(
    make_rig: MakeRig, t: T, model: str, write: str, seeded_random: random.Random
) -> None:
    """L1 holds about two prompts of eight, so everything moves all the time."""
    rig = shared_rig(
        make_rig,
        model,
        host=36,
        tiers__host__split="shared",
        store="scripted",
        policy__write=write,
        policy__eviction="lru",
    )
    prompts = [t(1000 * number + 40, 1000 * number + 1) for number in range(1, 9)]
    hits = 0
    for _ in range(40):
        first, second = seeded_random.choices(prompts, k=2)
        prompt = np.concatenate([first[: seeded_random.randrange(41)], second[:20]])
        hits += rig.serve(prompt).source.total
    rig.check_idle()
    assert hits > 0


def test_l1_alone_serves_short_chats_and_long_prompts(make_rig: MakeRig, t: T) -> None:
    """The same budget, which no fixed split serves both with: nine conversations of a page, then one of 24 pages."""
    rig = shared_rig(make_rig, "full+mamba", device=24)
    chats = [t(1000 * number + 4, 1000 * number) for number in range(1, 10)]
    for chat in chats:
        rig.serve(chat)
    assert [rig.cache.probe([*chat, 1]).boundary for chat in chats] == [4] * 9
    prompt = t(4 * 24)
    rig.serve(prompt)
    assert rig.serve(np.append(prompt, 1)).source.device == 4 * 24
    rig.check_idle()


def big_cache(capacity: str = "512KiB") -> HiCache:
    components = {
        "full": {"rule": "path", "layers": 2, "bytes_per_token": "2KiB"},
        "mamba": {"rule": "checkpoint", "layers": 2, "state_bytes": "64KiB"},
    }
    tree = {
        "model": {"name": "m", "page_size": 4, "components": components},
        "tiers": {"device": {"kind": "cpu", "capacity": capacity}},
    }
    return HiCache(load_config(tree, environ={}), background=False)


def test_memory_never_exceeds_the_budget_however_shares_move(t: T) -> None:
    """Chats fill L1 with states, a long prompt with pages, and again; each component alone could have it all."""
    with big_cache() as cache:
        device, engine = cache.device, SimulatedEngine(cache)
        budget = device_budget(cache.config)
        assert budget is not None
        most: dict[str, int] = {}
        for _ in range(3):
            for number in range(1, 12):
                engine.serve(t(100 * number + 4, 100 * number + 1), t(0))
                _note_residency(device, most)
                assert sum(resident_bytes(device[name]) for name in device.names) <= budget.num_units
            engine.serve(t(5160, 5001), t(0))
            _note_residency(device, most)
            assert sum(resident_bytes(device[name]) for name in device.names) <= budget.num_units
        assert sum(most.values()) > budget.num_units  # so that it did move
        assert cache.audit() == []


def _note_residency(device: DevicePool, most: dict[str, int]) -> None:
    for name in device.names:
        most[name] = max(most.get(name, 0), resident_bytes(device[name]))


@pytest.mark.parametrize("part", [0.3, 0.8])
def test_a_prompt_that_fits_l1_is_kept_whole_beside_its_windows(t: T, part: float) -> None:
    """The engine's chunk is 8192 tokens, of which windows would have slots for all."""
    components = {
        "full": {"rule": "path", "layers": 2, "bytes_per_token": "2KiB"},
        "swa": {"rule": "window", "window": 16, "layers": 2, "bytes_per_token": "2KiB"},
    }
    tree = {
        "model": {"name": "m", "page_size": 4, "components": components},
        "tiers": {"device": {"kind": "cpu", "capacity": 200 * 8192}},
    }
    with HiCache(load_config(tree, environ={}), background=False) as cache:
        engine, prompt = SimulatedEngine(cache), t(int(4 * 200 * part))
        assert engine.serve(prompt, t(0)).unkept_tokens == 0
        assert engine.serve(np.append(prompt, 1), t(0)).source.device == len(prompt)
        assert cache.audit() == []


def test_a_reset_gives_all_memory_back(t: T) -> None:
    with big_cache() as cache:
        SimulatedEngine(cache).serve(t(60), t(0))
        cache.reset()
        assert sum(resident_bytes(cache.device[name]) for name in cache.device.names) == 0
        assert cache.audit() == []


def test_a_prompt_longer_than_the_budget_is_told_how_long_it_may_be(make_rig: MakeRig, t: T) -> None:
    rig = shared_rig(make_rig, "full+mamba", device=4)
    budget = device_budget(rig.config)
    assert budget is not None
    page = budget.costs["full"]
    most = (budget.num_units // page - -(-2 * budget.costs["mamba"] // page)) * rig.page
    with (
        rig.cache.match(t(most + 1)) as lease,
        pytest.raises(CapacityError, match="wants room for 11 of full, and there is room for 10"),
    ):
        lease.reserve(most + 1)
    with rig.cache.match(t(most)) as lease:
        lease.reserve(most)


def test_a_pool_of_another_kind_has_room_for_each(make_rig: MakeRig) -> None:
    class OtherPool(DevicePool):
        pass

    tree = big_cache()
    tree.close()
    with pytest.raises(ConfigError, match=r"tiers.device.split: a OtherPool .* set it to fixed"):
        HiCache(tree.config, device_pool=OtherPool)


def test_the_code_chooses_one_budget_on_the_cpu_and_a_split_on_a_gpu(make_rig: MakeRig) -> None:
    tree = make_rig("full+mamba").config.model_dump(mode="json", exclude_none=True)
    assert device_budget(load_config(tree, environ={})) is None  # shares by hand
    del tree["tiers"]["device"]["split"]
    assert device_budget(load_config(tree, environ={})) is not None
    for overrides in ({"tiers.device.split": "fixed"}, {"tiers.device.kind": "cuda"}):
        assert device_budget(load_config(tree, overrides=overrides, environ={})) is None
    with pytest.raises(ConfigError, match=r"tiers.device.split .*found shared, but memory of kind cuda"):
        load_config(tree, overrides={"tiers.device.kind": "cuda", "tiers.device.split": "shared"}, environ={})
    with pytest.raises(ConfigError, match="found 'both'; expected shared, fixed, or a mapping"):
        load_config(tree, overrides={"tiers.device.split": "both"}, environ={})


def test_watermarks_ask_a_budget_once_and_not_for_a_whole_state(t: T) -> None:
    """5 % are 4 pages of 80, and a state is 8: with 5 pages free there is enough."""
    tree = big_cache("640KiB")
    tree.close()
    overrides = {
        "tiers.host": {"pinned": False, "capacity": "4MiB"},
        "policy.eviction": "lru",
        "policy.watermarks.device": {"low": 0.02, "high": 0.05},
    }
    with HiCache(
        load_config(tree.config.model_dump(mode="json", exclude_none=True), environ={}, overrides=overrides),
        background=False,
    ) as cache:
        engine = SimulatedEngine(cache)
        for first, pages in ((1, 30), (1001, 29)):
            engine.serve(t(first + 4 * pages - 1, first), t(0))
        core = cache._runtime.core
        assert core.free_slots("full", Tier.DEVICE) == (80, 5)
        cache._runtime.tend()
        cache.drain()
        assert core.free_slots("full", Tier.DEVICE) == (80, 5)
        engine.serve(t(2016, 2001), t(0))
        cache._runtime.tend()
        cache.drain()
        assert 4 <= core.free_slots("full", Tier.DEVICE)[1] < 80 // 4
        assert cache.audit() == []


def test_a_prompt_that_is_never_admitted_says_that_it_had_no_room(make_rig: MakeRig, t: T) -> None:
    rig = shared_rig(make_rig, "full+mamba", device=4, host=64, explain__enabled=True)
    budget = device_budget(rig.config)
    assert budget is not None
    most = (budget.num_units - 2 * budget.costs["mamba"]) // budget.costs["full"] * rig.page
    rig.serve(t(most))
    rig.serve(t(1000 + most, 1001))
    with rig.cache.match(t(most + 4)) as lease:
        assert lease.source.host > 0
        assert lease.load() == 0
        assert LossCause.NO_ROOM in {lost.cause for lost in lease.explain().lost}
        with pytest.raises(CapacityError, match="share L1"):
            lease.reserve(most + 4)
    assert rig.serve(np.append(t(1000 + most, 1001), 1)[:most]).source.device > 0
    rig.check_idle()
