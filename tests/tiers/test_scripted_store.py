"""The scripted store does what it is told, and is otherwise a store like any other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from hicache.errors import TierUnavailableError
from hicache.testing.scripted_store import (
    FLIPPED,
    MISS,
    OK,
    SHORT,
    Call,
    Outcome,
    Raise,
    ScriptedStore,
)
from hicache.testing.store_contract import StoreContract
from hicache.testing.store_pages import (
    PAYLOAD_BYTES,
    Corruption,
    make_chain,
    make_key,
    make_page,
    make_target,
    spoil,
)
from hicache.tiers.store import Store
from hicache.types import PageKey


class TestScriptedStoreWithoutScript(StoreContract):
    async def make_store(self, capacity_bytes: int | None = None) -> Store:
        store = ScriptedStore(capacity_bytes)
        await store.open()
        return store

    def raw_bytes(self, store: Store, key: PageKey) -> bytes | None:
        assert isinstance(store, ScriptedStore)
        raw = store.inner.raw(key)
        return None if raw is None else bytes(raw)

    def corrupt(self, store: Store, key: PageKey, how: Corruption) -> None:
        assert isinstance(store, ScriptedStore)
        raw = store.inner.raw(key)
        assert raw is not None
        spoilt = spoil(bytes(raw), how)
        if spoilt is None:
            del store.inner._blobs[key]
        else:
            raw[:] = spoilt


def run(test: Callable[[ScriptedStore], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        store = ScriptedStore()
        await store.open()
        await test(store)
        await store.close()

    asyncio.run(asyncio.wait_for(main(), timeout=120))


@pytest.mark.parametrize("outcome", [MISS, SHORT, FLIPPED], ids=lambda outcome: outcome.name)
def test_a_failing_read_of_one_key_leaves_the_other_keys_alone(outcome: Outcome) -> None:
    async def test(store: ScriptedStore) -> None:
        pages = make_chain(1, 3)
        await store.put(pages)
        store.script("get", outcome, key=pages[1].key)
        targets = [make_target(page.key) for page in pages]
        assert await store.get(targets) == [True, False, True]
        assert targets[1].payload != pages[1].payload
        stats = store.stats()
        assert (stats.pages_missed, stats.pages_corrupt) == (1, 0 if outcome is MISS else 1)

    run(test)


def test_a_short_read_leaves_half_a_page_in_the_target() -> None:
    async def test(store: ScriptedStore) -> None:
        page = make_page("a")
        await store.put([page])
        store.script("get", SHORT)
        target = make_target(page.key)
        assert await store.get([target]) == [False]
        half = PAYLOAD_BYTES // 2
        assert target.payload[:half] == page.payload[:half]
        assert target.payload[half:] == b"\xee" * half

    run(test)


def test_writes_fail_by_the_number_of_their_call() -> None:
    async def test(store: ScriptedStore) -> None:
        store.script("put", Raise(OSError(5, "input/output error")), call=3)
        store.script("put", MISS, call=7)
        pages = [make_page(n) for n in range(10)]
        answers: list[object] = []
        for page in pages:
            try:
                answers += await store.put([page])
            except OSError as error:
                answers.append(error.errno)
        assert answers == [True, True, 5, True, True, True, False, True, True, True]
        assert await store.exists([page.key for page in pages]) == [n not in (2, 6) for n in range(10)]

    run(test)


def test_a_raise_stops_the_batch_after_the_keys_before_it() -> None:
    async def test(store: ScriptedStore) -> None:
        pages = make_chain(1, 3)
        store.script("put", Raise(TierUnavailableError("gone")), key=pages[1].key)
        with pytest.raises(TierUnavailableError):
            await store.put(pages)
        assert await store.exists([page.key for page in pages]) == [True, False, False]

    run(test)


def test_the_more_particular_rule_wins_and_of_equals_the_later() -> None:
    async def test(store: ScriptedStore) -> None:
        pages = make_chain(1, 3)
        await store.put(pages)
        keys = [page.key for page in pages]
        store.script("exists", OK, key=keys[0])
        store.script("exists", MISS)
        assert await store.exists(keys) == [True, False, False]
        store.script("exists", OK)
        assert await store.exists(keys) == [True, True, True]
        store.unscript()
        store.script("exists", MISS, times=1)
        assert await store.exists(keys) == [False, False, False]
        assert await store.exists(keys) == [True, True, True]

    run(test)


def test_a_blocked_read_goes_on_when_another_thread_releases_it() -> None:
    async def test(store: ScriptedStore) -> None:
        page = make_page("a")
        await store.put([page])
        gate = store.block("get", key=page.key)

        def release() -> None:
            assert gate.reached.wait(timeout=30)
            gate.release()

        releaser = threading.Thread(target=release)
        releaser.start()
        target = make_target(page.key)
        assert await store.get([target]) == [True]
        assert target.payload == page.payload
        releaser.join()
        assert await store.get([target]) == [True]  # a released gate stays open

    run(test)


def test_a_blocked_call_holds_up_no_other_and_can_be_cancelled() -> None:
    async def test(store: ScriptedStore) -> None:
        pages = make_chain(1, 2)
        await store.put(pages)
        gate = store.block("get", key=pages[0].key)
        blocked = asyncio.create_task(store.get([make_target(pages[0].key)]))
        assert await store.get([make_target(pages[1].key)]) == [True]
        assert gate.reached.is_set()
        blocked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await blocked
        store.release()
        assert await store.get([make_target(pages[0].key)]) == [True]

    run(test)


def test_every_call_is_recorded_with_its_keys() -> None:
    async def test(store: ScriptedStore) -> None:
        pages = make_chain(1, 2)
        keys = tuple(page.key for page in pages)
        await store.put(pages)
        await store.exists([*keys, make_key("missing")])
        await store.get([make_target(keys[1])])
        await store.delete(keys)
        assert store.calls == [
            Call("open", ()),
            Call("put", keys),
            Call("exists", (*keys, make_key("missing"))),
            Call("get", (keys[1],)),
            Call("delete", keys),
        ]
        assert store.keys_of("get") == [keys[1]]

    run(test)
