"""Calls to a store, each with a time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from hicache.errors import CorruptPayloadError, TierTimeoutError, TierUnavailableError
from hicache.transfer.jobs import Failure

T = TypeVar("T")

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
