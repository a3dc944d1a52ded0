"""Gets pages from the store into host slots: a few fetches at a time, each in batches from its first page on."""

from __future__ import annotations

import asyncio
import logging

from hicache.tiers.store import PageTarget
from hicache.transfer.jobs import Direction, Failure, FetchJob, JobBoard
from hicache.transfer.staging import Staging
from hicache.transfer.store_calls import failure_of
from hicache.transfer.store_port import StorePort

logger = logging.getLogger(__name__)


class StoreFetcher:
    """The queue of fetches and those who work it off.

    *Thread*: one event loop.
    """

    def __init__(self, port: StorePort, staging: Staging, board: JobBoard) -> None:
        self._port = port
        self._staging = staging
        self._board = board
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
                with self._port.tracing.inside(job.span):
                    error = await self._fetch(job)
            except Exception as fault:
                # Not the store's fault but ours; the ticket ends, the worker lives.
                logger.exception("a fetch could not be handled")
                error = failure_of(fault)
            self._board.finish(job, job.progress, error)

    async def _fetch(self, job: FetchJob) -> Failure | None:
        step = max(1, min(self._staging.batch_pages, self._staging.buffer_bytes // job.slot_bytes))
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
        arrived = self._staging.pages(buffer, job.component, last - first)
        targets = [
            PageTarget(key, job.component, payload)
            for key, payload in zip(action.keys[first:last], arrived.payloads, strict=True)
        ]
        answers = await self._port.ask(Direction.FETCH, self._port.store.get(targets), len(targets))
        if isinstance(answers, Failure):
            return answers
        num_read = answers.num_leading
        if num_read == len(targets):
            num_bytes = num_read * job.slot_bytes
            self._port.counters.measured(Direction.FETCH, job.component, num_bytes, answers.seconds)
        num_good = self._port.num_good("fetch", targets[:num_read])
        with job.writing:
            if not self._board.is_open(job):
                return Failure.CLOSED
            arrived.copy_to_host(job.places[first : first + num_good])
            self._board.arrived(job, first + num_good)
        self._staging.give_back(buffer)
        if num_good < num_read:
            return Failure.STAMP
        return Failure.MISS if num_read < len(targets) else None
