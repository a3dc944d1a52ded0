"""Pages of SGLang's own host pools, through a disk and a Redis, and back bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hicache.errors import ConfigError
from hicache.testing.redis_server import RedisServer
from hicache.testing.sglang_pools import (
    MHA_LAYOUTS,
    MLA_LAYOUTS,
    STATE_LAYOUTS,
    fill,
    filled,
    indexer_pool,
    logical_pool,
    mha_pool,
    mla_pool,
    page_of,
    paged_pool,
    slots_of,
    state_pool,
)
from hicache.testing.sglang_rig import SglangRig, storage_config

pytestmark = [pytest.mark.engines, pytest.mark.redis]

Section = dict[str, object]
MakePool = Callable[[], Any]
KEYS = ["a1", "b2", "c3"]


def beside_latent(layout: str) -> Any:
    return indexer_pool(mla_pool(layout))


KV_POOLS: dict[str, tuple[MakePool, bool]] = {
    **{f"mha {layout}": (partial(mha_pool, layout), False) for layout in MHA_LAYOUTS},
    **{f"mla {layout}": (partial(mla_pool, layout), True) for layout in MLA_LAYOUTS},
    "mha 8-bit": (lambda: mha_pool(dtype=torch.uint8), False),
    "mha, a page is a token": (lambda: mha_pool(page_size=1), False),
    "mha, odd bytes": (lambda: mha_pool(dtype=torch.uint8, page_size=1, num_layers=1, head_size=5), False),
}
SIDE_POOLS: dict[str, tuple[str, MakePool]] = {
    **{f"swa {layout}": ("swa", partial(mha_pool, layout)) for layout in MHA_LAYOUTS},
    **{f"mamba {layout}": ("mamba", partial(state_pool, layout)) for layout in STATE_LAYOUTS},
    "mamba with a side state": ("mamba", lambda: state_pool(has_side_state=True)),
    **{f"indexer {it}": ("indexer", partial(beside_latent, it)) for it in MLA_LAYOUTS},
    **{f"paged {it}": ("deepseek_v4_c4", partial(paged_pool, it)) for it in MLA_LAYOUTS},
}


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(params=["disk", "redis"])
def store(request: pytest.FixtureRequest, tmp_path: Path, redis_server: RedisServer) -> Section:
    if request.param == "disk":
        return {"kind": "disk", "path": str(tmp_path), "capacity": "64MiB"}
    with redis_server.client as client:
        client.flushall()
    return {"kind": "redis", "url": redis_server.url}


# ---- the anchor pool ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KV_POOLS)
def test_pages_of_the_anchor_come_back_in_another_server(kind: str, store: Section) -> None:
    make, is_latent = KV_POOLS[kind]
    config = storage_config(store, is_mla_model=is_latent)
    source, target = filled(1, make), filled(2, make)
    untouched = [page_of(target, number) for number in range(4, 8)]
    with SglangRig(config, source) as first:
        assert first.put(KEYS, [3, 6, 1]) == [True, True, True]
    with SglangRig(config, target) as second:
        assert second.backend.batch_exists([*KEYS, "d4"]) == 3
        assert second.get([*KEYS, "d4"], [2, 0, 3, 1]) == [True, True, True, False]
    assert [page_of(target, number) for number in (2, 0, 3)] == [page_of(source, n) for n in (3, 6, 1)]
    assert [page_of(target, number) for number in range(4, 8)] == untouched


@pytest.mark.parametrize("kind", KV_POOLS)
def test_pages_that_sglang_packs_itself_come_back(kind: str, store: Section) -> None:
    make, is_latent = KV_POOLS[kind]
    config = storage_config(store, is_mla_model=is_latent, extra={"interface_v1": None})
    source, target = filled(1, make), filled(2, make)
    packed = [source.get_data_page(number * source.page_size) for number in (3, 6)]
    with SglangRig(config, source) as first:
        assert first.backend.batch_set(KEYS[:2], packed)
    with SglangRig(config, target) as second:
        assert second.backend.batch_exists(KEYS) == 2
        places = [target.get_dummy_flat_data_page() for _ in KEYS]
        got = second.backend.batch_get(KEYS, places)
    assert [page is None for page in got] == [False, False, True]
    for number, page in enumerate(got[:2]):
        target.set_from_flat_data_page(number * target.page_size, page)
    assert [page_of(target, number) for number in (0, 1)] == [page_of(source, number) for number in (3, 6)]


def test_both_ways_to_hand_pages_over_never_mix(store: Section) -> None:
    pool = filled(1)
    with SglangRig(storage_config(store), pool) as rig:
        rig.put(["a"], [0])
        assert rig.backend.batch_get(["a"], [pool.get_dummy_flat_data_page()]) == [None]
    with SglangRig(storage_config(store, extra={"interface_v1": None}), pool) as rig:
        assert rig.backend.batch_exists(["a"]) == 0


# ---- the other pools ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", SIDE_POOLS)
def test_pages_of_another_pool_come_back_in_another_server(kind: str, store: Section) -> None:
    name, make = SIDE_POOLS[kind]
    source, target = filled(1, make), filled(2, make)
    untouched = [page_of(target, number) for number in range(4, 8)]
    with SglangRig(storage_config(store), mha_pool(), **{name: source}) as first:
        assert first.put_side(name, KEYS, [3, 6, 1]) == [True, True, True]
    with SglangRig(storage_config(store), mha_pool(), **{name: target}) as second:
        assert second.get_side(name, [*KEYS, "d4"], [2, 0, 3, 1]) == [True, True, True, False]
    assert [page_of(target, number) for number in (2, 0, 3)] == [page_of(source, n) for n in (3, 6, 1)]
    assert [page_of(target, number) for number in range(4, 8)] == untouched


def test_several_pools_go_in_one_call(store: Section) -> None:
    window, states = filled(1), filled(2, state_pool)
    with SglangRig(storage_config(store), mha_pool(), swa=window, mamba=states) as rig:
        written = [rig.transfer("swa", ["a", "b"], [1, 2]), rig.transfer("mamba", ["b"], [5])]
        assert rig.backend.batch_set_v2(written) == {rig.names.SWA: [True, True], rig.names.MAMBA: [True]}
        expected = page_of(window, 1), page_of(window, 2), page_of(states, 5)
        fill(window, 3)
        fill(states, 4)
        read = [rig.transfer("swa", ["a", "b"], [6, 7]), rig.transfer("mamba", ["b"], [0])]
        assert rig.backend.batch_get_v2(read) == {rig.names.SWA: [True, True], rig.names.MAMBA: [True]}
        assert (page_of(window, 6), page_of(window, 7), page_of(states, 0)) == expected


def test_pools_with_equal_hashes_do_not_mix(store: Section) -> None:
    first, second = filled(1), filled(2)
    with SglangRig(storage_config(store), first, swa=second) as rig:
        rig.put(["a"], [0])
        assert rig.get_side("swa", ["a"], [1]) == [False]


# ---- stores behind each other ---------------------------------------------------------------------------------------
def test_a_server_with_a_disk_of_its_own_finds_pages_in_the_redis_behind_both(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    with redis_server.client as client:
        client.flushall()
    shared = {"kind": "redis", "url": redis_server.url}
    pools = [filled(1), filled(2)]

    def config(name: str) -> Any:
        disk = {"kind": "disk", "path": str(tmp_path / name), "capacity": "64MiB"}
        return storage_config(extra={"tiers": {"stores": [disk, shared], "stack": {"write": "all"}}})

    with SglangRig(config("one"), pools[0]) as rig:
        assert rig.put(KEYS, [3, 6, 1]) == [True] * 3
    with SglangRig(config("two"), pools[1]) as rig:
        assert rig.backend.batch_exists(KEYS) == 3
        assert rig.get(KEYS, [0, 1, 2]) == [True] * 3
        disk, behind = rig.backend.stats().store.stores
        assert (disk.pages_read, behind.pages_read) == (0, 3)
    assert [page_of(pools[1], number) for number in range(3)] == [page_of(pools[0], n) for n in (3, 6, 1)]


# ---- batches larger than staging ------------------------------------------------------------------------------------
def test_a_batch_larger_than_its_staging_comes_back(store: Section, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache.engines.sglang_store.STAGING_BYTES", 2000)  # two pages of 768 bytes
    pool = filled(1, num_pages=32)
    hashes = [f"h{number}" for number in range(11)]
    with SglangRig(storage_config(store), pool) as rig:
        assert rig.put(hashes, list(range(11))) == [True] * 11
        assert (
            rig.get([*hashes[:7], "missing", *hashes[7:]], list(range(16, 28)))
            == [True] * 7 + [False] + [False] * 4
        )
    assert [page_of(pool, 16 + n) for n in range(7)] == [page_of(pool, n) for n in range(7)]


# ---- an anchor without bytes ----------------------------------------------------------------------------------------
def test_an_anchor_without_a_buffer_always_succeeds_and_stores_nothing(store: Section) -> None:
    with SglangRig(storage_config(store), logical_pool(), deepseek_v4_c4=paged_pool()) as rig:
        assert rig.put(KEYS, [0, 1, 2]) == [True] * 3
        assert rig.get(KEYS, [0, 1, 2]) == [True] * 3
        assert rig.backend.batch_exists(KEYS) == 3
        assert rig.backend.stats().bytes_written == 0
        assert rig.query(KEYS, deepseek_v4_c4=("all_pages", 1)).kv_hit_pages == 0
        rig.put_side("deepseek_v4_c4", KEYS[:2], [4, 5])
        assert rig.query(KEYS, deepseek_v4_c4=("all_pages", 1)).kv_hit_pages == 2


# ---- what cannot be stored, and what was asked wrongly ----------------------------------------------------------------
def test_a_layout_that_cannot_be_stored_is_refused_at_the_attachment() -> None:
    with pytest.raises(ConfigError, match=r"--hicache-mem-layout: pages of the pool kv .*choose page_first"):
        SglangRig(storage_config(), mha_pool("page_unified"))


@pytest.mark.parametrize(
    "indices",
    [torch.arange(3), torch.arange(8), torch.arange(1, 5), torch.arange(4096, 4100), torch.arange(-4, 0)],
    ids=["too few", "too many", "within a page", "past the end", "negative"],
)
def test_slots_that_are_no_pages_are_a_miss_and_touch_nothing(indices: torch.Tensor) -> None:
    pool = filled(1)
    before = [page_of(pool, number) for number in range(8)]
    with SglangRig(storage_config(), pool) as rig:
        rig.put(["a"], [2])
        assert rig.backend.batch_get_v1(["a"], indices) == [False]
        assert rig.backend.batch_set_v1(["z"], indices) == [False]
        assert rig.backend.batch_exists(["z"]) == 0
        assert rig.backend.stats().faults == {"get": 1, "put": 1}
    assert [page_of(pool, number) for number in range(8)] == before


def test_a_pool_that_was_never_registered_is_a_miss() -> None:
    with SglangRig(storage_config(), mha_pool()) as rig:
        rig.pools["swa"] = mha_pool()
        assert rig.put_side("swa", ["a"], [0]) == [False]
        assert rig.get_side("swa", ["a"], [0]) == [False]


def test_a_pool_may_be_registered_later() -> None:
    late = filled(1)
    with SglangRig(storage_config(), mha_pool()) as rig:
        rig.pools["draft"] = late
        rig.backend.register_mem_host_pool_v2(late, rig.names.DRAFT)
        assert rig.put_side("draft", ["a"], [0]) == [True]
        assert rig.get_side("draft", ["a"], [7]) == [True]
    assert page_of(late, 7) == page_of(late, 0)


def test_slots_in_any_integer_type_and_order_are_read(store: Section) -> None:
    pool = filled(1)
    with SglangRig(storage_config(store), pool) as rig:
        assert rig.backend.batch_set_v1(["a", "b"], slots_of(pool, [5, 2]).to(torch.int32)) == [True, True]
        assert rig.get(["b", "a"], [7, 0]) == [True, True]
    assert (page_of(pool, 7), page_of(pool, 0)) == (page_of(pool, 2), page_of(pool, 5))
