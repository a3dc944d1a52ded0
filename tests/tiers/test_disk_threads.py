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
    pages_in,
    present_on_disk,
    run_on_disk,
    spoil_slot,
)
from hicache.testing.store_pages import Corruption, make_chain, make_page, make_target
from hicache.threads import DaemonExecutor
from hicache.tiers.disk import DiskStore
from hicache.tiers.folder_state import INDEX_BYTES, OVERHEAD_BYTES
from hicache.tiers.framing import decode_header
from hicache.tiers.page_ledger import PageLedger
from hicache.tiers.segment_files import SegmentFiles, slot_bytes
from hicache.tiers.store import StoredPage
from hicache.types import PageKey

# ---- order of a batch ---------------------------------------------------------------------------------------------

LARGE_BYTES = 300_000
"""Three of these are one run; so a chain of twelve takes four."""


def large_chain(num_pages: int) -> list[StoredPage]:
    return [
        make_page(f"large {n}", None if n == 0 else f"large {n - 1}", num_bytes=LARGE_BYTES)
        for n in range(num_pages)
    ]


def test_pages_become_visible_in_order_however_their_writes_end(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = large_chain(12)
    head_may_be_written = threading.Event()
    others_are_written = threading.Semaphore(0)
    published: list[PageKey] = []
    real_write, real_commit = SegmentFiles.write, PageLedger.commit

    def held_write(files: SegmentFiles, frames: Any) -> None:
        if bytes(chain[0].key) in bytes(frames[0].header):
            assert head_may_be_written.wait(timeout=30)
        real_write(files, frames)
        others_are_written.release()

    def noting_commit(ledger: PageLedger, window: Any, written: Any, failed: Any) -> dict[PageKey, bool]:
        published.extend(page.entry.key for page in written)
        return real_commit(ledger, window, written, failed)

    monkeypatch.setattr(SegmentFiles, "write", held_write)
    monkeypatch.setattr(PageLedger, "commit", noting_commit)

    async def test(store: DiskStore) -> None:
        put = asyncio.create_task(store.put(chain))
        for _ in range(3):
            assert await asyncio.to_thread(others_are_written.acquire, timeout=30)
        assert published == []
        assert pages_in(root) == {}
        head_may_be_written.set()
        assert await put == [True] * 12
        assert published == [page.key for page in chain]

    run_on_disk(root, test, num_threads=5)


def test_what_was_written_ahead_of_a_page_that_fails_is_taken_back(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, other = large_chain(12), make_page("other", num_bytes=LARGE_BYTES)
    others_are_written = threading.Semaphore(0)
    real_write = SegmentFiles.write

    def failing_head(files: SegmentFiles, frames: Any) -> None:
        if bytes(chain[0].key) in bytes(frames[0].header):
            if len(frames) > 1:
                for _ in range(3):
                    assert others_are_written.acquire(timeout=30)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real_write(files, frames)
        others_are_written.release()

    monkeypatch.setattr(SegmentFiles, "write", failing_head)

    async def test(store: DiskStore) -> None:
        assert await store.put([*chain, other]) == [False] * 12 + [True]
        assert store.stats().used_bytes == slot_bytes(LARGE_BYTES) + INDEX_BYTES
        monkeypatch.undo()
        assert await store.put(chain) == [True] * 12
        assert await present_on_disk(store, [*chain, other]) == list(range(13))

    run_on_disk(root, test, num_threads=4)


def test_a_long_batch_becomes_visible_window_by_window(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of any size holds bounded room that nobody can read yet."""
    monkeypatch.setattr("hicache.tiers.page_ledger.WINDOW_PAGES", 16)
    chain = make_chain(1, 50)
    num_before: list[int] = []
    real_write = SegmentFiles.write

    def noting_write(files: SegmentFiles, frames: Any) -> None:
        num_before.append(len(pages_in(root)))
        real_write(files, frames)

    monkeypatch.setattr(SegmentFiles, "write", noting_write)

    async def test(store: DiskStore) -> None:
        assert await store.put(chain) == [True] * 50

    run_on_disk(root, test)
    assert num_before == [0, 16, 32, 48]


def test_the_next_window_is_written_while_the_first_one_is_but_not_visible_before_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk never waits for the journal, and a kill leaves no suffix without its prefix."""
    monkeypatch.setattr("hicache.tiers.page_ledger.WINDOW_BYTES", LARGE_BYTES)
    chain = large_chain(3)
    head_may_be_written, second_is_written = threading.Event(), threading.Event()
    real_write = SegmentFiles.write

    def held_write(files: SegmentFiles, frames: Any) -> None:
        key = decode_header(frames[0].header).key
        if key == chain[0].key:
            assert head_may_be_written.wait(timeout=30)
        real_write(files, frames)
        if key == chain[1].key:
            second_is_written.set()

    monkeypatch.setattr(SegmentFiles, "write", held_write)

    async def test(store: DiskStore) -> None:
        put = asyncio.create_task(store.put(chain))
        assert await asyncio.to_thread(second_is_written.wait, 30)
        assert pages_in(root) == {}
        head_may_be_written.set()
        assert await put == [True] * 3

    run_on_disk(root, test, num_threads=3)


def test_a_page_without_room_waits_for_the_window_before_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows are admitted ahead, but what may be evicted is what can be seen."""
    monkeypatch.setattr("hicache.tiers.page_ledger.WINDOW_PAGES", 2)
    pages = [make_page(n) for n in range(6)]

    async def test(store: DiskStore) -> None:
        assert await store.put(pages) == [True] * 6
        assert await present_on_disk(store, pages) == [4, 5]
        stats = store.stats()
        assert (stats.pages_evicted, stats.pages_refused) == (4, 0)

    run_on_disk(root, test, 2 * PAGE_BYTES)


def test_neighbours_are_written_and_read_by_one_system_call(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    real_pwritev, real_preadv = os.pwritev, os.preadv

    def pwritev(*arguments: Any) -> int:
        calls.append("pwritev")
        return real_pwritev(*arguments)

    def preadv(*arguments: Any) -> int:
        calls.append("preadv")
        return real_preadv(*arguments)

    monkeypatch.setattr(os, "pwritev", pwritev)
    monkeypatch.setattr(os, "preadv", preadv)
    chain = make_chain(1, 64)

    async def test(store: DiskStore) -> None:
        assert await store.put(chain) == [True] * 64
        assert calls == ["pwritev"]
        shuffled = [chain[n * 27 % 64] for n in range(64)]
        assert await store.get([make_target(page.key) for page in shuffled]) == [True] * 64
        assert calls == ["pwritev", "preadv"]

    run_on_disk(root, test)


def test_a_cancelled_put_returns_only_when_its_buffers_are_free(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_writing, may_write = threading.Event(), threading.Event()
    real_write = SegmentFiles.write

    def held_write(files: SegmentFiles, frames: Any) -> None:
        is_writing.set()
        assert may_write.wait(timeout=30)
        real_write(files, frames)

    monkeypatch.setattr(SegmentFiles, "write", held_write)
    chain = large_chain(12)

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
        # The run that was being written is kept; the others never began, and hold no room.
        assert await present_on_disk(store, chain) == [0, 1, 2]
        assert store.stats().used_bytes == 3 * (slot_bytes(LARGE_BYTES) + INDEX_BYTES)

    run_on_disk(root, test, num_threads=1)


# ---- O-54: threads ------------------------------------------------------------------------------------------------


def test_a_batch_takes_at_most_one_hop_per_thread_and_never_the_default_executor(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submissions: list[str] = []
    real_submit, real_default = DaemonExecutor.submit, ThreadPoolExecutor.submit

    def counting_submit(pool: DaemonExecutor, /, *arguments: Any, **named: Any) -> Future[Any]:
        submissions.append(pool._name)
        return real_submit(pool, *arguments, **named)

    def counting_default(pool: ThreadPoolExecutor, /, *arguments: Any, **named: Any) -> Future[Any]:
        submissions.append("an executor of the standard library")
        return real_default(pool, *arguments, **named)

    monkeypatch.setattr(DaemonExecutor, "submit", counting_submit)
    monkeypatch.setattr(ThreadPoolExecutor, "submit", counting_default)
    pages = make_chain(1, 64)

    async def test(store: DiskStore) -> None:
        submissions.clear()
        assert await store.put(pages) == [True] * 64
        assert submissions == ["hicache-disk"], "a small batch takes one hop"
        assert await store.get([make_target(page.key) for page in pages]) == [True] * 64
        assert submissions == ["hicache-disk"] * 2
        assert await store.put(large_chain(12)) == [True] * 12
        assert submissions == ["hicache-disk"] * 5, "large pages take more, at most one for each thread"
        targets = [make_target(page.key, LARGE_BYTES) for page in large_chain(12)]
        assert await store.get(targets) == [True] * 12
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


def test_a_page_that_left_for_its_parent_comes_back_in_the_same_batch(root: Path) -> None:
    parent, child = make_chain(1, 2)
    other = make_page("other")

    async def test(store: DiskStore) -> None:
        assert await store.put([parent, child]) == [True, True]
        await store.delete([parent.key])
        assert await store.put([other]) == [True]  # full: the child, which lacks its parent, goes first
        assert await store.put([parent, child]) == [True, True]
        assert await store.exists([parent.key, child.key, other.key]) == [True, True, False]

    run_on_disk(root, test, 2 * PAGE_BYTES)


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
                    key = seeded_random.choice(chain).key
                    with store.pages.ledger._exclusive():  # its slot is not used again meanwhile
                        if key in pages_in(root):
                            spoil_slot(root, key, Corruption.FLIPPED_PAYLOAD)

    async def test(store: DiskStore) -> None:
        await asyncio.gather(*(worker(store) for _ in range(3)))
        assert store.stats().used_bytes == len(pages_in(root)) * PAGE_BYTES <= 12 * PAGE_BYTES
        assert bytes_in(root) <= 12 * PAGE_BYTES + OVERHEAD_BYTES

    run_on_disk(root, test, 12 * PAGE_BYTES)
