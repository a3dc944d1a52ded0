"""Large pages past the page cache: the same answers, whatever the kernel and the file system can do."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hicache.testing.disk_folder import present_on_disk, run_on_disk, segment_of, spoil_slot
from hicache.testing.store_pages import Corruption, make_page, make_target
from hicache.tiers.aio import MAX_READS, AsyncReads, Read
from hicache.tiers.codecs import Codec, CodecSettings
from hicache.tiers.direct_io import PIECE_BYTES
from hicache.tiers.disk import DiskStore
from hicache.tiers.encoded import EncodedStore
from hicache.tiers.frames import Frame
from hicache.tiers.framing import HEADER_BYTES
from hicache.tiers.segment_files import SegmentFiles
from hicache.tiers.store import StoredPage


def chain_of_many_sizes(num_pages: int) -> list[StoredPage]:
    return [
        make_page(n, None if n == 0 else n - 1, num_bytes=33_000 + n * 4_321 % 90_000)
        for n in range(num_pages)
    ]


def no_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(queue: AsyncReads) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(AsyncReads, "__init__", refuse)


def no_direct_io(monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = os.open

    def refuse(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        return real_open(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)


@pytest.mark.parametrize(
    "cripple", [lambda _: None, no_queues, no_direct_io], ids=["all", "no-queues", "no-direct-io"]
)
def test_pages_of_all_sizes_come_back_in_any_order(
    root: Path, monkeypatch: pytest.MonkeyPatch, cripple: Callable[[pytest.MonkeyPatch], None]
) -> None:
    cripple(monkeypatch)
    chain = chain_of_many_sizes(40)

    async def test(store: DiskStore) -> None:
        assert await store.put(chain) == [True] * 40
        shuffled = [chain[n * 27 % 40] for n in range(40)]
        assert await present_on_disk(store, shuffled) == list(range(40))
        assert await store.delete([page.key for page in chain[20:]]) == 20
        assert await store.put(chain) == [True] * 40  # into used slots
        assert await present_on_disk(store, chain) == list(range(40))
        assert store.stats().errors == {}

    run_on_disk(root, test, direct=True)
    run_on_disk(root, lambda store: _all_there(store, chain))  # and through the page cache


async def _all_there(store: DiskStore, pages: list[StoredPage]) -> None:
    assert await present_on_disk(store, pages) == list(range(len(pages)))


def test_reads_go_past_the_page_cache(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests here are about really happens on this machine."""
    descriptors: list[int] = []
    real_submit = AsyncReads.submit

    def noting_submit(queue: AsyncReads, reads: Sequence[Read]) -> None:
        descriptors.extend(read.descriptor for read in reads)
        real_submit(queue, reads)

    async def test(store: DiskStore) -> None:
        pages = chain_of_many_sizes(4)
        await store.put(pages)
        if not store.pages.ledger.files.has_depth:
            pytest.skip("this machine has no direct I/O or no asynchronous reads")
        monkeypatch.setattr(AsyncReads, "submit", noting_submit)
        assert await present_on_disk(store, pages) == [0, 1, 2, 3]
        assert descriptors
        for descriptor in descriptors:
            assert os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(root))  # noqa: PTH115  # a descriptor

    run_on_disk(root, test, direct=True)


def test_more_pages_than_one_queue_holds(root: Path) -> None:
    pages = [make_page(n, num_bytes=32_768) for n in range(2 * MAX_READS + 10)]

    async def test(store: DiskStore) -> None:
        assert await store.put(pages) == [True] * len(pages)
        every_other = [*pages[::2], *pages[1::2]][: MAX_READS + 5]
        targets = [make_target(page.key, 32_768) for page in every_other]
        assert await store.get(targets) == [True] * len(every_other)
        assert all(t.payload == p.payload for t, p in zip(targets, every_other, strict=True))

    run_on_disk(root, test, direct=True)


def test_a_spoilt_page_and_a_segment_that_ends_too_early_cost_no_neighbour(root: Path) -> None:
    pages = [make_page(n, num_bytes=100_000) for n in range(8)]

    async def test(store: DiskStore) -> None:
        await store.put(pages)
        spoil_slot(root, pages[2].key, Corruption.FLIPPED_PAYLOAD)
        path, offset = segment_of(root, pages[7].key)
        os.truncate(path, offset + 50_000)
        targets = [make_target(page.key, 100_000) for page in pages]
        assert await store.get(targets) == [n not in (2, 7) for n in range(8)]
        assert store.stats().pages_corrupt == 2

    run_on_disk(root, test, direct=True)


def test_a_block_that_cannot_be_read_costs_its_page_alone(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue reports an error for the run; the pages are then read one by one."""
    pages = [make_page(n, num_bytes=100_000) for n in range(8)]
    real_read, real_wait = SegmentFiles.read, AsyncReads.wait

    async def test(store: DiskStore) -> None:
        await store.put(pages)
        bad = store.pages.ledger.index.find(pages[3].key)
        assert bad is not None

        def failing_read(files: SegmentFiles, frames: Any) -> int:
            if any(frame.place == bad.place for frame in frames):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real_read(files, frames)

        def failing_wait(queue: AsyncReads) -> list[tuple[int, int]]:
            return [(tag, -errno.EIO) for tag, _ in real_wait(queue)]

        monkeypatch.setattr(SegmentFiles, "read", failing_read)
        monkeypatch.setattr(AsyncReads, "wait", failing_wait)
        targets = [make_target(page.key, 100_000) for page in pages]
        assert await store.get(targets) == [n != 3 for n in range(8)]
        assert store.stats().errors == {"EIO": 1}
        monkeypatch.undo()
        assert await present_on_disk(store, pages) == list(range(8))

    run_on_disk(root, test, direct=True)


def test_reads_that_nobody_waits_for_any_more_are_waited_for(root: Path) -> None:
    """Memory that the kernel still writes into is not given to anybody else."""
    pages = [make_page(n, num_bytes=100_000) for n in range(30)]

    async def test(store: DiskStore) -> None:
        await store.put(pages)
        files = store.pages.ledger.files
        entries = [store.pages.ledger.index.find(page.key) for page in pages]
        runs = [
            [Frame(e.place, e.size_bytes - 512, bytearray(160), memoryview(bytearray(100_000)))]
            for e in entries
            if e
        ]
        reads = files.read_many(runs)
        next(reads)
        reads.close()
        assert all(queue.num_under_way == 0 for queue in files._queues)
        assert await present_on_disk(store, pages) == list(range(30))

    run_on_disk(root, test, direct=True)


def test_a_page_that_encryption_made_longer_than_its_target_harms_no_read_under_way(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All reads have ended when the last page is looked at first: what is done for it must leave the others alone."""
    pages = [make_page(n, num_bytes=100_000) for n in range(20)]
    codec = Codec(CodecSettings(key=bytes(32), encrypts=True))
    real_wait = AsyncReads.wait

    def wait_for_all(queue: AsyncReads) -> list[tuple[int, int]]:
        ended = real_wait(queue)
        while queue.num_under_way:
            ended += real_wait(queue)
        return sorted(ended, reverse=True)

    async def test(store: DiskStore) -> None:
        encrypted = EncodedStore(store, codec)
        assert await encrypted.put(pages) == [True] * 20
        monkeypatch.setattr(AsyncReads, "wait", wait_for_all)
        targets = [make_target(page.key, 100_000) for page in pages[::-1]]
        assert await encrypted.get(targets) == [True] * 20
        assert all(t.payload == p.payload for t, p in zip(targets, pages[::-1], strict=True))
        assert store.stats().pages_corrupt == 0
        await encrypted.close()

    run_on_disk(root, test, direct=True)


@pytest.mark.parametrize("cripple", [lambda _: None, no_queues], ids=["all", "no-queues"])
def test_pages_longer_than_one_piece_come_back_whole(
    root: Path, monkeypatch: pytest.MonkeyPatch, cripple: Callable[[pytest.MonkeyPatch], None]
) -> None:
    cripple(monkeypatch)
    sizes = [PIECE_BYTES - HEADER_BYTES, PIECE_BYTES, 2 * PIECE_BYTES + 4_097, 40_000, 5 * PIECE_BYTES - 1]
    pages = [make_page(n, num_bytes=size) for n, size in enumerate(sizes)]

    async def test(store: DiskStore) -> None:
        assert await store.put(pages) == [True] * 5
        assert await present_on_disk(store, pages[::-1]) == [0, 1, 2, 3, 4]
        assert store.stats().errors == {}

    run_on_disk(root, test, direct=True)


def test_reads_that_the_kernel_does_not_take_are_made_one_by_one(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = [make_page(n, num_bytes=300_000) for n in range(20)]
    real_submit = AsyncReads.submit
    num_calls = 0

    def failing_submit(queue: AsyncReads, reads: Sequence[Read]) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls > 2:
            real_submit(queue, reads[:1])
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        real_submit(queue, reads)

    async def test(store: DiskStore) -> None:
        assert await store.put(pages) == [True] * 20
        monkeypatch.setattr(AsyncReads, "submit", failing_submit)
        assert await present_on_disk(store, pages) == list(range(20))
        assert store.stats().errors == {}

    run_on_disk(root, test, direct=True)
