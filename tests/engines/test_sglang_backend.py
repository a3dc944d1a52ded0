"""The backend between SGLang's factory and a store: which prefixes it promises, and what faults may cost."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hicache.clock import ManualClock
from hicache.engines.sglang_metrics import rank_number
from hicache.errors import TierUnavailableError
from hicache.testing.forked import ends_well_in_child
from hicache.testing.redis_server import RedisServer, wait_until
from hicache.testing.scripted_store import FLIPPED, MISS, SHORT, Gate, Operation, Raise, ScriptedStore
from hicache.testing.sglang_pools import fill, mha_pool, page_of, state_pool
from hicache.testing.sglang_released import import_sglang
from hicache.testing.sglang_rig import RECIPE, SglangRig, storage_config
from hicache.tiers.breaker import BreakerSettings, BreakerStore
from hicache.tiers.store import PageTarget, StoredPage

pytestmark = pytest.mark.engines

KEYS = [f"page{number}" for number in range(8)]


def filled(seed: int, make: Callable[..., Any] = mha_pool, **changes: Any) -> Any:
    pool = make(**changes)
    fill(pool, seed)
    return pool


def scripted(kv: Any, *, store: ScriptedStore, clock: ManualClock | None = None, **sides: Any) -> SglangRig:
    """A backend on a store that does what the test says, without a breaker in front."""
    arguments = {"make_store": lambda *_: store, "clock": clock or ManualClock()}
    return SglangRig(storage_config(), kv, arguments=arguments, **sides)


# ---- how SGLang makes it --------------------------------------------------------------------------------------------
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


# ---- which prefixes are promised ------------------------------------------------------------------------------------
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


# ---- several threads -------------------------------------------------------------------------------------------------
def test_queries_reads_and_writes_of_three_threads_do_not_disturb_each_other(tmp_path: Path) -> None:
    disk = {"kind": "disk", "path": str(tmp_path), "capacity": "64MiB"}
    source, target = filled(1, num_pages=64), filled(2, num_pages=64)
    with SglangRig(storage_config(disk), source, swa=target) as rig:
        hashes = [f"h{number}" for number in range(32)]
        rig.put_side("swa", hashes, list(range(32)))
        expected = [page_of(target, number) for number in range(32)]
        start = threading.Barrier(3)

        def write() -> list[bool]:
            start.wait()
            return [
                ok
                for n in range(0, 64, 4)
                for ok in rig.put([f"w{n + i}" for i in range(4)], list(range(n, n + 4)))
            ]

        def read() -> list[bool]:
            start.wait()
            return [
                ok
                for n in range(0, 32, 4)
                for ok in rig.get_side("swa", hashes[n : n + 4], list(range(32 + n, 36 + n)))
            ]

        def ask() -> list[int]:
            start.wait()
            return [rig.query(hashes, swa=("all_pages", 1)).kv_hit_pages for _ in range(16)]

        with ThreadPoolExecutor(3) as threads:
            written, there, asked = threads.submit(write), threads.submit(read), threads.submit(ask)
            assert (written.result(), there.result(), asked.result()) == ([True] * 64, [True] * 32, [0] * 16)
        assert [page_of(target, 32 + number) for number in range(32)] == expected
        assert rig.backend.batch_exists([f"w{n}" for n in range(64)]) == 64


def test_a_slow_read_keeps_neither_queries_nor_writes_nor_numbers_waiting() -> None:
    store = ScriptedStore()
    with scripted(filled(1), store=store) as rig:
        rig.put(KEYS[:2], [0, 1])
        gate = store.block("get")
        with ThreadPoolExecutor(1) as threads:
            reading = threads.submit(rig.get, KEYS[:2], [4, 5])
            assert gate.reached.wait(10)
            assert rig.backend.batch_exists(KEYS) == 2
            assert rig.put([KEYS[2]], [2]) == [True]
            assert rig.backend.get_stats() is not None
            assert rig.backend.stats().pages["kv", "written"] == 3
            assert not reading.done()
            gate.release()
            assert reading.result(10) == [True, True]


# ---- faults of a store ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("outcome", [MISS, SHORT, FLIPPED])
def test_a_page_that_comes_back_wrong_is_a_miss_and_its_slots_stay(outcome: Any) -> None:
    store, pool = ScriptedStore(), filled(1)
    with scripted(pool, store=store) as rig:
        rig.put(KEYS[:3], [0, 1, 2])
        store.script("get", outcome, key=store.keys_of("put")[1])
        expected = [page_of(pool, 0), page_of(pool, 5)]
        assert rig.get(KEYS[:3], [4, 5, 6])[:2] == [True, False]
        assert [page_of(pool, 4), page_of(pool, 5)] == expected


@pytest.mark.parametrize("error", [OSError(5, "I/O"), ValueError("?"), TierUnavailableError("gone")])
def test_a_store_that_raises_in_the_middle_of_a_batch_leaves_all_slots(error: Exception) -> None:
    store, pool = ScriptedStore(), filled(1)
    with scripted(pool, store=store) as rig:
        rig.put(KEYS[:3], [0, 1, 2])
        store.script("get", Raise(error), key=store.keys_of("put")[1])
        before = [page_of(pool, number) for number in range(8)]
        assert rig.get(KEYS[:3], [4, 5, 6]) == [False] * 3
        assert [page_of(pool, number) for number in range(8)] == before


def test_a_store_that_raises_is_a_miss_everywhere() -> None:
    store = ScriptedStore()
    with scripted(filled(1), store=store, swa=filled(2)) as rig:
        rig.put(KEYS, list(range(8)))
        operations: tuple[Operation, ...] = ("exists", "get", "put")
        for operation in operations:
            store.script(operation, Raise(TierUnavailableError("gone")))
        assert rig.backend.batch_exists(KEYS) == 0
        assert rig.query(KEYS, swa=("trailing_pages", 1)).restorable_prefix_pages == []
        assert rig.get(KEYS, list(range(8))) == [False] * 8
        assert rig.put(KEYS, list(range(8))) == [False] * 8
        assert rig.get_side("swa", KEYS, list(range(8))) == [False] * 8
        assert rig.put_side("swa", KEYS, list(range(8))) == [False] * 8
        assert (
            rig.backend.batch_get(KEYS, [rig.pools["kv"].get_dummy_flat_data_page() for _ in KEYS])
            == [None] * 8
        )
        assert not rig.backend.batch_set(KEYS[:1], [rig.pools["kv"].get_data_page(0)])
        assert set(rig.backend.stats().faults) == {"exists_unavailable", "get_unavailable", "put_unavailable"}


@pytest.mark.parametrize("operation", ["exists", "get", "put"])
def test_a_store_that_never_answers_is_given_up_at_its_limit(operation: Any) -> None:
    store, clock, pool = ScriptedStore(), ManualClock(), filled(1)
    with scripted(pool, store=store, clock=clock) as rig:
        rig.put(KEYS[:2], [0, 1])
        before = [page_of(pool, number) for number in range(8)]
        gate = store.block(operation)
        calls: dict[str, Callable[[], object]] = {
            "exists": lambda: rig.backend.batch_exists(KEYS),
            "get": lambda: rig.get(KEYS[:2], [4, 5]),
            "put": lambda: rig.put(KEYS[2:4], [2, 3]),
        }
        with ThreadPoolExecutor(1) as threads:
            answer = threads.submit(calls[operation])
            assert gate.reached.wait(10)
            clock.advance(5.0)  # policy.store_timeout
            rig.backend._store.wake()
            assert answer.result(10) in (0, [False, False])
        assert rig.backend.stats().faults == {f"{operation}_timeout": 1}
        gate.release()
        assert [page_of(pool, number) for number in range(8)] == before


def test_all_pools_of_a_call_share_its_limit() -> None:
    store, clock = ScriptedStore(), ManualClock()
    with scripted(filled(1), store=store, clock=clock, swa=filled(2), draft=filled(3)) as rig:
        for name in ("swa", "draft"):
            rig.put_side(name, KEYS[:1], [0])
        transfers = [rig.transfer(name, KEYS[:1], [4]) for name in ("swa", "draft")]
        gate = store.block("get", call=1)
        with ThreadPoolExecutor(1) as threads:
            answer = threads.submit(rig.backend.batch_get_v2, transfers)
            assert gate.reached.wait(10)
            clock.advance(30.0)  # policy.wait_limit
            rig.backend._store.wake()
            assert answer.result(10) == {rig.names.SWA: [False], rig.names.DRAFT: [False]}
        assert [call.operation for call in store.calls].count("get") == 1


class StubbornStore(ScriptedStore):
    """Goes on with what it was told to give up, as a disk does that hangs."""

    async def get(self, targets: Sequence[PageTarget]) -> list[bool]:
        work = asyncio.ensure_future(super().get(targets))
        while not work.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(work)
        return work.result()

    async def put(self, pages: Sequence[StoredPage]) -> list[bool]:
        work = asyncio.ensure_future(super().put(pages))
        while not work.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(work)
        return work.result()


def give_up(rig: SglangRig, gate: Gate, clock: ManualClock, call: Callable[[], list[bool]]) -> None:
    """Make a call that the store holds until long after its limit."""
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(call)
        assert gate.reached.wait(10)
        clock.advance(5.0)
        rig.backend._store.wake()
        assert answer.result(20) == [False]


def test_what_a_read_brings_after_it_was_given_up_reaches_no_slot() -> None:
    """The slots may be another request's by then."""
    store, clock, pool = StubbornStore(), ManualClock(), filled(1)
    with scripted(pool, store=store, clock=clock) as rig:
        rig.put(KEYS[:1], [0])
        gate = store.block("get", call=1)
        give_up(rig, gate, clock, lambda: rig.get(KEYS[:1], [4]))
        fill(pool, 9)
        now = page_of(pool, 4)
        gate.release()
        assert rig.get(KEYS[:1], [5]) == [True]  # on the same loop, after the late one
        assert page_of(pool, 4) == now


def test_what_a_write_stores_after_it_was_given_up_is_what_was_there_then() -> None:
    store, clock, pool = StubbornStore(), ManualClock(), filled(1)
    with scripted(pool, store=store, clock=clock) as rig:
        gate = store.block("put", call=1)
        then = page_of(pool, 0)
        give_up(rig, gate, clock, lambda: rig.put(KEYS[:1], [0]))
        fill(pool, 9)
        gate.release()
        assert rig.put(KEYS[1:2], [1]) == [True]
        assert rig.get(KEYS[:1], [7]) == [True]
        assert page_of(pool, 7) == then


def test_a_store_that_keeps_failing_is_left_alone_and_comes_back() -> None:
    store, clock = ScriptedStore(), ManualClock()
    breaker = BreakerStore(
        store, BreakerSettings(failures=3, jitter=0), clock=clock, randomness=random.Random(0)
    )
    arguments = {"make_store": lambda *_: breaker, "clock": clock}
    with SglangRig(storage_config(), filled(1), arguments=arguments) as rig:
        rig.put(KEYS[:1], [0])
        for call in (1, 2, 3):
            store.script("exists", Raise(TierUnavailableError("down")), call=call)
        assert [rig.backend.batch_exists(KEYS) for _ in range(4)] == [0] * 4
        assert len(store.keys_of("exists")) == 3 * len(KEYS)  # the breaker gave the fourth answer
        assert (rig.get(KEYS[:1], [4]), rig.put(KEYS[1:2], [1])) == ([False], [False])
        clock.advance(2)
        assert rig.backend.batch_exists(KEYS) == 0  # a probe begins beside it
        rig.backend._store._ask(breaker.settled(), 5.0, "probe")
        assert rig.backend.batch_exists(KEYS) == 1


def test_damaged_pages_on_the_disk_are_misses(tmp_path: Path) -> None:
    disk = {"kind": "disk", "path": str(tmp_path), "capacity": "64MiB"}
    pool = filled(1)
    with SglangRig(storage_config(disk), pool) as rig:
        rig.put(KEYS[:2], [0, 1])
    payload = page_of(pool, 1)[:64]
    damaged = [path for path in tmp_path.rglob("*") if path.is_file() and payload in path.read_bytes()]
    (segment,) = damaged
    raw = bytearray(segment.read_bytes())
    raw[raw.index(payload)] ^= 1
    segment.write_bytes(raw)
    with SglangRig(storage_config(disk), pool) as rig:
        before = page_of(pool, 5)
        assert rig.get(KEYS[:2], [4, 5]) == [True, False]
        assert (page_of(pool, 4), page_of(pool, 5)) == (page_of(pool, 0), before)
        assert rig.backend.batch_exists(KEYS) == 1
        assert rig.put(KEYS[1:2], [1]) == [True]  # stored anew


@pytest.mark.redis
def test_a_redis_that_is_away_costs_hits_and_comes_back(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        url = server.url
        server.stop()
        section = {
            "kind": "redis",
            "url": url,
            "timeout": "500ms",
            "breaker": {"backoff": "10ms", "jitter": 0},
        }
        with SglangRig(storage_config(section), filled(1)) as rig:  # starts without it
            assert (rig.backend.batch_exists(KEYS), rig.put(KEYS[:1], [0])) == (0, [False])
            server.start()
            wait_until(lambda: rig.put(KEYS[:1], [0]) == [True], "the server is used again")
            assert rig.get(KEYS[:1], [4]) == [True]
            server.kill()
            assert rig.get(KEYS[:1], [5]) == [False]
            assert rig.backend.batch_exists(KEYS) == 0


# ---- faults of SGLang's own tests -----------------------------------------------------------------------------------
def test_the_failure_injector_of_sglang_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.4")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.001")
    pool, states = filled(1), filled(2, state_pool)
    with SglangRig(storage_config(), pool, mamba=states) as rig:
        assert type(rig.backend).__name__ == "HiCacheStorageFailureInjector"
        full, state = page_of(pool, 0), page_of(states, 0)
        outcomes = set()
        for round_number in range(60):
            key = [f"r{round_number}"]
            stored = rig.put(key, [0]) + rig.put_side("mamba", key, [0])
            promised = rig.query(key, mamba=("trailing_pages", 1)).kv_hit_pages
            got = rig.get(key, [4]) + rig.get_side("mamba", key, [4])
            assert promised <= all(stored)
            assert all(ok <= was for ok, was in zip(got, stored, strict=True))
            outcomes.add((*stored, promised, *got))
            assert page_of(pool, 4) == full or not got[0]
            assert page_of(states, 4) == state or not got[1]
        assert len(outcomes) > 3  # it did fail, here and there
        assert rig.backend._backend.stats().faults == {}


# ---- numbers, the end -------------------------------------------------------------------------------------------------
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
