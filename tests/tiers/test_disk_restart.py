"""A disk store after a crash or a restart: what was written is there, and half-written pages are not."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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
    write_by_hand,
)
from hicache.testing.store_pages import make_chain, make_page
from hicache.tiers.disk import DiskStore
from hicache.tiers.segment_files import SegmentFiles

# ---- O-41: half-written pages ----------------------------------------------------------------------------------------


def test_a_page_is_invisible_between_write_and_publication(root: Path) -> None:
    page = make_page("a")

    async def test(store: DiskStore) -> None:
        other = open_ledger(root)
        window, written = write_by_hand(other, [page])
        assert await present_on_disk(store, [page]) == []
        other.commit(window, written, set())
        assert await present_on_disk(store, [page]) == [0]
        other.close()

    run_on_disk(root, test)


def test_the_slot_of_a_live_writer_survives_another_open_and_its_writes(root: Path) -> None:
    page, others = make_page("a"), make_chain(1, 5)
    writer = open_ledger(root)
    window, written = write_by_hand(writer, [page])

    async def test(store: DiskStore) -> None:
        assert store.stats().used_bytes == 0
        assert await store.put(others) == [True] * 5
        writer.commit(window, written, set())
        assert await present_on_disk(store, [page, *others]) == list(range(6))

    run_on_disk(root, test)
    writer.close()


KILLED_WRITER = """
import os, signal, sys
from pathlib import Path
from hicache.testing.disk_folder import open_ledger, write_by_hand
from hicache.testing.store_pages import make_page
write_by_hand(open_ledger(Path(sys.argv[1])), [make_page("a")])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_writer_left_is_no_page_and_its_room_is_used_again(root: Path) -> None:
    page = make_page("a")
    fill_folder(root, [make_page("b")])
    before = bytes_in(root)

    async def test(store: DiskStore) -> None:
        killed = await asyncio.create_subprocess_exec(sys.executable, "-c", KILLED_WRITER, str(root))
        await killed.wait()
        assert owners_in(root) == 2
        assert await present_on_disk(store, [page]) == []
        assert store.stats().used_bytes == PAGE_BYTES

    async def reopened(store: DiskStore) -> None:
        assert owners_in(root) == 1
        assert store.stats().used_bytes == PAGE_BYTES
        assert bytes_in(root) <= before + 8 * 128, "records of who owns the segments, no payload"
        assert await store.put([page]) == [True]

    run_on_disk(root, test)
    run_on_disk(root, reopened)


# ---- O-42: restart ---------------------------------------------------------------------------------------------------


def test_a_restart_finds_all_pages_and_their_size_without_reading_one(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = make_chain(1, 5)
    fill_folder(root, chain)
    num_reads = 0
    real_read = SegmentFiles.read

    def counting_read(files: SegmentFiles, frames: Any) -> int:
        nonlocal num_reads
        num_reads += 1
        return real_read(files, frames)

    async def test(store: DiskStore) -> None:
        assert (store.stats().num_pages, store.stats().used_bytes) == (5, 5 * PAGE_BYTES)
        assert await store.exists([page.key for page in chain]) == [True] * 5
        assert num_reads == 0
        assert await present_on_disk(store, chain) == [0, 1, 2, 3, 4]
        assert num_reads == 1  # five neighbours

    monkeypatch.setattr(SegmentFiles, "read", counting_read)
    run_on_disk(root, test)


def test_another_process_finds_what_this_one_wrote(root: Path) -> None:
    fill_folder(root, make_chain(1, 3))
    script = (
        "import asyncio, sys\n"
        "from hicache.testing.store_pages import make_chain, make_target\n"
        "from hicache.tiers.disk import DiskStore\n"
        "async def main():\n"
        "    store = DiskStore(sys.argv[1])\n"
        "    await store.open()\n"
        "    targets = [make_target(page.key) for page in make_chain(1, 3)]\n"
        "    print(await store.get(targets), [t.payload == p.payload for t, p in zip(targets, make_chain(1, 3))])\n"
        "    await store.close()\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(root)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[True, True, True] [True, True, True]"


def test_order_of_eviction_after_a_restart_is_by_time_of_writing_and_keeps_heads(root: Path) -> None:
    chain, singles = make_chain(1, 3), [make_page("x"), make_page("y")]
    fill_folder(root, [chain[0], singles[0], chain[1], chain[2], singles[1]])

    async def test(store: DiskStore) -> None:
        assert await store.put([make_page("n1")]) == [True]
        assert await present_on_disk(store, singles) == [1]
        assert await store.put([make_page("n2")]) == [True]
        assert await store.exists([page.key for page in chain]) == [True, True, False]

    run_on_disk(root, test, 5 * PAGE_BYTES)


def test_a_restart_with_less_capacity_evicts_down_to_it(root: Path) -> None:
    chain = make_chain(1, 6)
    fill_folder(root, chain)

    async def test(store: DiskStore) -> None:
        assert store.stats().used_bytes == 2 * PAGE_BYTES
        assert await present_on_disk(store, chain) == [0, 1]

    run_on_disk(root, test, 2 * PAGE_BYTES + 1)


def test_pages_of_another_identity_count_and_can_be_evicted_but_are_never_returned(root: Path) -> None:
    fill_folder(root, [make_page(n, component="other model's") for n in range(3)])

    async def test(store: DiskStore) -> None:
        assert store.stats().used_bytes == 3 * PAGE_BYTES
        mine = make_chain(1, 4, prefix="mine ")
        assert await store.exists([page.key for page in mine]) == [False] * 4
        assert await store.put(mine) == [True] * 4
        assert (store.stats().pages_evicted, store.stats().used_bytes) == (3, 4 * PAGE_BYTES)

    run_on_disk(root, test, 4 * PAGE_BYTES)


def test_pages_behind_the_end_of_a_segment_cut_short_by_a_power_cut_are_dropped_at_open(root: Path) -> None:
    pages = [make_page(n) for n in range(3)]
    fill_folder(root, pages)
    path, offset = segment_of(root, pages[2].key)
    os.truncate(path, offset + 500)

    async def test(store: DiskStore) -> None:
        assert (store.stats().pages_corrupt, store.stats().used_bytes) == (1, 2 * PAGE_BYTES)
        assert await present_on_disk(store, pages) == [0, 1]

    run_on_disk(root, test)
    assert set(pages_in(root)) == {pages[0].key, pages[1].key}


def test_a_lost_segment_costs_its_pages_and_no_more(root: Path) -> None:
    small, large = make_page("small"), make_page("large", num_bytes=100_000)
    fill_folder(root, [small, large])
    segment_of(root, large.key)[0].unlink()

    async def test(store: DiskStore) -> None:
        assert store.stats().pages_corrupt == 1
        assert await present_on_disk(store, [small, large]) == [0]
        assert await store.put([large]) == [True]
        assert await present_on_disk(store, [small, large]) == [0, 1]

    run_on_disk(root, test)


@pytest.mark.parametrize("byte", [0, 8, 12, 40, 127])
def test_a_rotten_record_costs_its_page_and_no_other(root: Path, byte: int) -> None:
    pages = [make_page(n) for n in range(3)]
    fill_folder(root, pages)
    raw = bytearray((root / "journal").read_bytes())
    position = next(
        at for at in range(0, len(raw), 128) if bytes(raw[at + 32 : at + 64]) == bytes(pages[1].key)
    )
    raw[position + byte] ^= 0x20
    (root / "journal").write_bytes(raw)

    async def test(store: DiskStore) -> None:
        assert store.stats().errors == {"journal": 1}
        assert await present_on_disk(store, pages) == [0, 2]
        assert await store.put([pages[1]]) == [True]

    run_on_disk(root, test)
