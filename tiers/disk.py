"""A store in a folder: one file per page, the store's own threads, one hop per thread and batch.

::

    event loop              DiskStore     coroutines, order of batches, open and close
    ── one hop ───────────────────────────────────────────────────────────────────────
    the store's threads     DiskPages     room, eviction, errors      (blocking)
                            PageFiles     names and system calls

A batch of writes goes through several threads at once, yet pages become visible in the batch's order:
a kill leaves no suffix without its prefix. A later layout (segment files) replaces the lower two.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar

from hicache.errors import TierUnavailableError
from hicache.tiers.arguments import check_keys, check_pages, check_targets
from hicache.tiers.counters import StoreCounters
from hicache.tiers.disk_pages import DiskPages
from hicache.tiers.page_files import PageFiles, TemporaryFile
from hicache.tiers.page_index import Outcome
from hicache.tiers.scratch_files import ScratchFiles
from hicache.tiers.store import PageTarget, Store, StoredPage, StoreStats
from hicache.tiers.workers import Workers
from hicache.types import PageKey

T = TypeVar("T")
R = TypeVar("R")

AUTO_PATH = "auto"
MAX_UNPUBLISHED = 16
"""How far a batch may write ahead of its first unpublished page: bounds open files."""


class DiskStore(Store):
    """Pages as files in a folder, several processes at a time if need be.

    Args:
        path: the folder, made if missing (files 0600, folders 0700); ``auto`` is a fresh temporary
            folder that goes when the store is closed.
        capacity_bytes: hard limit of all files, headers and temporary files included; None for none.
            In a shared folder each process holds to it over the pages that it has seen.
        num_threads: threads for I/O, and the most hops one batch takes.
        durable: fsync every page and its folder before it counts as written. Without it, what was
            acknowledged survives a kill of the process, not a power cut.
        min_free_bytes: evict, or refuse, rather than leave the file system with less.

    *Thread*: one event loop. A cancelled call returns only when no thread touches its buffers any
    more, which takes as long as the I/O of one page per thread.
    """

    kind = "disk"

    def __init__(
        self,
        path: str | os.PathLike[str],
        capacity_bytes: int | None = None,
        *,
        num_threads: int = 4,
        durable: bool = False,
        min_free_bytes: int = 0,
    ) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads is {num_threads}, 1 or more expected")
        if min_free_bytes < 0:
            raise ValueError(f"min_free_bytes is {min_free_bytes}, 0 or more expected")
        self._is_auto = os.fspath(path) == AUTO_PATH
        self._path = os.fspath(path)
        self._capacity_bytes = capacity_bytes
        self._num_threads = num_threads
        self._durable = durable
        self._min_free_bytes = min_free_bytes
        self._counters = StoreCounters(self.kind)
        self._pages = self._make_pages()
        self._workers: Workers | None = None
        self._calls: set[asyncio.Future[None]] = set()
        self._writing: dict[PageKey, asyncio.Future[None]] = {}

    @property
    def path(self) -> str:
        """The folder; for ``auto`` known once the store is open."""
        return self._path

    # ---- life ------------------------------------------------------------------------------------------------

    @property
    def is_private(self) -> bool:
        """A temporary folder of our own."""
        return self._is_auto

    async def open(self) -> None:
        if self._workers is not None:
            return
        workers = Workers(self._num_threads, name="hicache-disk")
        try:
            await workers.run([self._load], threading.Event())
        except OSError as error:
            workers.close()
            raise TierUnavailableError(
                f"disk store: cannot use {self._path}: {error}; name a folder that this user may write"
            ) from error
        except BaseException:
            workers.close()
            raise
        self._workers = workers

    async def close(self) -> None:
        workers, self._workers = self._workers, None
        try:
            while self._calls:
                await asyncio.wait(set(self._calls))
            if workers is not None and self._is_auto:
                await workers.run([self._remove_folder], threading.Event())
        finally:
            if workers is not None:
                workers.close()

    def stats(self) -> StoreStats:
        return self._counters.snapshot(self._pages.index)

    def check_integrity(self) -> list[str]:
        """One sentence for each disagreement of index and folder. Blocks; for tests and tools."""
        return self._pages.check_integrity()

    # ---- batches ---------------------------------------------------------------------------------------------

    async def exists(self, keys: Sequence[PageKey]) -> list[bool]:
        check_keys(keys)
        async with self._call() as workers:
            return await self._for_each(workers, self._pages.exists, keys, num_shares=1)

    async def get(self, targets: Sequence[PageTarget]) -> list[bool]:
        check_targets(targets)
        async with self._call() as workers:
            answers = await self._for_each(
                workers, self._pages.read, targets, num_shares=min(self._num_threads, len(targets))
            )
            for target, is_hit in zip(targets, answers, strict=True):
                if is_hit:
                    self._pages.index.touch(target.key)
            return answers

    async def put(self, pages: Sequence[StoredPage]) -> list[bool]:
        check_pages(pages)
        first_of_key: dict[PageKey, StoredPage] = {}
        for page in pages:
            first_of_key.setdefault(page.key, page)
        batch = _WriteBatch(self._pages, self._counters, list(first_of_key.values()))
        async with self._call() as workers, self._writing_alone(list(first_of_key)):
            await workers.run([batch.run] * min(self._num_threads, len(first_of_key)), batch.stop)
        return [batch.answers[page.key] for page in pages]

    async def delete(self, keys: Sequence[PageKey]) -> int:
        check_keys(keys)
        async with self._call() as workers:
            return sum(await self._for_each(workers, self._pages.remove, keys, num_shares=1))

    async def clear(self) -> int:
        async with self._call() as workers:
            return sum(await self._for_each(workers, DiskPages.clear, [self._pages], num_shares=1))

    # ---- helpers ---------------------------------------------------------------------------------------------

    def _make_pages(self) -> DiskPages:
        return DiskPages(
            ScratchFiles(self._path) if self._is_auto else PageFiles(self._path, durable=self._durable),
            self._capacity_bytes,
            min_free_bytes=self._min_free_bytes,
            counters=self._counters,
        )

    def _load(self) -> None:
        if self._is_auto:
            self._path = tempfile.mkdtemp(prefix="hicache-")
        self._pages = self._make_pages()
        self._pages.load()

    def _remove_folder(self) -> None:
        self._pages.close()
        shutil.rmtree(self._path, ignore_errors=True)
        self._pages = self._make_pages()

    async def _for_each(
        self, workers: Workers, function: Callable[[T], R], items: Sequence[T], *, num_shares: int
    ) -> list[R]:
        """Apply ``function`` to all items, cut into shares; results in the items' order."""
        stop = threading.Event()
        results: dict[int, R] = {}

        def run_share(first: int) -> None:
            for position in range(first, len(items), num_shares):
                if stop.is_set():
                    return
                results[position] = function(items[position])

        if items:
            await workers.run([functools.partial(run_share, first) for first in range(num_shares)], stop)
        return [results[position] for position in range(len(items))]

    @contextlib.asynccontextmanager
    async def _call(self) -> AsyncIterator[Workers]:
        """One running call: ``close`` waits for it."""
        if self._workers is None:
            raise TierUnavailableError(f"disk store {self._path}: not open; await open() first")
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._calls.add(done)
        try:
            yield self._workers
        finally:
            self._calls.discard(done)
            done.set_result(None)

    @contextlib.asynccontextmanager
    async def _writing_alone(self, keys: Sequence[PageKey]) -> AsyncIterator[None]:
        """Wait until no other batch writes one of ``keys``; whoever waits holds nothing."""
        while busy := {self._writing[key] for key in keys if key in self._writing}:
            await asyncio.wait(busy)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._writing.update(dict.fromkeys(keys, done))
        try:
            yield
        finally:
            for key in keys:
                del self._writing[key]
            done.set_result(None)


class _WriteBatch:
    """One ``put``: pages are admitted in order, written by several threads, published in order.

    ::

        answered ▏ written, waits ▏ being written ▏ not admitted yet
                 └ _num_answered                  └ _num_admitted

    A page without room waits for the pages before it, which may then be evicted for it.
    """

    def __init__(self, pages: DiskPages, counters: StoreCounters, batch: Sequence[StoredPage]) -> None:
        self.answers: dict[PageKey, bool] = {}
        self.stop = threading.Event()
        self._pages = pages
        self._counters = counters
        self._batch = batch
        self._turn = threading.Condition()
        self._num_admitted = 0
        self._num_answered = 0
        self._ready: dict[int, TemporaryFile | bool] = {}

    def run(self) -> None:
        """One thread's share: take the next page, write it, until none is left."""
        while (position := self._take()) is not None:
            temporary: TemporaryFile | None = None
            try:
                temporary = self._pages.write(self._batch[position])
            finally:
                with self._turn:
                    self._settle(position, temporary or False)

    def _take(self) -> int | None:
        with self._turn:
            while self._num_admitted < len(self._batch) and not self.stop.is_set():
                position = self._num_admitted
                if position - self._num_answered >= MAX_UNPUBLISHED:
                    self._turn.wait()
                    continue
                outcome = self._admit(self._batch[position])
                if outcome is Outcome.REFUSED and self._num_answered < position:
                    self._turn.wait()
                    continue
                self._num_admitted += 1
                if outcome is Outcome.GRANTED:
                    return position
                if outcome is Outcome.REFUSED:
                    self._counters.add(pages_refused=1)
                self._settle(position, outcome is Outcome.PRESENT)
            return None

    def _admit(self, page: StoredPage) -> Outcome:
        if page.parent is not None and self.answers.get(page.parent) is False:
            return Outcome.REFUSED  # out of reach without its parent
        return self._pages.admit(page)

    def _settle(self, position: int, result: TemporaryFile | bool) -> None:
        """Note a page's result and publish what is next in order; the lock is held."""
        self._ready[position] = result
        try:
            while self._num_answered in self._ready:
                page, ready = self._batch[self._num_answered], self._ready.pop(self._num_answered)
                self.answers[page.key] = False
                self._num_answered += 1
                self.answers[page.key] = ready if isinstance(ready, bool) else self._publish(page, ready)
        finally:
            self._turn.notify_all()

    def _publish(self, page: StoredPage, temporary: TemporaryFile) -> bool:
        if page.parent is not None and self.answers.get(page.parent) is False:
            self._pages.abandon(page, temporary)
            return False
        return self._pages.publish(page, temporary)
