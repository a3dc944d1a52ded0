"""Pages on their way into a store that nobody waits for: bounded in bytes, written in order of arrival."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Collection

from hicache.errors import HiCacheError
from hicache.tiers.counters import StoreCounters
from hicache.tiers.store import Store, StoredPage
from hicache.types import PageKey

BATCH_PAGES = 64
BATCH_BYTES = 8 << 20


class Backlog:
    """The queue in front of one store, and the one task that works it off.

    Args:
        store: where the pages go.
        limit_bytes: payload that may be queued or under way; what comes on top is dropped and counted.
        timeout_s: limit of one write.
        counters: of the owner; gets ``backlog_dropped`` and ``backlog_failed`` among its errors.

    *Thread*: one event loop.
    """

    def __init__(self, store: Store, limit_bytes: int, timeout_s: float, counters: StoreCounters) -> None:
        self._store = store
        self._limit_bytes = limit_bytes
        self._timeout_s = timeout_s
        self._counters = counters
        self._queue: deque[StoredPage] = deque()
        self._held: set[PageKey] = set()  # queued or under way
        self._writing: frozenset[PageKey] = frozenset()
        self._held_bytes = 0
        self._task: asyncio.Task[None] | None = None
        self._turn = asyncio.Event()  # set, and replaced, after every batch and at the task's end

    def add(self, page: StoredPage) -> None:
        """Queue a copy of a page; the caller may do with its payload what it likes afterwards."""
        num_bytes = page.payload.nbytes
        if page.key in self._held:
            return
        if self._held_bytes + num_bytes > self._limit_bytes:
            self._counters.error("backlog_dropped", f"{self._held_bytes} bytes are queued already")
            return
        copy = memoryview(bytes(page.payload))
        self._queue.append(StoredPage(page.key, page.parent, page.component, copy))
        self._held.add(page.key)
        self._held_bytes += num_bytes
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._work())

    async def discard(self, keys: Collection[PageKey] | None) -> None:
        """See to it that none of these (None: nothing at all) is written any more; waits for what is being."""
        doomed = set(self._held) if keys is None else self._held.intersection(keys)
        if not doomed:
            return
        dropped = [page for page in self._queue if page.key in doomed]
        self._queue = deque(page for page in self._queue if page.key not in doomed)
        self._let_go(dropped)
        while not self._writing.isdisjoint(doomed):
            await self._turn.wait()

    async def settled(self) -> None:
        """Wait until nothing is queued and nothing is being written."""
        while self._task is not None:
            await self._turn.wait()

    async def close(self, grace_s: float) -> None:
        """Go on writing for so long, then drop the rest and count it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self.settled()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        for _ in self._queue:
            self._counters.error("backlog_dropped", "the store was closed first")
        self._let_go(list(self._queue))
        self._queue.clear()

    async def _work(self) -> None:
        try:
            while self._queue:
                batch = self._next_batch()
                self._writing = frozenset(page.key for page in batch)
                try:
                    await self._write(batch)
                finally:
                    self._writing = frozenset()
                    self._let_go(batch)
                    self._announce()
        finally:
            self._task = None
            self._announce()

    async def _write(self, batch: list[StoredPage]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._store.put(batch)
        except (HiCacheError, OSError, TimeoutError) as error:
            self._counters.error("backlog_failed", error)

    def _announce(self) -> None:
        """Let everybody who waits look at what has changed."""
        self._turn.set()
        self._turn = asyncio.Event()

    def _next_batch(self) -> list[StoredPage]:
        batch = [self._queue.popleft()]
        num_bytes = batch[0].payload.nbytes
        while self._queue and len(batch) < BATCH_PAGES:
            num_bytes += self._queue[0].payload.nbytes
            if num_bytes > BATCH_BYTES:
                break
            batch.append(self._queue.popleft())
        return batch

    def _let_go(self, pages: list[StoredPage]) -> None:
        for page in pages:
            self._held.discard(page.key)
            self._held_bytes -= page.payload.nbytes
