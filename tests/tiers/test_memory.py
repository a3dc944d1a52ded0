"""The memory store: the contract, and what is special about it."""

from __future__ import annotations

import asyncio
import struct

import xxhash

from hicache.testing.store_contract import StoreContract
from hicache.testing.store_pages import Corruption, make_chain, make_page, make_target, spoil
from hicache.tiers.memory import MemoryStore
from hicache.tiers.store import Store
from hicache.types import PageKey


class TestMemoryStore(StoreContract):
    async def make_store(self, capacity_bytes: int | None = None) -> Store:
        store = MemoryStore(capacity_bytes)
        await store.open()
        return store

    def raw_bytes(self, store: Store, key: PageKey) -> bytes | None:
        assert isinstance(store, MemoryStore)
        raw = store.raw(key)
        return None if raw is None else bytes(raw)

    def corrupt(self, store: Store, key: PageKey, how: Corruption) -> None:
        assert isinstance(store, MemoryStore)
        raw = store.raw(key)
        assert raw is not None
        spoilt = spoil(bytes(raw), how)
        if spoilt is None:
            del store._blobs[key]
        else:
            raw[:] = spoilt


def test_closing_forgets_everything() -> None:
    async def test() -> None:
        store = MemoryStore()
        await store.open()
        pages = make_chain(1, 3)
        await store.put(pages)
        await store.close()
        assert (store.stats().num_pages, store.stats().used_bytes) == (0, 0)
        await store.open()
        assert await store.exists([page.key for page in pages]) == [False] * 3
        assert await store.put([make_page("a")]) == [True]
        assert store.check_integrity() == []
        await store.close()

    asyncio.run(test())


def test_a_page_of_a_newer_format_is_a_miss_and_is_no_corruption() -> None:
    async def test() -> None:
        store = MemoryStore()
        await store.open()
        page = make_page("a")
        await store.put([page])
        raw = store.raw(page.key)
        assert raw is not None
        struct.pack_into("<H", raw, 8, 2)
        struct.pack_into("<Q", raw, 152, xxhash.xxh3_64_intdigest(bytes(raw[:152])))
        assert await store.get([make_target(page.key)]) == [False]
        assert await store.exists([page.key]) == [False]
        stats = store.stats()
        assert (stats.errors, stats.pages_corrupt, stats.pages_missed) == ({"unsupported": 1}, 0, 1)
        assert await store.delete([page.key]) == 1
        await store.close()

    asyncio.run(test())
