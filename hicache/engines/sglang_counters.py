"""What SGLang asked of the backend, and what it got."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

from hicache.tiers.counters import StoreCounters
from hicache.tiers.store import StoreStats

MAX_KEPT_CALLS = 1024
"""Calls that are remembered for the next ``drain``."""
PAGE_COUNTS = ("hit", "missed", "written", "refused")


@dataclass(frozen=True, slots=True)
class Call:
    """One read or write that moved something."""

    num_pages: int
    num_bytes: int
    seconds: float

    @property
    def gb_per_s(self) -> float:
        return self.num_bytes / max(self.seconds, 1e-9) / 1e9


@dataclass(frozen=True, slots=True)
class BackendStats:
    """A moment's view; counters are monotonic.

    Args:
        asked_pages, found_pages: of queries: pages asked for, and of these the ones a prefix could be made of.
        pages: by pool and by what became of them: ``hit`` and ``missed`` of reads, ``written`` and ``refused`` of writes.
        bytes_read, bytes_written: of payload.
        faults: what made a call fall short, by cause; a plain miss is none.
        store: of the store; None before a pool was registered.
    """

    asked_pages: int
    found_pages: int
    pages: Mapping[tuple[str, str], int]
    bytes_read: int
    bytes_written: int
    faults: Mapping[str, int]
    store: StoreStats | None


class CallCounters:
    """Counts calls.

    Args:
        keeps_calls: whether single calls are remembered until ``drain``.

    *Thread*: any.
    """

    def __init__(self, *, keeps_calls: bool) -> None:
        self.keeps_calls = keeps_calls
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()
        self._pages: Counter[tuple[str, str]] = Counter()
        self._faults = StoreCounters("sglang")
        self._reads: deque[Call] = deque(maxlen=MAX_KEPT_CALLS)
        self._writes: deque[Call] = deque(maxlen=MAX_KEPT_CALLS)

    def asked(self, num_pages: int, num_found: int) -> None:
        """A query for so many pages found so many from the first on."""
        with self._lock:
            self._totals.update(asked=num_pages, found=num_found)

    def read(self, pool: str, num_pages: int, num_hits: int, num_bytes: int, seconds: float) -> None:
        with self._lock:
            self._pages.update({(pool, "hit"): num_hits, (pool, "missed"): num_pages - num_hits})
            self._totals.update(bytes_read=num_bytes)
            if self.keeps_calls and num_hits:
                self._reads.append(Call(num_hits, num_bytes, seconds))

    def written(self, pool: str, num_pages: int, num_stored: int, num_bytes: int, seconds: float) -> None:
        with self._lock:
            self._pages.update({(pool, "written"): num_stored, (pool, "refused"): num_pages - num_stored})
            self._totals.update(bytes_written=num_bytes)
            if self.keeps_calls and num_stored:
                self._writes.append(Call(num_stored, num_bytes, seconds))

    def fault(self, cause: str, detail: object) -> None:
        """A call fell short through no fault of the store."""
        self._faults.error(cause, detail)

    def drain(self) -> tuple[list[Call], list[Call]]:
        """Reads and writes since the last time."""
        with self._lock:
            read, written = list(self._reads), list(self._writes)
            self._reads.clear()
            self._writes.clear()
        return read, written

    def snapshot(self, store_faults: Mapping[str, int], store: StoreStats | None) -> BackendStats:
        with self._lock:
            totals, pages = dict(self._totals), dict(self._pages)
        return BackendStats(
            asked_pages=totals.get("asked", 0),
            found_pages=totals.get("found", 0),
            pages=pages,
            bytes_read=totals.get("bytes_read", 0),
            bytes_written=totals.get("bytes_written", 0),
            faults={**self._faults.totals().errors, **store_faults},
            store=store,
        )
