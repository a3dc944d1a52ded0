"""Warnings: what works but is unlikely to be meant (case O-61)."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import pytest

from hicache.config import config_warnings, load_config, preset_names
from hicache.config.policy import SESSION_POLICIES
from hicache.radix.ordering import ORDERINGS


def warnings(tree: dict[str, Any], overrides: dict[str, Any]) -> list[str]:
    return config_warnings(load_config(tree, environ={}, overrides=overrides), environ={})


@pytest.mark.parametrize("preset", preset_names())
def test_a_preset_warns_of_nothing(preset: str) -> None:
    assert config_warnings(load_config(preset, environ={})) == []


def test_a_page_longer_than_any_request_warns_with_both_numbers(tree: dict[str, Any]) -> None:
    overrides = {"model.page_size": 512, "model.max_tokens": 300, "policy.prefetch.min_tokens": 400}
    config = load_config(tree, environ={}, overrides=overrides)
    assert not config.model.can_hit
    assert config_warnings(config) == [
        (
            "model.page_size: a page of 512 tokens against a longest request (model.max_tokens) of 300:"
            " the cache can never hit"
        )
    ]


@pytest.mark.parametrize(("max_tokens", "can_hit"), [(16, False), (17, True), (None, True)], ids=str)
def test_one_token_is_always_computed_so_a_request_of_one_page_never_hits(
    tree: dict[str, Any], max_tokens: int | None, can_hit: bool
) -> None:
    config = load_config(tree, environ={}, overrides={"model.max_tokens": max_tokens})
    assert config.model.can_hit is can_hit
    assert any("can never hit" in line for line in config_warnings(config)) is not can_hit


def test_a_prefetch_threshold_over_any_request_warns_with_both_numbers(tree: dict[str, Any]) -> None:
    assert warnings(tree, {"model.max_tokens": 200}) == [
        (
            "policy.prefetch.min_tokens: 256 tokens against a longest request (model.max_tokens) of 200,"
            " of which 192 can be reused: nothing is ever prefetched"
        )
    ]


@pytest.mark.parametrize(
    "overrides",
    [
        {"model.max_tokens": 273},
        {"policy.prefetch.min_tokens": 0},
        {"model.max_tokens": 200, "tiers.stores": None},
    ],
    ids=str,
)
def test_a_prefetch_threshold_within_reach_or_without_a_store_is_fine(
    tree: dict[str, Any], overrides: dict[str, Any]
) -> None:
    assert warnings(tree, overrides) == []


def test_a_window_over_any_request_warns(tree: dict[str, Any]) -> None:
    (line,) = warnings(tree, {"model.components.swa.window": 512, "model.max_tokens": 400})
    assert line.startswith("model.components.swa.window: 512 tokens against a longest request")


def test_each_tier_smaller_than_the_one_above_warns(tree: dict[str, Any]) -> None:
    assert warnings(tree, {"tiers.host.capacity": "512KiB", "tiers.stores.0.capacity": "256KiB"}) == [
        (
            "tiers.host.capacity: 512KiB (524288 bytes) is less than tiers.device above it, 1MiB (1048576 bytes):"
            " such a tier only costs"
        ),
        (
            "tiers.stores.0.capacity: 256KiB (262144 bytes) is less than tiers.host above it, 512KiB (524288 bytes):"
            " such a tier only costs"
        ),
    ]


def test_tiers_are_compared_by_their_totals(tree: dict[str, Any]) -> None:
    tree["tiers"]["host"] = {"capacity_per_rank": "512KiB"}
    found = warnings(tree, {"ranks.tp_size": 2})
    assert not [line for line in found if line.startswith("tiers")]


def test_ranks_that_agree_on_nothing_warn(tree: dict[str, Any]) -> None:
    (line,) = warnings(tree, {"ranks.tp_size": 2})
    assert line.startswith("ranks.backend: none, with 2 ranks: each decides alone what it reuses; set gloo")
    agreeing = {"ranks.tp_size": 2, "ranks.backend": "gloo", "ranks.address": "localhost:29600"}
    assert warnings(tree, agreeing) == []


def test_a_launcher_s_variables_are_named_and_not_taken(tree: dict[str, Any]) -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    config = load_config(tree, environ=environ)
    assert (config.ranks.count, config.ranks.number) == (1, 0)
    (line,) = config_warnings(config, environ=environ)
    assert line.startswith("ranks: one rank, but WORLD_SIZE is 4 here, which is not read; say under ranks")


@pytest.mark.parametrize(
    ("place", "number"), [((0, 0, 1), 1), ((0, 1, 0), 2), ((1, 0, 0), 6), ((1, 2, 1), 11)], ids=str
)
def test_ranks_are_counted_tensor_ranks_first(
    tree: dict[str, Any], place: tuple[int, int, int], number: int
) -> None:
    pp_rank, cp_rank, tp_rank = place
    sizes = {"tp_size": 2, "cp_size": 3, "pp_size": 2}
    tree["ranks"] = {**sizes, "tp_rank": tp_rank, "cp_rank": cp_rank, "pp_rank": pp_rank}
    config = load_config(tree, environ={})
    assert (config.ranks.count, config.ranks.number) == (12, number)


def test_a_store_without_a_bound_is_never_too_small(tree: dict[str, Any]) -> None:
    assert warnings(tree, {"tiers.stores": [{"kind": "memory"}]}) == []


def test_a_request_that_no_pool_holds_warns(tree: dict[str, Any]) -> None:
    (line,) = warnings(tree, {"model.max_tokens": 100_000, "tiers.device.split": "fixed"})
    assert line.startswith(
        "tiers.device: 3390 pages of full a rank, but a request of model.max_tokens 100000 needs"
    )


def test_a_request_that_one_budget_never_admits_warns() -> None:
    """Its pages, its state and the one that it leaves: 1 KiB a page, 8 KiB a state, 40 KiB in all."""
    tree = _small(8192, {"kind": "cpu", "capacity": "40KiB"})
    assert warnings(tree, {"model.max_tokens": 16 * 24}) == []
    (line,) = warnings(tree, {"model.max_tokens": 16 * 24 + 1})
    assert line == (
        "tiers.device: 40960 bytes a rank, but a request of model.max_tokens 385 needs 41984 (25 of full, 2 of mamba):"
        " it will be refused; raise capacity to 41KiB (41984 bytes) or more"
    )


def test_so_does_one_whose_window_is_what_is_too_much() -> None:
    tree = _small(8192, {"kind": "cpu", "capacity": "40KiB"})
    tree["model"]["components"]["mamba"] = {"rule": "window", "window": 20, "bytes_per_token": 64}
    assert warnings(tree, {"model.max_tokens": 16 * 38}) == []
    (line,) = warnings(tree, {"model.max_tokens": 16 * 39})
    assert "needs 41984 (39 of full, 2 of mamba)" in line


@pytest.mark.parametrize(
    ("state_bytes", "capacity", "says"),
    [
        (4096, "16KiB", None),
        (4096, "15KiB", "tiers.device: 2 states of mamba a rank"),
        (
            16384,
            "40KiB",
            (
                "tiers.device: 2 states of mamba a rank, of which a running request takes all: next to nothing is ever"
                " reused; expected at least 3: raise capacity to 60212B or more"
            ),
        ),
    ],
    ids=["roomy", "too small", "states too dear"],
)
def test_a_pool_in_which_nothing_can_be_left_warns(state_bytes: int, capacity: str, says: str | None) -> None:
    """Else it serves with a hit rate of 0 and says nothing."""
    lines = warnings(_small(state_bytes, {"kind": "cpu", "capacity": capacity, "split": "fixed"}), {})
    assert len(lines) == (says is not None)
    assert says is None or lines[0].startswith(says)


def _small(state_bytes: int, device: dict[str, Any]) -> dict[str, Any]:
    components = {
        "full": {"rule": "path", "bytes_per_token": 64},
        "mamba": {"rule": "checkpoint", "state_bytes": state_bytes},
    }
    return {
        "model": {"name": "m", "page_size": 16, "components": components},
        "tiers": {"device": device},
    }


def test_so_does_one_budget_that_holds_no_more_than_a_request_runs_on() -> None:
    device = {"kind": "cpu", "capacity": 3 * 16384 + 1024}
    assert warnings(_small(16384, device), {}) == []
    (line,) = warnings(_small(16384, {**device, "capacity": 3 * 16384 + 1023}), {})
    assert line == (
        "tiers.device: 50175 bytes a rank, of which a running request takes nearly all: next to nothing is ever reused;"
        " expected room for 1 of full, 3 of mamba: raise capacity to 49KiB (50176 bytes) or more"
    )


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"policy.admission": "ranked"}, None),
        (
            {"policy.admission": "ranked", "tiers.host": None, "tiers.stores": None},
            "policy.admission: ranked has no effect without L2, which it is about; give tiers.host, or leave it out",
        ),
        *(
            ({"policy.store_admission": "unless_over", "policy.eviction": name}, None)
            for name in ("adaptive", "session")
        ),
        *(
            (
                {"policy.store_admission": "unless_over", "policy.eviction": name},
                (
                    f"policy.store_admission: unless_over has no effect with policy.eviction {name}, which follows no"
                    " sessions; set that to adaptive or session, or leave this out"
                ),
            )
            for name in ("lru", "my.Own")
        ),
        (
            {"policy.store_admission": "unless_over", "tiers.stores": None},
            (
                "policy.store_admission: unless_over has no effect without L3, which it is about; give tiers.stores,"
                " or leave it out"
            ),
        ),
        ({"policy.eviction": "lru", "tiers.stores": None}, None),
    ],
    ids=str,
)
def test_an_admission_that_has_nothing_to_decline_warns(
    tree: dict[str, Any], overrides: dict[str, Any], says: str | None
) -> None:
    assert warnings(tree, overrides) == ([] if says is None else [says])


def test_the_policies_that_follow_sessions_are_those_of_the_tree() -> None:
    assert {name for name, made in ORDERINGS.items() if made.follows_turns} == set(SESSION_POLICIES)


def test_a_password_that_is_not_there_yet_warns(tree: dict[str, Any], tmp_path: Path) -> None:
    store = {"kind": "redis", "url": "redis://h", "password_env": "REDIS_PASSWORD"}
    config = load_config(tree, environ={}, overrides={"tiers.stores": [store]})
    assert config_warnings(config, environ={"REDIS_PASSWORD": "x"}) == []
    assert config_warnings(config, environ={}) == [
        "tiers.stores.0.password_env: the variable REDIS_PASSWORD is not set here"
    ]
    store = {"kind": "redis", "url": "redis://h", "password_file": str(tmp_path / "none")}
    (line,) = warnings(tree, {"tiers.stores": [store]})
    assert line.startswith("tiers.stores.0.password_file: ")


@pytest.mark.parametrize("name", ["hunter2", "Hunter2", "_hunter2", "HUNTER2" * 10])
@pytest.mark.parametrize("key", ["password_env", "password_file", "key_env", "key_file"])
def test_a_secret_that_stands_where_its_place_is_named_is_not_repeated(
    tree: dict[str, Any], key: str, name: str
) -> None:
    store: dict[str, object] = {"kind": "redis", "url": "redis://h"}
    where = store if key.startswith("password") else store.setdefault("codec", {})
    assert isinstance(where, dict)
    where[key] = name
    (line,) = warnings(tree, {"tiers.stores": [store]})
    assert f"{key}: the " in line
    assert "not shown" in line
    assert name not in line


def test_a_key_of_a_codec_that_is_not_there_yet_warns(tree: dict[str, Any], tmp_path: Path) -> None:
    def lines(**codec: str) -> list[str]:
        store = {"kind": "memory", "capacity": "1GiB", "codec": {"encryption": "aes-gcm", **codec}}
        config = load_config(tree, environ={}, overrides={"tiers.stores": [store]})
        return config_warnings(config, environ={"KEY": "x"})

    assert lines(key_env="KEY") == []
    assert lines(key_env="NO_KEY") == ["tiers.stores.0.codec.key_env: the variable NO_KEY is not set here"]
    (line,) = lines(key_file=str(tmp_path / "none"))
    assert line.startswith(f"tiers.stores.0.codec.key_file: {tmp_path / 'none'} cannot be read here")


def slots_of(full: int, state: int, **device: object) -> dict[str, Any]:
    """A page of one token, two layers each: bytes of a layer of a slot."""
    return {
        "model.page_size": 1,
        "model.components": {
            "swa": None,
            "full": {"rule": "path", "layers": 2, "bytes_per_token": 2 * full},
            "mamba": {"rule": "checkpoint", "layers": 2, "state_bytes": 2 * state},
        },
        "tiers.device": {"kind": "cpu", "capacity": "1GiB", **device},
        "tiers.host": None,
        "tiers.stores": None,
    }


def test_slots_that_share_pages_of_the_system_in_a_shared_l1_warn(tree: dict[str, Any]) -> None:
    page = mmap.PAGESIZE
    (line,) = warnings(tree, slots_of(page - 8, page))
    assert line.startswith(
        f"tiers.device.split: shared, where a slot has {page - 8} bytes of full in a layer"
    )
    assert "up to 2 times the capacity" in line
    (line,) = warnings(tree, slots_of(page // 4, page // 2))
    assert f"{page // 4} bytes of full, {page // 2} bytes of mamba in a layer" in line
    assert "up to 2 times the capacity" in line
    assert len(warnings(tree, slots_of(page + 64, page))) == 1
    assert warnings(tree, slots_of(page, page)) == []
    assert warnings(tree, slots_of(4 * page + 64, page)) == []
    assert warnings(tree, slots_of(page // 4, page, capacity="16MiB")) == []
    assert warnings(tree, slots_of(page // 4, page, split="fixed")) == []
    assert warnings(tree, slots_of(page // 4, page, kind="cuda")) == []
