"""The contract of an L3 store as a class of tests that any store can subclass.

    class TestMyStore(StoreContract):
        async def make_store(self, capacity_bytes: int | None = None) -> Store: ...
        def raw_bytes(self, store: Store, key: PageKey) -> bytes | None: ...
        def corrupt(self, store: Store, key: PageKey, how: Corruption) -> None: ...

A store that does not bound itself (a server decides about room) takes ``UnboundedStoreContract``, which
is the same without quota and order of eviction. Needs pytest and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from hicache.testing.store_pages import PAYLOAD_BYTES, make_chain, make_page, make_target
from hicache.testing.unbounded_store_contract import UnboundedStoreContract
from hicache.tiers.store import Store
from hicache.types import Regard

__all__ = ["StoreContract", "UnboundedStoreContract"]


class StoreContract(UnboundedStoreContract):
    """What every store with a capacity must do: all that, its quota, and the order of eviction."""

    has_capacity = True

    # ---- quota and order of eviction -------------------------------------------------------------------------

    def test_the_capacity_holds_and_the_most_recent_pages_survive(self) -> None:
        async def test(store: Store) -> None:
            pages = [make_page(n) for n in range(25)]
            assert await store.put(pages) == [True] * 25
            stats = store.stats()
            assert (stats.num_pages, stats.pages_evicted) == (10, 15)
            assert stats.used_bytes <= 10 * self.page_cost_bytes(PAYLOAD_BYTES)
            assert await self.present(store, pages) == list(range(15, 25))
            on_medium = [n for n, page in enumerate(pages) if self.raw_bytes(store, page.key) is not None]
            assert on_medium == list(range(15, 25))

        self.run(test, room_for=10)

    def test_the_quota_is_one_for_pages_of_every_component(self) -> None:
        """No part of it is kept for a component or a size: the most recent pages have it all."""

        async def test(store: Store) -> None:
            pages = [make_page(n) for n in range(12)]
            states = [
                make_page(f"state {n}", num_bytes=3 * PAYLOAD_BYTES, component="mamba") for n in range(3)
            ]
            assert await store.put(pages) == [True] * 12
            assert await self.present(store, pages) == list(range(12))
            assert await store.put(states) == [True] * 3
            assert await self.present(store, states) == [0, 1, 2]
            assert await store.put(pages) == [True] * 12
            assert await self.present(store, pages) == list(range(12))
            assert await self.present(store, states) == []
            assert store.stats().used_bytes <= 12 * self.page_cost_bytes(PAYLOAD_BYTES)

        self.run(test, room_for=12)

    def test_reading_a_page_keeps_it_longer(self) -> None:
        async def test(store: Store) -> None:
            pages = [make_page(n) for n in range(4)]
            await store.put(pages[:3])
            await store.get([make_target(pages[0].key)])
            await store.put(pages[3:])
            assert await self.present(store, pages) == [0, 2, 3]

        self.run(test, room_for=3)

    def test_putting_a_page_again_keeps_it_longer(self) -> None:
        async def test(store: Store) -> None:
            pages = [make_page(n) for n in range(4)]
            await store.put(pages[:3])
            await store.put(pages[:1])
            await store.put(pages[3:])
            assert await self.present(store, pages) == [0, 2, 3]

        self.run(test, room_for=3)

    def test_pages_that_are_over_leave_first_suffix_before_prefix(self) -> None:
        async def test(store: Store) -> None:
            old, over = make_chain(1, 3, prefix="old "), make_chain(1, 3, prefix="over ")
            await store.put(old)
            await store.put(over)
            await store.hint([page.key for page in over], Regard.OVER)
            await store.put([make_page(n) for n in range(2)])
            assert (await self.present(store, old), await self.present(store, over)) == ([0, 1, 2], [0])

        self.run(test, room_for=6)

    def test_what_is_regarded_more_highly_leaves_later_and_does_leave(self) -> None:
        async def test(store: Store) -> None:
            names = [regard.name for regard in sorted(Regard, reverse=True)]
            pages = [make_page(name) for name in names]  # the most highly regarded is the least recent
            await store.put(pages)
            for page, name in zip(pages, names, strict=True):
                await store.hint([page.key], Regard[name])
            left = []
            for n in range(5):
                assert await store.put([make_page(n, parent=n - 1 if n else None)]) == [True]
                left.append(
                    [n for n, page in enumerate(pages) if self.raw_bytes(store, page.key) is not None]
                )
            assert left == [[0, 1, 2, 3], [0, 1, 2], [0, 1], [0], []]

        self.run(test, room_for=5)

    @pytest.mark.parametrize("how", ["read", "put"])
    def test_what_is_kept_stays_so_when_it_is_used_until_a_hint_takes_it_back(self, how: str) -> None:
        async def test(store: Store) -> None:
            pages = [make_page(n) for n in range(6)]
            await store.put(pages[:2])
            await store.hint([pages[0].key], Regard.KEPT)
            if how == "read":
                await store.get([make_target(pages[0].key)])
            else:
                await store.put(pages[:1])
            for page in pages[2:4]:  # one by one: what is being written makes no room
                await store.put([page])
            assert await self.present(store, pages) == [0, 3]
            await store.hint([pages[0].key], Regard.PLAIN)
            for page in pages[4:]:
                await store.put([page])
            assert await self.present(store, pages) == [4, 5]

        self.run(test, room_for=2)

    @pytest.mark.parametrize("how", ["read", "put", "hint"])
    def test_pages_that_are_not_over_after_all_leave_as_before(self, how: str) -> None:
        async def test(store: Store) -> None:
            pages = [make_page(n) for n in range(4)]
            await store.put(pages[:3])
            await store.hint([pages[2].key], Regard.OVER)
            match how:
                case "read":
                    await store.get([make_target(pages[2].key)])
                case "put":
                    await store.put(pages[2:3])
                case "hint":
                    await store.hint([pages[2].key], Regard.PLAIN)
            await store.put(pages[3:])
            assert await self.present(store, pages) == [1, 2, 3]

        self.run(test, room_for=3)

    def test_a_suffix_leaves_before_its_prefix(self) -> None:
        async def test(store: Store) -> None:
            chain = make_chain(1, 3)
            await store.put(chain)
            assert await store.put([make_page("other")]) == [True]
            assert await self.present(store, chain) == [0, 1]

        self.run(test, room_for=3)

    def test_a_chain_written_in_chunks_is_cut_from_its_end(self) -> None:
        async def test(store: Store) -> None:
            chain = make_chain(1, 8)
            await store.put(chain[:4])
            await store.put(chain[4:])
            assert await store.put([make_page(f"other {n}") for n in range(4)]) == [True] * 4
            assert await self.present(store, chain) == [0, 1, 2, 3]

        self.run(test, room_for=8)

    def test_reading_only_the_tail_keeps_the_head(self) -> None:
        async def test(store: Store) -> None:
            hot, cold = make_chain(1, 3, prefix="hot "), make_chain(1, 3, prefix="cold ")
            await store.put(hot)
            await store.put(cold)
            await store.get([make_target(hot[2].key)])
            await store.put([make_page(f"other {n}") for n in range(3)])
            assert await self.present(store, hot) == [0, 1, 2]
            assert await self.present(store, cold) == []

        self.run(test, room_for=6)

    def test_a_chain_over_the_capacity_keeps_its_head(self) -> None:
        async def test(store: Store) -> None:
            chain = make_chain(1, 5)
            assert await store.put(chain) == [True, True, True, False, False]
            assert await self.present(store, chain) == [0, 1, 2]
            assert store.stats().pages_refused == 2
            assert await store.put(chain[4:]) == [False]
            assert await self.present(store, chain) == [0, 1, 2]

        self.run(test, room_for=3)

    def test_a_page_over_the_capacity_is_refused_and_nobody_leaves(self) -> None:
        async def test(store: Store) -> None:
            pages = [make_page(n) for n in range(3)]
            await store.put(pages)
            large = make_page("large", num_bytes=3 * self.page_cost_bytes(PAYLOAD_BYTES))
            assert await store.put([large]) == [False]
            assert await self.present(store, pages) == [0, 1, 2]
            assert store.stats().pages_refused == 1

        self.run(test, room_for=3)

    def test_a_store_without_capacity_refuses_everything(self) -> None:
        async def test(store: Store) -> None:
            assert await store.put(make_chain(1, 2)) == [False, False]
            assert store.stats().used_bytes == 0

        self.run(test, capacity_bytes=0)

    def test_the_capacity_holds_under_concurrent_writes_and_reads(self) -> None:
        async def test(store: Store) -> None:
            chains = [make_chain(1, 6, prefix=f"{n}: ") for n in range(8)]
            calls: list[Coroutine[Any, Any, object]] = [store.put(chain) for chain in chains]
            calls += [store.get([make_target(page.key) for page in chain]) for chain in chains]
            await asyncio.gather(*calls)
            stats = store.stats()
            assert stats.used_bytes <= 10 * self.page_cost_bytes(PAYLOAD_BYTES)
            found = [await self.present(store, chain) for chain in chains]
            assert sum(map(len, found)) == stats.num_pages
            assert found == [list(range(len(positions))) for positions in found]  # heads, no gaps

        self.run(test, room_for=10)
