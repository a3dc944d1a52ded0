"""What every store must do, whether or not it bounds itself; see ``hicache.testing.store_contract``.

``raw_bytes`` and ``corrupt`` reach around the store to its medium, so that each half of a round trip is
checked on its own. Needs pytest and nothing else; each test runs its own event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from hicache.errors import ProtocolError, TierUnavailableError
from hicache.testing.store_pages import (
    COMPONENT,
    PAYLOAD_BYTES,
    Corruption,
    make_chain,
    make_key,
    make_page,
    make_target,
)
from hicache.tiers.framing import HEADER_BYTES, check_payload, decode_header
from hicache.tiers.store import PageTarget, Store, StoredPage
from hicache.types import PageKey, Regard


class UnboundedStoreContract(ABC):
    """What every store must do. Subclass it, name the subclass ``Test…``, fill in the hooks."""

    has_capacity: ClassVar[bool] = False
    """Whether ``make_store`` honours a capacity."""
    keeps_batch_order: ClassVar[bool] = True
    """Whether a batch that is cut short was written from its beginning on."""

    # ---- hooks -----------------------------------------------------------------------------------------------

    @abstractmethod
    async def make_store(self, capacity_bytes: int | None = None) -> Store:
        """A new, empty, opened store. The test closes it."""

    @abstractmethod
    def raw_bytes(self, store: Store, key: PageKey) -> bytes | None:
        """Header and payload as they lie on the medium, read without the store; None if not there."""

    @abstractmethod
    def corrupt(self, store: Store, key: PageKey, how: Corruption) -> None:
        """Spoil a stored page on the medium, behind the store's back (see ``spoil``)."""

    def page_cost_bytes(self, num_bytes: int) -> int:
        """What a page with a payload of ``num_bytes`` costs of the capacity."""
        return HEADER_BYTES + num_bytes

    async def gauges(self, store: Store) -> tuple[int, int]:
        """Number of pages that are there now, and the bytes that they take."""
        stats = store.stats()
        return stats.num_pages, stats.used_bytes

    # ---- helpers ---------------------------------------------------------------------------------------------

    def run(
        self,
        test: Callable[[Store], Coroutine[Any, Any, None]],  # Any: what a coroutine yields is asyncio's
        *,
        capacity_bytes: int | None = None,
        room_for: int | None = None,
    ) -> None:
        """Run a test on a new store and close that; a store that hangs fails it.

        Args:
            room_for: so many pages of ``PAYLOAD_BYTES``, in place of ``capacity_bytes``.
        """
        if room_for is not None and self.has_capacity:
            capacity_bytes = room_for * self.page_cost_bytes(PAYLOAD_BYTES)

        async def run() -> None:
            store = await self.make_store(capacity_bytes)
            try:
                await test(store)
            finally:
                await store.close()

        asyncio.run(asyncio.wait_for(run(), timeout=120))

    async def present(self, store: Store, pages: Sequence[StoredPage]) -> list[int]:
        """Positions of those pages that exist; each of them must also read back right."""
        exists = await store.exists([page.key for page in pages])
        targets = [make_target(page.key, page.payload.nbytes, component=page.component) for page in pages]
        assert await store.get(targets) == exists
        for page, target, is_there in zip(pages, targets, exists, strict=True):
            assert not is_there or target.payload == page.payload
        return [position for position, is_there in enumerate(exists) if is_there]

    # ---- round trip ------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("num_bytes", [1, 127, 4096, 65_537, 4 << 20], ids=lambda n: f"{n}-bytes")
    def test_what_was_put_is_on_the_medium_and_comes_back(self, num_bytes: int) -> None:
        async def test(store: Store) -> None:
            page = make_page("a", "its parent", num_bytes=num_bytes)
            assert await store.put([page]) == [True]

            raw = self.raw_bytes(store, page.key)
            assert raw is not None
            header = decode_header(raw)
            assert (header.key, header.parent, header.component) == (page.key, page.parent, COMPONENT)
            check_payload(header, raw[HEADER_BYTES:])
            assert raw[HEADER_BYTES:] == page.payload

            target = make_target(page.key, num_bytes)
            assert await store.get([target]) == [True]
            assert target.payload == page.payload

        self.run(test)

    def test_only_its_own_component_reads_a_page(self) -> None:
        async def test(store: Store) -> None:
            page = make_page("a", component="mamba")
            assert await store.put([page]) == [True]
            wrong, right = make_target(page.key, component="swa"), make_target(page.key, component="mamba")
            assert await store.get([wrong]) == [False]
            assert await store.get([right]) == [True]
            assert right.payload == page.payload

        self.run(test)

    def test_a_target_of_another_length_is_a_miss_and_leaves_the_page(self) -> None:
        async def test(store: Store) -> None:
            page = make_page("a")
            await store.put([page])
            longer, shorter = make_target(page.key, PAYLOAD_BYTES + 1), make_target(page.key, 10)
            assert await store.get([longer, shorter]) == [False, False]
            assert await self.present(store, [page]) == [0]

        self.run(test)

    def test_answers_come_in_the_order_of_the_questions(self) -> None:
        async def test(store: Store) -> None:
            pages = [make_page(n) for n in range(40)]
            assert await store.put(pages[::2]) == [True] * 20
            order = random.Random(3).sample(pages, 40)
            expected = [pages.index(page) % 2 == 0 for page in order]
            assert await store.exists([page.key for page in order]) == expected
            targets = [make_target(page.key) for page in order]
            assert await store.get(targets) == expected
            for page, target, is_hit in zip(order, targets, expected, strict=True):
                assert not is_hit or target.payload == page.payload

        self.run(test)

    def test_a_hit_tells_the_parent_to_who_asks(self) -> None:
        async def test(store: Store) -> None:
            first, second = make_page("first"), make_page("second", "first")
            await store.put([first, second])
            told: dict[PageKey, PageKey | None] = {}
            targets = [
                replace(make_target(key), on_parent=functools.partial(told.__setitem__, key))
                for key in (first.key, second.key, make_key("missing"))
            ]
            assert await store.get(targets) == [True, True, False]
            assert told == {first.key: None, second.key: first.key}

        self.run(test)

    def test_an_empty_batch_is_answered_with_nothing(self) -> None:
        async def test(store: Store) -> None:
            assert await store.exists([]) == []
            assert await store.get([]) == []
            assert await store.put([]) == []
            assert await store.delete([]) == 0
            assert await store.clear() == 0

        self.run(test)

    def test_a_miss_is_counted_and_is_no_error(self) -> None:
        async def test(store: Store) -> None:
            missing = make_key("missing")
            assert await store.exists([missing]) == [False]
            assert await store.get([make_target(missing)]) == [False]
            stats = store.stats()
            assert (stats.pages_missed, stats.pages_corrupt, stats.errors) == (1, 0, {})

        self.run(test)

    def test_the_same_page_in_one_batch_twice_gets_the_same_answer(self) -> None:
        async def test(store: Store) -> None:
            page = make_page("a")
            assert await store.put([page, page]) == [True, True]
            targets = [make_target(page.key), make_target(page.key)]
            assert await store.get(targets) == [True, True]
            assert [target.payload for target in targets] == [page.payload, page.payload]
            assert (await self.gauges(store))[0] == 1

        self.run(test)

    def test_putting_a_page_again_succeeds_and_costs_nothing(self) -> None:
        async def test(store: Store) -> None:
            page = make_page("a")
            assert await store.put([page]) == [True]
            _, used_bytes = await self.gauges(store)
            assert await store.put([page]) == [True]
            assert await self.gauges(store) == (1, used_bytes)
            assert await self.present(store, [page]) == [0]

        self.run(test, room_for=2)

    # ---- removing --------------------------------------------------------------------------------------------

    def test_delete_removes_pages_and_says_how_many_were_there(self) -> None:
        async def test(store: Store) -> None:
            pages = [make_page(n) for n in range(4)]
            await store.put(pages)
            assert await store.delete([pages[1].key, make_key("missing"), pages[2].key]) == 2
            assert await self.present(store, pages) == [0, 3]
            assert self.raw_bytes(store, pages[1].key) is None
            assert await self.gauges(store) == (2, 2 * self.page_cost_bytes(PAYLOAD_BYTES))
            assert await store.delete([pages[1].key]) == 0
            assert await store.put([pages[1]]) == [True]
            assert await self.present(store, pages) == [0, 1, 3]

        self.run(test)

    def test_clear_leaves_a_store_like_new(self) -> None:
        async def test(store: Store) -> None:
            pages = make_chain(1, 5)
            await store.put(pages)
            assert await store.clear() == 5
            assert await self.present(store, pages) == []
            assert [self.raw_bytes(store, page.key) for page in pages] == [None] * 5
            assert await self.gauges(store) == (0, 0)
            assert await store.put(pages) == [True] * 5
            assert await store.clear() == 5

        self.run(test, room_for=5)

    # ---- damage ----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("how", list(Corruption), ids=lambda how: how.name.lower())
    def test_a_damaged_page_is_a_miss_and_goes(self, how: Corruption) -> None:
        async def test(store: Store) -> None:
            pages = [make_page(n) for n in range(3)]
            await store.put(pages)
            self.corrupt(store, pages[1].key, how)

            targets = [make_target(page.key) for page in pages]
            assert await store.get(targets) == [True, False, True]

            assert await store.exists([pages[1].key]) == [False]
            assert self.raw_bytes(store, pages[1].key) is None
            stats = store.stats()
            assert stats.pages_missed == 1
            assert stats.pages_corrupt == (0 if how is Corruption.VANISHED else 1)
            assert await self.gauges(store) == (2, 2 * self.page_cost_bytes(PAYLOAD_BYTES))
            assert await store.put([pages[1]]) == [True]
            assert await self.present(store, pages) == [0, 1, 2]

        self.run(test)

    # ---- several calls at once -------------------------------------------------------------------------------

    def test_concurrent_batches_do_not_disturb_each_other(self) -> None:
        async def test(store: Store) -> None:
            chains = [make_chain(1, 12, prefix=f"{n}: ") for n in range(8)]
            answers = await asyncio.gather(*(store.put(chain) for chain in chains))
            assert answers == [[True] * 12] * 8
            found = await asyncio.gather(*(self.present(store, chain) for chain in chains))
            assert found == [list(range(12))] * 8

        self.run(test)

    def test_concurrent_puts_of_the_same_pages_all_succeed(self) -> None:
        async def test(store: Store) -> None:
            chain = make_chain(1, 6)
            answers = await asyncio.gather(*(store.put(chain) for _ in range(5)))
            assert answers == [[True] * 6] * 5
            assert await self.present(store, chain) == list(range(6))
            assert (await self.gauges(store))[0] == 6

        self.run(test)

    @pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
    def test_a_cancelled_put_leaves_whole_pages_or_none(self, num_steps: int) -> None:
        async def test(store: Store) -> None:
            chain = make_chain(1, 20)
            await _cancel_after(store.put(chain), num_steps)
            found = await self.present(store, chain)
            if self.keeps_batch_order:
                assert found == list(range(len(found)))  # no suffix without its prefix
            cost_bytes = len(found) * self.page_cost_bytes(PAYLOAD_BYTES)
            assert await self.gauges(store) == (len(found), cost_bytes)
            assert await store.put(chain) == [True] * 20
            assert await self.present(store, chain) == list(range(20))

        self.run(test)

    @pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
    def test_a_cancelled_get_writes_no_target_afterwards(self, num_steps: int) -> None:
        async def test(store: Store) -> None:
            chain = make_chain(1, 20)
            await store.put(chain)
            targets = [make_target(page.key) for page in chain]
            await _cancel_after(store.get(targets), num_steps)
            for target in targets:
                target.payload[:] = b"\x11" * PAYLOAD_BYTES  # the buffers are the caller's again
            assert await self.present(store, chain) == list(range(20))
            assert all(target.payload == b"\x11" * PAYLOAD_BYTES for target in targets)

        self.run(test)

    # ---- life and counters -----------------------------------------------------------------------------------

    def test_close_is_idempotent_and_a_closed_store_refuses_service(self) -> None:
        async def test(store: Store) -> None:
            page = make_page("a")
            await store.put([page])
            await store.close()
            await store.close()
            for call in (
                store.exists([page.key]),
                store.get([make_target(page.key)]),
                store.put([page]),
                store.delete([page.key]),
                store.clear(),
            ):
                with pytest.raises(TierUnavailableError):
                    await call
            assert store.stats().pages_written == 1

        self.run(test)

    def test_close_waits_for_what_is_running(self) -> None:
        async def test(store: Store) -> None:
            chain = make_chain(1, 20)
            running = asyncio.create_task(store.put(chain))
            await asyncio.sleep(0)
            await store.close()
            with contextlib.suppress(TierUnavailableError):
                assert len(await running) == 20

        self.run(test)

    def test_counters_tell_what_was_done(self) -> None:
        async def test(store: Store) -> None:
            chain = make_chain(1, 3)
            await store.put(chain)
            await store.get([make_target(page.key) for page in chain[:2]])
            await store.get([make_target(make_key("missing"))])
            assert await self.gauges(store) == (3, 3 * self.page_cost_bytes(PAYLOAD_BYTES))
            stats = store.stats()
            room_bytes = 4 * self.page_cost_bytes(PAYLOAD_BYTES) if self.has_capacity else None
            assert stats.capacity_bytes == room_bytes
            assert (stats.pages_written, stats.bytes_written) == (3, 3 * PAYLOAD_BYTES)
            assert (stats.pages_read, stats.bytes_read, stats.pages_missed) == (2, 2 * PAYLOAD_BYTES, 1)
            assert (stats.pages_corrupt, stats.pages_evicted, stats.pages_refused) == (0, 0, 0)
            stats.errors["mine"] = 1
            assert store.stats().errors == {}  # a copy

        self.run(test, room_for=4)

    @pytest.mark.parametrize(
        "page",
        [
            StoredPage(PageKey(b"short"), None, COMPONENT, memoryview(b"x")),
            StoredPage(make_key("a"), PageKey(b"short"), COMPONENT, memoryview(b"x")),
            StoredPage(make_key("a"), make_key("a"), COMPONENT, memoryview(b"x")),
            StoredPage(make_key("a"), None, "", memoryview(b"x")),
            StoredPage(make_key("a"), None, "n" * 57, memoryview(b"x")),
            StoredPage(make_key("a"), None, COMPONENT, memoryview(b"abcd")[::2]),
        ],
        ids=["short-key", "short-parent", "own-parent", "no-component", "long-component", "strided"],
    )
    def test_a_page_that_cannot_be_framed_is_the_callers_fault(self, page: StoredPage) -> None:
        async def test(store: Store) -> None:
            with pytest.raises(ProtocolError):
                await store.put([make_page("fine"), page])
            assert (await self.gauges(store))[0] == 0

        self.run(test)

    def test_a_target_that_cannot_be_written_is_the_callers_fault(self) -> None:
        async def test(store: Store) -> None:
            with pytest.raises(ProtocolError):
                await store.get([PageTarget(make_key("a"), COMPONENT, memoryview(b"read only"))])

        self.run(test)

    # ---- hints -----------------------------------------------------------------------------------------------

    def test_hints_take_nothing_away(self) -> None:
        async def test(store: Store) -> None:
            chain = make_chain(1, 3)
            await store.put(chain)
            keys = [page.key for page in chain]
            for regard in Regard:
                await store.hint([*keys, make_key("not here")], regard)
                await store.hint([], regard)
            assert await self.present(store, chain) == [0, 1, 2]
            assert await store.put([make_page("another")]) == [True]

        self.run(test)


async def _cancel_after(call: Coroutine[Any, Any, object], num_steps: int) -> None:
    """Start a call, let the event loop turn ``num_steps`` times, cancel the call, see it end."""
    task = asyncio.ensure_future(call)
    for _ in range(num_steps):
        await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
