"""The backend between SGLang's factory and a store: how it is made, which prefixes it promises, what it counts, its end."""

from __future__ import annotations

import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hicache.engines.sglang_metrics import rank_number
from hicache.errors import TierUnavailableError
from hicache.testing.forked import ends_well_in_child
from hicache.testing.scripted_store import ScriptedStore
from hicache.testing.sglang_pools import filled, mha_pool, page_of, state_pool
from hicache.testing.sglang_released import import_sglang
from hicache.testing.sglang_rig import RECIPE, SglangRig, scripted, storage_config

pytestmark = pytest.mark.engines

KEYS = [f"page{number}" for number in range(8)]


# ---- how SGLang makes it ---------------------------------------------------------------------------------------------


def test_the_factory_makes_it_by_the_dynamic_recipe() -> None:
    with SglangRig(storage_config(), mha_pool()) as rig:
        assert isinstance(rig.backend, import_sglang().storage.HiCacheStorage)
        assert type(rig.backend).__name__ == RECIPE["class_name"]


def test_the_recipe_lacks_nothing_that_the_factory_asks_for() -> None:
    config = storage_config(extra={"class_name": None})
    with pytest.raises(ValueError, match="class_name"):
        import_sglang().factory.create_backend("dynamic", config, mha_pool())


def test_it_overrides_every_call_that_moves_or_counts() -> None:
    with SglangRig(storage_config(), mha_pool()) as rig:
        base, ours = import_sglang().storage.HiCacheStorage, type(rig.backend)
        calls = [name for name in vars(base) if not name.startswith("_")]
        assert [name for name in calls if getattr(ours, name) is getattr(base, name)] == []


# ---- which prefixes are promised -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("full", "windows", "states", "expected"),
    [
        (3, {3}, {3}, [3]),
        (3, {3}, {2}, []),
        (3, {1, 3}, {1, 2}, [1]),
        (2, {1, 3}, {1, 3}, [1]),
        (3, {2}, {2}, [2]),
        (3, set(), {1}, []),
        (3, {1, 2, 3}, {1, 3}, [1, 3]),
        (0, {1}, {1}, []),
    ],
)
def test_a_prefix_is_promised_where_all_pools_can_restore_it(
    full: int, windows: set[int], states: set[int], expected: list[int]
) -> None:
    """O-22, O-23: the minimum of maxima is no common endpoint."""
    with SglangRig(storage_config(), mha_pool(), swa=mha_pool(), mamba=state_pool()) as rig:
        rig.put(KEYS[:full], list(range(full)))
        for name, ends in (("swa", windows), ("mamba", states)):
            for end in ends:
                rig.put_side(name, [KEYS[end - 1]], [end])
        result = rig.query(KEYS[:3], swa=("trailing_pages", 1), mamba=("trailing_pages", 1))
    assert result.restorable_prefix_pages == expected
    assert result.kv_hit_pages == max(expected, default=0)


@pytest.mark.parametrize(
    ("there", "width", "expected"),
    [
        ({0, 1, 2, 3}, 2, [1, 2, 3, 4]),
        ({2, 3}, 2, [4]),
        ({1, 2, 3}, 2, [3, 4]),
        ({0, 2, 3}, 2, [1, 4]),
        ({0, 1, 3}, 2, [1, 2]),
        ({3}, 2, []),
        ({0, 1}, 8, [1, 2]),
        (set(), 1, []),
    ],
)
def test_a_window_needs_its_last_pages_or_all_of_a_shorter_prefix(
    there: set[int], width: int, expected: list[int]
) -> None:
    with SglangRig(storage_config(), mha_pool(), swa=mha_pool()) as rig:
        rig.put(KEYS[:4], [0, 1, 2, 3])
        for number in there:
            rig.put_side("swa", [KEYS[number]], [number])
        result = rig.query(KEYS, swa=("trailing_pages", width))
    assert result.restorable_prefix_pages == expected
    assert result.extra_pool_hit_pages == {rig.names.KV: 4, rig.names.SWA: max(expected, default=0)}


def test_a_pool_of_all_pages_ends_a_prefix_where_it_ends() -> None:
    with SglangRig(storage_config(), mha_pool(), draft=mha_pool()) as rig:
        rig.put(KEYS[:4], [0, 1, 2, 3])
        rig.put_side("draft", [KEYS[0], KEYS[1], KEYS[3]], [0, 1, 3])
        result = rig.query(KEYS, draft=("all_pages", 1))
    assert result.restorable_prefix_pages == [1, 2]


def test_the_anchor_alone_promises_its_leading_pages() -> None:
    with SglangRig(storage_config(), mha_pool()) as rig:
        rig.put([KEYS[0], KEYS[1], KEYS[3]], [0, 1, 3])
        assert rig.backend.batch_exists(KEYS) == 2
        assert (rig.backend.exists(KEYS[3]), rig.backend.exists(KEYS[2])) == (True, False)
        assert rig.query(KEYS).restorable_prefix_pages == [1, 2]


def test_a_pool_that_was_never_registered_promises_nothing() -> None:
    with SglangRig(storage_config(), mha_pool()) as rig:
        rig.put(KEYS, list(range(8)))
        assert rig.query(KEYS, mamba=("trailing_pages", 1)).kv_hit_pages == 0


def test_a_second_form_of_the_same_pages_never_shortens_a_hit() -> None:
    with SglangRig(storage_config(), mha_pool(), swa=mha_pool()) as rig:
        rig.put(KEYS, list(range(8)))
        result = rig.query(KEYS, swa=("block_groups", 2))
    assert result.kv_hit_pages == 8
    assert result.extra_pool_hit_pages == {rig.names.KV: 8}


def test_a_policy_of_a_release_to_come_promises_nothing() -> None:
    with SglangRig(storage_config(), mha_pool(), swa=mha_pool()) as rig:
        rig.put(KEYS, list(range(8)))
        rig.put_side("swa", KEYS, list(range(8)))
        transfer = rig.transfer("swa", KEYS, list(range(8)))
        transfer.hit_policy = "every_other_page"
        assert rig.backend.batch_exists_v2(KEYS, [transfer]).kv_hit_pages == 0


# ---- numbers, the end ------------------------------------------------------------------------------------------------


def test_numbers_are_those_of_the_calls() -> None:
    pool = filled(1)
    with SglangRig(storage_config(), pool, swa=filled(2)) as rig:
        rig.put(KEYS[:3], [0, 1, 2])
        rig.put_side("swa", KEYS[:1], [0])
        rig.get(KEYS[:4], [4, 5, 6, 7])
        rig.backend.batch_exists(KEYS)
        stats = rig.backend.stats()
        assert (stats.asked_pages, stats.found_pages) == (8, 3)
        assert stats.pages == {
            ("kv", "written"): 3, ("kv", "refused"): 0, ("kv", "hit"): 3, ("kv", "missed"): 1,
            ("swa", "written"): 1, ("swa", "refused"): 0,
        }  # fmt: skip
        page_bytes = len(page_of(pool, 0))
        assert (stats.bytes_read, stats.bytes_written) == (3 * page_bytes, 4 * page_bytes)
        for_sglang = rig.backend.get_stats()
        assert (for_sglang.prefetch_pgs, for_sglang.backup_pgs) == ([3], [3, 1])
        assert all(gb_per_s > 0 for gb_per_s in for_sglang.prefetch_bandwidth + for_sglang.backup_bandwidth)
        assert rig.backend.get_stats().prefetch_pgs == []


def test_without_metrics_nothing_is_kept_for_sglang() -> None:
    with SglangRig(storage_config(enable_storage_metrics=False), filled(1)) as rig:
        rig.put(KEYS[:1], [0])
        assert rig.backend.get_stats() is None


def test_prometheus_reads_every_rank_on_a_port_of_its_own() -> None:
    config = storage_config(extra={"metrics": {"port": 0}})
    with SglangRig(config, filled(1)) as rig:
        rig.put(KEYS[:2], [0, 1])
        rig.get(KEYS[:3], [4, 5, 6])
        with urllib.request.urlopen(f"http://127.0.0.1:{rig.backend.metrics.port}/metrics") as answer:
            text = answer.read().decode()
    assert 'hicache_sglang_pages_total{outcome="written",pool="kv"} 2.0' in text
    assert 'hicache_sglang_pages_total{outcome="missed",pool="kv"} 1.0' in text
    assert 'hicache_store_pages_total{outcome="read",store="memory"} 2.0' in text


@pytest.mark.parametrize(
    ("changes", "number"),
    [
        ({}, 0),
        ({"tp_rank": 3, "tp_size": 8}, 3),
        ({"tp_rank": 1, "tp_size": 2, "pp_rank": 1, "pp_size": 2}, 3),
        ({"tp_rank": 1, "tp_size": 2, "dp_rank": 2}, 5),
        ({"tp_rank": 1, "tp_size": 2, "attn_cp_rank": 1, "attn_cp_size": 2, "pp_rank": 1, "pp_size": 3}, 7),
    ],
)
def test_ranks_of_one_server_have_numbers_of_their_own(changes: dict[str, int], number: int) -> None:
    assert rank_number(storage_config(**changes)) == number


def test_clear_empties_the_store() -> None:
    with SglangRig(storage_config(), filled(1), swa=filled(2)) as rig:
        rig.put(KEYS, list(range(8)))
        rig.put_side("swa", KEYS, list(range(8)))
        assert rig.backend.clear()
        assert rig.backend.batch_exists(KEYS) == 0
        assert rig.get_side("swa", KEYS[:1], [0]) == [False]


def test_after_close_everything_is_a_miss() -> None:
    rig = SglangRig(storage_config(), filled(1))
    rig.put(KEYS[:1], [0])
    rig.backend.close()
    rig.backend.close()
    assert rig.backend.batch_exists(KEYS) == 0
    assert (rig.get(KEYS[:1], [4]), rig.put(KEYS[:1], [0])) == ([False], [False])
    assert not rig.backend.clear()
    assert rig.backend.stats().store.kind == "memory"


def test_a_forked_child_has_no_store_and_closes_none() -> None:
    with SglangRig(storage_config(), filled(1)) as rig:
        rig.put(KEYS[:1], [0])

        def use() -> None:
            assert rig.backend.batch_exists(KEYS) == 0
            assert rig.get(KEYS[:1], [4]) == [False]
            rig.backend.close()

        assert ends_well_in_child(use)
        assert rig.get(KEYS[:1], [4]) == [True]


def test_close_ends_a_read_that_waits() -> None:
    store = ScriptedStore()
    with scripted(filled(1), store=store) as rig, ThreadPoolExecutor(1) as threads:
        rig.put(KEYS[:1], [0])
        gate = store.block("get")
        reading = threads.submit(rig.get, KEYS[:1], [4])
        assert gate.reached.wait(10)
        rig.backend.close()
        assert reading.result(10) in ([True], [False])  # as the store closed: it released what waits


def test_a_store_that_cannot_be_opened_fails_the_attachment(tmp_path: Path) -> None:
    store = ScriptedStore()

    async def refuse() -> None:
        raise TierUnavailableError("disk store: cannot use /nowhere: no such folder")

    store.open = refuse  # type: ignore[method-assign]  # the only call that a script does not reach
    with pytest.raises(TierUnavailableError, match="cannot use /nowhere"):
        scripted(filled(1), store=store)
