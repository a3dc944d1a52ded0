"""The bound of a disk store: never more than its capacity, nor than the file system has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hicache.testing.disk_folder import (
    PAGE_BYTES,
    bytes_in,
    fill_folder,
    present_on_disk,
    run_on_disk,
)
from hicache.testing.store_pages import make_page
from hicache.tiers.disk import DiskStore
from hicache.tiers.disk_folder import DiskFolder
from hicache.tiers.folder_state import OVERHEAD_BYTES, SPARE_RECORDS
from hicache.tiers.journal import Journal
from hicache.tiers.journal_records import RECORD_BYTES
from hicache.tiers.segment_files import slot_bytes

SPARE_BYTES = SPARE_RECORDS * RECORD_BYTES
assert SPARE_BYTES <= OVERHEAD_BYTES


def test_the_disk_never_holds_more_than_the_capacity_not_even_in_between(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 0
    real_append = Journal.append

    def measuring_append(journal: Journal, records: Any) -> Any:
        nonlocal most
        most = max(most, bytes_in(root))
        return real_append(journal, records)

    async def test(store: DiskStore) -> None:
        pages = [make_page(n) for n in range(25)]
        for page in pages[:12]:
            assert await store.put([page]) == [True]
            assert bytes_in(root) <= 10 * PAGE_BYTES + SPARE_BYTES
        assert await store.put(pages[12:]) == [True] * 13
        assert store.stats().used_bytes == 10 * PAGE_BYTES
        assert await present_on_disk(store, pages) == list(range(15, 25))

    monkeypatch.setattr(Journal, "append", measuring_append)
    # With one thread nothing can be written while the folder is being measured.
    run_on_disk(root, test, 10 * PAGE_BYTES, num_threads=1)
    assert 10 * slot_bytes(1000) <= most <= 10 * PAGE_BYTES + SPARE_BYTES


def test_the_bound_holds_for_pages_of_many_sizes_and_over_restarts(root: Path, seeded_random: Any) -> None:
    capacity_bytes = 1 << 20
    num_put = 0

    async def test(store: DiskStore) -> None:
        nonlocal num_put
        for _ in range(60):
            num_put += 1
            size = seeded_random.choice([100, 5000, 40_000, 70_001, 200_000])
            assert await store.put([make_page(num_put, num_bytes=size)]) == [True]
            assert bytes_in(root) <= capacity_bytes + OVERHEAD_BYTES, "the file system's own blocks included"
        assert store.stats().pages_evicted > 10

    for _ in range(3):
        run_on_disk(root, test, capacity_bytes)


def test_the_journal_stays_small_however_often_pages_come_and_go(root: Path) -> None:
    async def test(store: DiskStore) -> None:
        for n in range(300):
            await store.put([make_page(n)])
        assert (root / "journal").stat().st_size <= 3 * 10 * 128 + SPARE_BYTES
        assert await present_on_disk(store, [make_page(n) for n in range(300)]) == list(range(290, 300))

    run_on_disk(root, test, 10 * PAGE_BYTES)


def test_a_journal_written_anew_keeps_the_order_of_use(root: Path) -> None:
    pages = [make_page(n) for n in range(10)]

    async def test(store: DiskStore) -> None:
        await store.put(pages)
        await present_on_disk(store, pages[:1])  # makes it the most recent
        inode = (root / "journal").stat().st_ino
        for n in range(60):
            await store.put([make_page(f"passing {n}")])
            await store.delete([make_page(f"passing {n}").key])
        assert (root / "journal").stat().st_ino != inode

    async def reopened(store: DiskStore) -> None:
        assert await store.put([make_page("new")]) == [True]
        assert await present_on_disk(store, pages) == [0, *range(2, 10)]

    run_on_disk(root, test, 12 * PAGE_BYTES)
    run_on_disk(root, reopened, 10 * PAGE_BYTES)


def test_a_low_file_system_evicts_without_any_capacity(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DiskFolder, "free_bytes", lambda folder: 20 * PAGE_BYTES - bytes_in(root))

    async def test(store: DiskStore) -> None:
        pages = [make_page(n) for n in range(25)]
        for page in pages:
            assert await store.put([page]) == [True]
        assert bytes_in(root) <= 11 * PAGE_BYTES + SPARE_BYTES
        found = await present_on_disk(store, pages)
        assert found == list(range(25 - len(found), 25))
        assert len(found) >= 5

    run_on_disk(root, test, None, num_threads=1, min_free_bytes=10 * PAGE_BYTES)


def test_a_full_file_system_refuses_and_takes_nobodys_page(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = [make_page(n) for n in range(3)]
    fill_folder(root, pages)
    monkeypatch.setattr(DiskFolder, "free_bytes", lambda folder: 0)

    async def test(store: DiskStore) -> None:
        assert await store.put([make_page("new"), pages[0]]) == [False, True]
        assert await present_on_disk(store, pages) == [0, 1, 2]
        assert store.stats().pages_refused == 1

    run_on_disk(root, test, None, min_free_bytes=100 * PAGE_BYTES)
