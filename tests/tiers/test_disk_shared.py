"""Several processes at work in one folder: what each sees, who owns what, and the bound over all of them."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from hicache.testing.disk_folder import (
    PAGE_BYTES,
    bytes_in,
    fill_folder,
    open_ledger,
    owners_in,
    pages_in,
    present_on_disk,
    run_on_disk,
    segment_of,
    spoil_slot,
    write_by_hand,
)
from hicache.testing.store_pages import Corruption, make_chain, make_page, make_target
from hicache.tiers.disk import DiskStore
from hicache.tiers.extents import BLOCK_BYTES
from hicache.tiers.folder_state import INDEX_BYTES, OVERHEAD_BYTES
from hicache.tiers.segment_files import slot_bytes

# ---- what each sees -----------------------------------------------------------------------------------------------


def test_pages_that_another_store_wrote_after_open_are_hits(root: Path) -> None:
    chain = make_chain(1, 3)

    async def test(store: DiskStore) -> None:
        await asyncio.to_thread(fill_folder, root, chain)
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
        assert pages_in(root) == {}
        assert bytes_in(root) <= OVERHEAD_BYTES

    run_on_disk(root, test)


def test_a_spoilt_page_of_another_store_is_removed_for_all(root: Path) -> None:
    page = make_page("a")

    async def test(store: DiskStore) -> None:
        other = open_ledger(root)
        other.commit(*write_by_hand(other, [page]), set())
        spoil_slot(root, page.key, Corruption.FLIPPED_HEADER)
        assert await store.get([make_target(page.key)]) == [False]
        assert store.stats().pages_corrupt == 1
        other.refresh()
        assert other.index.find(page.key) is None
        assert await store.put([page]) == [True]
        assert await present_on_disk(store, [page]) == [0]
        assert other.check_integrity() == []
        other.close()

    run_on_disk(root, test)


def test_a_journal_that_another_store_wrote_anew_is_followed(root: Path) -> None:
    pages = [make_page(n) for n in range(6)]

    async def test(store: DiskStore) -> None:
        await store.put(pages[:3])
        async with opened(root) as other:
            assert await other.delete([pages[0].key]) == 1
            for n in range(150):  # more than its share: it is written anew on the way
                await other.put([make_page(f"passing {n}")])
                await other.delete([make_page(f"passing {n}").key])
            assert await other.put(pages[3:]) == [True] * 3
            assert await present_on_disk(store, pages) == [1, 2, 3, 4, 5]
            assert store.check_integrity() == []
            assert await store.put(pages[:1]) == [True]
            assert await present_on_disk(other, pages) == list(range(6))
            assert other.check_integrity() == []

    run_on_disk(root, test)


class opened:  # noqa: N801  # reads as a verb
    """One more store on a folder."""

    def __init__(self, root: Path, capacity_bytes: int | None = None) -> None:
        self.store = DiskStore(root, capacity_bytes)

    async def __aenter__(self) -> DiskStore:
        await self.store.open()
        return self.store

    async def __aexit__(self, *_: object) -> None:
        await self.store.close()


# ---- two at the same page -----------------------------------------------------------------------------------------


def test_two_that_write_the_same_page_both_succeed_and_keep_it_once(root: Path) -> None:
    chain = make_chain(1, 4)

    async def test(store: DiskStore) -> None:
        other = open_ledger(root)
        window, written = write_by_hand(other, chain)
        assert await store.put(chain[:3]) == [True] * 3  # overtakes
        assert other.commit(window, written, set()) == {page.key: True for page in chain}
        assert await present_on_disk(store, chain) == [0, 1, 2, 3]
        assert store.stats().used_bytes == other.index.used_bytes == 4 * PAGE_BYTES
        assert other.check_integrity() == []
        other.close()

    run_on_disk(root, test)


def test_a_page_that_overtook_and_was_removed_again_is_committed_by_the_slower(root: Path) -> None:
    page = make_page("a")

    async def test(store: DiskStore) -> None:
        other = open_ledger(root)
        window, written = write_by_hand(other, [page])
        await store.put([page])
        other.refresh()
        await store.delete([page.key])
        assert other.commit(window, written, set()) == {page.key: True}
        assert await present_on_disk(store, [page]) == [0]
        other.close()

    run_on_disk(root, test)


# ---- the bound over all -------------------------------------------------------------------------------------------


def test_the_capacity_holds_over_all_processes_together(root: Path) -> None:
    capacity_bytes = 12 * PAGE_BYTES

    async def test(store: DiskStore) -> None:
        async with opened(root, capacity_bytes) as other:
            for n in range(20):
                mine, theirs = make_chain(1, 3, prefix=f"m{n} "), make_chain(1, 3, prefix=f"t{n} ")
                assert await store.put(mine) == [True] * 3
                assert await other.put(theirs) == [True] * 3
                assert bytes_in(root) <= capacity_bytes + OVERHEAD_BYTES
                assert other.stats().used_bytes <= capacity_bytes
                assert await present_on_disk(store, [*mine, *theirs]) == list(range(6))
            assert store.check_integrity() == other.check_integrity() == []

    run_on_disk(root, test, capacity_bytes)


def test_what_another_process_is_writing_counts(root: Path) -> None:
    pages = [make_page(n) for n in range(5)]
    writer = open_ledger(root, 4 * PAGE_BYTES)
    window, written = write_by_hand(writer, pages[:3])

    async def test(store: DiskStore) -> None:
        assert await store.put([pages[3]]) == [True]
        assert await store.put([pages[4]]) == [True]  # in place of the one before
        assert await present_on_disk(store, pages) == [4]
        writer.commit(window, written, set())
        assert await present_on_disk(store, pages) == [0, 1, 2, 4]

    run_on_disk(root, test, 4 * PAGE_BYTES)
    writer.close()


def test_room_that_another_process_had_goes_back_to_the_file_system(root: Path) -> None:
    """Its slots are nobody else's to write into, so their blocks must go."""
    mine = [make_page(f"m{n}", num_bytes=100_000) for n in range(8)]
    theirs = [make_page(f"t{n}", num_bytes=100_000) for n in range(8)]
    capacity_bytes = 8 * (106_496 + 512)

    async def test(store: DiskStore) -> None:
        async with opened(root, capacity_bytes) as other:
            assert await other.put(theirs) == [True] * 8
            assert await store.put(mine) == [True] * 8
            assert await present_on_disk(other, [*theirs, *mine]) == list(range(8, 16))
            assert bytes_in(root) <= capacity_bytes + OVERHEAD_BYTES
            assert await other.put(theirs) == [True] * 8
            assert bytes_in(root) <= capacity_bytes + OVERHEAD_BYTES
            assert await present_on_disk(store, [*theirs, *mine]) == list(range(8))

    run_on_disk(root, test, capacity_bytes)


SMALL_BYTES = 1024
SMALL_PAGE_BYTES = slot_bytes(SMALL_BYTES) + INDEX_BYTES


@pytest.mark.parametrize("step", [1, 2, 3, 7], ids=lambda step: f"every_{step}")
def test_blocks_that_a_page_of_another_process_left_in_part_count(root: Path, step: int) -> None:
    """Its slots end within blocks, which stay until that process uses them again."""
    capacity_bytes = 512 * SMALL_PAGE_BYTES
    theirs = [make_page(f"t{n}", num_bytes=SMALL_BYTES) for n in range(512)]

    async def test(store: DiskStore) -> None:
        async with opened(root, capacity_bytes) as other:
            assert await other.put(theirs) == [True] * 512
            await store.get([make_target(page.key, SMALL_BYTES) for page in theirs[::step]])  # these go last
            num_stored = 0
            for n in range(0, 512, 8):
                mine = [make_page(f"m{i}", num_bytes=SMALL_BYTES) for i in range(n, n + 8)]
                num_stored += sum(await store.put(mine))
                assert bytes_in(root) <= capacity_bytes + OVERHEAD_BYTES
                assert store.check_integrity() == []
            assert num_stored == 512
            # once it has heard of it, it counts them itself, and all the room is used again
            assert await other.put(theirs) == [True] * 512
            assert bytes_in(root) <= capacity_bytes + OVERHEAD_BYTES
            assert other.check_integrity() == store.check_integrity() == []
            assert len(await present_on_disk(store, theirs)) == other.stats().num_pages >= 500

    run_on_disk(root, test, capacity_bytes)


def test_what_another_process_left_counts_until_it_has_heard_of_it(root: Path) -> None:
    pages = [make_page(n, num_bytes=SMALL_BYTES) for n in range(8)]

    async def test(store: DiskStore) -> None:
        async with opened(root) as other:
            await other.put(pages)
            slots = store.pages.ledger.slots
            await store.delete([pages[1].key])
            assert sum(slots.left_bytes().values()) == slot_bytes(SMALL_BYTES)
            await store.delete([page.key for page in pages[2:7]])  # now the second block is free
            assert sum(slots.left_bytes().values()) == 6 * slot_bytes(SMALL_BYTES) - BLOCK_BYTES
            await other.put([pages[0]])
            await store.put([pages[1]])
            assert slots.left_bytes() == {}
            assert other.pages.ledger.slots.retained_bytes >= 6 * slot_bytes(SMALL_BYTES) - BLOCK_BYTES

    run_on_disk(root, test)


def test_a_block_is_given_back_only_while_its_owner_cannot_have_used_it_again(root: Path) -> None:
    pages = [make_page(n, num_bytes=SMALL_BYTES) for n in range(9)]
    new = [make_page(f"new {n}", num_bytes=SMALL_BYTES) for n in range(3)]

    async def test(store: DiskStore) -> None:
        async with opened(root) as other:
            await other.put(pages)
            await store.delete([page.key for page in pages[1:4]])
            assert await other.put(new) == [True] * 3  # into these slots
            await store.delete([page.key for page in pages[4:7]])  # next to them
            assert await present_on_disk(store, [*pages, *new]) == [0, 7, 8, 9, 10, 11]

    run_on_disk(root, test)


def test_a_journal_written_anew_hides_nothing_that_was_left(root: Path) -> None:
    pages = [make_page(n, num_bytes=SMALL_BYTES) for n in range(8)]

    async def test(store: DiskStore) -> None:
        async with opened(root) as other:
            await other.put(pages)
            await store.delete([pages[1].key])
            journal = root / "journal"
            inode, n = journal.stat().st_ino, 0
            while journal.stat().st_ino == inode:
                await store.put([make_page(f"passing {n}")])
                await store.delete([make_page(f"passing {n}").key])
                n += 1
            assert sum(store.pages.ledger.slots.left_bytes().values()) == slot_bytes(SMALL_BYTES)
            await other.put([make_page("any")])
            await store.put([make_page("other")])
            assert store.pages.ledger.slots.left_bytes() == {}

    run_on_disk(root, test)


# ---- those that end -----------------------------------------------------------------------------------------------


def test_segments_of_a_process_that_ended_are_adopted_and_used_again(root: Path) -> None:
    pages = [make_page(n) for n in range(3)]

    async def test(store: DiskStore) -> None:
        async with opened(root, 3 * PAGE_BYTES) as other:
            assert await other.put(pages) == [True] * 3
            path, _ = segment_of(root, pages[0].key)
        new = make_page("new")
        assert await store.put([new]) == [True]
        assert segment_of(root, new.key)[0] == path
        assert await present_on_disk(store, [*pages, new]) == [1, 2, 3]

    run_on_disk(root, test, 3 * PAGE_BYTES)


WRITER = """
import asyncio, sys
from hicache.testing.store_pages import make_chain, make_page
from hicache.tiers.disk import DiskStore
async def main():
    store = DiskStore(sys.argv[1], int(sys.argv[3]))
    await store.open()
    for n in range(10**6):
        pages = make_chain(1, 4, prefix=f"{sys.argv[2]} {n} ")
        if len(sys.argv) > 4:
            pages = [make_page(f"{n} {i}", num_bytes=700 + 97 * ((7 * n + i) % 40)) for i in range(12)]
        answers = await store.put(pages)
        print(n, *map(int, answers), flush=True)
        if sys.stdin.readline() == "":
            return
asyncio.run(main())
"""


def start_writer(root: Path, name: str, capacity_bytes: int, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(root), name, str(capacity_bytes), *options]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


@pytest.mark.slow
def test_three_processes_write_and_one_is_killed(root: Path) -> None:
    capacity_bytes = 400 * PAGE_BYTES
    names = ["a", "b", "c"]
    writers = [start_writer(root, name, capacity_bytes) for name in names]
    for turn in range(8):
        for writer in writers:
            assert pipe(writer.stdout).readline().split() == [str(turn), "1", "1", "1", "1"]
            pipe(writer.stdin).write("on\n")
            pipe(writer.stdin).flush()
        if turn == 4:
            writers[0].send_signal(signal.SIGKILL)
            writers[0].wait()
            for stream in (writers[0].stdin, writers[0].stdout):
                pipe(stream).close()
            del writers[0]
    for writer in writers:
        writer.communicate()
        assert writer.returncode == 0

    async def test(store: DiskStore) -> None:
        assert owners_in(root) == 1
        for name, turns in (("a", 5), ("b", 8), ("c", 8)):
            for n in range(turns):
                chain = make_chain(1, 4, prefix=f"{name} {n} ")
                assert await present_on_disk(store, chain) == [0, 1, 2, 3]

    run_on_disk(root, test, capacity_bytes)


@pytest.mark.slow
def test_two_processes_with_pages_of_odd_sizes_keep_the_bound(root: Path) -> None:
    capacity_bytes = 400_000
    writer = start_writer(root, "b", capacity_bytes, "odd sizes")

    async def test(store: DiskStore) -> None:
        for turn in range(60):
            answers = (await asyncio.to_thread(pipe(writer.stdout).readline)).split()
            assert answers == [str(turn), *"1" * 12]
            pages = [
                make_page(f"mine {turn} {i}", num_bytes=500 + 131 * ((5 * turn + i) % 40)) for i in range(9)
            ]
            if turn % 3:  # else the other writes twice in a row
                assert await store.put(pages) == [True] * 9
                await present_on_disk(store, pages[::2])
            assert bytes_in(root) <= capacity_bytes + OVERHEAD_BYTES
            pipe(writer.stdin).write("on\n")
            pipe(writer.stdin).flush()
        writer.kill()
        writer.communicate()
        assert await store.put([make_page("last")]) == [True]
        assert bytes_in(root) <= capacity_bytes + OVERHEAD_BYTES

    run_on_disk(root, test, capacity_bytes)
