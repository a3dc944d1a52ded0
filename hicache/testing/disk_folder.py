"""A disk store's folder seen from outside: its pages, ways to spoil them, and stores opened on it.

Helpers for tests; they read the journal as another process would, and block.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np

from hicache.errors import TierUnavailableError
from hicache.testing.store_pages import PAYLOAD_BYTES, Corruption, make_target, spoil
from hicache.tiers.counters import StoreCounters
from hicache.tiers.disk import DiskStore
from hicache.tiers.folder_state import INDEX_BYTES
from hicache.tiers.frames import Frame
from hicache.tiers.framing import HEADER_BYTES, encode_header
from hicache.tiers.journal import JOURNAL_NAME, Journal
from hicache.tiers.journal_records import (
    RECORD,
    NewPage,
    entries_of,
    gone_records,
    last_of_each_slot,
    split_place,
)
from hicache.tiers.page_index import PageEntry
from hicache.tiers.page_ledger import PageLedger, Window
from hicache.tiers.segment_files import segment_name, slot_bytes
from hicache.tiers.store import Store, StoredPage
from hicache.types import PageKey

PAGE_BYTES = slot_bytes(PAYLOAD_BYTES) + INDEX_BYTES
"""What a page of ``PAYLOAD_BYTES`` costs of the capacity."""


def pages_in(root: Path) -> dict[PageKey, PageEntry]:
    """What the journal says is there."""
    try:
        raw = (root / JOURNAL_NAME).read_bytes()
    except FileNotFoundError:
        return {}
    records = np.frombuffer(raw, RECORD, count=len(raw) // RECORD.itemsize)
    return {entry.key: entry for entry in entries_of(last_of_each_slot(records), INDEX_BYTES)}


def segment_of(root: Path, key: PageKey) -> tuple[Path, int]:
    """The file that a page is in, and its offset there."""
    segment, offset = split_place(pages_in(root)[key].place)
    return root / segment_name(segment), offset


def frame_in(root: Path, key: PageKey) -> bytes | None:
    """Header and payload of a page as they lie on the disk; None if it is not there."""
    if key not in pages_in(root):
        return None
    path, offset = segment_of(root, key)
    with path.open("rb") as file:
        file.seek(offset)
        head = file.read(HEADER_BYTES)
        return head + file.read(int.from_bytes(head[16:24], "little"))


def overwrite_frame(root: Path, key: PageKey, frame: bytes) -> None:
    """Put other bytes into a page's slot."""
    path, offset = segment_of(root, key)
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(frame)


def spoil_slot(root: Path, key: PageKey, how: Corruption) -> None:
    """Spoil a page in place. What is cut off reads as zeros, as a torn write would leave it."""
    frame = frame_in(root, key)
    assert frame is not None
    spoilt = spoil(frame, how)
    if spoilt is None:
        remove_from_outside(root, key)
        return
    if how is Corruption.TRUNCATED:  # the zero may have been there before
        spoilt += bytes([frame[-1] ^ 0xFF])
    overwrite_frame(root, key, spoilt.ljust(len(frame), b"\0"))


def remove_from_outside(root: Path, key: PageKey) -> None:
    """Remove a page as another process would."""
    journal = Journal(str(root), durable=False)
    journal.open()
    with journal.locked():
        journal.read()
        journal.append(gone_records([pages_in(root)[key]], INDEX_BYTES))
    journal.close()


def bytes_in(root: Path) -> int:
    """Bytes of the segments and the journal: their length, less what is punched out of them."""
    paths = [*root.glob("segment-*"), *root.glob(f"{JOURNAL_NAME}*")]
    return sum(min(status.st_size, status.st_blocks * 512) for status in map(Path.stat, paths))


def open_ledger(root: Path, capacity_bytes: int | None = None) -> PageLedger:
    """The blocking half of a store, as one more process at work in the folder."""
    ledger = PageLedger(
        str(root),
        capacity_bytes,
        durable=False,
        min_free_bytes=0,
        counters=StoreCounters("disk"),
        is_private=False,
    )
    ledger.load()
    return ledger


def write_by_hand(ledger: PageLedger, pages: list[StoredPage]) -> tuple[Window, list[NewPage]]:
    """The first of the two steps in which pages are stored; ``ledger.commit`` is the second."""
    wanted = [
        PageEntry(page.key, page.parent, slot_bytes(page.payload.nbytes) + INDEX_BYTES) for page in pages
    ]
    window = ledger.admit(wanted, set())
    written = []
    for page in pages:
        entry = window.granted[page.key]
        header = encode_header(page.key, page.component, page.payload, parent=page.parent)
        window.files.write([Frame(entry.place, entry.size_bytes - INDEX_BYTES, header, page.payload)])
        written.append(NewPage(entry, page.component))
    return window, written


def owners_in(root: Path) -> int:
    """How many processes have, or had when they were killed, the folder open."""
    return len(list(root.glob("owner-*")))


DiskTest = Callable[[DiskStore], Coroutine[Any, Any, None]]  # Any: asyncio's business


def run_on_disk(root: Path | str, test: DiskTest, capacity_bytes: int | None = None, **settings: Any) -> None:
    """Open a store on ``root``, as a new process would, run the test, check it and close it."""

    async def main() -> None:
        store = DiskStore(root, capacity_bytes, **settings)
        await store.open()
        try:
            await test(store)
            assert store.check_integrity() == []
        finally:
            await store.close()

    asyncio.run(asyncio.wait_for(main(), timeout=120))


def refusal(root: Path | str) -> str:
    """Why a store cannot be opened there. Raises ``AssertionError`` if it can."""

    async def test() -> str:
        store = DiskStore(root)
        try:
            await store.open()
        except TierUnavailableError as refused:
            return str(refused)
        finally:
            await store.close()
        raise AssertionError("it was opened")

    return asyncio.run(test())


def fill_folder(root: Path, pages: list[StoredPage], capacity_bytes: int | None = None) -> None:
    """Put pages as another store, which is closed again."""

    async def test(store: DiskStore) -> None:
        await store.put(pages)

    run_on_disk(root, test, capacity_bytes)


async def present_on_disk(store: Store, pages: list[StoredPage]) -> list[int]:
    """Positions of the pages that read back right; ``exists`` must agree."""
    exists = await store.exists([page.key for page in pages])
    targets = [make_target(page.key, page.payload.nbytes) for page in pages]
    assert await store.get(targets) == exists
    assert all(
        target.payload == page.payload
        for target, page, hit in zip(targets, pages, exists, strict=True)
        if hit
    )
    return [position for position, is_there in enumerate(exists) if is_there]
