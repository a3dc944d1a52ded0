"""Counters add up and warnings thin out."""

from __future__ import annotations

import pytest

from hicache.tiers.counters import StoreCounters
from hicache.tiers.page_index import PageEntry, PageIndex
from hicache.tiers.store import StoreStats
from hicache.types import PageKey


def test_a_snapshot_joins_counters_and_gauges_and_is_a_copy() -> None:
    counters, index = StoreCounters("disk"), PageIndex(100)
    index.add(PageEntry(PageKey(bytes(32)), None, 40))
    counters.add(pages_read=2, bytes_read=20)
    counters.add(pages_read=1)
    counters.error("EIO", "detail")
    stats = counters.snapshot(index)
    expected = StoreStats("disk", 1, 40, 100, pages_read=3, bytes_read=20, errors={"EIO": 1})
    assert stats == expected
    counters.error("EIO", "detail")
    assert stats == expected


def test_the_first_tenth_and_hundredth_error_of_a_name_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    counters = StoreCounters("disk")
    for _ in range(250):
        counters.error("EIO", "detail")
    counters.error("ENOSPC", "detail")
    assert caplog.messages == [
        "disk store: EIO (1 so far): detail",
        "disk store: EIO (10 so far): detail",
        "disk store: EIO (100 so far): detail",
        "disk store: ENOSPC (1 so far): detail",
    ]
