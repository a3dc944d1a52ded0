"""Where copies run: one queue and one worker per direction.

A copy is a ``SlotWork``: it can be run for any range of its slots, so that a stream may stop between
two slots and say how many leading ones are in place. Copies on one stream run in order; streams know
nothing of each other. A CUDA stream stands behind the same protocol (``hicache.transfer.cuda_streams``).
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch

from hicache.closing import Closing
from hicache.errors import TierUnavailableError

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 60.0
"""How long ``close`` waits for the copy under way."""

OnDone = Callable[[int, BaseException | None], None]
"""Told once how many leading slots are in place, and what went wrong if not all are."""


class StreamClosedError(TierUnavailableError):
    """The stream was closed before the copy began."""


class SlotWork(Protocol):
    """A copy of ``num_slots`` slots."""

    @property
    def num_slots(self) -> int: ...

    def run(self, first: int, last: int) -> None:
        """Copy slots ``first .. last - 1``; on return their bytes are in place, or, on a CUDA stream, the copy
        is in the current stream.

        *Thread*: one, the stream's. *Raises*: anything; then none of the range may be relied on.
        """
        ...


@runtime_checkable
class TimedWork(Protocol):
    """A copy that wants to know how long it took where ``run`` only begins it."""

    def took(self, seconds: float) -> None:
        """From when the device could begin it until it was done."""
        ...


class Fence(Protocol):
    """A copy's place on a device's own time line."""

    def pass_on(self, timeout_s: float) -> bool:
        """Have what the caller's device stream does from now on come after the copy.

        Does not wait for the copy itself. False, bounded, if it was not begun in time or cannot be; then
        only ``on_done`` tells.
        """
        ...


class Stream(Protocol):
    """Runs copies in the order of submission."""

    def submit(self, work: SlotWork, on_done: OnDone) -> Fence | None:
        """Queue a copy. Never blocks, never raises: on a closed stream the copy ends at once with
        ``StreamClosedError``.

        Returns:
            The copy's fence where the device keeps the order; None where only ``on_done`` tells.

        *Implementation must*: call ``on_done`` exactly once for each copy, not before its bytes are
        in place, and survive whatever work and ``on_done`` raise.
        """
        ...

    @property
    def num_pending(self) -> int:
        """Copies whose ``on_done`` was not called yet."""
        ...

    def close(self) -> None:
        """Finish the copy under way, end the others with ``StreamClosedError``. Idempotent."""
        ...


class CpuStream(Closing):
    """A stream with one worker thread.

    Args:
        name: of the thread, for stack dumps.

    *Thread*: submit and close from anywhere; ``on_done`` runs on the worker, or on the closing thread
    for copies that never began.
    """

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[tuple[SlotWork, OnDone] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_pending = 0
        self._is_closed = False
        self._worker = threading.Thread(target=self._run, name=f"hicache-{name}", daemon=True)
        self._worker.start()

    @property
    def num_pending(self) -> int:
        return self._num_pending

    def submit(self, work: SlotWork, on_done: OnDone) -> Fence | None:
        with self._lock:
            self._num_pending += 1
            accepted = not self._is_closed
            if accepted:
                self._queue.put((work, on_done))
        if not accepted:
            self._end(on_done, 0, StreamClosedError("the copy stream is closed"))
        return None

    def close(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._queue.put(None)
        if threading.current_thread() is not self._worker:
            self._worker.join(JOIN_TIMEOUT_S)
            if self._worker.is_alive():
                logger.error("%s is still copying after %.0f s", self._worker.name, JOIN_TIMEOUT_S)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, on_done = item
            if self._is_closed:
                self._end(on_done, 0, StreamClosedError("the copy stream was closed"))
                continue
            try:
                work.run(0, work.num_slots)
            except BaseException as error:  # noqa: BLE001  the worker outlives whatever a copy raises
                self._end(on_done, 0, error)
            else:
                self._end(on_done, work.num_slots, None)

    def _end(self, on_done: OnDone, done_slots: int, error: BaseException | None) -> None:
        with self._lock:
            self._num_pending -= 1
        call_on_done(on_done, done_slots, error)


def call_on_done(on_done: OnDone, done_slots: int, error: BaseException | None) -> None:
    """Call it; a fault of its own is logged, so that no worker dies of it."""
    try:
        on_done(done_slots, error)
    except Exception:
        logger.exception("the end of a copy could not be reported")


class Order(Protocol):
    """Tells copies where the engine's own work on the device stands; see ``hicache.transfer.cuda_streams``."""

    def wrote(self) -> None:
        """The calling thread has published payload."""
        ...

    def ended(self) -> None:
        """The calling thread has given slots back."""
        ...

    def begin(self) -> None:
        """The calling thread has got slots."""
        ...


class HostOrder:
    """On the CPU what has been computed is there, and what was read has been read."""

    def wrote(self) -> None:
        pass

    def ended(self) -> None:
        pass

    def begin(self) -> None:
        pass


@dataclass(frozen=True, slots=True, eq=False)
class Streams:
    """One stream per direction.

    Args:
        to_host: L1 to L2.
        to_device: L2 to L1.
        local: within L1 (claims), so that no claim waits behind a load.
        compute: where the engine's work stands.
    """

    to_host: Stream
    to_device: Stream
    local: Stream
    compute: Order = field(default_factory=HostOrder)

    @classmethod
    def on(cls, device: torch.device) -> Streams:
        """What suits the device."""
        if device.type != "cuda":
            return cls.on_cpu()
        from hicache.transfer.cuda_streams import cuda_streams

        return cuda_streams(device)

    @classmethod
    def on_cpu(cls) -> Streams:
        """Three worker threads."""
        return cls(CpuStream("to-host"), CpuStream("to-device"), CpuStream("local"))

    @property
    def num_pending(self) -> int:
        return self.to_host.num_pending + self.to_device.num_pending + self.local.num_pending

    def close(self) -> None:
        for stream in (self.to_host, self.to_device, self.local):
            stream.close()
