"""A store's own threads: blocking work leaves the event loop here, and nowhere else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

from hicache.threads import DaemonExecutor


class Workers:
    """A bounded pool of threads that runs one batch as at most ``num_threads`` shares.

    Args:
        num_threads: how many threads, 1 or more; they start when first needed.
        name: what the threads are called in dumps.
    """

    def __init__(self, num_threads: int, *, name: str) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads is {num_threads}, 1 or more expected")
        self.num_threads = num_threads
        self._executor = DaemonExecutor(num_threads, name=name)

    async def run(self, shares: Sequence[Callable[[], None]], stop: threading.Event) -> None:
        """Run the shares and return when every one of them has ended; one hop each.

        A cancelled call sets ``stop``, at which shares are to end after the page they are at, and
        raises only then: until that moment they may be touching the caller's buffers.

        Raises:
            Exception: the first error of a share, after all have ended.
        """
        loop = asyncio.get_running_loop()
        futures = [loop.run_in_executor(self._executor, share) for share in shares]
        pending = set(futures)
        cancelled: asyncio.CancelledError | None = None
        while pending:
            try:
                _, pending = await asyncio.wait(pending)
            except asyncio.CancelledError as error:
                cancelled = error
                stop.set()
                pending = {future for future in pending if not future.done()}
        failures = [failure for future in futures if (failure := future.exception()) is not None]
        if cancelled is not None:
            raise cancelled
        if failures:
            raise failures[0]

    def close(self) -> None:
        """End the threads; waits for what they are at, with a bound."""
        self._executor.shutdown(wait=True)
