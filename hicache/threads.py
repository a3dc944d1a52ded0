"""Threads that do not hold up the end of the process, and work until it is there."""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

JOIN_TIMEOUT_S = 10.0
"""How long ``shutdown`` waits for what threads are at."""


class DaemonExecutor(Executor):
    """A pool like ``ThreadPoolExecutor``, for what has to work while the process ends.

    The interpreter ends that one's threads before it calls what is registered ``atexit``, and waits for them without
    a bound. So a cache that is closed at the end could store nothing any more, and a hung disk would keep the process.

    Args:
        num_threads: how many at most; they start when first needed.
        name: of the threads, for stack dumps.

    *Thread*: any.
    """

    def __init__(self, num_threads: int, *, name: str) -> None:
        self._num_threads = num_threads
        self._name = name
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue a call. Raises ``RuntimeError`` after ``shutdown``.

        Where there is no thread and none can be had, as at the end of a process (Python 3.12 and newer), it is made here.
        """
        future: Future[T] = Future()
        call = functools.partial(fn, *args, **kwargs)
        with self._lock:
            if self._is_closed:
                raise RuntimeError(f"{self._name}: the threads were ended")
            if len(self._threads) < self._num_threads:
                self._start_one()
            if self._threads:
                self._queue.put((future, call))
                return future
        _make(future, call)
        return future

    def _start_one(self) -> None:
        thread = threading.Thread(target=self._run, name=f"{self._name}_{len(self._threads)}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            logger.debug("%s: no more than %d threads: %s", self._name, len(self._threads), error)
        else:
            self._threads.append(thread)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads after what is queued, or, with ``cancel_futures``, after what they are at. Idempotent.

        Args:
            wait: for them, but not longer than ``JOIN_TIMEOUT_S``.
        """
        with self._lock:
            self._is_closed = True
            if cancel_futures:
                self._drop()
            for _ in self._threads:
                self._queue.put(None)  # again, if some were dropped: one too many harms nobody
        deadline_s = time.monotonic() + JOIN_TIMEOUT_S
        for thread in self._threads if wait else ():
            thread.join(max(0.0, deadline_s - time.monotonic()))
            if thread.is_alive():
                logger.error("%s is still at work after %.0f s", thread.name, JOIN_TIMEOUT_S)

    def _drop(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._queue.get_nowait()
                if item is not None:
                    item[0].cancel()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            _make(*item)
            del item  # a waiting thread keeps nobody's buffers


def _make(future: Future[T], call: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001  the caller finds it in the future
        future.set_exception(error)
    else:
        future.set_result(result)
