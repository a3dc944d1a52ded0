"""What the transfer engine has moved and what went wrong, as numbers."""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hicache.clock import Clock
from hicache.transfer.jobs import Direction, Failure

logger = logging.getLogger(__name__)

WARNING_INTERVAL_S = 30.0
"""At most one warning in this time for each kind of failure."""
RECENT = 0.9
"""How much a measured batch counts after the next one."""
CALL_BOUNDS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
"""Upper bounds of the classes that copies and store calls are counted in, by how long they took."""
PROBE = "probe"
"""Beside the directions: asking the store what it has, which a match waits for."""


@dataclass(frozen=True, slots=True)
class Moved:
    """Work done in one direction for one component: transfers that ended, and what arrived."""

    direction: Direction
    component: str
    transfers: int = 0
    slots: int = 0
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """Fetches or stores under way: submitted and not completed."""

    jobs: int
    used_bytes: int
    limit_bytes: int


@dataclass(frozen=True, slots=True)
class CallTimes:
    """How long copies or store calls of one direction took.

    Args:
        counts: calls in each class: up to ``CALL_BOUNDS_S[i]``, and above the last bound.
        seconds: of all of them.
    """

    counts: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class TransferStats:
    """Monotonic counters, and present depths.

    Args:
        moved: a row for each direction and component that had a transfer, sorted.
        seconds: spent copying or inside store calls, by direction, and in ``PROBE``. Calls that overlap each
            count in full, so bytes / seconds is what one transfer gets.
        calls: the same time by duration of each copy or call.
        failures: by ``Failure``: one for each ticket that fell short, failed probe and failed deletion.
        queue_drops: tickets that found their queue full, by direction.
        probed_pages, absent_pages: pages the store was asked for before a fetch, and those it had not.
        forgotten_pages: pages the store has deleted on request.
        forget_drops: pages not deleted because too many deletions were queued, or the store failed.
        hinted_pages: pages that the store was told are over, or are not any more.
        hint_drops: pages of which it was not told because too many hints were queued.
        store_queue, fetch_queue: depth now.
        outstanding: tickets not completed now.
        stuck_calls: store calls now that did not end when cancelled.
    """

    moved: tuple[Moved, ...]
    seconds: Mapping[str, float]
    calls: Mapping[str, CallTimes]
    failures: Mapping[str, int]
    queue_drops: Mapping[Direction, int]
    probed_pages: int
    absent_pages: int
    forgotten_pages: int
    forget_drops: int
    hinted_pages: int
    hint_drops: int
    store_queue: QueueDepth
    fetch_queue: QueueDepth
    outstanding: int
    stuck_calls: int

    def directions(self) -> tuple[Moved, ...]:
        """The rows of ``moved``."""
        return self.moved

    def bytes_moved(self, direction: Direction) -> int:
        """Bytes in one direction, over all components."""
        return sum(row.num_bytes for row in self.moved if row.direction is direction)


class TransferCounters:
    """Where the engine's threads count.

    *Thread*: any; never blocks.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._moved: dict[tuple[Direction, str], Moved] = {}
        self._seconds: dict[str, float] = {}
        self._calls: dict[str, list[int]] = {}
        self._recent: dict[tuple[Direction, str | None], tuple[float, float]] = {}
        self._failures: Counter[str] = Counter()
        self._queue_drops: Counter[Direction] = Counter()
        self._probed_pages = 0
        self._absent_pages = 0
        self._forgotten_pages = 0
        self._forget_drops = 0
        self._hinted_pages = 0
        self._hint_drops = 0
        self._warned_s: dict[Failure, float] = {}

    def ended(
        self, direction: Direction, component: str, slots: int, num_bytes: int, error: Failure | None
    ) -> None:
        """A ticket is done."""
        with self._lock:
            row = self._moved.get((direction, component), Moved(direction, component))
            self._moved[direction, component] = replace(
                row,
                transfers=row.transfers + 1,
                slots=row.slots + slots,
                num_bytes=row.num_bytes + num_bytes,
            )
            if error is not None:
                self._failures[error] += 1
            if error is Failure.QUEUE_FULL:
                self._queue_drops[direction] += 1

    def spent(self, what: str, seconds: float) -> None:
        """Time went into copying or a store call of a ``Direction``, or into a ``PROBE``."""
        with self._lock:
            self._seconds[what] = self._seconds.get(what, 0.0) + seconds
            counts = self._calls.setdefault(what, [0] * (len(CALL_BOUNDS_S) + 1))
            counts[bisect_left(CALL_BOUNDS_S, seconds)] += 1

    def measured(self, direction: Direction, component: str, num_bytes: int, seconds: float) -> None:
        """A batch that moved all its bytes took so long."""
        with self._lock:
            for of in ((direction, component), (direction, None)):
                old_bytes, old_seconds = self._recent.get(of, (0.0, 0.0))
                self._recent[of] = (RECENT * old_bytes + num_bytes, RECENT * old_seconds + seconds)

    def recent(self, direction: Direction, component: str | None = None) -> tuple[float, float]:
        """Bytes and seconds of the latest batches of one component or of all, older ones counting less."""
        with self._lock:
            return self._recent.get((direction, component), (0.0, 0.0))

    def failed(self, error: Failure) -> None:
        """Something without a ticket failed: a probe, a deletion."""
        with self._lock:
            self._failures[error] += 1

    def probed(self, num_pages: int, num_absent: int) -> None:
        """The store said which pages it has."""
        with self._lock:
            self._probed_pages += num_pages
            self._absent_pages += num_absent

    def forgot(self, num_pages: int) -> None:
        """The store has deleted so many pages on request."""
        with self._lock:
            self._forgotten_pages += num_pages

    def hinted(self, num_pages: int, *, dropped: int = 0) -> None:
        """The store was told what pages are worth, or was not for want of room in the queue."""
        with self._lock:
            self._hinted_pages += num_pages
            self._hint_drops += dropped

    def dropped_forget(self, num_pages: int) -> None:
        """So many pages that were to be deleted are not going to be."""
        with self._lock:
            self._forget_drops += num_pages

    def warn(self, error: Failure, what: str, cause: BaseException) -> None:
        """Log a failure, unless one of its kind was logged a short while ago."""
        now_s = self._clock.now_s()
        with self._lock:
            last_s = self._warned_s.get(error)
            if last_s is not None and now_s - last_s < WARNING_INTERVAL_S:
                return
            self._warned_s[error] = now_s
        logger.warning("%s failed (%s): %s: %s", what, error, type(cause).__name__, cause)

    def snapshot(
        self, *, store_queue: QueueDepth, fetch_queue: QueueDepth, outstanding: int, stuck_calls: int
    ) -> TransferStats:
        with self._lock:
            return TransferStats(
                moved=tuple(self._moved[key] for key in sorted(self._moved)),
                seconds=dict(self._seconds),
                calls={
                    direction: CallTimes(tuple(counts), self._seconds[direction])
                    for direction, counts in self._calls.items()
                },
                failures=dict(self._failures),
                queue_drops=dict(self._queue_drops),
                probed_pages=self._probed_pages,
                absent_pages=self._absent_pages,
                forgotten_pages=self._forgotten_pages,
                forget_drops=self._forget_drops,
                hinted_pages=self._hinted_pages,
                hint_drops=self._hint_drops,
                store_queue=store_queue,
                fetch_queue=fetch_queue,
                outstanding=outstanding,
                stuck_calls=stuck_calls,
            )
