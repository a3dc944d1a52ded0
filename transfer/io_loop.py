"""One asyncio loop on a thread of its own: where all calls to a store run."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, TypeVarTuple

from hicache.clock import Clock, MonotonicClock
from hicache.closing import Closing
from hicache.errors import ProtocolError, TierTimeoutError, TierUnavailableError
from hicache.threads import DaemonExecutor

logger = logging.getLogger(__name__)
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

MAX_LOOK_UPS = 8
"""Names that are looked up at once; one whose server hangs takes a thread."""
CLOSE_GRACE_S = 5.0
"""How long ``close`` waits for cancelled tasks to end, and then for the thread."""


def deadline_time(clock: Clock) -> Callable[[], float]:
    """Seconds for deadlines: the clock's, and real time too where a test owns the clock.

    Advancing a manual clock makes deadlines pass at once; leaving it alone still bounds every wait.
    """
    if isinstance(clock, MonotonicClock):
        return clock.now_s
    start_s = clock.now_s()
    return lambda: time.monotonic() + clock.now_s() - start_s


class _Loop(asyncio.SelectorEventLoop):
    """An event loop whose timers follow ``deadline_time``, and whose names are looked up until the process has ended.

    asyncio's own threads, which look names up, end before what is registered ``atexit`` is called; and it takes no others
    for them (``set_default_executor``).
    """

    def __init__(self, now_s: Callable[[], float], name: str) -> None:
        super().__init__()
        self._now_s = now_s
        self._threads = DaemonExecutor(MAX_LOOK_UPS, name=f"{name}-names")

    def run_in_executor(
        self, executor: concurrent.futures.Executor | None, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        return super().run_in_executor(self._threads if executor is None else executor, func, *args)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        super().close()

    def time(self) -> float:
        return self._now_s()


class IoLoop(Closing):
    """Runs coroutines for callers that have no loop.

    Args:
        clock: drives the loop's timers; after advancing a manual one call ``wake``.
        name: of the thread.

    *Thread*: any, but ``run`` and ``close`` not from the loop itself. What a coroutine raises ends up
    in its future and nowhere else.
    """

    def __init__(self, clock: Clock | None = None, *, name: str = "hicache-io") -> None:
        self._loop = _Loop(deadline_time(clock or MonotonicClock()), name)
        self._loop.set_exception_handler(_log_stray)
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:  # Any: what it awaits
        """Start a coroutine. Cancelling the future cancels it.

        *Raises*: ``TierUnavailableError`` when closed; the coroutine never starts then.
        """
        with self._lock:
            if not self._is_closed:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise TierUnavailableError("the store's loop is closed")

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:  # Any: what it awaits
        """Run a coroutine and wait for its result.

        *Raises*: what the coroutine raises; ``TierTimeoutError`` when it has not ended in time (it is
        cancelled then, without waiting for its end).
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise ProtocolError("waiting for the store's loop from the loop itself would never end")
        future = self.submit(work)
        done, _ = concurrent.futures.wait((future,), timeout_s)
        if not done:
            future.cancel()
            raise TierTimeoutError(f"no answer within {timeout_s:g} s")
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise TierUnavailableError("the call was cancelled") from None

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Call it on the loop's thread; forgotten when the loop is closed."""
        with self._lock:
            if not self._is_closed:
                self._loop.call_soon_threadsafe(callback)

    def wake(self) -> None:
        """Look at the clock again."""
        self.call_soon(lambda: None)

    def close(self) -> None:
        """Cancel what runs, wait for its end, stop the thread; all bounded. Idempotent."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop)
        if threading.current_thread() is self._thread:
            return
        self._thread.join(2 * CLOSE_GRACE_S)
        if self._thread.is_alive():
            logger.error("%s is blocked by a store that does not yield", self._thread.name)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            asyncio.set_event_loop(None)
            self._loop.close()

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        try:
            if tasks:
                await asyncio.wait(tasks, timeout=CLOSE_GRACE_S)
            await self._loop.shutdown_asyncgens()
        finally:
            self._loop.stop()


def _log_stray(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:  # Any: asyncio's own
    logger.debug("on the store's loop: %s", context.get("message"), exc_info=context.get("exception"))
