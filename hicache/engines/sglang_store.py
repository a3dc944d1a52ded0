"""Pages of host pools into a store and back, from any thread, in bounded time, without an exception.

::

    write    gather chunk 0 | gather 1      | gather 2      |              the caller's thread
                            | put 0         | put 1         | put 2        the store's loop
    read     get 0 | scatter 0     | scatter 1
                   | get 1         | get 2 ...

The store never sees the engine's memory. A call that is given up may go on for a while in the store's threads, and by
then the engine may have given the slots to somebody else: it would fill them with another request's bytes, or store
those under the old name. So pages pass through staging memory, one copy each way, and a call that did not end well
keeps its staging.
"""

from __future__ import annotations

import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from hicache.clock import Clock
from hicache.engines.sglang_pages import PageNumbers, PoolPages
from hicache.errors import HiCacheError, TierError, TierTimeoutError, TierUnavailableError
from hicache.tiers.counters import StoreCounters
from hicache.tiers.store import PageTarget, Store, StoredPage, StoreStats
from hicache.transfer.io_loop import IoLoop
from hicache.transfer.staging import STAGING_BYTES
from hicache.transfer.store_calls import CANCEL_GRACE_S, StoreCalls, failure_of
from hicache.types import PageKey

T = TypeVar("T")

OPEN_TIMEOUT_S = 60.0
"""A large disk store reads its index then."""
ANSWER_MARGIN_S = 1.0
"""A waiting thread gives up this much after the call itself should have been given up."""
MAX_SPARE = 4
"""Staging buffers that each pool keeps for reuse."""
EXISTS_KEYS = 4096
"""Questions in one call."""


@dataclass(frozen=True, slots=True)
class PageName:
    """What one page is called, and the page it hangs under if that is known."""

    key: PageKey
    parent: PageKey | None = None


@dataclass(slots=True)
class _Chunk:
    """Pages ``first ..`` of a batch in staging, and the call that reads or writes them."""

    first: int
    buffer: torch.Tensor
    num_pages: int
    answer: Future[list[bool]]

    @property
    def rows(self) -> torch.Tensor:
        return self.buffer[: self.num_pages]


class PageStore:
    """One store on a loop of its own.

    Args:
        store: opened and closed with this.
        timeout_s: limit of one call to it.
        wait_limit_s: limit of a whole batch.

    *Thread*: any. ``close`` ends what others wait for with misses.
    """

    def __init__(self, store: Store, *, clock: Clock, timeout_s: float, wait_limit_s: float) -> None:
        self._store = store
        self._clock = clock
        self._wait_limit_s = wait_limit_s
        self._calls = StoreCalls(timeout_s)
        # An engine that dies does not close its backend, and must not wait for it either.
        self._loop = IoLoop(clock, name="hicache-sglang")
        self._lock = threading.Lock()
        self._is_closed = False
        self._spare: dict[int, list[torch.Tensor]] = {}
        self._faults = StoreCounters("sglang")

    def open(self) -> None:
        """Open the store.

        Raises:
            TierError, ConfigError: it cannot be opened; says why.
        """
        self._loop.run(self._calls.run(self._store.open(), OPEN_TIMEOUT_S), self._bound_s(OPEN_TIMEOUT_S))

    def close(self) -> None:
        """Close the store and end its thread; bounded. Idempotent."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        if not was_closed:
            self._ask(self._store.close(), self._calls.timeout_s, "close")
        self._loop.close()

    def clear(self) -> int | None:
        """Remove all pages; how many there were. None if that failed."""
        return self._ask(self._store.clear(), self._wait_limit_s, "clear")

    def stats(self) -> StoreStats:
        """Of the store; returns at once."""
        return self._store.stats()

    def faults(self) -> dict[str, int]:
        """Calls that failed, by operation and cause."""
        return self._faults.totals().errors

    def wake(self) -> None:
        """Look at the clock again."""
        self._loop.wake()

    # ---- batches ---------------------------------------------------------------------------------------------
    def deadline_s(self) -> float:
        """When a batch that begins now must be over, by the clock."""
        return self._clock.now_s() + self._wait_limit_s

    def exists(self, keys: Sequence[PageKey], until_s: float) -> list[bool] | None:
        """Which pages are there; None when the store could not say."""
        answers: list[bool] = []
        while len(answers) < len(keys):
            some = keys[len(answers) : len(answers) + EXISTS_KEYS]
            got = self._ask(self._store.exists(some), self._left_s(until_s), "exists")
            if got is None:
                return None
            answers += got
        return answers

    def put(
        self,
        pages: PoolPages,
        numbers: PageNumbers,
        names: Sequence[PageName],
        component: str,
        until_s: float,
    ) -> list[bool]:
        """Write pages; which ones are stored now. What comes after a page that is not, may not be tried."""
        answers = [False] * len(names)
        under_way: _Chunk | None = None
        step = _chunk_pages(pages)
        for first in range(0, len(names), step):
            some = names[first : first + step]
            buffer = self._take(pages)
            rows = buffer[: len(some)]
            pages.gather(numbers[first : first + step], rows)
            if under_way is not None and not self._ended(under_way, answers, until_s, "put"):
                self._give_back(buffer)
                return answers
            stored = [
                StoredPage(name.key, name.parent, component, _bytes(row))
                for name, row in zip(some, rows, strict=True)
            ]
            answer = self._submit(self._store.put(stored), self._left_s(until_s))
            under_way = _Chunk(first, buffer, len(some), answer)
        if under_way is not None:
            self._ended(under_way, answers, until_s, "put")
        return answers

    def get(
        self,
        pages: PoolPages,
        numbers: PageNumbers,
        names: Sequence[PageName],
        component: str,
        until_s: float,
    ) -> list[bool]:
        """Read pages into the pool; which ones are there now. What comes after a miss may not be tried."""
        answers = [False] * len(names)

        def begin(first: int) -> _Chunk | None:
            some = names[first : first + _chunk_pages(pages)]
            if not some:
                return None
            buffer = self._take(pages)
            targets = [
                PageTarget(name.key, component, _bytes(row))
                for name, row in zip(some, buffer[: len(some)], strict=True)
            ]
            answer = self._submit(self._store.get(targets), self._left_s(until_s))
            return _Chunk(first, buffer, len(some), answer)

        chunk = begin(0)
        while chunk is not None:
            got = self._answers(chunk, until_s, "get")
            following = begin(chunk.first + chunk.num_pages) if got and all(got) else None
            good = [row for row, is_there in enumerate(got) if is_there]
            if good:
                arrived = chunk.rows if len(good) == chunk.num_pages else chunk.rows[good]
                pages.scatter(arrived, numbers[chunk.first : chunk.first + chunk.num_pages][good])
                answers[chunk.first : chunk.first + chunk.num_pages] = got
            if got:
                self._give_back(chunk.buffer)
            chunk = following
        return answers

    def get_into(self, targets: Sequence[PageTarget]) -> list[bool]:
        """Read pages into memory that is nobody's but the caller's, who drops it if the page did not come."""
        answers = self._ask(self._store.get(targets), self._calls.timeout_s, "get")
        return [False] * len(targets) if answers is None else answers

    # ---- helpers ---------------------------------------------------------------------------------------------
    def _ended(self, chunk: _Chunk, answers: list[bool], until_s: float, what: str) -> bool:
        """Wait for a chunk and book its answers; whether all of its pages went well."""
        got = self._answers(chunk, until_s, what)
        if got:
            answers[chunk.first : chunk.first + chunk.num_pages] = got
            self._give_back(chunk.buffer)
        return bool(got) and all(got)

    def _answers(self, chunk: _Chunk, until_s: float, what: str) -> list[bool]:
        """One answer a page; none at all if the call did not end well, and then its buffer stays with it."""
        got = self._result(chunk.answer, self._left_s(until_s), what)
        if got is not None and len(got) != chunk.num_pages:
            self._note(what, TierUnavailableError(f"{len(got)} answers for {chunk.num_pages} pages"))
            got = None
        return got or []

    def _ask(self, call: Coroutine[Any, Any, T], limit_s: float, what: str) -> T | None:  # Any: as above
        return self._result(self._submit(call, limit_s), limit_s, what)

    def _submit(self, call: Coroutine[Any, Any, T], limit_s: float) -> Future[T]:  # Any: as above
        failed: Future[T] = Future()
        try:
            if limit_s <= 0:
                raise TierTimeoutError(f"no time is left of {self._wait_limit_s:g} s for a batch")
            return self._loop.submit(self._calls.run(call, limit_s))
        except TierError as error:
            call.close()
            failed.set_exception(error)
            return failed

    def _result(self, answer: Future[T], limit_s: float, what: str) -> T | None:
        """The answer; None, and a fault counted, if there is none in time."""
        try:
            return answer.result(self._bound_s(max(0.0, limit_s)))
        except Exception as error:  # noqa: BLE001  whatever a store raises is a miss to the engine
            answer.cancel()
            self._note(what, error)
            return None

    def _left_s(self, until_s: float) -> float:
        """Limit of the next call of a batch that must be over by then."""
        return min(self._calls.timeout_s, until_s - self._clock.now_s())

    @staticmethod
    def _bound_s(limit_s: float) -> float:
        return limit_s + CANCEL_GRACE_S + ANSWER_MARGIN_S

    def _note(self, what: str, error: BaseException) -> None:
        cause = f"{what}_{failure_of(error)}".replace(" ", "_")
        self._faults.error(cause, error if isinstance(error, HiCacheError) else repr(error))

    def _take(self, pages: PoolPages) -> torch.Tensor:
        """A buffer that nobody else uses: uint8 ``[pages in a chunk, page_bytes]``."""
        with self._lock:
            spare = self._spare.get(pages.page_bytes)
            if spare:
                return spare.pop()
        return torch.empty((_chunk_pages(pages), pages.page_bytes), dtype=torch.uint8)

    def _give_back(self, buffer: torch.Tensor) -> None:
        """*Caller guarantees*: the call that used it ended without an exception."""
        with self._lock:
            spare = self._spare.setdefault(int(buffer.shape[1]), [])
            if len(spare) < MAX_SPARE:
                spare.append(buffer)


def _chunk_pages(pages: PoolPages) -> int:
    return max(1, STAGING_BYTES // pages.page_bytes)


def _bytes(row: torch.Tensor) -> memoryview:
    return row.numpy().data
