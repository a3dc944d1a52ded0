"""The order of a batch, cancelled calls, and whose threads do the work."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hicache.testing.disk_folder import (
    PAGE_BYTES,
    bytes_in,
    files_in,
    page_file,
    present_on_disk,
    run_on_disk,
)
from hicache.testing.store_pages import make_chain, make_page, make_target
from hicache.tiers.disk import DiskStore
from hicache.tiers.page_files import PageFiles, TemporaryFile
from hicache.tiers.page_index import PageEntry
from hicache.types import PageKey

# ---- order of a batch ---------------------------------------------------------------------------------------------


def test_pages_become_visible_in_order_however_their_writes_end(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = make_chain(1, 4)
    head_may_be_written = threading.Event()
    others_are_written = threading.Semaphore(0)
    published: list[PageKey] = []
    real_write, real_publish = PageFiles.write_temporary, PageFiles.publish

    def held_write(files: PageFiles, key: PageKey, parts: Any) -> TemporaryFile:
        if key == chain[0].key:
            assert head_may_be_written.wait(timeout=30)
        temporary = real_write(files, key, parts)
        others_are_written.release()
        return temporary

    def noting_publish(files: PageFiles, temporary: TemporaryFile, entry: PageEntry) -> None:
        published.append(entry.key)
        real_publish(files, temporary, entry)

    monkeypatch.setattr(PageFiles, "write_temporary", held_write)
    monkeypatch.setattr(PageFiles, "publish", noting_publish)

    async def test(store: DiskStore) -> None:
        put = asyncio.create_task(store.put(chain))
        for _ in range(3):
            assert await asyncio.to_thread(others_are_written.acquire, timeout=30)
        assert published == []
        assert await store.exists([page.key for page in chain]) == [False] * 4
        head_may_be_written.set()
        assert await put == [True] * 4
        assert published == [page.key for page in chain]

    run_on_disk(root, test, num_threads=5)


def test_what_was_written_ahead_of_a_page_that_fails_is_taken_back(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, other = make_chain(1, 3), make_page("other")
    others_are_written = threading.Semaphore(0)
    real_write = PageFiles.write_temporary

    def failing_head(files: PageFiles, key: PageKey, parts: Any) -> TemporaryFile:
        if key == chain[0].key:
            for _ in range(3):
                assert others_are_written.acquire(timeout=30)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        temporary = real_write(files, key, parts)
        others_are_written.release()
        return temporary

    monkeypatch.setattr(PageFiles, "write_temporary", failing_head)

    async def test(store: DiskStore) -> None:
        assert await store.put([*chain, other]) == [False, False, False, True]
        assert (store.stats().used_bytes, bytes_in(root)) == (PAGE_BYTES, PAGE_BYTES)
        assert files_in(root, ".tmp") == []

    run_on_disk(root, test)


def test_a_long_batch_keeps_few_files_open(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = [make_page(n) for n in range(100)]
    head_may_be_written = threading.Event()
    written: set[PageKey] = set()
    real_write = PageFiles.write_temporary

    def held_write(files: PageFiles, key: PageKey, parts: Any) -> TemporaryFile:
        temporary = real_write(files, key, parts)
        written.add(key)
        if len(written) == 16:
            head_may_be_written.set()
        if key == pages[0].key:
            assert head_may_be_written.wait(timeout=30)
            assert len(written) == 16
        return temporary

    monkeypatch.setattr(PageFiles, "write_temporary", held_write)

    async def test(store: DiskStore) -> None:
        assert await store.put(pages) == [True] * 100

    run_on_disk(root, test)


def test_a_cancelled_put_returns_only_when_its_buffers_are_free(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_writing, may_write = threading.Event(), threading.Event()
    real_write = PageFiles.write_temporary

    def held_write(files: PageFiles, key: PageKey, parts: Any) -> TemporaryFile:
        is_writing.set()
        assert may_write.wait(timeout=30)
        return real_write(files, key, parts)

    monkeypatch.setattr(PageFiles, "write_temporary", held_write)
    chain = make_chain(1, 10)

    async def test(store: DiskStore) -> None:
        put = asyncio.create_task(store.put(chain))
        assert await asyncio.to_thread(is_writing.wait, 30)
        put.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not put.done()
        put.cancel()  # once more changes nothing
        may_write.set()
        with pytest.raises(asyncio.CancelledError):
            await put
        assert await present_on_disk(store, chain) == [
            0
        ]  # the page that was being written; the others never began

    run_on_disk(root, test, num_threads=1)


# ---- O-54: threads ------------------------------------------------------------------------------------------------


def test_a_batch_takes_at_most_one_hop_per_thread_and_never_the_default_executor(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submissions: list[str] = []
    real_submit = ThreadPoolExecutor.submit

    def counting_submit(pool: ThreadPoolExecutor, /, *arguments: Any, **named: Any) -> Future[Any]:
        submissions.append(str(pool._thread_name_prefix))
        return real_submit(pool, *arguments, **named)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", counting_submit)
    pages = make_chain(1, 64)

    async def test(store: DiskStore) -> None:
        submissions.clear()
        assert await store.put(pages) == [True] * 64
        assert submissions == ["hicache-disk"] * 4
        assert await store.get([make_target(page.key) for page in pages]) == [True] * 64
        assert submissions == ["hicache-disk"] * 8
        assert await store.exists([page.key for page in pages]) == [True] * 64
        assert await store.get([make_target(pages[0].key)]) == [True]
        assert submissions == ["hicache-disk"] * 10

    run_on_disk(root, test)


def test_a_blocked_default_executor_does_not_hold_up_the_store(root: Path) -> None:
    page = make_page("a")

    async def test(store: DiskStore) -> None:
        may_end = threading.Event()
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        blocking = loop.run_in_executor(None, may_end.wait, 30)
        assert await store.put([page]) == [True]
        assert await present_on_disk(store, [page]) == [0]
        may_end.set()
        assert await blocking

    run_on_disk(root, test)


def test_close_leaves_no_thread(root: Path) -> None:
    async def test(store: DiskStore) -> None:
        await store.put(make_chain(1, 8))
        assert any(thread.name.startswith("hicache-disk") for thread in threading.enumerate())

    run_on_disk(root, test)
    assert not any(thread.name.startswith("hicache-disk") for thread in threading.enumerate())


def test_a_closed_store_can_be_opened_again(root: Path) -> None:
    chain = make_chain(1, 3)

    async def main() -> None:
        store = DiskStore(root)
        for _ in range(2):
            await store.open()
            await store.open()  # twice is once
            assert await store.put(chain) == [True] * 3
            assert await present_on_disk(store, chain) == [0, 1, 2]
            await store.close()
        assert store.stats().pages_written == 3

    asyncio.run(main())


def test_pages_are_gone_from_the_index_and_the_folder_alike_after_random_work(
    root: Path, seeded_random: Any
) -> None:
    chains = [make_chain(1, 6, prefix=f"{n} ") for n in range(6)]

    async def worker(store: DiskStore) -> None:
        for _ in range(30):
            chain = seeded_random.choice(chains)
            match seeded_random.randrange(5):
                case 0 | 1:
                    await store.put(chain[: seeded_random.randint(1, 6)])
                case 2:
                    targets = [make_target(page.key) for page in chain]
                    for target, page, hit in zip(targets, chain, await store.get(targets), strict=True):
                        assert not hit or target.payload == page.payload
                case 3:
                    await store.delete([seeded_random.choice(chain).key])
                case _:
                    path = page_file(root, seeded_random.choice(chain).key)
                    if path is not None:
                        path.unlink(missing_ok=True)

    async def test(store: DiskStore) -> None:
        await asyncio.gather(*(worker(store) for _ in range(3)))
        await store.exists([page.key for chain in chains for page in chain])  # notices what vanished
        assert store.stats().used_bytes == bytes_in(root) <= 12 * PAGE_BYTES

    run_on_disk(root, test, 12 * PAGE_BYTES)
