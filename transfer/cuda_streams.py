"""Copies on a CUDA device's own time line: what waits for what, with no wait for the whole device.

::

    compute    write K,V | released ......................... | layer 0 | layer 1
                   |event     |event                            ^ fence   ^ fence
    to host        +-> copy   |                                 |         |
    to device                 +-> copy layer 0 ----------------+          |
                                  copy layer 1 ---------------------------+

- A copy down, or within L1, begins after the compute that wrote its source: ``ComputeOrder.wrote``.
- A copy up begins after the compute that still read its target slots for an earlier request: ``ended``.
- Compute goes on after the layer that it reads: the copy's fence.
- A completion is reported when the copy's event has passed, so slots are given away only then.

*Never run on a device so far: tested with a stand-in for ``torch.cuda`` that records the order of calls.*
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from hicache.transfer.streams import (
    JOIN_TIMEOUT_S,
    Fence,
    OnDone,
    SlotWork,
    StreamClosedError,
    Streams,
    TimedWork,
    call_on_done,
)

logger = logging.getLogger(__name__)

HIGH_PRIORITY = -1
"""CUDA's lower numbers go first; for what a request waits for."""
Event = Any  # of torch.cuda, or a stand-in for it
Cuda = Any  # torch.cuda, or a stand-in: Stream, Event, current_stream, stream


class ComputeOrder:
    """What the engine's own streams have done up to now.

    Args:
        device: whose streams.
        cuda: ``torch.cuda``.

    *Thread*: any; each call is about the calling thread's current stream. Nothing blocks.
    """

    def __init__(self, device: torch.device, cuda: Cuda = torch.cuda) -> None:
        self._device = device
        self._cuda = cuda
        self._lock = threading.Lock()
        self._wrote: dict[int, Event] = {}
        self._ended: dict[int, Event] = {}

    def wrote(self) -> None:
        """Payload was published: copies that read it come after what the stream has been given so far."""
        self._note(self._wrote)

    def ended(self) -> None:
        """A request gave its slots back: who writes them next comes after what still reads them."""
        self._note(self._wrote, self._ended)

    def begin(self) -> None:
        """A request got slots: its stream waits for the other streams' readers of these."""
        current = self._cuda.current_stream(self._device)
        with self._lock:
            others = [event for stream, event in self._ended.items() if stream != current.cuda_stream]
        for event in others:
            current.wait_event(event)

    def written(self) -> tuple[Event, ...]:
        """What copies out of L1 wait for; one event for each compute stream."""
        with self._lock:
            return tuple(self._wrote.values())

    def released(self) -> tuple[Event, ...]:
        """What copies into L1 wait for."""
        with self._lock:
            return tuple(self._ended.values())

    def _note(self, *kinds: dict[int, Event]) -> None:
        try:
            current = self._cuda.current_stream(self._device)
            event = self._cuda.Event()
            event.record(current)
        except RuntimeError:  # the device is lost: its copies will say so, a request that ends need not
            logger.exception("no event can be recorded on %s", self._device)
            return
        with self._lock:
            for events in kinds:
                events[current.cuda_stream] = event  # the stream's latest stands for all before it


@dataclass(slots=True, eq=False)
class _Begun:
    """One copy on its way through the stream's two threads."""

    work: SlotWork
    on_done: OnDone
    after: tuple[Event, ...]
    fence: CudaFence
    error: BaseException | None = None
    began_s: float = 0.0


@dataclass(slots=True, eq=False)
class CudaFence:
    """Stands in the stream right behind one copy."""

    cuda: Cuda
    device: torch.device
    event: Event
    is_recorded: threading.Event = field(default_factory=threading.Event)
    has_failed: bool = False

    def pass_on(self, timeout_s: float) -> bool:
        # Waiting for an event that was not recorded yet would be no wait at all.
        if not self.is_recorded.wait(timeout_s) or self.has_failed:
            return False
        self.cuda.current_stream(self.device).wait_event(self.event)
        return True


class CudaStream:
    """A CUDA stream, a thread that feeds it, and one that reports what has passed.

    Args:
        name: of the threads, for stack dumps.
        device: where.
        after: what a copy submitted now has to come after.
        priority: of the CUDA stream.
        cuda: ``torch.cuda``.

    *Thread*: submit and close from anywhere.
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        *,
        after: Callable[[], tuple[Event, ...]],
        priority: int = 0,
        cuda: Cuda = torch.cuda,
    ) -> None:
        self._cuda = cuda
        self._device = device
        self._after = after
        self._stream = cuda.Stream(device=device, priority=priority)
        self._to_begin: queue.SimpleQueue[_Begun | None] = queue.SimpleQueue()
        self._to_end: queue.SimpleQueue[_Begun | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_pending = 0
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._begin_all, name=f"hicache-{name}", daemon=True),
            threading.Thread(target=self._end_all, name=f"hicache-{name}-end", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_pending(self) -> int:
        return self._num_pending

    def submit(self, work: SlotWork, on_done: OnDone) -> Fence | None:
        fence = CudaFence(self._cuda, self._device, self._cuda.Event())
        begun = _Begun(work, on_done, self._after(), fence)
        with self._lock:
            self._num_pending += 1
            accepted = not self._is_closed
            if accepted:
                self._to_begin.put(begun)
        if not accepted:
            self._end(begun, StreamClosedError("the copy stream is closed"))
        return fence if accepted else None

    def close(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._to_begin.put(None)
        for thread in self._threads:
            if threading.current_thread() is not thread:
                thread.join(JOIN_TIMEOUT_S)
                if thread.is_alive():
                    logger.error("%s is still copying after %.0f s", thread.name, JOIN_TIMEOUT_S)

    def _begin_all(self) -> None:
        with self._cuda.stream(self._stream):
            while (begun := self._to_begin.get()) is not None:
                if self._is_closed:
                    begun.fence.has_failed = True
                    begun.error = StreamClosedError("the copy stream was closed")
                else:
                    self._begin(begun)
                begun.fence.is_recorded.set()
                self._to_end.put(begun)
        self._to_end.put(None)

    def _begin(self, begun: _Begun) -> None:
        try:
            for event in begun.after:
                self._stream.wait_event(event)
            begun.began_s = time.perf_counter()
            begun.work.run(0, begun.work.num_slots)
        except BaseException as error:  # noqa: BLE001  the thread outlives whatever a copy raises
            begun.error, begun.fence.has_failed = error, True
        try:
            # Also after an error: a part of the copy may be under way, and its slots must stay until it has passed.
            begun.fence.event.record(self._stream)
        except BaseException as error:  # noqa: BLE001  the device is lost
            begun.error, begun.fence.has_failed = begun.error or error, True

    def _end_all(self) -> None:
        free_since_s = 0.0
        while (begun := self._to_end.get()) is not None:
            error = begun.error
            if not isinstance(error, StreamClosedError):
                try:
                    begun.fence.event.synchronize()  # this copy alone; lets go of the interpreter lock
                except BaseException as fault:  # noqa: BLE001  an error of the device shows here
                    error = error or fault
                now_s = time.perf_counter()
                if error is None and isinstance(begun.work, TimedWork):
                    begun.work.took(now_s - max(begun.began_s, free_since_s))
                free_since_s = now_s
            self._end(begun, error)

    def _end(self, begun: _Begun, error: BaseException | None) -> None:
        with self._lock:
            self._num_pending -= 1
        call_on_done(begun.on_done, 0 if error else begun.work.num_slots, error)


def cuda_streams(device: torch.device, cuda: Cuda = torch.cuda) -> Streams:
    """One stream per direction; loads and claims, for which requests wait, go before copies down."""
    order = ComputeOrder(device, cuda)
    return Streams(
        CudaStream("to-host", device, after=order.written, cuda=cuda),
        CudaStream("to-device", device, after=order.released, priority=HIGH_PRIORITY, cuda=cuda),
        CudaStream("local", device, after=order.written, priority=HIGH_PRIORITY, cuda=cuda),
        order,
    )
