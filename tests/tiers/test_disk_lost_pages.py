"""Pages that vanish, go bad or are replaced under a disk store are misses."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import pytest
import xxhash

from hicache.testing.disk_folder import (
    PAGE_BYTES,
    frame_in,
    overwrite_frame,
    pages_in,
    present_on_disk,
    remove_from_outside,
    run_on_disk,
    segment_of,
    spoil_slot,
    write_by_hand,
)
from hicache.testing.store_pages import Corruption, make_chain, make_page, make_target
from hicache.tiers.disk import DiskStore
from hicache.tiers.segment_files import SegmentFiles


def test_a_page_that_vanished_is_a_miss_and_leaves_the_index(root: Path) -> None:
    pages = [make_page(n) for n in range(3)]

    async def test(store: DiskStore) -> None:
        await store.put(pages)
        remove_from_outside(root, pages[0].key)
        remove_from_outside(root, pages[1].key)
        assert await store.get([make_target(pages[0].key)]) == [False]
        assert await store.exists([pages[1].key]) == [False]
        stats = store.stats()
        assert (stats.num_pages, stats.used_bytes) == (1, PAGE_BYTES)
        assert (stats.pages_missed, stats.pages_corrupt, stats.errors) == (1, 0, {})
        assert await store.put([pages[0]]) == [True]
        assert await present_on_disk(store, pages) == [0, 2]
        assert store.stats().pages_written == 4

    run_on_disk(root, test)


def test_the_whole_folder_may_vanish(root: Path) -> None:
    chain = make_chain(1, 3)

    async def test(store: DiskStore) -> None:
        await store.put(chain)
        os.rename(root, f"{root} moved away")  # noqa: PTH104  # a Path in a coroutine is ASYNC240
        assert await store.get([make_target(page.key) for page in chain]) == [False] * 3
        assert await store.put(chain) == [True] * 3
        assert await present_on_disk(store, chain) == [0, 1, 2]
        assert set(pages_in(root)) == {page.key for page in chain}

    run_on_disk(root, test)


def test_a_folder_that_vanishes_during_a_write_takes_the_write_and_no_more(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = make_chain(1, 3)
    real_write = SegmentFiles.write

    def write_then_move(files: SegmentFiles, frames: Any) -> None:
        real_write(files, frames)
        monkeypatch.undo()
        root.rename(f"{root} moved away")

    async def test(store: DiskStore) -> None:
        monkeypatch.setattr(SegmentFiles, "write", write_then_move)
        assert await store.put(chain) == [False] * 3
        assert store.stats().errors == {"folder-replaced": 1}
        assert await store.put(chain) == [True] * 3
        assert await present_on_disk(store, chain) == [0, 1, 2]

    run_on_disk(root, test)


def test_a_folder_that_cannot_be_made_again_is_a_miss_until_it_can(root: Path) -> None:
    chain = make_chain(1, 2)
    away = f"{root} moved away"

    async def test(store: DiskStore) -> None:
        await store.put(chain)
        os.rename(root, away)  # noqa: PTH104
        os.close(os.open(root, os.O_CREAT))  # a file stands in its place
        assert await store.exists([page.key for page in chain]) == [False] * 2
        assert await store.get([make_target(chain[0].key)]) == [False]
        assert await store.put(chain) == [False] * 2
        os.unlink(root)  # noqa: PTH108
        assert await store.put(chain) == [True] * 2
        assert await present_on_disk(store, chain) == [0, 1]

    run_on_disk(root, test)


@pytest.mark.parametrize("race", ["removed", "replaced"])
def test_a_slot_that_changed_during_a_read_is_a_miss_and_no_corruption(
    root: Path, monkeypatch: pytest.MonkeyPatch, race: str
) -> None:
    """O-49: the page leaves, another takes its slot; what is there now is not touched."""
    page, other = make_page("a"), make_page("b")
    real_read = SegmentFiles.read

    async def test(store: DiskStore) -> None:
        await store.put([page])
        before = segment_of(root, page.key)

        def read_late(files: SegmentFiles, frames: Any) -> int:
            monkeypatch.undo()
            store.pages.ledger.remove([page.key])
            if race == "replaced":
                ledger = store.pages.ledger
                window, written = write_by_hand(ledger, [other])
                ledger.commit(window, written, set())
                assert segment_of(root, other.key) == before, "the case is a slot used again"
            return real_read(files, frames)

        monkeypatch.setattr(SegmentFiles, "read", read_late)
        assert await store.get([make_target(page.key)]) == [False]
        assert (store.stats().pages_corrupt, store.stats().pages_missed) == (0, 1)
        assert await present_on_disk(store, [page, other]) == ([1] if race == "replaced" else [])

    run_on_disk(root, test)


def test_a_page_put_anew_during_a_bad_read_is_not_removed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = make_page("a")
    real_read = SegmentFiles.read

    async def test(store: DiskStore) -> None:
        await store.put([page])
        spoil_slot(root, page.key, Corruption.FLIPPED_PAYLOAD)

        def read_then_replace(files: SegmentFiles, frames: Any) -> int:
            result = real_read(files, frames)
            monkeypatch.undo()
            ledger = store.pages.ledger
            ledger.remove([page.key])
            window, written = write_by_hand(ledger, [page])
            ledger.commit(window, written, set())
            return result

        monkeypatch.setattr(SegmentFiles, "read", read_then_replace)
        assert await store.get([make_target(page.key)]) == [False]
        assert await present_on_disk(store, [page]) == [0]

    run_on_disk(root, test)


def test_a_page_of_a_newer_format_is_a_miss_and_is_left_to_its_owner(root: Path) -> None:
    page = make_page("a")

    async def test(store: DiskStore) -> None:
        await store.put([page])
        raw = bytearray(frame_in(root, page.key) or b"")
        struct.pack_into("<H", raw, 8, 999)
        struct.pack_into("<Q", raw, 152, xxhash.xxh3_64_intdigest(bytes(raw[:152])))
        overwrite_frame(root, page.key, bytes(raw))
        assert await store.get([make_target(page.key)]) == [False]
        assert await store.exists([page.key]) == [False]
        assert await store.put([page]) == [False]
        assert frame_in(root, page.key) == bytes(raw)
        stats = store.stats()
        assert (stats.errors, stats.pages_corrupt, stats.used_bytes) == ({"unsupported": 1}, 0, PAGE_BYTES)
        assert await store.put([make_page("b")]) == [True]  # it is evicted like any other
        assert frame_in(root, page.key) is None

    run_on_disk(root, test, PAGE_BYTES)


def test_a_bad_page_costs_none_of_its_neighbours_in_the_same_read(root: Path) -> None:
    pages = [make_page(n) for n in range(9)]

    async def test(store: DiskStore) -> None:
        await store.put(pages)
        for position, how in enumerate(Corruption):
            spoil_slot(root, pages[position].key, how)
        targets = [make_target(page.key) for page in pages]
        assert await store.get(targets) == [False] * len(Corruption) + [True] * (9 - len(Corruption))
        assert store.stats().pages_corrupt == len(Corruption) - 1  # one vanished

    run_on_disk(root, test)
