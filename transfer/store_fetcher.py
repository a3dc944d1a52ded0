"""Gets pages from the store into host slots: a few fetches at a time, each in batches from its first page on."""

from __future__ import annotations

import asyncio
import logging
import time

import numpy as np

from hicache.errors import TierUnavailableError
from hicache.tiers.store import PageTarget, Store
from hicache.tracing import OFF, Tracing
from hicache.transfer.copy import PageCopier
from hicache.transfer.jobs import Direction, Failure, FetchJob, JobBoard
from hicache.transfer.layout import Layout
from hicache.transfer.stats import TransferCounters
from hicache.transfer.store_calls import OnPage, Staging, StoreCalls, failure_of, page_views, staged
from hicache.types import Tier

logger = logging.getLogger(__name__)


class StoreFetcher:
    """The queue of fetches and those who work it off.

    *Thread*: one event loop.
    """

    def __init__(
        self,
        store: Store,
        *,
        calls: StoreCalls,
        staging: Staging,
        layout: Layout,
        copier: PageCopier,
        board: JobBoard,
        counters: TransferCounters,
        batch_pages: int,
        on_page: OnPage | None,
        tracing: Tracing = OFF,
    ) -> None:
        self.store = store
        self._calls = calls
        self._staging = staging
        self._layout = layout
        self._copier = copier
        self._board = board
        self._counters = counters
        self._batch_pages = batch_pages
        self._on_page = on_page
        self._tracing = tracing
        self._queue: asyncio.Queue[FetchJob] = asyncio.Queue()

    def submit(self, job: FetchJob) -> None:
        """Queue a fetch."""
        self._queue.put_nowait(job)

    async def run(self) -> None:
        """Fetch one job after the other for ever; ends only by cancellation. Run as often as wanted."""
        while True:
            job = await self._queue.get()
            if not self._board.begin(job):
                continue
            try:
                with self._tracing.inside(job.span):
                    error = await self._fetch(job)
            except Exception as fault:
                # Not the store's fault but ours; the ticket ends, the worker lives.
                logger.exception("a fetch could not be handled")
                error = failure_of(fault)
            self._board.finish(job, job.progress, error)

    async def _fetch(self, job: FetchJob) -> Failure | None:
        step = max(1, min(self._batch_pages, self._staging.buffer_bytes // job.slot_bytes))
        while job.progress < job.num_slots:
            if job.is_cancelled:
                return Failure.CANCELLED
            error = await self._fetch_batch(job, min(job.progress + step, job.num_slots))
            if error is not None:
                return error
        return None

    async def _fetch_batch(self, job: FetchJob, last: int) -> Failure | None:
        """Get the pages up to ``last``; what stopped it short of that."""
        action, first = job.action, job.progress
        buffer = self._staging.take()
        view = self._layout.view(job.component, Tier.HOST)
        arrived = staged(buffer, 0, last - first, view)
        payloads = page_views(arrived)
        targets = [
            PageTarget(key, job.component, payload)
            for key, payload in zip(action.keys[first:last], payloads, strict=True)
        ]
        began = time.perf_counter()
        try:
            answers = await self._calls.run(self.store.get(targets))
            if len(answers) != len(targets):
                raise TierUnavailableError(f"the store answered {len(answers)} of {len(targets)} gets")
        except Exception as error:  # noqa: BLE001  whatever a store raises ends as a failed ticket
            self._counters.warn(failure_of(error), "a get", error)
            return failure_of(error)
        finally:
            seconds = time.perf_counter() - began
            self._counters.spent(Direction.FETCH, seconds)
        num_read = answers.index(False) if False in answers else len(answers)
        if num_read == len(answers):
            self._counters.measured(Direction.FETCH, job.component, num_read * job.slot_bytes, seconds)
        num_good = self._num_checked(targets[:num_read])
        with job.writing:
            if not self._board.is_open(job):
                return Failure.CLOSED
            good = np.arange(num_good, dtype=np.int64)
            self._copier.copy(arrived, good, view, job.places[first : first + num_good])
            self._board.arrived(job, first + num_good)
        self._staging.give_back(buffer)
        if num_good < num_read:
            return Failure.STAMP
        return Failure.MISS if num_read < len(answers) else None

    def _num_checked(self, targets: list[PageTarget]) -> int:
        """How many leading pages pass ``on_page``."""
        if self._on_page is None:
            return len(targets)
        for index, target in enumerate(targets):
            try:
                self._on_page("fetch", target.component, target.key, target.payload)
            except Exception as error:  # noqa: BLE001  the check's verdict, whatever its type
                self._counters.warn(Failure.STAMP, "the check of a fetched page", error)
                return index
        return len(targets)
