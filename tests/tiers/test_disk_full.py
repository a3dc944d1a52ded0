"""A disk store on a file system that has no room left: it opens, serves, and can be emptied."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from hicache.errors import TierUnavailableError
from hicache.testing.disk_folder import (
    fill_folder,
    open_ledger,
    pages_in,
    present_on_disk,
    run_on_disk,
    write_by_hand,
)
from hicache.testing.store_pages import make_chain, make_page, make_target
from hicache.tiers.disk import DiskStore
from hicache.tiers.disk_folder import DiskFolder
from hicache.tiers.frames import Frame
from hicache.tiers.journal import Appended, Journal
from hicache.tiers.journal_records import KIND_GONE, KIND_OWNER, Records, split_place
from hicache.tiers.segment_files import SegmentFiles, slot_bytes
from hicache.tiers.store import StoredPage

CHAIN = make_chain(1, 6)


def no_room() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def refuse_records(monkeypatch: pytest.MonkeyPatch, *kinds: int) -> None:
    """The journal takes no records of these kinds."""
    real_append = Journal.append

    def append(journal: Journal, records: Records) -> Appended:
        if any(kind in kinds for kind in records["kind"].tolist()):
            return Appended(0, no_room())
        return real_append(journal, records)

    monkeypatch.setattr(Journal, "append", append)


def refuse_to_tell(folder: DiskFolder, state: object) -> None:
    raise no_room()


def test_a_full_disk_is_opened_and_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the owner's file nor the journal can grow."""
    fill_folder(root, CHAIN)
    monkeypatch.setattr(DiskFolder, "tell", refuse_to_tell)
    refuse_records(monkeypatch, KIND_OWNER)

    async def test(store: DiskStore) -> None:
        assert await present_on_disk(store, CHAIN) == [0, 1, 2, 3, 4, 5]
        assert store.stats().errors == {"ENOSPC": 2}

    run_on_disk(root, test)


def test_pages_of_a_full_disk_can_be_removed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal has room for what is gone only once blocks were given back."""
    fill_folder(root, CHAIN)
    real_append, real_punch = Journal.append, SegmentFiles.punch
    num_punched = 0

    def append(journal: Journal, records: Records) -> Appended:
        if KIND_GONE in records["kind"].tolist() and not num_punched:
            return Appended(0, no_room())
        return real_append(journal, records)

    def punch(files: SegmentFiles, start: int, end: int) -> None:
        nonlocal num_punched
        num_punched += 1
        real_punch(files, start, end)

    async def test(store: DiskStore) -> None:
        monkeypatch.setattr(Journal, "append", append)
        monkeypatch.setattr(SegmentFiles, "punch", punch)
        assert await store.delete([page.key for page in CHAIN[3:]]) == 3
        assert await present_on_disk(store, CHAIN) == [0, 1, 2]
        assert (store.stats().errors, store.stats().pages_corrupt) == ({}, 0)

    run_on_disk(root, test)
    assert set(pages_in(root)) == {page.key for page in CHAIN[:3]}


def test_pages_that_cannot_be_removed_for_want_of_room_are_misses_and_no_wrong_bytes(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their blocks are gone, and the journal still names them."""
    fill_folder(root, CHAIN)

    async def test(store: DiskStore) -> None:
        refuse_records(monkeypatch, KIND_GONE)
        assert await store.delete([CHAIN[5].key]) == 0
        assert store.stats().errors == {"ENOSPC": 1}
        assert await present_on_disk(store, CHAIN) == [0, 1, 2, 3, 4]
        assert store.stats().pages_corrupt == 0

    run_on_disk(root, test)
    monkeypatch.undo()
    run_on_disk(root, find_one_bad)


async def find_one_bad(store: DiskStore) -> None:
    assert await store.get([make_target(page.key) for page in CHAIN]) == [True] * 5 + [False]
    assert store.stats().pages_corrupt == 1


def test_a_segment_is_nobodys_before_the_journal_says_whose_it_is(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else another process takes it for one that nobody has, and both write into it."""

    async def test(store: DiskStore) -> None:
        refuse_records(monkeypatch, KIND_OWNER)
        assert await store.put(CHAIN) == [False] * 6
        monkeypatch.undo()
        assert await store.put(CHAIN) == [True] * 6
        other = open_ledger(root)
        window, written = write_by_hand(other, [make_page("other")])
        assert list(other.commit(window, written, set()).values()) == [True]
        assert await store.put([make_page("ours")]) == [True]
        pages = [*CHAIN, make_page("ours"), make_page("other")]
        assert await present_on_disk(store, pages) == list(range(8))
        assert store.check_integrity() == []
        other.close()

    run_on_disk(root, test)


def test_a_segment_of_a_dead_process_that_cannot_be_claimed_is_left_alone(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_folder(root, CHAIN)
    refuse_records(monkeypatch, KIND_OWNER)

    async def test(store: DiskStore) -> None:
        monkeypatch.undo()
        other = open_ledger(root)  # adopts it
        window, written = write_by_hand(other, [make_page("other")])
        assert await store.put([make_page("ours")]) == [True]
        assert list(other.commit(window, written, set()).values()) == [True]
        pages = [*CHAIN, make_page("ours"), make_page("other")]
        assert await present_on_disk(store, pages) == list(range(8))
        assert store.check_integrity() == []
        other.close()

    run_on_disk(root, test)


# ---- room that others took ---------------------------------------------------------------------------------------------
class SmallDisk:
    """A file system with so much room for slots; ``error`` is what it says when there is none."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, room_bytes: int, *, number: int = errno.ENOSPC
    ) -> None:
        self.room_bytes = room_bytes
        self._taken: dict[int, int] = {}
        real_write, real_punch, real_truncate = SegmentFiles.write, SegmentFiles.punch, SegmentFiles.truncate

        def write(files: SegmentFiles, frames: Sequence[Frame]) -> None:
            new = {frame.place: frame.slot_bytes for frame in frames if frame.place not in self._taken}
            if sum(self._taken.values()) + sum(new.values()) > self.room_bytes:
                raise OSError(number, os.strerror(number))
            real_write(files, frames)
            self._taken.update(new)

        def punch(files: SegmentFiles, start: int, end: int) -> None:
            real_punch(files, start, end)
            self._taken = {at: size for at, size in self._taken.items() if not start <= at < end}

        def truncate(files: SegmentFiles, segment: int, size: int) -> None:
            real_truncate(files, segment, size)
            self._taken = {at: n for at, n in self._taken.items() if split_place(at) < (segment, size)}

        monkeypatch.setattr(SegmentFiles, "write", write)
        monkeypatch.setattr(SegmentFiles, "punch", punch)
        monkeypatch.setattr(SegmentFiles, "truncate", truncate)
        is_told = number == errno.ENOSPC  # a quota is not
        monkeypatch.setattr(DiskFolder, "free_bytes", lambda _: self.free_bytes if is_told else 1 << 40)

    @property
    def free_bytes(self) -> int:
        return max(0, self.room_bytes - sum(self._taken.values()))


LARGE_BYTES = 36_000
LARGE_SLOT = slot_bytes(LARGE_BYTES)


def large(number: int, parent: int | None = None, num_bytes: int = LARGE_BYTES) -> StoredPage:
    return make_page(number, parent, num_bytes=num_bytes)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT], ids=["ENOSPC", "EDQUOT"])
def test_on_a_disk_that_others_filled_the_least_recent_pages_leave_for_new_ones(
    root: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """It is far below its capacity, and refused everything from then on."""
    disk = SmallDisk(monkeypatch, 6 * LARGE_SLOT, number=number)
    pages = [large(n) for n in range(9)]

    async def test(store: DiskStore) -> None:
        assert await store.put(pages[:6]) == [True] * 6
        assert await store.put([pages[6]]) == [False]
        assert store.stats().errors == {errno.errorcode[number]: 1}
        assert await store.put([pages[6]]) == [True]  # tried again, as the cache does
        assert store.stats().pages_evicted == 1
        assert await present_on_disk(store, pages) == [1, 2, 3, 4, 5, 6]
        disk.room_bytes *= 2  # the others left
        assert await store.put(pages[7:]) == [True, True]
        assert store.stats().pages_evicted == 1
        assert await present_on_disk(store, pages) == [1, 2, 3, 4, 5, 6, 7, 8]
        assert store.check_integrity() == []

    run_on_disk(root, test)


def test_while_the_disk_stays_full_each_new_page_takes_an_old_ones_room_at_once(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SmallDisk(monkeypatch, 4 * LARGE_SLOT)
    pages = [large(n) for n in range(10)]

    async def test(store: DiskStore) -> None:
        await store.put(pages[:5])
        for page in pages[5:]:
            assert await store.put([page]) == [True]
        assert await present_on_disk(store, pages) == [6, 7, 8, 9]
        assert (store.stats().errors, store.stats().pages_evicted) == ({"ENOSPC": 1}, 5)

    run_on_disk(root, test)


def test_a_larger_page_gets_the_blocks_of_several(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not their slots, in which it has no room."""
    SmallDisk(monkeypatch, 4 * LARGE_SLOT)
    pages = [large(n) for n in range(4)]
    larger = large(9, num_bytes=LARGE_BYTES * 2)

    async def test(store: DiskStore) -> None:
        assert await store.put(pages) == [True] * 4
        assert await store.put([larger]) == [False]
        assert await store.put([larger]) == [True]
        assert await store.get([make_target(larger.key, LARGE_BYTES * 2)]) == [True]
        assert await store.exists([page.key for page in pages]) == [False, False, True, True]
        assert store.check_integrity() == []

    run_on_disk(root, test)


def test_a_page_evicts_neither_its_parent_nor_anybody_if_that_is_not_there(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SmallDisk(monkeypatch, 2 * LARGE_SLOT)
    chain = [large(0), large(1, 0), large(2, 1)]
    orphan = large(8, 7)

    async def test(store: DiskStore) -> None:
        assert await store.put(chain) == [True, True, False]
        for page in (chain[2], orphan):
            assert await store.put([page]) == [False]
        assert await present_on_disk(store, chain[:2]) == [0, 1]
        assert store.stats().pages_evicted == 0

    run_on_disk(root, test)


def test_it_works_although_the_journal_has_no_room_for_what_is_gone(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SmallDisk(monkeypatch, 4 * LARGE_SLOT)
    pages = [large(n) for n in range(5)]
    real_append = Journal.append

    def append(journal: Journal, records: Records) -> Appended:
        if not disk.free_bytes and KIND_GONE in records["kind"].tolist():
            return Appended(0, no_room())
        return real_append(journal, records)

    async def test(store: DiskStore) -> None:
        assert await store.put(pages) == [True] * 4 + [False]
        monkeypatch.setattr(Journal, "append", append)
        assert await store.put(pages[4:]) == [True]
        assert await present_on_disk(store, pages) == [1, 2, 3, 4]
        assert store.check_integrity() == []

    run_on_disk(root, test)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "make room on its file system"),
        (errno.EROFS, "for writing, or name another folder"),
        (errno.EACCES, "name a folder that this user may write"),
    ],
    ids=["full", "read-only", "forbidden"],
)
def test_a_folder_that_cannot_be_opened_is_refused_with_what_helps(
    root: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    def refuse(journal: Journal) -> None:
        raise OSError(number, os.strerror(number), str(root))

    monkeypatch.setattr(Journal, "open", refuse)

    async def never(store: DiskStore) -> None:
        pytest.fail("it was opened")

    with pytest.raises(TierUnavailableError, match=remedy):
        run_on_disk(root, never)
