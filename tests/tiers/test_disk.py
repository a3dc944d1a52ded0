"""The disk store: the contract on real files, and what its folder holds."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import tempfile
import threading
from pathlib import Path

import pytest

from hicache.testing.disk_folder import (
    PAGE_BYTES,
    fill_folder,
    frame_in,
    owners_in,
    refusal,
    run_on_disk,
    spoil_slot,
)
from hicache.testing.store_contract import StoreContract, UnboundedStoreContract
from hicache.testing.store_pages import Corruption, make_page, spoil
from hicache.tiers import segment_files
from hicache.tiers.codecs import Codec, CodecSettings
from hicache.tiers.disk import DiskStore
from hicache.tiers.encoded import EncodedStore
from hicache.tiers.folder_state import INDEX_BYTES, SPARE_RECORDS
from hicache.tiers.frames import Frame
from hicache.tiers.framing import HEADER_BYTES
from hicache.tiers.page_ledger import PageLedger
from hicache.tiers.segment_files import slot_bytes
from hicache.tiers.store import PageTarget, Store
from hicache.types import PageKey


class TestDiskStore(StoreContract):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.root = tmp_path / "store"

    async def make_store(self, capacity_bytes: int | None = None) -> Store:
        store = DiskStore(self.root, capacity_bytes)
        await store.open()
        return store

    def page_cost_bytes(self, num_bytes: int) -> int:
        return slot_bytes(num_bytes) + INDEX_BYTES

    def raw_bytes(self, store: Store, key: PageKey) -> bytes | None:
        return frame_in(self.root, key)

    def corrupt(self, store: Store, key: PageKey, how: Corruption) -> None:
        spoil_slot(self.root, key, how)


class TestDurableDiskStoreWithOneThread(TestDiskStore):
    async def make_store(self, capacity_bytes: int | None = None) -> Store:
        store = DiskStore(self.root, capacity_bytes, num_threads=1, durable=True)
        await store.open()
        return store


class TestDirectDiskStore(TestDiskStore):
    """Every page takes whole blocks, so that all of them go past the page cache."""

    @pytest.fixture(autouse=True)
    def _large(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(segment_files, "LARGE_FRAME_BYTES", 0)

    async def make_store(self, capacity_bytes: int | None = None) -> Store:
        store = DiskStore(self.root, capacity_bytes, direct=True)
        await store.open()
        return store


class TestEncryptedDirectDiskStore(UnboundedStoreContract):
    """A page is longer than its target."""

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(segment_files, "LARGE_FRAME_BYTES", 0)
        self.root = tmp_path / "store"

    async def make_store(self, capacity_bytes: int | None = None) -> Store:
        codec = Codec(CodecSettings(key=bytes(32), encrypts=True))
        store = EncodedStore(DiskStore(self.root, capacity_bytes, direct=True), codec)
        await store.open()
        return store


class TestTemporaryDiskStore(StoreContract):
    """Its files have no names, so its medium is reached through its own descriptors."""

    async def make_store(self, capacity_bytes: int | None = None) -> Store:
        store = DiskStore("auto", capacity_bytes)
        await store.open()
        return store

    def page_cost_bytes(self, num_bytes: int) -> int:
        return slot_bytes(num_bytes)

    def raw_bytes(self, store: Store, key: PageKey) -> bytes | None:
        assert isinstance(store, DiskStore)
        ledger = store.pages.ledger
        entry = ledger.index.find(key)
        if entry is None:
            return None
        head, body = bytearray(HEADER_BYTES), bytearray(entry.size_bytes - HEADER_BYTES)
        ledger.files.read([Frame(entry.place, entry.size_bytes, head, memoryview(body))])
        return bytes(head + body[: int.from_bytes(head[16:24], "little")])

    def corrupt(self, store: Store, key: PageKey, how: Corruption) -> None:
        assert isinstance(store, DiskStore)
        ledger = store.pages.ledger
        frame = self.raw_bytes(store, key)
        entry = ledger.index.find(key)
        assert frame is not None
        assert entry is not None
        spoilt = spoil(frame, how)
        if spoilt is None:
            ledger.remove([key])
            return
        if how is Corruption.TRUNCATED:
            spoilt += bytes([frame[-1] ^ 0xFF])
        spoilt = spoilt.ljust(entry.size_bytes, b"\0")
        body = memoryview(spoilt)[HEADER_BYTES:]
        ledger.files.write([Frame(entry.place, entry.size_bytes, spoilt[:HEADER_BYTES], body)])


def test_files_are_private_and_few_however_many_pages(root: Path) -> None:
    async def test(store: DiskStore) -> None:
        assert await store.put([make_page(n) for n in range(500)]) == [True] * 500
        names = sorted(path.name for path in root.iterdir())  # noqa: ASYNC240  # a test may block
        assert [name.partition("-")[0] for name in names] == [
            "format.json",
            "journal",
            "lock",
            "owner",
            "segment",
        ]
        modes = {stat.S_IMODE((root / name).stat().st_mode) for name in names}
        assert modes <= {0o600, 0o644}  # format.json holds no payload

    run_on_disk(root, test)
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert owners_in(root) == 0


def test_foreign_files_are_left_alone_not_counted_and_never_returned(root: Path) -> None:
    page = make_page("a")
    fill_folder(root, [page])
    foreign = [root / "README", root / "segment-000000ff.data", root / "owner-me", root / "00"]
    for path in foreign:
        path.write_bytes(b"mine")

    async def test(store: DiskStore) -> None:
        assert (store.stats().num_pages, store.stats().used_bytes) == (1, PAGE_BYTES)
        assert await store.clear() == 1

    run_on_disk(root, test)
    assert [path.read_bytes() for path in foreign] == [b"mine"] * len(foreign)


def test_an_auto_folder_goes_when_the_store_is_closed() -> None:
    seen: list[str] = []

    async def test(store: DiskStore) -> None:
        seen.append(store.path)
        assert await store.put([make_page("a")]) == [True]
        seen_files = list(Path(store.path).iterdir())  # noqa: ASYNC240  # a test may block
        assert seen_files == [], "its files have no names, so a kill leaves no bytes"

    run_on_disk("auto", test)
    run_on_disk("auto", test)
    assert not any(Path(path).exists() for path in seen)
    assert seen[0] != seen[1]


def test_an_auto_folder_uses_the_room_of_pages_that_left() -> None:
    """Slots are used again, and what they held before is never handed out."""

    async def test(store: DiskStore) -> None:
        pages = [make_page(f"page {i}", num_bytes=1000) for i in range(40)]
        for page in pages:
            assert await store.put([page]) == [True]
        there = await store.exists([page.key for page in pages])
        assert there == [False] * 36 + [True] * 4
        assert await store.delete([pages[-1].key]) == 1
        assert await store.put([pages[0]]) == [True]
        for page in (pages[0], pages[37]):
            into = bytearray(1000)
            target = PageTarget(page.key, page.component, memoryview(into))
            assert await store.get([target]) == [True]
            assert bytes(into) == bytes(page.payload)
        assert store.pages.ledger.files.size(1) <= 5 * slot_bytes(1000)

    run_on_disk("auto", test, capacity_bytes=4 * slot_bytes(1000))


def test_an_auto_folder_takes_many_pages_at_once() -> None:
    """Far more than it has: where a journal would be written anew first, there is none."""

    async def test(store: DiskStore) -> None:
        assert await store.put([make_page("first")]) == [True]
        pages = [make_page(f"page {i}", num_bytes=100) for i in range(2 * SPARE_RECORDS)]
        assert all(await store.put(pages))
        assert all(await store.exists([page.key for page in pages]))

    run_on_disk("auto", test)


@pytest.mark.parametrize("path", ["auto", "named"])
def test_an_open_that_is_cancelled_leaves_no_folder_and_no_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """As when the limit of a slow disk's opening is over: the thread that opens it is waited for."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    begun, may_go_on = threading.Event(), threading.Event()
    real_load = PageLedger.load

    def load(ledger: PageLedger) -> None:
        begun.set()
        assert may_go_on.wait(60)
        real_load(ledger)

    async def main() -> None:
        store = DiskStore("auto" if path == "auto" else tmp_path / path)
        opening = asyncio.ensure_future(store.open())
        assert await asyncio.to_thread(begun.wait, 60)
        opening.cancel()
        may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await store.close()

    monkeypatch.setattr(PageLedger, "load", load)
    asyncio.run(main())
    if path == "auto":
        assert list(tmp_path.iterdir()) == []
    else:
        assert owners_in(tmp_path / path) == 0


def test_an_auto_folder_that_cannot_be_used_is_taken_away_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: PageLedger) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(PageLedger, "load", fail)
    assert "No space left" in refusal("auto")
    assert list(tmp_path.iterdir()) == []


def test_pages_of_a_batch_that_failed_unexpectedly_can_be_put_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(store: DiskStore) -> None:
        with monkeypatch.context() as broken:
            broken.setattr(store.pages.ledger, "_tell", lambda: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                await store.put([make_page("a")])
        assert await store.put([make_page("a")]) == [True]

    run_on_disk("auto", test)
