"""Copies between L1 and L2, and within L1, as jobs on streams."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from hicache.errors import ProtocolError, TierUnavailableError
from hicache.radix.actions import Copy, Slots
from hicache.transfer.copy import PageCopier, check_pairs
from hicache.transfer.jobs import Direction, Failure, Job, JobBoard
from hicache.transfer.layers import LayeredCopy, submit_layers
from hicache.transfer.layout import Layout, SlotView
from hicache.transfer.stats import TransferCounters
from hicache.transfer.streams import Stream, StreamClosedError, Streams
from hicache.types import Tier

_DIRECTIONS = {
    (Tier.DEVICE, Tier.HOST): Direction.TO_HOST,
    (Tier.HOST, Tier.DEVICE): Direction.TO_DEVICE,
    (Tier.DEVICE, Tier.DEVICE): Direction.LOCAL,
}


class CopyWork:
    """A ``Copy`` as a stream runs it."""

    def __init__(
        self,
        copier: PageCopier,
        source: tuple[SlotView, Slots],
        target: tuple[SlotView, Slots],
        *,
        direction: Direction,
        component: str,
        counters: TransferCounters,
    ) -> None:
        self._copier = copier
        self._source, self._source_slots = source  # places: of one slot each along the first dimension
        self._target, self._target_slots = target
        self._direction = direction
        self._component = component
        self._counters = counters

    @property
    def num_slots(self) -> int:
        return len(self._source_slots)

    def run(self, first: int, last: int) -> None:
        began = time.perf_counter()
        self._copier.copy(
            self._source, self._source_slots[first:last], self._target, self._target_slots[first:last]
        )
        if not (self._source.payload.is_cuda or self._target.payload.is_cuda):  # else it has only begun
            self._note(last - first, time.perf_counter() - began)

    def took(self, seconds: float) -> None:
        self._note(self.num_slots, seconds)

    def _note(self, num_slots: int, seconds: float) -> None:
        self._counters.spent(self._direction, seconds)
        num_bytes = num_slots * self._source.slot_bytes
        self._counters.measured(self._direction, self._component, num_bytes, seconds)


class CopyJobs:
    """Begins what a ``Copy`` asks for, and ends its job when the stream has done it.

    Args:
        open_job: makes a job's ticket outstanding; False if it is done already.
    """

    def __init__(
        self,
        layout: Layout,
        streams: Streams,
        copier: PageCopier,
        board: JobBoard,
        counters: TransferCounters,
        open_job: Callable[[Job], bool],
    ) -> None:
        self._layout = layout
        self._streams = streams
        self._copier = copier
        self._board = board
        self._counters = counters
        self._open_job = open_job

    def submit(self, action: Copy) -> None:
        job, source, target = self._prepare(action)

        def on_done(done_slots: int, error: BaseException | None) -> None:
            self._copied(job, done_slots, error)

        # With no lock held: a stepped or closed stream may end the copy right here. A stream that is closed
        # meanwhile ends it as well.
        if self._open_job(job):
            self._stream(job.kind).submit(self._work(job, source, target), on_done)

    def submit_by_layer(self, copies: Sequence[Copy]) -> None:
        prepared = [self._prepare(copy, by_layer=True) for copy in copies]
        begun = [LayeredCopy(*each) for each in prepared if self._open_job(each[0])]
        if begun:
            submit_layers(
                self._stream(begun[0].job.kind),
                begun,
                self._work,
                self._board.layer_arrived,
                self._copied,
            )

    def _prepare(
        self, action: Copy, *, by_layer: bool = False
    ) -> tuple[Job, tuple[SlotView, Slots], tuple[SlotView, Slots]]:
        """A copy's job, not open yet, and its two ends."""
        direction = _DIRECTIONS.get((action.source, action.target))
        if direction is None:
            raise ProtocolError(f"no copy leads from {action.source.name} to {action.target.name}")
        source = self._layout.view(action.component, action.source)
        target = self._layout.view(action.component, action.target)
        source_slots = np.ascontiguousarray(action.source_slots)
        target_slots = np.ascontiguousarray(action.target_slots)
        check_pairs(source, source_slots, target, target_slots)
        source_places, target_places = source.locate(source_slots), target.place(target_slots)
        job = Job(action.ticket, direction, action.component, action.num_slots, source.slot_bytes)
        if by_layer:
            job.num_layers = source.separable_layers
        return job, (source, source_places), (target, target_places)

    def _work(self, job: Job, source: tuple[SlotView, Slots], target: tuple[SlotView, Slots]) -> CopyWork:
        return CopyWork(
            self._copier,
            source,
            target,
            direction=job.kind,
            component=job.component,
            counters=self._counters,
        )

    def _stream(self, direction: Direction) -> Stream:
        match direction:
            case Direction.TO_HOST:
                return self._streams.to_host
            case Direction.TO_DEVICE:
                return self._streams.to_device
        return self._streams.local

    def _copied(self, job: Job, done_slots: int, error: BaseException | None) -> None:
        if error is None and done_slots == job.num_slots:
            self._board.finish(job, done_slots, None)
            return
        failure = Failure.CLOSED if isinstance(error, StreamClosedError) else Failure.COPY
        if failure is Failure.COPY:
            cause = error or TierUnavailableError(f"it stopped after {done_slots} of {job.num_slots} slots")
            self._counters.warn(failure, f"a copy {job.kind}", cause)
        self._board.finish(job, min(done_slots, job.num_slots - 1), failure)
