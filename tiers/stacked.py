"""Several stores as one: asked in order, what a later one had is copied into the first.

::

    get      local disk ──miss──> shared Redis ──hit──> target
                 ^                                │
                 └──────── promotion (backlog) ───┘

    put      first    disk
             all      disk and Redis at once; there if either has it
             later    disk now, Redis behind (backlog); what the disk refuses goes to Redis now

A store that fails is as one that has nothing; only if all fail does the call. Promotions and later
writes wait in a backlog with a bound in bytes: they cost no caller time, and are dropped when it is full.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import TypeVar

from hicache.errors import TierError
from hicache.tiers.arguments import check_keys, check_pages, check_targets
from hicache.tiers.backlog import Backlog
from hicache.tiers.counters import StoreCounters
from hicache.tiers.store import PageTarget, Store, StoredPage, StoreStats
from hicache.types import PageKey, Regard

T = TypeVar("T")

CLOSE_GRACE_S = 2.0
"""How long closing waits for backlogs."""


class WriteMode(StrEnum):
    """Where pages are put."""

    FIRST = "first"
    """Into the first store; others are only read."""
    ALL = "all"
    """Into all at once."""
    LATER = "later"
    """Into the first, and into the others behind it."""


class StackedStore(Store):
    """Stores in the order in which they are asked.

    Args:
        stores: two or more; opened and closed with this one, the first of them first. Later one more may be
            attached, or one of several detached.
        write: where pages are put.
        promote: whether what a later store had is copied into the first.
        backlog_bytes: limit of what waits for each store.
        backlog_timeout_s: limit of one write from a backlog.

    *Thread*: one event loop. In ``stats`` a page counts once for reads, misses and writes, and once for
    each copy in ``num_pages``, ``used_bytes`` and the rest; ``stores`` has each store's own.
    """

    kind = "stacked"

    def __init__(
        self,
        stores: Sequence[Store],
        *,
        write: WriteMode = WriteMode.LATER,
        promote: bool = True,
        backlog_bytes: int = 64 << 20,
        backlog_timeout_s: float = 5.0,
    ) -> None:
        if len(stores) < 2:
            raise ValueError(f"{len(stores)} stores make no stack, two or more expected")
        if backlog_bytes < 0:
            raise ValueError(f"backlog_bytes is {backlog_bytes}, 0 or more expected")
        self._stores = tuple(stores)
        self._write = WriteMode(write)
        self._promote = promote
        self._counters = StoreCounters(self.kind)
        self._num_removals = 0  # calls so far that removed pages
        self._backlog_bytes = backlog_bytes
        self._backlog_timeout_s = backlog_timeout_s
        self._backlogs = [
            Backlog(store, backlog_bytes, backlog_timeout_s, self._counters) for store in self._stores
        ]

    # ---- life ------------------------------------------------------------------------------------------------

    @property
    def is_private(self) -> bool:
        return all(store.is_private for store in self._stores)

    async def open(self) -> None:
        """Open all. Raises what the first that fails raises, and closes the others again."""
        try:
            for store in self._stores:
                await store.open()
        except BaseException:
            await self._close_stores()
            raise

    async def close(self) -> None:
        for backlog in self._backlogs:
            await backlog.close(CLOSE_GRACE_S)
        await self._close_stores()

    async def attach(self, store: Store) -> None:
        """Open a store and ask it after all others. Raises what opening it raises."""
        await store.open()
        self._stores = (*self._stores, store)
        backlog = Backlog(store, self._backlog_bytes, self._backlog_timeout_s, self._counters)
        self._backlogs = [*self._backlogs, backlog]

    async def detach(self, store: Store) -> None:
        """Ask a store no more, write what waits for it, close it.

        *Caller guarantees*: it is one of several.
        """
        place = self._stores.index(store)
        backlog = self._backlogs[place]
        self._stores = (*self._stores[:place], *self._stores[place + 1 :])
        self._backlogs = [*self._backlogs[:place], *self._backlogs[place + 1 :]]
        await backlog.close(CLOSE_GRACE_S)
        await store.close()

    async def settled(self) -> None:
        """Wait until all backlogs are empty."""
        for backlog in self._backlogs:
            await backlog.settled()

    def stats(self) -> StoreStats:
        parts = tuple(store.stats() for store in self._stores)
        capacities = [part.capacity_bytes for part in parts if part.capacity_bytes is not None]
        totals = self._counters.totals()
        errors = Counter(totals.errors)
        for part in parts:
            errors.update(part.errors)
        return replace(
            totals,
            num_pages=sum(part.num_pages for part in parts),
            used_bytes=sum(part.used_bytes for part in parts),
            capacity_bytes=sum(capacities) if len(capacities) == len(parts) else None,
            pages_corrupt=sum(part.pages_corrupt for part in parts),
            pages_evicted=sum(part.pages_evicted for part in parts),
            errors=dict(errors),
            stores=parts,
        )

    # ---- batches ---------------------------------------------------------------------------------------------

    async def exists(self, keys: Sequence[PageKey]) -> list[bool]:
        check_keys(keys)
        depths = await self._descend(keys, lambda store, some: store.exists(some))
        return [depth is not None for depth in depths]

    async def get(self, targets: Sequence[PageTarget]) -> list[bool]:
        check_targets(targets)
        parents: dict[int, PageKey | None] = {}
        asked = [
            replace(target, on_parent=functools.partial(self._note_parent, parents, n, target))
            for n, target in enumerate(targets)
        ]
        num_removals = self._num_removals
        depths = await self._descend(asked, lambda store, some: store.get(some))
        promotes = self._promote and num_removals == self._num_removals  # what was removed must not come back
        num_read = num_bytes = 0
        for n, (target, depth) in enumerate(zip(targets, depths, strict=True)):
            if depth is None:
                continue
            num_read += 1
            num_bytes += target.payload.nbytes
            # A page whose parent is not known would be evicted before its own suffix.
            if depth > 0 and promotes and n in parents:
                page = StoredPage(target.key, parents[n], target.component, target.payload)
                self._backlogs[0].add(page)
        self._counters.add(pages_read=num_read, bytes_read=num_bytes, pages_missed=len(targets) - num_read)
        return [depth is not None for depth in depths]

    async def put(self, pages: Sequence[StoredPage]) -> list[bool]:
        check_pages(pages)
        match self._write:
            case WriteMode.FIRST:
                answers = await self._stores[0].put(pages)
            case WriteMode.ALL:
                answers = await self._put_all(pages)
            case WriteMode.LATER:
                answers = await self._put_first(pages)
        stored = {page.key: page for page, is_there in zip(pages, answers, strict=True) if is_there}
        num_bytes = sum(page.payload.nbytes for page in stored.values())
        num_refused = len({page.key for page in pages}) - len(stored)
        self._counters.add(pages_written=len(stored), bytes_written=num_bytes, pages_refused=num_refused)
        return answers

    async def delete(self, keys: Sequence[PageKey]) -> int:
        """Remove pages from all stores; how many of them were in at least one."""
        check_keys(keys)
        distinct = list(dict.fromkeys(keys))
        self._num_removals += 1
        for backlog in self._backlogs:
            await backlog.discard(distinct)
        there = await self.exists(distinct)
        removed = await self._in_each(lambda store: store.delete(distinct))
        return max(sum(there), *removed)

    async def hint(self, keys: Sequence[PageKey], regard: Regard) -> None:
        """Every store makes of it what it can."""
        await self._in_each(lambda store: store.hint(keys, regard))

    async def clear(self) -> int:
        """Empty all stores; how many pages the fullest had."""
        self._num_removals += 1
        for backlog in self._backlogs:
            await backlog.discard(None)
        return max(await self._in_each(lambda store: store.clear()))

    # ---- helpers ---------------------------------------------------------------------------------------------

    async def _descend(
        self, items: Sequence[T], ask: Callable[[Store, Sequence[T]], Awaitable[list[bool]]]
    ) -> list[int | None]:
        """Ask one store after the other for what is missing still; where each item was found.

        Raises what the last store raised, if all did.
        """
        depths: list[int | None] = [None] * len(items)
        missing = list(range(len(items)))
        failures: list[TierError] = []
        for depth, store in enumerate(self._stores):
            if not missing and depth:
                break
            try:
                answers = await ask(store, [items[n] for n in missing])
            except TierError as error:
                failures.append(error)
                continue
            for n, is_there in zip(missing, answers, strict=True):
                if is_there:
                    depths[n] = depth
            missing = [n for n in missing if depths[n] is None]
        if len(failures) == len(self._stores):
            raise failures[-1]
        self._note(failures)
        return depths

    async def _put_all(self, pages: Sequence[StoredPage]) -> list[bool]:
        results = await asyncio.gather(*(store.put(pages) for store in self._stores), return_exceptions=True)
        answers = [result for result in results if isinstance(result, list)]
        self._check(results, served=len(answers))
        return [any(of_page) for of_page in zip(*answers, strict=True)]

    async def _put_first(self, pages: Sequence[StoredPage]) -> list[bool]:
        """Into the first store that takes it; the ones behind that get it from their backlogs."""
        depths = await self._descend(pages, lambda store, some: store.put(some))
        for page, depth in zip(pages, depths, strict=True):
            if depth is not None:
                for backlog in self._backlogs[depth + 1 :]:
                    backlog.add(page)
        return [depth is not None for depth in depths]

    async def _in_each(self, ask: Callable[[Store], Awaitable[T]]) -> list[T]:
        results = await asyncio.gather(*(ask(store) for store in self._stores), return_exceptions=True)
        answers = [result for result in results if not isinstance(result, BaseException)]
        self._check(results, served=len(answers))
        return answers

    def _check(self, results: Sequence[object], *, served: int) -> None:
        """Count the failures among the results of all stores; raise if it is all of them, or not the tier's."""
        failures = [result for result in results if isinstance(result, BaseException)]
        for failure in failures:
            if not isinstance(failure, TierError) or not served:
                raise failure
        self._note(failures)

    def _note(self, failures: Sequence[BaseException]) -> None:
        for failure in failures:
            self._counters.error("store_failed", failure)

    @staticmethod
    def _note_parent(
        parents: dict[int, PageKey | None], n: int, target: PageTarget, parent: PageKey | None
    ) -> None:
        parents[n] = parent
        if target.on_parent is not None:
            target.on_parent(parent)

    async def _close_stores(self) -> None:
        for store in self._stores:
            await store.close()
