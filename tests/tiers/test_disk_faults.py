"""Errors of the file system under a disk store: counted, and never wrong bytes."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from hicache.testing.disk_folder import (
    PAGE_BYTES,
    pages_in,
    present_on_disk,
    remove_from_outside,
    run_on_disk,
    segment_of,
    spoil_slot,
)
from hicache.testing.store_pages import PAYLOAD_BYTES, Corruption, make_chain, make_page, make_target
from hicache.tiers.disk import DiskStore
from hicache.tiers.framing import HEADER_BYTES
from hicache.tiers.journal import JOURNAL_NAME, Appended, Journal
from hicache.tiers.segment_files import SegmentFiles, slot_bytes


def fault(number: int) -> OSError:
    return OSError(number, os.strerror(number))


# ---- errors of the file system ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=lambda number: errno.errorcode[number])
def test_a_failed_write_is_counted_and_refuses_what_hangs_below(
    root: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    chain, other = make_chain(1, 4), make_page("other")
    real_write = SegmentFiles.write

    def failing_write(files: SegmentFiles, frames: Any) -> None:
        if any(bytes(chain[1].key) in bytes(frame.header) for frame in frames[:1]) or len(frames) > 1:
            raise fault(number)
        real_write(files, frames)

    async def test(store: DiskStore) -> None:
        monkeypatch.setattr(SegmentFiles, "write", failing_write)
        assert await store.put([chain[0], other, *chain[1:]]) == [True, True, False, False, False]
        stats = store.stats()
        assert set(stats.errors) == {errno.errorcode[number]}
        assert stats.used_bytes == 2 * PAGE_BYTES
        monkeypatch.undo()
        assert await store.put(chain) == [True] * 4
        assert await present_on_disk(store, chain) == [0, 1, 2, 3]

    run_on_disk(root, test)


def test_an_unexpected_error_is_raised_and_leaves_the_store_usable(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken_write(files: SegmentFiles, frames: Any) -> None:
        raise MemoryError

    chain = make_chain(1, 10)

    async def test(store: DiskStore) -> None:
        monkeypatch.setattr(SegmentFiles, "write", broken_write)
        with pytest.raises(MemoryError):
            await store.put(chain)
        assert store.stats().used_bytes == 0
        monkeypatch.undo()
        assert await store.put(chain) == [True] * 10

    run_on_disk(root, test)


def test_a_write_that_fails_half_way_leaves_no_page(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_pwritev = os.pwritev
    calls = 0

    def pwritev(descriptor: int, parts: Any, offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise fault(errno.ENOSPC)
        return real_pwritev(descriptor, [parts[0]], offset)  # short: the header only

    async def test(store: DiskStore) -> None:
        monkeypatch.setattr(os, "pwritev", pwritev)
        assert await store.put([make_page("a")]) == [False]
        assert (store.stats().errors, store.stats().used_bytes, pages_in(root)) == ({"ENOSPC": 1}, 0, {})

    run_on_disk(root, test)


def test_short_system_calls_are_continued(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_pwritev, real_preadv, real_pwrite = os.pwritev, os.preadv, os.pwrite

    def one_part(parts: Any) -> list[Any]:
        part = next(part for part in parts if len(part))
        return [memoryview(part)[:100]]

    async def test(store: DiskStore) -> None:
        monkeypatch.setattr(os, "pwritev", lambda file, parts, at: real_pwritev(file, one_part(parts), at))
        monkeypatch.setattr(os, "preadv", lambda file, parts, at: real_preadv(file, one_part(parts), at))
        monkeypatch.setattr(os, "pwrite", lambda file, raw, at: real_pwrite(file, raw[:50], at))
        pages = [make_page(n) for n in range(3)]
        assert await store.put(pages) == [True] * 3
        assert await present_on_disk(store, pages) == [0, 1, 2]

    run_on_disk(root, test)


def test_a_segment_that_ends_too_early_is_a_miss(root: Path) -> None:
    pages = [make_page(n) for n in range(3)]

    async def test(store: DiskStore) -> None:
        await store.put(pages)
        path, offset = segment_of(root, pages[2].key)
        os.truncate(path, offset + 200)
        targets = [make_target(page.key) for page in pages]
        assert await store.get(targets) == [True, True, False]
        assert store.stats().pages_corrupt == 1

    run_on_disk(root, test)


@pytest.mark.parametrize("num_whole", [0, 2], ids=["nothing", "in-part"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=lambda number: errno.errorcode[number])
def test_pages_that_the_journal_does_not_take_are_not_there(
    root: Path, monkeypatch: pytest.MonkeyPatch, number: int, num_whole: int
) -> None:
    """The journal takes whole records or none; those that it took, others may have seen."""
    chain = make_chain(1, 4)
    real_pwrite = os.pwrite

    def failing_pwrite(descriptor: int, raw: Any, offset: int) -> int:
        if len(raw) == 4 * 128 and num_whole:
            return real_pwrite(descriptor, memoryview(raw)[: num_whole * 128 + 50], offset)
        if len(raw) > 128:
            raise fault(number)
        return real_pwrite(descriptor, raw, offset)

    async def test(store: DiskStore) -> None:
        monkeypatch.setattr(os, "pwrite", failing_pwrite)
        assert await store.put(chain) == [n < num_whole for n in range(4)]
        monkeypatch.undo()
        assert store.stats().errors == {errno.errorcode[number]: 1}
        assert store.stats().used_bytes == num_whole * PAGE_BYTES
        assert await present_on_disk(store, chain) == list(range(num_whole))
        assert await store.put(chain) == [True] * 4
        assert await present_on_disk(store, chain) == [0, 1, 2, 3]

    run_on_disk(root, test)
    run_on_disk(root, lambda store: _all_there(store, chain))


async def _all_there(store: DiskStore, pages: list[Any]) -> None:
    assert await present_on_disk(store, pages) == list(range(len(pages)))


def test_a_page_that_could_not_be_made_durable_does_not_count_as_written(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing_sync(descriptor: int) -> None:
        raise fault(errno.EIO)

    async def test(store: DiskStore) -> None:
        assert await store.put([make_page("b")]) == [True]
        monkeypatch.setattr(os, "fdatasync", failing_sync)
        assert await store.put([make_page("a")]) == [False]
        monkeypatch.undo()
        assert store.stats().errors == {"EIO": 1}
        assert store.stats().used_bytes == PAGE_BYTES
        assert await store.exists([make_page("a").key]) == [False]
        assert await store.put([make_page("a")]) == [True]

    run_on_disk(root, test, None, durable=True)


def test_an_unreadable_page_is_a_miss_and_stays_and_so_do_its_neighbours(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = [make_page(n) for n in range(3)]
    real_read = SegmentFiles.read

    async def test(store: DiskStore) -> None:
        await store.put(pages)
        bad = pages_in(root)[pages[1].key].place

        def failing_read(files: SegmentFiles, frames: Any) -> int:
            if any(frame.place == bad for frame in frames):
                raise fault(errno.EIO)
            return real_read(files, frames)

        monkeypatch.setattr(SegmentFiles, "read", failing_read)
        targets = [make_target(page.key) for page in pages]
        assert await store.get(targets) == [True, False, True]
        assert (store.stats().errors, store.stats().pages_missed) == ({"EIO": 1}, 1)
        monkeypatch.undo()
        assert await present_on_disk(store, pages) == [0, 1, 2]

    run_on_disk(root, test)


def test_a_victim_that_cannot_be_removed_stays_and_the_put_is_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing_append(journal: Journal, records: Any) -> Appended:
        return Appended(0, fault(errno.EIO)) if len(records) else Appended(0, None)

    async def test(store: DiskStore) -> None:
        chain = make_chain(1, 2)
        await store.put(chain)
        monkeypatch.setattr(Journal, "append", failing_append)
        assert await store.put([make_page("new")]) == [False]
        assert await store.delete([chain[1].key]) == 0
        assert store.stats().errors == {"EIO": 2}
        monkeypatch.undo()
        assert await present_on_disk(store, chain) == [0, 1]
        assert await store.put([make_page("new")]) == [True]
        assert await present_on_disk(store, chain) == [0]

    run_on_disk(root, test, 2 * PAGE_BYTES)


def test_a_bad_page_that_cannot_be_removed_is_hidden(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing_append(journal: Journal, records: Any) -> Appended:
        return Appended(0, fault(errno.EIO))

    async def test(store: DiskStore) -> None:
        page = make_page("a")
        await store.put([page])
        spoil_slot(root, page.key, Corruption.FLIPPED_PAYLOAD)
        monkeypatch.setattr(Journal, "append", failing_append)
        assert await store.get([make_target(page.key)]) == [False]
        monkeypatch.undo()
        assert await store.exists([page.key]) == [False]
        assert store.stats().used_bytes == PAGE_BYTES
        assert await store.delete([page.key]) == 1

    run_on_disk(root, test)


def test_blocks_that_cannot_be_given_back_are_counted_and_stop_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing_punch(files: SegmentFiles, start: int, end: int) -> None:
        raise fault(errno.EIO)

    async def test(store: DiskStore) -> None:
        pages = [make_page(n, num_bytes=100_000) for n in range(4)]
        await store.put(pages)
        monkeypatch.setattr(SegmentFiles, "punch", failing_punch)
        assert await store.delete([pages[0].key, pages[2].key]) == 2
        assert set(store.stats().errors) == {"EIO"}
        assert await store.put(pages) == [True] * 4
        assert await present_on_disk(store, pages) == [0, 1, 2, 3]

    run_on_disk(root, test)


def test_a_journal_that_cannot_be_written_anew_goes_on_growing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing_replace(source: str, target: str) -> None:
        raise fault(errno.ENOSPC)

    page = make_page("a")

    async def test(store: DiskStore) -> None:
        monkeypatch.setattr(os, "replace", failing_replace)
        for _ in range(60):
            assert await store.put([page]) == [True]
            assert await store.delete([page.key]) == 1
        assert store.stats().errors["ENOSPC"] > 1
        assert (root / JOURNAL_NAME).stat().st_size >= 120 * 128
        monkeypatch.undo()
        assert await store.put([page]) == [True]
        assert await store.delete([page.key]) == 1
        assert (root / JOURNAL_NAME).stat().st_size <= 4 * 128
        assert [path.name for path in root.iterdir() if path.name.startswith("journal")] == ["journal"]  # noqa: ASYNC240

    async def prepared(store: DiskStore) -> None:
        assert store.stats().num_pages == 0

    run_on_disk(root, prepared)  # its format file is written before replacing fails
    run_on_disk(root, test)


def test_a_lock_that_nobody_lets_go_of_is_waited_for_within_a_bound(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = make_page("a")
    monkeypatch.setattr("hicache.tiers.journal.LOCK_TIMEOUT_S", 0.0)

    async def test(store: DiskStore) -> None:
        await store.put([page])
        holder = Journal(str(root), durable=False)
        holder.open()
        with holder.locked():
            assert await store.get([make_target(page.key)]) == [True], "reads take no lock"
            assert await store.put([make_page("b")]) == [False]
            assert await store.delete([page.key]) == 0
            assert store.stats().errors == {"ETIMEDOUT": 2}
        holder.close()
        assert await store.put([make_page("b")]) == [True]

    run_on_disk(root, test)


def test_what_a_killed_process_left_at_the_journals_end_is_cut_off(root: Path) -> None:
    page, other = make_page("a"), make_page("b")

    async def test(store: DiskStore) -> None:
        await store.put([page])
        with (root / JOURNAL_NAME).open("ab") as journal:
            journal.write(b"half a record")
        assert await present_on_disk(store, [page]) == [0]
        assert await store.put([other]) == [True]
        assert (root / JOURNAL_NAME).stat().st_size % 128 == 0

    run_on_disk(root, test)
    run_on_disk(root, lambda store: _all_there(store, [page, other]))


# ---- O-48: a batch that works in part --------------------------------------------------------------------------------


def test_a_batch_that_fails_in_part_says_which_and_the_next_one_works(root: Path) -> None:
    chain = make_chain(1, 4)

    async def test(store: DiskStore) -> None:
        await store.put(chain)
        remove_from_outside(root, chain[2].key)
        targets = [make_target(page.key) for page in chain]
        assert await store.get(targets) == [True, True, False, True]
        assert [targets[n].payload == chain[n].payload for n in (0, 1, 3)] == [True] * 3
        assert targets[2].payload == b"\xee" * PAYLOAD_BYTES
        assert await store.get(targets[:2]) == [True, True]

    run_on_disk(root, test)


def test_a_slot_is_written_to_its_end(root: Path) -> None:
    """What a page left there before it is no part of it: a file tells no more than its pages."""
    secret, short = make_page("secret", num_bytes=PAYLOAD_BYTES), make_page("b", num_bytes=PAYLOAD_BYTES - 1)

    async def test(store: DiskStore) -> None:
        await store.put([secret])
        path, offset = segment_of(root, secret.key)
        assert await store.put([short]) == [True]
        assert segment_of(root, short.key) == (path, offset)
        raw = path.read_bytes()
        end = offset + HEADER_BYTES + PAYLOAD_BYTES - 1
        assert raw[end : offset + slot_bytes(PAYLOAD_BYTES)] == b"\0"

    run_on_disk(root, test, PAGE_BYTES)
