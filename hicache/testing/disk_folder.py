"""A disk store's folder seen from outside: its files, ways to spoil them, and stores opened on it.

Helpers for tests; they know the names of ``hicache.tiers.page_files`` and block.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from hicache.testing.store_pages import PAYLOAD_BYTES, Corruption, make_target, spoil
from hicache.tiers.disk import DiskStore
from hicache.tiers.framing import HEADER_BYTES, encode_header
from hicache.tiers.page_files import PageFiles, TemporaryFile
from hicache.tiers.page_index import PageEntry
from hicache.tiers.store import Store, StoredPage
from hicache.types import PageKey

PAGE_BYTES = HEADER_BYTES + PAYLOAD_BYTES


def page_file(root: Path, key: PageKey) -> Path | None:
    """The file of a page; None if there is none."""
    found = list(root.glob(f"{key[:1].hex()}/{key.hex()}-*.page"))
    assert len(found) <= 1
    return found[0] if found else None


def existing_file(root: Path, key: PageKey) -> Path:
    """The file of a page that is there."""
    path = page_file(root, key)
    assert path is not None
    return path


def bytes_in(root: Path) -> int:
    """Bytes of all regular files, temporary ones too; each file once, whatever its names."""
    found = [path.lstat() for path in root.rglob("*")]
    return sum({status.st_ino: status.st_size for status in found if stat.S_ISREG(status.st_mode)}.values())


def files_in(root: Path, suffix: str) -> list[str]:
    """Names in the fan-out folders that end so."""
    return sorted(name for _, _, names in os.walk(root) for name in names if name.endswith(suffix))


def link_of(root: Path, page: StoredPage) -> Path:
    """Where a page's second name is, if it has one."""
    return root / page.key.hex()[:2] / f"{page.key.hex()}.key"


def spoil_file(root: Path, key: PageKey, how: Corruption) -> None:
    """Spoil a page's file in place."""
    path = existing_file(root, key)
    spoilt = spoil(path.read_bytes(), how)
    if spoilt is None:
        path.unlink()
    else:
        path.write_bytes(spoilt)


def entry_of(page: StoredPage) -> PageEntry:
    """What an index knows of a page."""
    return PageEntry(page.key, page.parent, HEADER_BYTES + page.payload.nbytes)


def write_by_hand(files: PageFiles, page: StoredPage) -> TemporaryFile:
    """The first of the two steps in which a page is stored."""
    header = encode_header(page.key, page.component, page.payload, parent=page.parent)
    return files.write_temporary(page.key, (header, page.payload))


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

    asyncio.run(asyncio.wait_for(main(), timeout=60))


def fill_folder(root: Path, pages: list[StoredPage], capacity_bytes: int | None = None) -> None:
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
