"""What a process has open: closed at its end by whoever forgot to, and not by the processes that it forks.

A forked child has its parent's objects and shares its files, sockets and memory maps, but has none of its threads. What
it closed of them would go in the parent, or wait for ever; so there they count as closed, and nothing was done.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from typing import Protocol

logger = logging.getLogger(__name__)


class Owned(Protocol):
    """What belongs to the process that opened it."""

    def close(self) -> None: ...

    def disown(self) -> None:
        """This process is a fork of the one that opened it: be closed, and touch nothing that both have.

        *Implementation must*: take no lock; a thread of the parent's may have held it.
        """
        ...


class OpenThings:
    """What this process has open of one kind; module-level, as processes end once.

    Args:
        complaint: logged for each that nobody had closed.
        with_main_thread: close when the main thread ends, which other threads may outlive, but which also comes where
            no ``atexit`` does: in a worker that ``multiprocessing`` has forked. Otherwise at exit: when all threads
            but daemons have ended, and so all that may still use them.

    *Thread*: any.
    """

    def __init__(self, *, complaint: str = "", with_main_thread: bool = False) -> None:
        self._complaint = complaint
        self._with_main_thread = with_main_thread
        # Strongly: the threads of what nobody closed and nobody has any more run on. Oldest first.
        self._open: dict[Owned, None] = {}
        self._is_watching = False
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._inherit)

    def add(self, thing: Owned) -> None:
        """It is open from now on."""
        with self._lock:
            self._open[thing] = None
            was_watching, self._is_watching = self._is_watching, True
        if was_watching:
            return
        if self._with_main_thread:
            # No daemon: the process waits for it.
            threading.Thread(target=self._close_after_main, name="hicache-exit").start()
        else:
            atexit.register(self._close_all)

    def discard(self, thing: Owned) -> None:
        """It is closed, or being closed. Idempotent."""
        with self._lock:
            self._open.pop(thing, None)

    def _close_after_main(self) -> None:
        threading.main_thread().join()
        self._close_all()

    def _close_all(self) -> None:
        while True:
            with self._lock:
                if not self._open:
                    return
                thing, _ = self._open.popitem()  # the newest: what it hangs on came before it
            if self._complaint:
                logger.warning("%s", self._complaint)
            try:
                thing.close()
            except Exception:
                logger.exception("at the end of the process: closing failed")

    def _inherit(self) -> None:
        inherited, self._open = self._open, {}
        self._lock = threading.Lock()
        self._is_watching = False  # the child has no such thread, and may have to register anew
        for thing in inherited:
            thing.disown()
