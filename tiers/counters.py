"""What a store counts: one lock, names of ``StoreStats``, warnings that thin out."""

from __future__ import annotations

import errno
import logging
import threading
from collections import Counter
from dataclasses import replace

from hicache.tiers.page_index import PageIndex
from hicache.tiers.store import StoreStats

logger = logging.getLogger(__name__)


def error_name(error: OSError) -> str:
    """What an error of the file system is counted under: ``ENOSPC``, say."""
    return errno.errorcode.get(error.errno, "OSError") if error.errno is not None else "OSError"


class StoreCounters:
    """The monotonic counters of one store.

    Args:
        kind: of the store; names it in statistics and warnings.

    *Thread*: any.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()

    def add(self, **amounts: int) -> None:
        """Raise counters, each named as in ``StoreStats``."""
        with self._lock:
            self._counts.update(amounts)

    def error(self, name: str, detail: object) -> None:
        """Count one error under ``name``; the 1st, 10th, 100th … of a name are logged."""
        with self._lock:
            self._errors[name] += 1
            count = self._errors[name]
        if str(count).strip("0") == "1":
            logger.warning("%s store: %s (%d so far): %s", self._kind, name, count, detail)

    def snapshot(self, index: PageIndex) -> StoreStats:
        """A copy of the counters, with the gauges of ``index``."""
        return replace(
            self.totals(),
            num_pages=len(index),
            used_bytes=index.used_bytes,
            capacity_bytes=index.capacity_bytes,
        )

    def totals(self) -> StoreStats:
        """A copy of the counters; the gauges are for the caller to fill in."""
        with self._lock:
            counts, errors = dict(self._counts), dict(self._errors)
        stats = StoreStats(kind=self._kind, errors=errors)
        for name, amount in counts.items():
            setattr(stats, name, amount)
        return stats
