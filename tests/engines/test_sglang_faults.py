"""What faults of a store may cost SGLang: hits, never wrong bytes; and threads that use it at once."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hicache.clock import ManualClock
from hicache.errors import TierUnavailableError
from hicache.testing.redis_server import RedisServer, wait_until
from hicache.testing.scripted_store import FLIPPED, MISS, SHORT, Gate, Operation, Raise, ScriptedStore
from hicache.testing.sglang_pools import fill, filled, page_of, state_pool
from hicache.testing.sglang_rig import SglangRig, scripted, storage_config
from hicache.tiers.breaker import BreakerSettings, BreakerStore
from hicache.tiers.store import PageTarget, StoredPage

pytestmark = pytest.mark.engines

KEYS = [f"page{number}" for number in range(8)]


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


# ---- faults of a store -----------------------------------------------------------------------------------------------


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


# ---- faults of SGLang's own tests ------------------------------------------------------------------------------------


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
