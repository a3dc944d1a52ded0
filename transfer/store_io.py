"""The store's side of the engine: its loop, its queues, and calls that wait for an answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from hicache.clock import Clock
from hicache.errors import ConfigError, TierError, TierUnavailableError
from hicache.tiers.store import Store
from hicache.tracing import OFF, Tracing
from hicache.transfer.copy import PageCopier
from hicache.transfer.io_loop import IoLoop
from hicache.transfer.jobs import Failure, FetchJob, JobBoard, StoreJob
from hicache.transfer.layout import Layout
from hicache.transfer.staging import Staging
from hicache.transfer.stats import PROBE, TransferCounters
from hicache.transfer.store_calls import CANCEL_GRACE_S, StoreCalls, failure_of
from hicache.transfer.store_fetcher import StoreFetcher
from hicache.transfer.store_port import OnPage, StorePort
from hicache.transfer.store_writer import Note, StoreWriter
from hicache.types import PageKey

logger = logging.getLogger(__name__)
T = TypeVar("T")

PUT_PAGES, GET_PAGES = 256, 64
"""The most pages in a call. A disk writes on within a batch while the next pages are admitted and the last ones
made visible; between two batches it waits.
"""
FETCH_CONCURRENCY = 4
ANSWER_MARGIN_S = 1.0
"""A blocked caller gives up this much after the call itself should have been given up."""

Presence = dict[str, list[bool]]


class StoreIO:
    """Runs one store on a loop of its own.

    Args:
        timeout_s: limit of each call.
        batch_pages: the most pages in a call; default: ``PUT_PAGES`` and ``GET_PAGES``.

    *Thread*: any. Only ``call`` and ``exists`` wait, with a bound.
    """

    def __init__(
        self,
        store: Store,
        *,
        layout: Layout,
        copier: PageCopier,
        board: JobBoard,
        counters: TransferCounters,
        clock: Clock,
        timeout_s: float,
        batch_pages: int | None,
        on_page: OnPage | None,
        tracing: Tracing = OFF,
    ) -> None:
        self._calls = StoreCalls(timeout_s)
        self._port = StorePort(store, calls=self._calls, counters=counters, on_page=on_page, tracing=tracing)
        put_pages, get_pages = (batch_pages, batch_pages) if batch_pages else (PUT_PAGES, GET_PAGES)
        put_staging = Staging(layout, copier, batch_pages=put_pages, max_spare=1)
        get_staging = Staging(layout, copier, batch_pages=get_pages, max_spare=FETCH_CONCURRENCY)
        self._counters = counters
        self._writer = StoreWriter(self._port, put_staging, board)
        self._fetcher = StoreFetcher(self._port, get_staging, board)
        self._workers: list[asyncio.Task[None]] = []
        self._loop = IoLoop(clock, name="hicache-store")
        self._loop.call_soon(self._start_workers)

    @property
    def num_stuck(self) -> int:
        return self._calls.num_stuck

    def submit(self, work: StoreJob | FetchJob | Note) -> None:
        """Queue it; never blocks."""
        if isinstance(work, FetchJob):
            self._loop.call_soon(lambda: self._fetcher.submit(work))
        else:
            self._loop.call_soon(lambda: self._writer.submit(work))

    def call(self, call: Callable[[Store], Coroutine[Any, Any, T]], timeout_s: float | None) -> T:
        """Run another call of the store and wait for it.

        *Raises*: ``TierError``, whatever the store raised; ``ConfigError`` as it came.
        """
        limit_s = self._calls.timeout_s if timeout_s is None else timeout_s
        try:
            return self._loop.run(
                self._calls.run(call(self._port.store), limit_s), limit_s + CANCEL_GRACE_S + ANSWER_MARGIN_S
            )
        except (TierError, ConfigError) as error:
            self._counters.failed(failure_of(error))
            raise
        except Exception as error:
            self._counters.failed(failure_of(error))
            raise TierUnavailableError(f"the store failed: {type(error).__name__}: {error}") from error

    def exists(self, keys: Mapping[str, Sequence[PageKey]], timeout_s: float) -> Presence | None:
        """Which pages the store has; None when it could not say."""
        limit_s = min(timeout_s, self._calls.timeout_s)
        try:
            return self._loop.run(self._ask(keys, limit_s), limit_s + CANCEL_GRACE_S + ANSWER_MARGIN_S)
        except TierError as error:
            self._counters.failed(failure_of(error))
            return None

    async def aexists(self, keys: Mapping[str, Sequence[PageKey]], timeout_s: float) -> Presence | None:
        """The same for a caller with a loop of its own."""
        limit_s = min(timeout_s, self._calls.timeout_s)
        try:
            answer = self._loop.submit(self._ask(keys, limit_s))
        except TierError as error:
            self._counters.failed(failure_of(error))
            return None
        return await asyncio.wrap_future(answer)

    def exchange(self, store: Store) -> None:
        """Have the calls that begin from now on go to another store."""

        def exchange() -> None:
            self._port.store = store

        self._loop.call_soon(exchange)

    def settle(self, timeout_s: float) -> bool:
        """Wait until all queued deletions and stores were worked off."""
        try:
            self._loop.run(self._writer.settled(), timeout_s)
        except TierError:
            return False
        return True

    def undeleted(self, timeout_s: float) -> int:
        """Wait until all queued deletions were worked off; how many pages are still to be deleted after that time."""
        try:
            self._loop.run(self._writer.deleted(), timeout_s)
        except TierError:
            return self._writer.num_deleting
        return 0

    def wake(self) -> None:
        """Look at the clock again."""
        self._loop.wake()

    def close(self) -> None:
        """Cancel what runs, close the store, end the loop; all bounded. Idempotent."""
        try:
            self._loop.run(self._stop_workers(), 2 * CANCEL_GRACE_S + ANSWER_MARGIN_S)
            self.call(lambda store: store.close(), None)
        except TierError as error:
            logger.warning("the store was not closed cleanly: %s", error)
        self._loop.close()

    def _start_workers(self) -> None:
        loop = asyncio.get_running_loop()
        self._workers = [loop.create_task(self._writer.run())]
        self._workers += [loop.create_task(self._fetcher.run()) for _ in range(FETCH_CONCURRENCY)]

    async def _stop_workers(self) -> None:
        for worker in self._workers:
            worker.cancel()
        if self._workers:
            await asyncio.wait(self._workers, timeout=2 * CANCEL_GRACE_S)

    async def _ask(self, keys: Mapping[str, Sequence[PageKey]], timeout_s: float) -> Presence | None:
        flat = [key for of_component in keys.values() for key in of_component]
        if not flat:
            return {component: [] for component in keys}
        leaving = self._writer.deleting(flat)
        answers = await self._port.ask(PROBE, self._port.store.exists(flat), len(flat), timeout_s)
        if isinstance(answers, Failure):
            self._counters.failed(answers)
            return None
        there = answers.of_pages
        if leaving:
            there = [is_there and key not in leaving for key, is_there in zip(flat, there, strict=True)]
        self._counters.probed(len(flat), there.count(False))
        answered = iter(there)
        return {component: [next(answered) for _ in of_component] for component, of_component in keys.items()}
