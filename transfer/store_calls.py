"""Calls to a store, each with a time limit, and the private buffers its pages pass through.

A store reads and writes *staging* memory, never host slots. So a call that was given up, however long
its threads go on, can neither fill a slot that belongs to somebody else by now nor store what a new
owner wrote there. The price is one memcpy. Memory of a call that did not end well is left to it; only
a clean end gives it back for reuse. Staging is allocated, never waited for, so no two transfers can
block each other over it; the number of calls under way bounds it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import torch

from hicache.errors import CorruptPayloadError, TierTimeoutError, TierUnavailableError
from hicache.transfer.jobs import Failure
from hicache.transfer.layout import SlotView
from hicache.types import PageKey

T = TypeVar("T")
OnPage = Callable[[str, str, PageKey, memoryview], None]

STAGING_BYTES = 16 << 20
"""A batch holds at most so many bytes, but always one page."""
ALIGNMENT = 64
CANCEL_GRACE_S = 1.0
"""How long a call that was cancelled may take to end."""
MAX_STUCK_CALLS = 8
"""With so many calls that ignored their cancellation the store gets no further one."""


def failure_of(error: BaseException) -> Failure:
    """The kind under which an exception of a store is counted."""
    match error:
        case TierTimeoutError() | TimeoutError():
            return Failure.TIMEOUT
        case TierUnavailableError():
            return Failure.UNAVAILABLE
        case CorruptPayloadError():
            return Failure.CORRUPT
    return Failure.RAISED


class StoreCalls:
    """Bounds every call to a store.

    Args:
        timeout_s: limit of a call that names none.

    *Thread*: one event loop.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._stuck: set[asyncio.Task[Any]] = set()  # Any: results nobody will read

    @property
    def num_stuck(self) -> int:
        return len(self._stuck)

    async def run(self, call: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:  # Any: see above
        """Await the call for at most so long.

        *Raises*: what the call raises; ``TierTimeoutError`` when it was given up;
        ``TierUnavailableError`` when too many calls are stuck already.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        if len(self._stuck) >= MAX_STUCK_CALLS:
            call.close()
            raise TierUnavailableError(f"{len(self._stuck)} calls to the store never ended; it gets no more")
        task = asyncio.ensure_future(call)
        try:
            await asyncio.wait((task,), timeout=limit_s)
        except asyncio.CancelledError:
            await self._give_up(task)
            raise
        if not task.done():
            await self._give_up(task)
            raise TierTimeoutError(f"the store did not answer within {limit_s:g} s")
        if task.cancelled():
            raise TierUnavailableError("the store cancelled its own call")
        return task.result()

    async def _give_up(self, task: asyncio.Task[Any]) -> None:  # Any: see above
        task.cancel()
        self._stuck.add(task)
        task.add_done_callback(self._ended)
        await asyncio.wait((task,), timeout=CANCEL_GRACE_S)

    def _ended(self, task: asyncio.Task[Any]) -> None:  # Any: see above
        self._stuck.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as seen


class Staging:
    """Buffers of one size for batches of pages.

    Args:
        slot_bytes: the largest slot.
        batch_pages: the most pages in a batch.
        max_spare: how many buffers are kept for reuse.

    *Thread*: one event loop.
    """

    def __init__(self, *, slot_bytes: int, batch_pages: int, max_spare: int) -> None:
        self.buffer_bytes = max(min(STAGING_BYTES, batch_pages * slot_bytes), slot_bytes)
        self._alloc_bytes = self.buffer_bytes + ALIGNMENT * batch_pages
        self._max_spare = max_spare
        self._spare: list[torch.Tensor] = []

    def take(self) -> torch.Tensor:
        """A buffer nobody else uses: uint8, ``buffer_bytes`` and room to align each page."""
        return self._spare.pop() if self._spare else torch.empty(self._alloc_bytes, dtype=torch.uint8)

    def give_back(self, buffer: torch.Tensor) -> None:
        """*Caller guarantees*: the call that used it ended without an exception."""
        if len(self._spare) < self._max_spare:
            self._spare.append(buffer)


def staged(buffer: torch.Tensor, offset: int, num_slots: int, like: SlotView) -> SlotView:
    """``num_slots`` slots of the same shape as another view's, in a buffer from ``offset`` on."""
    part = buffer[offset : offset + num_slots * like.slot_bytes]
    payload = part.view(like.payload.dtype).view(num_slots, like.num_layers, -1)
    return SlotView("staging", payload, like.slot_bytes)


def page_views(view: SlotView) -> list[memoryview]:
    """Each slot's bytes. *Caller guarantees*: page first."""
    return [memoryview(row) for row in view.rows().numpy()]
