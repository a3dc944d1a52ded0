"""What files, other processes and a failing disk can do to a disk store."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
import xxhash

from hicache.testing.disk_folder import (
    PAGE_BYTES,
    bytes_in,
    existing_file,
    files_in,
    fill_folder,
    link_of,
    page_file,
    present_on_disk,
    run_on_disk,
    spoil_file,
    write_by_hand,
)
from hicache.testing.store_pages import PAYLOAD_BYTES, Corruption, make_chain, make_page, make_target
from hicache.tiers.disk import DiskStore
from hicache.tiers.page_files import PageFiles, TemporaryFile
from hicache.tiers.page_index import PageEntry
from hicache.tiers.store import PageTarget
from hicache.types import PageKey


def same_file(first: Path, second: Path) -> bool:
    return first.samefile(second)


# ---- O-44: files that vanish, go bad or are replaced --------------------------------------------------------------


def test_a_vanished_file_is_a_miss_and_leaves_the_index(root: Path) -> None:
    pages = [make_page(n) for n in range(3)]

    async def test(store: DiskStore) -> None:
        await store.put(pages)
        existing_file(root, pages[0].key).unlink()
        existing_file(root, pages[1].key).unlink()
        assert await store.get([make_target(pages[0].key)]) == [False]
        assert await store.exists([pages[1].key]) == [False]
        stats = store.stats()
        assert (stats.num_pages, stats.used_bytes) == (1, PAGE_BYTES)
        assert bytes_in(root) == PAGE_BYTES  # the second names went too
        assert (stats.pages_missed, stats.pages_corrupt, stats.errors) == (1, 0, {})

    run_on_disk(root, test)


def test_a_vanished_file_can_be_evicted(root: Path) -> None:
    pages = [make_page(n) for n in range(4)]

    async def test(store: DiskStore) -> None:
        await store.put(pages[:3])
        existing_file(root, pages[0].key).unlink()
        assert await store.put(pages[3:]) == [True]
        assert (store.stats().errors, store.stats().used_bytes) == ({}, 3 * PAGE_BYTES)
        assert await present_on_disk(store, pages) == [1, 2, 3]

    run_on_disk(root, test, 3 * PAGE_BYTES)


def test_a_vanished_page_is_written_again_when_put_again(root: Path) -> None:
    page = make_page("a")

    async def test(store: DiskStore) -> None:
        await store.put([page])
        existing_file(root, page.key).unlink()
        assert await store.put([page]) == [True]
        assert await present_on_disk(store, [page]) == [0]
        assert store.stats().pages_written == 2

    run_on_disk(root, test)


def test_the_whole_folder_may_vanish(root: Path) -> None:
    chain = make_chain(1, 3)

    async def test(store: DiskStore) -> None:
        await store.put(chain)
        os.rename(root, f"{root} moved away")  # noqa: PTH104  # a Path in a coroutine is ASYNC240
        assert await store.get([make_target(page.key) for page in chain]) == [False] * 3
        assert await store.put(chain) == [True] * 3
        assert await present_on_disk(store, chain) == [0, 1, 2]

    run_on_disk(root, test)


def test_a_replacement_that_came_during_a_bad_read_is_not_removed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = make_page("a")
    real_read = PageFiles.read

    def read_then_replace(files: PageFiles, entry: PageEntry, target: PageTarget) -> Any:
        result = real_read(files, entry, target)
        monkeypatch.undo()
        files.publish(write_by_hand(files, page), entry)
        return result

    async def test(store: DiskStore) -> None:
        await store.put([page])
        spoil_file(root, page.key, Corruption.FLIPPED_PAYLOAD)
        monkeypatch.setattr(PageFiles, "read", read_then_replace)
        assert await store.get([make_target(page.key)]) == [False]
        assert store.stats().pages_corrupt == 1
        assert await present_on_disk(store, [page]) == [0]
        assert same_file(link_of(root, page), existing_file(root, page.key))

    run_on_disk(root, test)


def test_a_page_of_a_newer_format_is_a_miss_and_is_left_to_its_owner(root: Path) -> None:
    page = make_page("a")

    async def test(store: DiskStore) -> None:
        await store.put([page])
        path = existing_file(root, page.key)
        raw = bytearray(path.read_bytes())
        struct.pack_into("<H", raw, 8, 2)
        struct.pack_into("<Q", raw, 152, xxhash.xxh3_64_intdigest(bytes(raw[:152])))
        path.write_bytes(raw)
        assert await store.get([make_target(page.key)]) == [False]
        assert await store.exists([page.key]) == [False]
        assert await store.put([page]) == [False]
        assert path.read_bytes() == raw
        stats = store.stats()
        assert (stats.errors, stats.pages_corrupt, stats.used_bytes) == ({"unsupported": 1}, 0, PAGE_BYTES)
        assert await store.put([make_page("b")]) == [True]  # it is evicted like any other
        assert page_file(root, page.key) is None

    run_on_disk(root, test, PAGE_BYTES)


# ---- several stores in one folder ---------------------------------------------------------------------------------


def test_pages_that_another_store_wrote_after_open_are_hits(root: Path) -> None:
    chain = make_chain(1, 3)

    async def test(store: DiskStore) -> None:
        fill_thread = threading.Thread(target=fill_folder, args=(root, chain))
        fill_thread.start()
        await asyncio.to_thread(fill_thread.join)
        assert store.stats().num_pages == 0
        assert await store.exists([page.key for page in chain[:2]]) == [True, True]
        assert await store.get([make_target(chain[2].key)]) == [True]
        assert (store.stats().num_pages, store.stats().used_bytes) == (3, 3 * PAGE_BYTES)
        assert await store.put(chain) == [True] * 3
        assert store.stats().pages_written == 0

    run_on_disk(root, test)


def test_pages_found_later_keep_their_parents(root: Path) -> None:
    chain = make_chain(1, 3)

    async def test(store: DiskStore) -> None:
        await asyncio.to_thread(fill_folder, root, chain)
        await store.exists([page.key for page in reversed(chain)])
        assert await store.put([make_page("new")]) == [True]
        assert await present_on_disk(store, chain) == [0, 1]

    run_on_disk(root, test, 3 * PAGE_BYTES)


def test_delete_and_clear_reach_pages_that_another_store_wrote(root: Path) -> None:
    chain = make_chain(1, 4)

    async def test(store: DiskStore) -> None:
        await asyncio.to_thread(fill_folder, root, chain)
        assert await store.delete([chain[3].key]) == 1
        assert await store.clear() == 3
        assert bytes_in(root) == 0
        assert files_in(root, ".key") == []

    run_on_disk(root, test)


def test_without_links_other_stores_see_pages_at_their_next_open(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_links(page: str, link: str) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), link)

    monkeypatch.setattr(os, "link", no_links)
    chain = make_chain(1, 3)

    async def test(store: DiskStore) -> None:
        with caplog.at_level("INFO"):
            await asyncio.to_thread(fill_folder, root, chain)
        assert await store.exists([chain[0].key]) == [False]
        assert sum("keeps no hard links" in message for message in caplog.messages) == 1

    async def reopened(store: DiskStore) -> None:
        assert await present_on_disk(store, chain) == [0, 1, 2]

    run_on_disk(root, test)
    run_on_disk(root, reopened)


# ---- errors of the file system ------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=lambda number: errno.errorcode[number])
def test_a_failed_write_is_counted_and_refuses_what_hangs_below(
    root: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    chain, other = make_chain(1, 4), make_page("other")
    real_write = PageFiles.write_temporary

    def failing_write(files: PageFiles, key: PageKey, parts: Any) -> TemporaryFile:
        if key == chain[1].key:
            raise OSError(number, os.strerror(number))
        return real_write(files, key, parts)

    async def test(store: DiskStore) -> None:
        monkeypatch.setattr(PageFiles, "write_temporary", failing_write)
        assert await store.put([*chain, other]) == [True, False, False, False, True]
        stats = store.stats()
        assert stats.errors == {errno.errorcode[number]: 1}
        assert stats.used_bytes == 2 * PAGE_BYTES == bytes_in(root)
        monkeypatch.undo()
        assert await store.put(chain) == [True] * 4
        assert await present_on_disk(store, chain) == [0, 1, 2, 3]

    run_on_disk(root, test)


def test_an_unexpected_error_is_raised_and_leaves_the_store_usable(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken_write(files: PageFiles, key: PageKey, parts: Any) -> TemporaryFile:
        raise MemoryError

    chain = make_chain(1, 10)

    async def test(store: DiskStore) -> None:
        monkeypatch.setattr(PageFiles, "write_temporary", broken_write)
        with pytest.raises(MemoryError):
            await store.put(chain)
        assert store.stats().used_bytes == 0
        monkeypatch.undo()
        assert await store.put(chain) == [True] * 10

    run_on_disk(root, test)


def test_a_write_that_fails_half_way_leaves_no_file(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_writev = os.writev
    calls = 0

    def writev(descriptor: int, parts: Any) -> int:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real_writev(descriptor, [parts[0]])  # short: the header only

    async def test(store: DiskStore) -> None:
        monkeypatch.setattr(os, "writev", writev)
        assert await store.put([make_page("a")]) == [False]
        assert (store.stats().errors, store.stats().used_bytes, bytes_in(root)) == ({"ENOSPC": 1}, 0, 0)

    run_on_disk(root, test)


def test_short_system_calls_are_continued(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_writev, real_readv = os.writev, os.readv

    def one_part(parts: Any) -> list[Any]:
        part = next(part for part in parts if len(part))
        return [memoryview(part)[:100]]

    async def test(store: DiskStore) -> None:
        monkeypatch.setattr(os, "writev", lambda descriptor, parts: real_writev(descriptor, one_part(parts)))
        monkeypatch.setattr(os, "readv", lambda descriptor, parts: real_readv(descriptor, one_part(parts)))
        page = make_page("a")
        assert await store.put([page]) == [True]
        assert await present_on_disk(store, [page]) == [0]

    run_on_disk(root, test)


@pytest.mark.parametrize("step", ["replace", "fsync"])
def test_a_failed_publication_leaves_no_page(root: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    real = getattr(os, step)

    def failing(*arguments: Any) -> Any:
        if step == "fsync" and not stat.S_ISDIR(os.fstat(arguments[0]).st_mode):
            return real(*arguments)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async def test(store: DiskStore) -> None:
        assert await store.put([make_page("b")]) == [True]  # its folder is there
        folder = existing_file(root, make_page("b").key).parent
        page = next(page for n in range(5000) if (page := make_page(n)).key.hex()[:2] == folder.name)
        monkeypatch.setattr(os, step, failing)
        assert await store.put([page]) == [False]
        monkeypatch.undo()
        assert (store.stats().errors, store.stats().used_bytes) == ({"EIO": 1}, PAGE_BYTES)
        assert bytes_in(root) == PAGE_BYTES
        assert await store.exists([page.key]) == [False]

    run_on_disk(root, test, None, durable=True)


def test_an_unreadable_file_is_a_miss_and_stays(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing_readv(descriptor: int, parts: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async def test(store: DiskStore) -> None:
        page = make_page("a")
        await store.put([page])
        monkeypatch.setattr(os, "readv", failing_readv)
        assert await store.get([make_target(page.key)]) == [False]
        assert (store.stats().errors, store.stats().pages_missed) == ({"EIO": 1}, 1)
        monkeypatch.undo()
        assert await present_on_disk(store, [page]) == [0]

    run_on_disk(root, test)


def test_a_file_that_cannot_be_looked_at_does_not_exist_and_is_not_written(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing_stat(path: str, *, follow_symlinks: bool) -> os.stat_result:
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    async def test(store: DiskStore) -> None:
        page = make_page("a")
        await store.put([page])
        with monkeypatch.context() as patch:
            patch.setattr(os, "stat", failing_stat)
            assert await store.exists([page.key]) == [False]
            assert await store.put([page]) == [False]
        assert store.stats().errors == {"EIO": 2}
        assert await present_on_disk(store, [page]) == [0]

    run_on_disk(root, test)


def test_a_spoilt_page_of_another_store_is_not_found(root: Path) -> None:
    page = make_page("a")

    async def test(store: DiskStore) -> None:
        await asyncio.to_thread(fill_folder, root, [page])
        spoil_file(root, page.key, Corruption.FLIPPED_HEADER)
        assert await present_on_disk(store, [page]) == []
        assert await store.put([page]) == [True]
        assert await present_on_disk(store, [page]) == [0]

    run_on_disk(root, test)


def test_a_victim_that_cannot_be_removed_stays_and_the_put_is_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing_unlink(path: str) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), path)

    async def test(store: DiskStore) -> None:
        chain = make_chain(1, 2)
        await store.put(chain)
        monkeypatch.setattr(os, "unlink", failing_unlink)
        assert await store.put([make_page("new")]) == [False]
        assert await store.delete([chain[1].key]) == 0
        assert store.stats().errors == {"EACCES": 2}
        monkeypatch.undo()
        assert await present_on_disk(store, chain) == [0, 1]
        assert await store.put([make_page("new")]) == [True]
        assert await present_on_disk(store, chain) == [0]

    run_on_disk(root, test, 2 * PAGE_BYTES)


def test_a_bad_page_that_cannot_be_removed_is_hidden(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing_unlink(path: str) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), path)

    async def test(store: DiskStore) -> None:
        page = make_page("a")
        await store.put([page])
        spoil_file(root, page.key, Corruption.FLIPPED_PAYLOAD)
        monkeypatch.setattr(os, "unlink", failing_unlink)
        assert await store.get([make_target(page.key)]) == [False]
        assert await store.exists([page.key]) == [False]
        assert store.stats().used_bytes == PAGE_BYTES
        monkeypatch.undo()
        assert await store.delete([page.key]) == 1

    run_on_disk(root, test)


# ---- O-48: a batch that works in part -----------------------------------------------------------------------------


def test_a_batch_that_fails_in_part_says_which_and_the_next_one_works(root: Path) -> None:
    chain = make_chain(1, 4)

    async def test(store: DiskStore) -> None:
        await store.put(chain)
        existing_file(root, chain[2].key).unlink()
        targets = [make_target(page.key) for page in chain]
        assert await store.get(targets) == [True, True, False, True]
        assert [targets[n].payload == chain[n].payload for n in (0, 1, 3)] == [True] * 3
        assert targets[2].payload == b"\xee" * PAYLOAD_BYTES
        assert await store.get(targets[:2]) == [True, True]

    run_on_disk(root, test)
