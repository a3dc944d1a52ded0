"""The disk store: the contract on real files, its folder, restarts and the bound."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from hicache.errors import TierUnavailableError
from hicache.testing.disk_folder import (
    PAGE_BYTES,
    bytes_in,
    fill_folder,
    frame_in,
    open_ledger,
    owners_in,
    pages_in,
    present_on_disk,
    run_on_disk,
    segment_of,
    spoil_slot,
    write_by_hand,
)
from hicache.testing.store_contract import StoreContract, UnboundedStoreContract
from hicache.testing.store_pages import Corruption, make_chain, make_page, spoil
from hicache.tiers import segment_files
from hicache.tiers.codecs import Codec, CodecSettings
from hicache.tiers.disk import DiskStore
from hicache.tiers.disk_folder import FORMAT, DiskFolder
from hicache.tiers.encoded import EncodedStore
from hicache.tiers.folder_state import INDEX_BYTES, OVERHEAD_BYTES, SPARE_RECORDS
from hicache.tiers.frames import Frame
from hicache.tiers.framing import HEADER_BYTES, encode_header
from hicache.tiers.journal import Journal
from hicache.tiers.journal_records import RECORD_BYTES
from hicache.tiers.page_ledger import PageLedger
from hicache.tiers.segment_files import SegmentFiles, slot_bytes
from hicache.tiers.store import PageTarget, Store
from hicache.types import PageKey

SPARE_BYTES = SPARE_RECORDS * RECORD_BYTES
assert SPARE_BYTES <= OVERHEAD_BYTES


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


# ---- what is on the disk ---------------------------------------------------------------------------------------


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


# ---- what is refused ---------------------------------------------------------------------------------------------


def refusal(root: Path | str) -> str:
    """Why a store cannot be opened there."""

    async def test() -> str:
        store = DiskStore(root)
        with pytest.raises(TierUnavailableError) as refused:
            await store.open()
        await store.close()
        return str(refused.value)

    return asyncio.run(test())


def test_a_path_that_cannot_be_used_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert "name a folder that this user may write" in refusal(tmp_path / "file")


def test_a_read_only_folder_is_refused_with_the_remedy(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_folder(root, [make_page("a")])
    real_open = os.open

    def read_only_open(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return real_open(path, flags, mode)

    monkeypatch.setattr(os, "open", read_only_open)
    assert "Read-only file system" in (told := refusal(root))
    assert "mount its file system for writing, or name another folder" in told


def test_a_read_only_mount_is_not_taken_for_a_folder_without_rights(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There access(2) says no to everybody."""
    fill_folder(root, [make_page("a")])
    found = list(os.statvfs(root))
    found[8] |= os.ST_RDONLY
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(found))
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "Read-only file system" in (told := refusal(root))
    assert "mount its file system for writing, or name another folder" in told


def test_a_folder_of_another_user_is_refused_with_the_remedy(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_folder(root, [make_page("a")])
    monkeypatch.setattr(os, "geteuid", lambda: root.stat().st_uid + 1)
    assert "change its owner or name a folder of this user" in refusal(root)


def test_a_newer_format_is_refused_with_the_remedy_and_left_as_it_is(root: Path) -> None:
    fill_folder(root, [make_page("a")])
    (root / "format.json").write_text(json.dumps({"format": FORMAT + 1, "new": "things"}))
    before = {path.name: path.read_bytes() for path in root.iterdir()}
    assert f"has format {FORMAT + 1}" in (told := refusal(root))
    assert "update hicache or name another folder" in told
    assert {path.name: path.read_bytes() for path in root.iterdir()} == before


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", "\x00", "[" * 200_000],
    ids=["empty", "no-number", "list", "binary", "endless nesting"],
)
def test_a_format_file_that_says_nothing_is_refused_with_the_remedy(root: Path, text: str) -> None:
    fill_folder(root, [make_page("a")])
    (root / "format.json").write_text(text)
    assert "name another folder" in refusal(root)


def test_pages_of_the_older_format_are_set_aside_with_a_message(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    page = make_page("a")
    frame = encode_header(page.key, page.component, page.payload) + page.payload
    folder = root / page.key.hex()[:2]
    folder.mkdir(parents=True)
    old = folder / f"{page.key.hex()}-root-{len(frame)}.page"
    old.write_bytes(frame)
    (root / "zz").mkdir()

    async def test(store: DiskStore) -> None:
        assert (store.stats().num_pages, store.stats().used_bytes) == (0, 0)

    with caplog.at_level(logging.WARNING):
        run_on_disk(root, test)
    aside = root / "old-format-1" / folder.name / old.name
    assert aside.read_bytes() == frame
    assert (root / "zz").is_dir()
    assert any(f"hicache store import {root}/old-format-1" in message for message in caplog.messages)


@pytest.mark.parametrize("settings", [{"num_threads": 0}, {"min_free_bytes": -1}, {"capacity_bytes": -1}])
def test_settings_out_of_range_are_refused(root: Path, settings: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        DiskStore(root, **settings)  # type: ignore[arg-type]  # whichever setting it is


# ---- O-41: half-written pages -----------------------------------------------------------------------------------


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


# ---- O-42: restart ----------------------------------------------------------------------------------------------


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


# ---- O-43: the bound --------------------------------------------------------------------------------------------


def test_the_disk_never_holds_more_than_the_capacity_not_even_in_between(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 0
    real_append = Journal.append

    def measuring_append(journal: Journal, records: Any) -> Any:
        nonlocal most
        most = max(most, bytes_in(root))
        return real_append(journal, records)

    async def test(store: DiskStore) -> None:
        pages = [make_page(n) for n in range(25)]
        for page in pages[:12]:
            assert await store.put([page]) == [True]
            assert bytes_in(root) <= 10 * PAGE_BYTES + SPARE_BYTES
        assert await store.put(pages[12:]) == [True] * 13
        assert store.stats().used_bytes == 10 * PAGE_BYTES
        assert await present_on_disk(store, pages) == list(range(15, 25))

    monkeypatch.setattr(Journal, "append", measuring_append)
    # With one thread nothing can be written while the folder is being measured.
    run_on_disk(root, test, 10 * PAGE_BYTES, num_threads=1)
    assert 10 * slot_bytes(1000) <= most <= 10 * PAGE_BYTES + SPARE_BYTES


def test_the_bound_holds_for_pages_of_many_sizes_and_over_restarts(root: Path, seeded_random: Any) -> None:
    capacity_bytes = 1 << 20
    num_put = 0

    async def test(store: DiskStore) -> None:
        nonlocal num_put
        for _ in range(60):
            num_put += 1
            size = seeded_random.choice([100, 5000, 40_000, 70_001, 200_000])
            assert await store.put([make_page(num_put, num_bytes=size)]) == [True]
            assert bytes_in(root) <= capacity_bytes + OVERHEAD_BYTES, "the file system's own blocks included"
        assert store.stats().pages_evicted > 10

    for _ in range(3):
        run_on_disk(root, test, capacity_bytes)


def test_the_journal_stays_small_however_often_pages_come_and_go(root: Path) -> None:
    async def test(store: DiskStore) -> None:
        for n in range(300):
            await store.put([make_page(n)])
        assert (root / "journal").stat().st_size <= 3 * 10 * 128 + SPARE_BYTES
        assert await present_on_disk(store, [make_page(n) for n in range(300)]) == list(range(290, 300))

    run_on_disk(root, test, 10 * PAGE_BYTES)


def test_a_journal_written_anew_keeps_the_order_of_use(root: Path) -> None:
    pages = [make_page(n) for n in range(10)]

    async def test(store: DiskStore) -> None:
        await store.put(pages)
        await present_on_disk(store, pages[:1])  # makes it the most recent
        inode = (root / "journal").stat().st_ino
        for n in range(60):
            await store.put([make_page(f"passing {n}")])
            await store.delete([make_page(f"passing {n}").key])
        assert (root / "journal").stat().st_ino != inode

    async def reopened(store: DiskStore) -> None:
        assert await store.put([make_page("new")]) == [True]
        assert await present_on_disk(store, pages) == [0, *range(2, 10)]

    run_on_disk(root, test, 12 * PAGE_BYTES)
    run_on_disk(root, reopened, 10 * PAGE_BYTES)


def test_a_low_file_system_evicts_without_any_capacity(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DiskFolder, "free_bytes", lambda folder: 20 * PAGE_BYTES - bytes_in(root))

    async def test(store: DiskStore) -> None:
        pages = [make_page(n) for n in range(25)]
        for page in pages:
            assert await store.put([page]) == [True]
        assert bytes_in(root) <= 11 * PAGE_BYTES + SPARE_BYTES
        found = await present_on_disk(store, pages)
        assert found == list(range(25 - len(found), 25))
        assert len(found) >= 5

    run_on_disk(root, test, None, num_threads=1, min_free_bytes=10 * PAGE_BYTES)


def test_a_full_file_system_refuses_and_takes_nobodys_page(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = [make_page(n) for n in range(3)]
    fill_folder(root, pages)
    monkeypatch.setattr(DiskFolder, "free_bytes", lambda folder: 0)

    async def test(store: DiskStore) -> None:
        assert await store.put([make_page("new"), pages[0]]) == [False, True]
        assert await present_on_disk(store, pages) == [0, 1, 2]
        assert store.stats().pages_refused == 1

    run_on_disk(root, test, None, min_free_bytes=100 * PAGE_BYTES)
