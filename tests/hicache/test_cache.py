"""The cache as a whole: how it is built, asked, and what it counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from hicache.cache import HiCache
from hicache.config import load_config
from hicache.errors import ConfigError, TierUnavailableError
from hicache.radix.core import core_kind
from hicache.testing.scripted_store import ScriptedStore
from hicache.testing.transfer_rig import engine_threads
from hicache.types import Tier, TierTokens

if TYPE_CHECKING:
    from tests.hicache.conftest import MakeRig, Tokens

T = Callable[..., "Tokens"]
EVERY = "full+swa+mamba"


# ---- building --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["cpu", "hybrid"])
def test_a_preset_serves_a_request(preset: str, t: T) -> None:
    with HiCache.from_yaml(preset, environ={}) as cache:
        tokens = t(2 * cache.page_size)
        with cache.match(tokens, session="chat") as lease:
            lease.load()
            lease.reserve(len(tokens))
            lease.release(tokens)
        assert cache.probe([*tokens, 1]).boundary == len(tokens)
        assert cache.audit() == []
        assert cache.stats().core == core_kind()[0]
    assert engine_threads() == set()


def test_a_policy_of_the_users_own_is_named_in_the_configuration(t: T) -> None:
    path = "hicache.testing.orderings.UsesOverAge"
    with HiCache.from_yaml("cpu", environ={}, overrides={"policy.eviction": path}) as cache:
        tokens = t(2 * cache.page_size)
        with cache.match(tokens) as lease:
            lease.reserve(len(tokens))
            lease.release(tokens)
        assert cache.config.policy.eviction == path
        assert cache.stats().core == core_kind()[0]
        assert cache.audit() == []


def test_what_is_no_configuration_is_refused_with_what_makes_one() -> None:
    with pytest.raises(
        ConfigError, match=r"a dict is no HiCacheConfig; use HiCache\.from_yaml or load_config"
    ):
        HiCache({"model": {}})  # type: ignore[arg-type]


def test_a_policy_that_cannot_be_loaded_is_refused_with_its_key() -> None:
    with pytest.raises(ConfigError, match=r"policy\.eviction: cannot load 'nowhere\.Policy'"):
        HiCache.from_yaml("cpu", environ={}, overrides={"policy.eviction": "nowhere.Policy"})
    assert engine_threads() == set()


def test_a_yaml_file_with_overrides_and_environment_is_what_runs(tmp_path: Path) -> None:
    path = tmp_path / "hicache.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "model": {
                    "name": "m",
                    "page_size": 4,
                    "components": {"full": {"rule": "path", "bytes_per_token": 16}},
                },
                "tiers": {"device": {"kind": "cpu", "capacity": "64KiB"}},
            }
        )
    )
    environ = {"HICACHE__MODEL__PAGE_SIZE": "8"}
    with HiCache.from_yaml(path, overrides={"policy.eviction": "fifo"}, environ=environ) as cache:
        assert (cache.page_size, cache.config.policy.eviction) == (8, "fifo")
        assert cache.device.num_slots("full") == 512


def test_all_that_is_wrong_is_refused_at_once() -> None:
    overrides = {"policy.eviction": "lur", "model.page_size": 0, "tiers.device.capacity": "12XB"}
    with pytest.raises(ConfigError) as caught:
        HiCache.from_yaml("cpu", overrides=overrides, environ={})
    assert len(caught.value.problems) == 3


def test_a_store_that_does_not_open_is_told_and_leaves_nothing_behind(make_rig: MakeRig) -> None:
    class Refusing(ScriptedStore):
        async def open(self) -> None:
            raise TierUnavailableError("no such server")

    with pytest.raises(TierUnavailableError, match="no such server"):
        make_rig(host=8, store=Refusing())
    assert engine_threads() == set()


def test_a_store_is_opened_once(make_rig: MakeRig) -> None:
    rig = make_rig(host=8, store="scripted")
    rig.cache.close()
    operations = [call.operation for call in rig.store.calls]
    assert (operations.count("open"), operations.count("close")) == (1, 1)


def test_only_models_with_windows_or_states_are_hybrid(make_rig: MakeRig, model: str) -> None:
    assert make_rig(model).cache.is_hybrid == (model != "full")


def test_config_objects_are_shared_safely(t: T) -> None:
    config = load_config("hybrid", environ={})
    with HiCache(config) as first, HiCache(config) as second:
        assert first.identity == second.identity
        assert first.device is not second.device


# ---- asking ----------------------------------------------------------------------------------------------------------


def test_a_probe_changes_nothing(make_rig: MakeRig, t: T, model: str) -> None:
    rig = make_rig(model, host=64, store="scripted")
    rig.serve(t(20))
    rig.cache.drain()
    before, tree = rig.cache.stats(), rig._views()
    calls = len(rig.store.calls)
    found = rig.cache.probe([*t(12), 99, 98])
    assert found.walked == 12
    assert rig.cache.stats() == before
    assert rig._views() == tree
    assert len(rig.store.calls) == calls


def test_a_probe_says_what_a_match_will_find(make_rig: MakeRig, t: T, model: str) -> None:
    rig = make_rig(model, host=64, store="scripted")
    rig.serve(t(20))
    rig.serve([*t(12), *t(120, 101)])
    for prompt in (t(20), t(21), [*t(12), 99], [*t(12), *t(130, 101)], [99]):
        probed = rig.cache.probe(prompt)
        with rig.cache.match(prompt) as lease:
            assert lease.reused == probed.boundary
            assert lease.source == probed.source
            assert lease.load() == probed.boundary


# ---- counters --------------------------------------------------------------------------------------------------------


def test_sources_sum_to_the_prompts_whatever_way_a_request_takes(make_rig: MakeRig, t: T) -> None:
    rig = make_rig(EVERY, host=64, store="scripted")
    rig.serve(t(20))
    rig.serve(t(21))
    rig.squeeze()
    rig.serve(t(22))
    rig.cache.drain()
    rig.cache.reset()
    rig.serve(t(23))
    with rig.cache.match(t(24)):
        pass
    with rig.cache.match(t(24)) as lease:
        lease.load()
    counts = rig.cache.stats().tokens
    # 1 token of the request that squeezes; two of 24 that were given up, one of them after its load.
    assert counts.prompt == 20 + 21 + 1 + 22 + 23 + 24 + 24
    assert (counts.device, counts.host, counts.store) == (20 + 20, 20, 20)
    assert counts.computed == counts.prompt - 80
    assert rig.cache.stats().by_component["mamba"] == TierTokens(40, 20, 20)
    assert rig.cache.stats().by_component["swa"] == TierTokens(16, 8, 8)


def test_overlapping_tiers_are_counted_once(make_rig: MakeRig, t: T) -> None:
    """O-64: L1 has 48 and L3 has 64 of 80 tokens: 48 + 16 + 16."""
    rig = make_rig(host=64, store="scripted")
    rig.seed_store(t(64))
    with rig.cache.match(t(48)) as lease:  # computed here, not read
        lease.reserve(48)
        rig.write(lease, t(48), 0, 48)
        lease.release(t(48))
    assert rig.serve(t(80)).source == TierTokens(48, 0, 16)
    counts = rig.cache.stats().tokens
    assert (counts.prompt, counts.computed) == (128, 48 + 16)
    rig.check_idle()


def test_a_snapshot_of_the_counters_does_not_move(make_rig: MakeRig, t: T) -> None:
    rig = make_rig(EVERY, host=64, store="scripted")
    rig.serve(t(20), session="a")
    rig.cache.drain()
    before = rig.cache.stats()
    copied = dataclasses.asdict(before)
    rig.serve(t(40), session="b")
    rig.cache.drain()
    assert dataclasses.asdict(before) == copied
    assert before.store is not None
    assert before.store.num_pages == 5 + 3 + 2  # full pages, the windows and the states at 16 and 20


def test_fresh_payload_never_enters_a_window_that_no_mark_needs(make_rig: MakeRig, t: T) -> None:
    rig = make_rig("full+swa")
    rig.serve(t(40))
    assert rig.resident("full", Tier.DEVICE) == 10
    assert rig.resident("swa", Tier.DEVICE) == 3  # [28, 36) for the mark at 36, and [32, 40)
