"""Puts pages into the store: one consumer, in the order of submission.

::

    queue    S1 S1 S1 | S2 | S3 S3 S3 S3 | F4 | S5       (pages of stores, a forget or a hint)
    batches  [ S1 S1 S1 S2 S3 ] [ S3 S3 S3 ]  F4 [ S5 ]  (batch_pages = 5)

A batch takes consecutive pages over the bounds of tickets; a ticket ends with its first page that was
not put. A call that raises says nothing of single pages, so its tickets are then put one by one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hicache.radix.actions import Forget, Hint
from hicache.tiers.store import StoredPage
from hicache.transfer.jobs import Direction, Failure, JobBoard, StoreJob
from hicache.transfer.staging import Staging
from hicache.transfer.store_calls import failure_of
from hicache.transfer.store_port import Answers, StorePort
from hicache.types import PageKey, Regard

logger = logging.getLogger(__name__)

MAX_FORGET_PAGES = 1 << 20
"""Deletions queued beyond this are dropped: the store's own eviction will get there."""
MAX_HINT_PAGES = 1 << 20
"""Hints queued beyond this are dropped: they say in which order pages may go, and nothing else. One that pages are
plain (again) is dropped beyond twice as many, so that what they were told to be before it is taken back."""
NOTE_BATCH_PAGES = 1024
"""One call names so many pages to delete or to give a hint of, or all of one action."""
MAX_SINGLE_FAILURES = 2
"""After so many tickets in a row that fail on their own too, the rest of the batch is not tried."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Pages ``first .. last - 1`` of a ticket."""

    job: StoreJob
    first: int
    last: int


@dataclass(frozen=True, slots=True, eq=False)
class StagedSegment:
    """A segment's pages in staging, up to the first whose payload is not what its key says."""

    segment: Segment
    pages: list[StoredPage]

    @property
    def shortfall(self) -> Failure | None:
        """Why not all pages were staged."""
        wanted = self.segment.last - self.segment.first
        return Failure.STAMP if len(self.pages) < wanted else None


Note = Forget | Hint
"""What is said of pages by name alone, without a ticket."""


class StoreWriter:
    """The FIFO of stores, deletions and hints.

    *Thread*: one event loop.
    """

    def __init__(self, port: StorePort, staging: Staging, board: JobBoard) -> None:
        self._port = port
        self._calls = port.calls
        self._counters = port.counters
        self._staging = staging
        self._board = board
        self._queue: deque[StoreJob | Note] = deque()
        self._deletions: Counter[PageKey] = Counter()  # queued and under way
        self._hint_pages = 0
        self._current: StoreJob | None = None
        self._next_page = 0
        self._wakeup = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._has_deleted = asyncio.Event()
        self._has_deleted.set()

    @property
    def num_deleting(self) -> int:
        """Pages whose deletion is queued or under way."""
        return len(self._deletions)

    def deleting(self, keys: Sequence[PageKey]) -> set[PageKey]:
        """Which of these the store still has only because their deletion waits for its turn."""
        return self._deletions.keys() & set(keys) if self._deletions else set()

    def submit(self, item: StoreJob | Note) -> None:
        """Queue pages to put, to delete, or to give the store a hint of."""
        if isinstance(item, Forget):
            if len(self._deletions) + len(item.keys) > MAX_FORGET_PAGES:
                self._counters.dropped_forget(len(item.keys))
                return
            self._deletions.update(item.keys)
            self._has_deleted.clear()
        elif isinstance(item, Hint):
            limit = MAX_HINT_PAGES * (1 + (item.regard is Regard.PLAIN))
            if self._hint_pages + len(item.keys) > limit:
                self._counters.hinted(0, dropped=len(item.keys))
                return
            self._hint_pages += len(item.keys)
        self._queue.append(item)
        self._idle.clear()
        self._wakeup.set()

    async def settled(self) -> None:
        """Wait until nothing is queued and nothing runs."""
        await self._idle.wait()

    async def deleted(self) -> None:
        """Wait until no deletion is queued or runs."""
        await self._has_deleted.wait()

    async def run(self) -> None:
        """Work the queue off for ever; ends only by cancellation."""
        while True:
            if not self._queue and self._current is None:
                self._idle.set()
                self._wakeup.clear()
                await self._wakeup.wait()
            elif self._current is None and isinstance(self._queue[0], Forget):
                await self._forget()
            elif self._current is None and isinstance(self._queue[0], Hint):
                await self._hint(self._queue[0].regard)
            else:
                segments = self._next_batch()
                if segments:
                    await self._put_safely(segments)

    # ---- batches ---------------------------------------------------------------------------------------------

    def _next_batch(self) -> list[Segment]:
        segments: list[Segment] = []
        room_pages, room_bytes = self._staging.batch_pages, self._staging.buffer_bytes
        while room_pages:
            job = self._current or self._begin_next()
            if job is None:
                break
            count = min(job.num_slots - self._next_page, room_pages, room_bytes // job.slot_bytes)
            if count == 0:
                break  # the next page does not fit in this batch
            segments.append(Segment(job, self._next_page, self._next_page + count))
            room_pages -= count
            room_bytes -= count * job.slot_bytes
            self._next_page += count
            self._current = None if self._next_page == job.num_slots else job
        return segments

    def _begin_next(self) -> StoreJob | None:
        while self._queue:
            head = self._queue[0]
            if isinstance(head, Note):
                return None
            self._queue.popleft()
            if self._board.begin(head):
                self._next_page = 0
                return head
        return None

    async def _put_safely(self, segments: list[Segment]) -> None:
        try:
            # A call may put pages of several tickets: it hangs under the first.
            with self._port.tracing.inside(segments[0].job.span):
                await self._put(segments)
        except Exception as error:
            # Not the store's fault but ours; the tickets end, the worker lives.
            logger.exception("a batch of stores could not be handled")
            for segment in segments:
                self._fail(segment, segment.job.progress, failure_of(error))

    async def _put(self, segments: list[Segment]) -> None:
        failure = await self._put_batch(segments)
        if failure is None:
            return
        num_failed = 0
        for segment in segments:
            hopeless = failure is Failure.TIMEOUT or num_failed >= MAX_SINGLE_FAILURES or len(segments) == 1
            alone = failure if hopeless else await self._put_batch([segment])
            num_failed = 0 if alone is None else num_failed + 1
            if alone is not None:
                self._fail(segment, segment.first, alone)

    async def _put_batch(self, segments: list[Segment]) -> Failure | None:
        """Put all pages in one call and report each segment; the failure, unreported, if it raised."""
        buffer = self._staging.take()
        offset = 0
        batch: list[StagedSegment] = []
        for segment in segments:
            places = segment.job.places[segment.first : segment.last]
            into = self._staging.pages(buffer, segment.job.component, len(places), offset=offset)
            into.copy_from_host(places)
            offset = into.end
            batch.append(StagedSegment(segment, self._checked_pages(segment, into.payloads)))
        pages = [page for part in batch for page in part.pages]
        answers: Answers | Failure = Answers([], 0.0)
        if pages:
            answers = await self._port.ask(Direction.STORE, self._port.store.put(pages), len(pages))
        if isinstance(answers, Failure):
            return answers
        self._staging.give_back(buffer)
        answered = iter(answers.of_pages)
        for part in batch:
            self._report(part, [next(answered) for _ in part.pages])
        return None

    def _checked_pages(self, segment: Segment, payloads: list[memoryview]) -> list[StoredPage]:
        action = segment.job.action
        pages = [
            StoredPage(action.keys[index], action.parents[index], action.component, payload)
            for index, payload in enumerate(payloads, segment.first)
        ]
        return pages[: self._port.num_good("store", pages)]

    def _report(self, part: StagedSegment, answers: list[bool]) -> None:
        segment = part.segment
        num_put = answers.index(False) if False in answers else len(answers)
        done_slots = segment.first + num_put
        self._board.arrived(segment.job, done_slots)
        if num_put < len(answers):
            self._fail(segment, done_slots, Failure.REFUSED)
        elif part.shortfall is not None:
            self._fail(segment, done_slots, part.shortfall)
        elif segment.last == segment.job.num_slots:
            self._board.finish(segment.job, done_slots, None)

    def _fail(self, segment: Segment, done_slots: int, failure: Failure) -> None:
        if self._current is segment.job:
            self._current = None
        self._board.finish(segment.job, done_slots, failure)

    # ---- deletions and hints -----------------------------------------------------------------------------------

    async def _forget(self) -> None:
        keys = self._take_notes(lambda note: isinstance(note, Forget))
        try:
            self._counters.forgot(await self._calls.run(self._port.store.delete(keys)))
        except Exception as error:  # noqa: BLE001  best effort: the store's own eviction gets there too
            self._counters.failed(failure_of(error))
            self._counters.dropped_forget(len(keys))
            self._counters.warn(failure_of(error), "a deletion", error)
        for key in keys:
            self._deletions[key] -= 1
            if not self._deletions[key]:
                del self._deletions[key]
        if not self._deletions:
            self._has_deleted.set()

    async def _hint(self, regard: Regard) -> None:
        keys = self._take_notes(lambda note: isinstance(note, Hint) and note.regard is regard)
        self._hint_pages -= len(keys)
        try:
            await self._calls.run(self._port.store.hint(keys, regard))
            self._counters.hinted(len(keys))
        except Exception as error:  # noqa: BLE001  a hint that is lost costs no more than its pages' place
            self._counters.failed(failure_of(error))
            self._counters.warn(failure_of(error), "a hint", error)

    def _take_notes(self, is_alike: Callable[[Note], bool]) -> list[PageKey]:
        """The keys of the notes of one kind that come next."""
        keys: list[PageKey] = []
        while self._queue and len(keys) < NOTE_BATCH_PAGES:
            note = self._queue[0]
            if not isinstance(note, Note) or not is_alike(note):
                break
            self._queue.popleft()
            keys += note.keys
        return keys
