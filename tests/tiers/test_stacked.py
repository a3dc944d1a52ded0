"""Stacked stores: the contract in every write mode, promotion, backlogs, faults of one of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from hicache.errors import TierUnavailableError
from hicache.testing.scripted_store import MISS, Raise, ScriptedStore
from hicache.testing.store_contract import UnboundedStoreContract
from hicache.testing.store_pages import (
    PAYLOAD_BYTES,
    Corruption,
    make_chain,
    make_key,
    make_page,
    make_target,
    spoil,
)
from hicache.tiers.framing import decode_header
from hicache.tiers.memory import MemoryStore
from hicache.tiers.stacked import StackedStore, WriteMode
from hicache.tiers.store import PageTarget, Store, StoredPage
from hicache.types import PageKey, Regard

ILL = Raise(TierUnavailableError("ill"))


class StackedContract(UnboundedStoreContract):
    """Two memory stores as one. The copies that a page has are spoilt as one."""

    write: WriteMode

    async def make_store(self, capacity_bytes: int | None = None) -> Store:
        self.parts = (MemoryStore(), MemoryStore())
        store = StackedStore(self.parts, write=self.write)
        await store.open()
        return store

    def raw_bytes(self, store: Store, key: PageKey) -> bytes | None:
        copies = [part.raw(key) for part in self.parts]
        return next((bytes(raw) for raw in copies if raw is not None), None)

    def corrupt(self, store: Store, key: PageKey, how: Corruption) -> None:
        spoilt = spoil(self.raw_bytes(store, key) or b"", how)
        holders = [part for part in self.parts if part.raw(key) is not None]
        for part in holders:
            raw = part.raw(key)
            assert raw is not None
            if spoilt is None or part is not holders[0]:
                del part._blobs[key]
                part._index.drop(key)
            else:
                raw[:] = spoilt

    async def gauges(self, store: Store) -> tuple[int, int]:
        assert isinstance(store, StackedStore)
        await store.settled()
        first = self.parts[0].stats()
        return first.num_pages, first.used_bytes


class TestFirst(StackedContract):
    write = WriteMode.FIRST


class TestAll(StackedContract):
    write = WriteMode.ALL


class SettledStack(StackedStore):
    """Every put ends with both copies in place, so that a test may spoil them."""

    async def put(self, pages: Sequence[StoredPage]) -> list[bool]:
        answers = await super().put(pages)
        await self.settled()
        return answers


class TestLater(StackedContract):
    write = WriteMode.LATER

    async def make_store(self, capacity_bytes: int | None = None) -> Store:
        self.parts = (MemoryStore(), MemoryStore())
        store = SettledStack(self.parts, write=self.write)
        await store.open()
        return store


class Rig:
    def __init__(self, write: WriteMode = WriteMode.LATER, **settings: Any) -> None:  # Any: StackedStore's
        self.disk, self.shared = ScriptedStore(), ScriptedStore()
        self.store = StackedStore((self.disk, self.shared), write=write, **settings)

    async def on_disk(self, pages: list[StoredPage]) -> list[bool]:
        return await self.disk.inner.exists([page.key for page in pages])

    async def on_shared(self, pages: list[StoredPage]) -> list[bool]:
        return await self.shared.inner.exists([page.key for page in pages])

    async def read(self, pages: list[StoredPage]) -> list[bool]:
        targets = [make_target(page.key) for page in pages]
        answers = await self.store.get(targets)
        for page, target, hit in zip(pages, targets, answers, strict=True):
            assert not hit or target.payload == page.payload
        return answers


def run(test: Callable[[Rig], Coroutine[Any, Any, None]], rig: Rig) -> None:  # Any: asyncio's
    async def main() -> None:
        await rig.store.open()
        try:
            await test(rig)
        finally:
            await rig.store.close()

    asyncio.run(asyncio.wait_for(main(), timeout=120))


def test_what_a_later_store_had_is_read_and_then_lies_in_the_first_under_its_parent() -> None:
    async def test(rig: Rig) -> None:
        chain = make_chain(1, 3)
        await rig.shared.put(chain)
        assert await rig.read(chain) == [True] * 3
        await rig.store.settled()
        assert await rig.on_disk(chain) == [True] * 3
        raw = rig.disk.inner.raw(chain[2].key)
        assert raw is not None
        assert decode_header(raw).parent == chain[1].key
        num_shared = len(rig.shared.keys_of("get"))
        assert await rig.read(chain) == [True] * 3
        assert len(rig.shared.keys_of("get")) == num_shared  # the first store had them all
        stats = rig.store.stats()
        assert (stats.pages_read, stats.pages_missed) == (6, 0)

    run(test, Rig())


def test_only_what_is_missing_is_asked_of_the_next_store() -> None:
    async def test(rig: Rig) -> None:
        chain = make_chain(1, 4)
        await rig.disk.put(chain[:2])
        await rig.shared.put(chain[2:3])
        assert await rig.store.exists([page.key for page in chain]) == [True, True, True, False]
        assert rig.shared.keys_of("exists") == [page.key for page in chain[2:]]
        assert await rig.read(chain) == [True, True, True, False]
        assert rig.shared.keys_of("get") == [page.key for page in chain[2:]]
        assert rig.store.stats().pages_missed == 1

    run(test, Rig())


def test_promotion_can_be_switched_off() -> None:
    async def test(rig: Rig) -> None:
        chain = make_chain(1, 3)
        await rig.shared.put(chain)
        assert await rig.read(chain) == [True] * 3
        await rig.store.settled()
        assert await rig.on_disk(chain) == [False] * 3

    run(test, Rig(promote=False))


@pytest.mark.parametrize(
    ("write", "on_shared"),
    [(WriteMode.FIRST, False), (WriteMode.ALL, True), (WriteMode.LATER, True)],
)
def test_each_mode_writes_where_it_says(write: WriteMode, on_shared: bool) -> None:
    async def test(rig: Rig) -> None:
        chain = make_chain(1, 3)
        assert await rig.store.put(chain) == [True] * 3
        await rig.store.settled()
        assert await rig.on_disk(chain) == [True] * 3
        assert await rig.on_shared(chain) == [on_shared] * 3
        assert rig.store.stats().pages_written == 3

    run(test, Rig(write))


def test_later_acknowledges_before_the_second_store_has_it() -> None:
    async def test(rig: Rig) -> None:
        gate = rig.shared.block("put")
        payload = bytearray(b"a" * PAYLOAD_BYTES)
        page = StoredPage(make_key("a"), None, "full", memoryview(payload))
        assert await rig.store.put([page]) == [True]
        payload[:] = b"b" * PAYLOAD_BYTES  # the buffer is the caller's again
        assert await rig.on_shared([page]) == [False]
        gate.release()
        await rig.store.settled()
        target = make_target(page.key)
        assert await rig.shared.get([target]) == [True]
        assert target.payload == b"a" * PAYLOAD_BYTES

    run(test, Rig())


def test_a_full_backlog_drops_what_comes_on_top_and_counts_it() -> None:
    async def test(rig: Rig) -> None:
        gate = rig.shared.block("put")
        chain = make_chain(1, 5)
        assert await rig.store.put(chain) == [True] * 5
        gate.release()
        await rig.store.settled()
        assert await rig.on_shared(chain) == [True, True, False, False, False]
        assert rig.store.stats().errors == {"backlog_dropped": 3}
        assert await rig.store.put([make_page("later")]) == [True]  # there is room again
        await rig.store.settled()
        assert await rig.on_shared([make_page("later")]) == [True]

    run(test, Rig(backlog_bytes=2 * PAYLOAD_BYTES))


def test_a_page_deleted_while_it_waits_or_is_written_does_not_come_back() -> None:
    async def test(rig: Rig) -> None:
        gate = rig.shared.block("put")
        under_way, waiting = make_page("under way"), make_page("waiting")
        await rig.store.put([under_way])
        await asyncio.sleep(0)
        assert rig.shared.keys_of("put") == [under_way.key]
        await rig.store.put([waiting])
        deletion = asyncio.ensure_future(rig.store.delete([under_way.key, waiting.key]))
        await asyncio.sleep(0)
        assert not deletion.done()
        gate.release()
        assert await deletion == 2
        await rig.store.settled()
        assert await rig.store.exists([under_way.key, waiting.key]) == [False, False]

    run(test, Rig())


def test_what_the_first_store_refuses_goes_to_the_second_at_once() -> None:
    async def test(rig: Rig) -> None:
        chain = make_chain(1, 3)
        rig.disk.script("put", MISS, key=chain[2].key)
        assert await rig.store.put(chain) == [True] * 3
        assert await rig.on_shared(chain) == [False, False, True]
        await rig.store.settled()
        assert await rig.on_shared(chain) == [True] * 3

    run(test, Rig())


@pytest.mark.parametrize("operation", ["exists", "get"])
@pytest.mark.parametrize("ill", ["disk", "shared"])
def test_a_store_that_fails_is_as_one_that_has_nothing(operation: Any, ill: str) -> None:
    async def test(rig: Rig) -> None:
        chain = make_chain(1, 2)
        well = rig.shared if ill == "disk" else rig.disk
        await well.put(chain)
        (rig.disk if ill == "disk" else rig.shared).script(operation, ILL)
        if operation == "get":
            assert await rig.read([*chain, make_page("none")]) == [True, True, False]
        else:
            keys = [*(page.key for page in chain), make_key("none")]
            assert await rig.store.exists(keys) == [True, True, False]
        assert rig.store.stats().errors == {"store_failed": 1}

    run(test, Rig(promote=False))


@pytest.mark.parametrize("write", list(WriteMode))
def test_a_write_fails_only_if_every_store_that_it_may_go_to_does(write: WriteMode) -> None:
    async def test(rig: Rig) -> None:
        rig.disk.script("put", ILL)
        page = make_page("a")
        if write is WriteMode.FIRST:
            with pytest.raises(TierUnavailableError):
                await rig.store.put([page])
        else:
            assert await rig.store.put([page]) == [True]
            assert await rig.on_shared([page]) == [True]
        rig.shared.script("put", ILL)
        with pytest.raises(TierUnavailableError):
            await rig.store.put([make_page("b")])

    run(test, Rig(write))


def test_a_later_write_that_fails_is_counted_and_nobody_hears_of_it() -> None:
    async def test(rig: Rig) -> None:
        rig.shared.script("put", ILL)
        assert await rig.store.put(make_chain(1, 3)) == [True] * 3
        await rig.store.settled()
        assert rig.store.stats().errors == {"backlog_failed": 1}

    run(test, Rig())


def test_statistics_name_each_store_and_add_up_their_room() -> None:
    async def main() -> None:
        store = StackedStore((MemoryStore(5000), MemoryStore(7000)), write=WriteMode.ALL)
        await store.open()
        await store.put(make_chain(1, 2))
        stats = store.stats()
        assert (stats.kind, stats.capacity_bytes, stats.num_pages) == ("stacked", 12_000, 4)
        assert [(part.kind, part.capacity_bytes, part.num_pages) for part in stats.stores] == [
            ("memory", 5000, 2),
            ("memory", 7000, 2),
        ]
        await store.close()

    asyncio.run(main())


def test_a_store_that_does_not_open_closes_the_others() -> None:
    class Broken(MemoryStore):
        async def open(self) -> None:
            raise TierUnavailableError("broken")

    async def main() -> None:
        first = ScriptedStore()
        with pytest.raises(TierUnavailableError, match="broken"):
            await StackedStore((first, Broken())).open()
        assert [call.operation for call in first.calls] == ["open", "close"]

    asyncio.run(main())


def test_one_store_makes_no_stack() -> None:
    with pytest.raises(ValueError, match="1 stores make no stack"):
        StackedStore([MemoryStore()])


def test_hints_go_to_every_store_and_one_that_is_away_costs_nothing() -> None:
    class Away(ScriptedStore):
        async def hint(self, keys: Sequence[PageKey], regard: Regard) -> None:
            if regard is Regard.OVER:
                raise TierUnavailableError("away")
            await super().hint(keys, regard)

    async def main() -> None:
        stores = (Away(), ScriptedStore())
        stack = StackedStore(stores)
        await stack.open()
        keys = [page.key for page in make_chain(1, 2)]
        await stack.hint(keys, Regard.OVER)
        await stack.hint(keys, Regard.KEPT)
        assert (stores[0].keys_of("kept"), stores[1].keys_of("over")) == (keys, keys)
        assert stack.stats().errors["store_failed"] == 1
        await stack.close()

    asyncio.run(main())


@pytest.mark.parametrize("removal", ["delete", "clear"])
def test_a_page_removed_while_it_is_read_is_not_promoted(removal: str) -> None:
    async def test(rig: Rig) -> None:
        page = make_page(1)
        await rig.shared.put([page])
        has_read, go_on = asyncio.Event(), asyncio.Event()
        get = rig.shared.get

        async def slow_get(targets: Sequence[PageTarget]) -> list[bool]:
            answers = await get(targets)
            has_read.set()
            await go_on.wait()
            return answers

        rig.shared.get = slow_get  # type: ignore[method-assign]  # what it has read it tells later
        reading = asyncio.create_task(rig.read([page]))
        await has_read.wait()
        await (rig.store.delete([page.key]) if removal == "delete" else rig.store.clear())
        go_on.set()
        assert await reading == [True]
        await rig.store.settled()
        assert await rig.on_disk([page]) == [False]

    run(test, Rig())
