"""A disk store on a file system that has no room left: it opens, serves, and can be emptied."""

from __future__ import annotations

import errno
import os
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
from hicache.tiers.journal import Appended, Journal
from hicache.tiers.journal_records import KIND_GONE, KIND_OWNER, Records
from hicache.tiers.segment_files import SegmentFiles

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
