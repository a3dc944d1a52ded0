"""A store in a folder: segment files, a journal, the store's own threads, one hop per thread and batch.

::

    event loop              DiskStore                  coroutines, order of batches, open and close
    ── one hop ───────────────────────────────────────────────────────────────────────
    the store's threads     WriteBatch, ReadBatch      who does which run of neighbours    (blocking)
                            PageLedger                 what is where, room, eviction
                            Journal, SegmentFiles …    system calls

A batch goes through several threads at once, yet pages become visible in the batch's order: a kill
leaves no suffix without its prefix.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar

from hicache.errors import TierUnavailableError
from hicache.tiers.arguments import check_keys, check_pages, check_targets
from hicache.tiers.counters import StoreCounters
from hicache.tiers.disk_pages import DiskPages, ReadBatch, WriteBatch
from hicache.tiers.page_ledger import PageLedger
from hicache.tiers.store import PageTarget, Store, StoredPage, StoreStats
from hicache.tiers.workers import Workers
from hicache.types import PageKey, Regard

T = TypeVar("T")

AUTO_PATH = "auto"
_OTHER_REMEDY = "name a folder that this user may write"
_REMEDIES = {
    errno.ENOSPC: "make room on its file system",
    errno.EDQUOT: "make room within the quota of its file system",
    errno.EROFS: "mount its file system for writing, or name another folder",
    errno.ETIMEDOUT: "another process holds its lock; end that one if it hangs",
}
"""What to do when a folder cannot be opened, by the number of the error."""
SHARE_PAGE_BYTES = 128 << 10
"""A batch takes one more thread for each so many bytes of its mean page. What a page costs outside the
interpreter's lock (copy, checksum) grows with its size; two threads that both want the lock are slower
than one. The depth of reads does not come from threads but from asking the kernel ahead.
"""


class DiskStore(Store):
    """Pages in segment files of a folder, several processes at a time if need be.

    Args:
        path: the folder, made if missing (files 0600, folders 0700); ``auto`` is a fresh temporary
            folder that goes when the store is closed, and whose files have no names even before.
        capacity_bytes: hard limit of what all processes together keep in the folder, headers, padding
            and journal included; None for none. All processes should be given the same.
        num_threads: threads for I/O, and the most hops one batch takes.
        durable: fsync a batch and its journal records before it counts as written. Without it, what
            was acknowledged survives a kill of the process, not a power cut.
        direct: pages of 32 KiB or more bypass the page cache (O_DIRECT): what is read again comes from the
            disk again, and the memory stays free for the host pool.
        min_free_bytes: evict, or refuse, rather than leave the file system with less.

    *Thread*: one event loop. A cancelled call returns only when no thread touches its buffers any
    more, which takes as long as the I/O of one run (1 MiB, or one page) per thread.
    """

    kind = "disk"

    def __init__(
        self,
        path: str | os.PathLike[str],
        capacity_bytes: int | None = None,
        *,
        num_threads: int = 4,
        durable: bool = False,
        direct: bool = False,
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
        self._direct = direct
        self._min_free_bytes = min_free_bytes
        self._counters = StoreCounters(self.kind)
        self._pages = self._make_pages(self._path)
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
        workers, before = Workers(self._num_threads, name="hicache-disk"), self._pages
        try:
            await workers.run([self._load], threading.Event())
        except OSError as error:
            workers.close()
            raise TierUnavailableError(
                f"disk store: cannot use {self._path}: {error}; {_REMEDIES.get(error.errno or 0, _OTHER_REMEDY)}"
            ) from error
        except BaseException:
            if self._pages is not before:  # we were cancelled, and the thread had gone on to the end
                await workers.run([self._unload], threading.Event())
            workers.close()
            raise
        self._workers = workers

    async def close(self) -> None:
        workers, self._workers = self._workers, None
        try:
            while self._calls:
                await asyncio.wait(set(self._calls))
            if workers is not None:
                await workers.run([self._unload], threading.Event())
        finally:
            if workers is not None:
                workers.close()

    def stats(self) -> StoreStats:
        return self._counters.snapshot(self._pages.ledger.index)

    def check_integrity(self) -> list[str]:
        """One sentence for each disagreement of index and folder. Blocks; for tests and tools."""
        return self._pages.ledger.check_integrity()

    # ---- batches ---------------------------------------------------------------------------------------------

    async def exists(self, keys: Sequence[PageKey]) -> list[bool]:
        check_keys(keys)
        async with self._call() as workers:
            return await self._in_thread(workers, lambda: self._pages.exists(keys)) if keys else []

    async def get(self, targets: Sequence[PageTarget]) -> list[bool]:
        check_targets(targets)
        async with self._call() as workers:
            num_shares = self._num_shares([target.payload.nbytes for target in targets], writes=False)
            batch = ReadBatch(self._pages, targets, num_threads=num_shares)
            await workers.run([batch.run] * num_shares, batch.stop)
            for target, is_hit in zip(targets, batch.answers, strict=True):
                if is_hit:
                    self._pages.ledger.index.touch(target.key)
            return batch.answers

    async def put(self, pages: Sequence[StoredPage]) -> list[bool]:
        check_pages(pages)
        first_of_key: dict[PageKey, StoredPage] = {}
        for page in pages:
            first_of_key.setdefault(page.key, page)
        async with self._call() as workers, self._writing_alone(list(first_of_key)):
            batch = WriteBatch(self._pages, list(first_of_key.values()))
            sizes = [page.payload.nbytes for page in first_of_key.values()]
            await workers.run([batch.run] * self._num_shares(sizes, writes=True), batch.stop)
        return [batch.answers[page.key] for page in pages]

    async def delete(self, keys: Sequence[PageKey]) -> int:
        check_keys(keys)
        async with self._call() as workers:
            return await self._in_thread(workers, lambda: self._pages.remove(keys)) if keys else 0

    async def hint(self, keys: Sequence[PageKey], regard: Regard) -> None:
        """As every store; in the order of this process only, and until the folder is opened again."""
        check_keys(keys)
        async with self._call():
            self._pages.ledger.index.hint(keys, regard)

    async def clear(self) -> int:
        async with self._call() as workers:
            return await self._in_thread(workers, self._pages.clear)

    async def resize(self, capacity_bytes: int) -> None:
        """See ``Store``. Other processes at the folder keep the limit that they were given."""
        async with self._call() as workers:
            await self._in_thread(workers, lambda: self._pages.ledger.resize(capacity_bytes))
            self._capacity_bytes = capacity_bytes

    # ---- for tools ---------------------------------------------------------------------------------------------

    @property
    def pages(self) -> DiskPages:
        """The blocking half."""
        return self._pages

    async def run(self, tool: Callable[[DiskPages], T], stop: threading.Event | None = None) -> T:
        """Run something that walks the pages (see ``disk_tools``) in one of the store's threads.

        Args:
            stop: set when the call is cancelled; it returns only when the tool has ended.
        """
        async with self._call() as workers:
            return await self._in_thread(workers, lambda: tool(self._pages), stop)

    # ---- helpers ---------------------------------------------------------------------------------------------

    def _make_pages(self, root: str) -> DiskPages:
        ledger = PageLedger(
            root,
            self._capacity_bytes,
            durable=self._durable and not self._is_auto,
            min_free_bytes=self._min_free_bytes,
            counters=self._counters,
            is_private=self._is_auto,
            direct=self._direct,
        )
        return DiskPages(ledger, self._counters)

    def _load(self) -> None:
        root = tempfile.mkdtemp(prefix="hicache-") if self._is_auto else self._path
        pages = self._make_pages(root)
        try:
            pages.ledger.load()
        except BaseException:
            if self._is_auto:
                shutil.rmtree(root, ignore_errors=True)
            raise
        self._path, self._pages = root, pages

    def _unload(self) -> None:
        self._pages.ledger.close()
        if self._is_auto:
            shutil.rmtree(self._path, ignore_errors=True)
            self._pages = self._make_pages(self._path)

    def _num_shares(self, sizes: Sequence[int], *, writes: bool) -> int:
        """How many threads a batch of such pages takes."""
        most = min(self._num_threads, len(sizes))
        if self._direct and (writes or not self._pages.ledger.files.has_depth):
            return most  # here depth comes from threads alone
        return min(most, 1 + sum(sizes) // max(1, len(sizes)) // SHARE_PAGE_BYTES)

    @staticmethod
    async def _in_thread(workers: Workers, call: Callable[[], T], stop: threading.Event | None = None) -> T:
        """One hop."""
        results: list[T] = []
        await workers.run([lambda: results.append(call())], stop or threading.Event())
        return results[0]

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
