"""Keeps a cache going while its engine does not call: books, stores on, tries again, demotes ahead.

Everything a transfer's end allows (a child is stored after its parent, say) is begun when it is booked.
Every call of the engine books; between calls this thread does. It sleeps until a transfer ends or a retry
is due, then lets ``PAUSE_S`` pass: a busy engine has booked by then, so that it is not disturbed.
"""

from __future__ import annotations

import logging
import threading

from hicache.runtime import Runtime

logger = logging.getLogger(__name__)

PAUSE_S = 0.005
MAX_SLEEP_S = 1.0
"""Clocks other than the system's do not wake anybody, so the keeper looks at them this often."""
JOIN_S = 5.0


class Keeper:
    """The background thread of one cache.

    *Thread*: ``close`` from any but its own.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hicache-keeper", daemon=True)
        runtime.transfers.on_completion(self._wake.set)
        self._thread.start()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._stopped.set()
        self._wake.set()
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._wake.wait(self._sleep_s())
            self._wake.clear()
            if self._stopped.wait(PAUSE_S):
                return
            try:
                self._runtime.tend()
            except Exception:
                logger.exception("the keeper could not tend the cache; it goes on")

    def _sleep_s(self) -> float:
        due_s = self._runtime.retry_due_s
        if due_s is None:
            return MAX_SLEEP_S
        return min(MAX_SLEEP_S, max(0.0, due_s - self._runtime.clock.now_s()))
