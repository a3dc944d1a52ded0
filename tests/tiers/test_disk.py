"""The disk store: the contract on real files, its folder, restarts and the bound."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hicache.errors import TierUnavailableError
from hicache.testing.disk_folder import (
    PAGE_BYTES,
    bytes_in,
    entry_of,
    existing_file,
    files_in,
    fill_folder,
    link_of,
    page_file,
    present_on_disk,
    run_on_disk,
    spoil_file,
    write_by_hand,
)
from hicache.testing.store_contract import StoreContract
from hicache.testing.store_pages import Corruption, make_chain, make_page
from hicache.tiers.disk import DiskStore
from hicache.tiers.framing import HEADER_BYTES
from hicache.tiers.page_files import PageFiles, TemporaryFile
from hicache.tiers.page_index import PageEntry
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

    def raw_bytes(self, store: Store, key: PageKey) -> bytes | None:
        path = page_file(self.root, key)
        return None if path is None else path.read_bytes()

    def corrupt(self, store: Store, key: PageKey, how: Corruption) -> None:
        spoil_file(self.root, key, how)


class TestDurableDiskStoreWithOneThread(TestDiskStore):
    async def make_store(self, capacity_bytes: int | None = None) -> Store:
        store = DiskStore(self.root, capacity_bytes, num_threads=1, durable=True)
        await store.open()
        return store


# ---- what is on the disk ---------------------------------------------------------------------------------------


def test_files_are_private_and_named_after_key_parent_and_size(root: Path) -> None:
    chain = make_chain(1, 2)
    fill_folder(root, chain)
    for page, parent in zip(chain, ["root", chain[0].key.hex()], strict=True):
        path = existing_file(root, page.key)
        assert path.name == f"{page.key.hex()}-{parent}-{PAGE_BYTES}.page"
        assert path.parent.name == page.key.hex()[:2]
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


def test_foreign_files_are_left_alone_not_counted_and_never_returned(root: Path) -> None:
    page, other = make_page("a"), make_page("b")
    fill_folder(root, [page])
    folder = existing_file(root, page.key).parent
    wrong_folder = root / ("00" if other.key.hex()[:2] != "00" else "01")
    wrong_folder.mkdir(exist_ok=True)
    foreign = [
        root / "README",
        folder / "notes.txt",
        folder / f"{page.key.hex()}.page",
        folder / f"{page.key.hex()}-{'0' * 63}-{PAGE_BYTES}.page",
        wrong_folder / f"{other.key.hex()}-root-{PAGE_BYTES}.page",
    ]
    for path in foreign:
        path.write_bytes(b"mine")
    (root / "zz").mkdir()

    async def test(store: DiskStore) -> None:
        assert (store.stats().num_pages, store.stats().used_bytes) == (1, PAGE_BYTES)
        assert await present_on_disk(store, [page, other]) == [0]
        assert await store.clear() == 1

    run_on_disk(root, test)
    assert [path.read_bytes() for path in foreign] == [b"mine"] * len(foreign)
    assert (root / "zz").is_dir()


def test_an_auto_folder_goes_when_the_store_is_closed() -> None:
    seen: list[str] = []

    async def test(store: DiskStore) -> None:
        seen.append(store.path)
        assert await store.put([make_page("a")]) == [True]
        assert files_in(Path(store.path), "") == [], "its one file has no name, so a kill leaves no bytes"

    run_on_disk("auto", test)
    run_on_disk("auto", test)
    assert not any(Path(path).exists() for path in seen)
    assert seen[0] != seen[1]


def test_an_auto_folder_uses_the_room_of_pages_that_left() -> None:
    """Extents are used again, and what they held before is never handed out."""

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
        assert store.check_integrity() == []

    run_on_disk("auto", test, capacity_bytes=4 * (1000 + HEADER_BYTES))


def test_a_path_that_cannot_be_used_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")

    async def test() -> None:
        store = DiskStore(tmp_path / "file")
        with pytest.raises(TierUnavailableError, match="name a folder that this user may write"):
            await store.open()
        await store.close()

    asyncio.run(test())


@pytest.mark.parametrize("settings", [{"num_threads": 0}, {"min_free_bytes": -1}, {"capacity_bytes": -1}])
def test_settings_out_of_range_are_refused(root: Path, settings: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        DiskStore(root, **settings)  # type: ignore[arg-type]  # whichever setting it is


# ---- O-41: half-written files -----------------------------------------------------------------------------------


def test_a_page_is_invisible_between_write_and_publication(root: Path) -> None:
    page = make_page("a")

    async def test(store: DiskStore) -> None:
        files = PageFiles(str(root), durable=False)
        temporary = write_by_hand(files, page)
        assert await present_on_disk(store, [page]) == []
        files.publish(temporary, entry_of(page))
        assert await present_on_disk(store, [page]) == [0]

    run_on_disk(root, test)


def test_the_temporary_file_of_a_live_writer_survives_another_open(root: Path) -> None:
    page = make_page("a")
    files = PageFiles(str(root), durable=False)
    files.open()
    temporary = write_by_hand(files, page)

    async def test(store: DiskStore) -> None:
        assert store.stats().used_bytes == 0
        assert len(files_in(root, ".tmp")) == 1
        files.publish(temporary, entry_of(page))
        assert await present_on_disk(store, [page]) == [0]

    run_on_disk(root, test)


KILLED_WRITER = """
import os, signal, sys
from hicache.testing.store_contract import make_page
from hicache.tiers.framing import encode_header
from hicache.tiers.page_files import PageFiles
page = make_page("a")
files = PageFiles(sys.argv[1], durable=False)
files.open()
files.write_temporary(page.key, (encode_header(page.key, page.component, page.payload), page.payload))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_writer_left_is_ignored_and_removed_at_the_next_open(root: Path) -> None:
    page = make_page("a")
    fill_folder(root, [make_page("b")])

    async def test(store: DiskStore) -> None:
        killed = await asyncio.create_subprocess_exec(sys.executable, "-c", KILLED_WRITER, str(root))
        await killed.wait()
        assert len(files_in(root, ".tmp")) == 1
        assert await present_on_disk(store, [page]) == []
        assert store.stats().used_bytes == PAGE_BYTES

    async def reopened(store: DiskStore) -> None:
        assert files_in(root, ".tmp") == []
        assert store.stats().used_bytes == PAGE_BYTES
        assert await store.put([page]) == [True]

    run_on_disk(root, test)
    run_on_disk(root, reopened)


def test_a_link_without_a_page_is_removed_at_open_and_a_missing_link_made(root: Path) -> None:
    kept, lost = make_page("a"), make_page("b")
    fill_folder(root, [kept, lost])
    existing_file(root, lost.key).unlink()
    kept_link, lost_link = link_of(root, kept), link_of(root, lost)
    kept_link.unlink()
    fill_folder(root, [])
    assert kept_link.samefile(existing_file(root, kept.key))
    assert not lost_link.exists()


# ---- O-42: restart ----------------------------------------------------------------------------------------------


def test_a_restart_finds_all_pages_and_their_size_without_opening_one(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = make_chain(1, 5)
    fill_folder(root, chain)
    opened: list[str] = []
    real_open = os.open

    def noting_open(path: str, flags: int, mode: int = 0o777) -> int:
        opened.append(path)
        return real_open(path, flags, mode)

    async def test(store: DiskStore) -> None:
        assert opened == []
        assert (store.stats().num_pages, store.stats().used_bytes) == (5, 5 * PAGE_BYTES)
        assert await store.exists([page.key for page in chain]) == [True] * 5
        assert opened == []
        assert await present_on_disk(store, chain) == [0, 1, 2, 3, 4]
        assert len(opened) == 5

    monkeypatch.setattr(os, "open", noting_open)
    run_on_disk(root, test)


def test_another_process_finds_what_this_one_wrote(root: Path) -> None:
    fill_folder(root, make_chain(1, 3))
    script = (
        "import asyncio, sys\n"
        "from hicache.testing.store_contract import make_chain, make_target\n"
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
    fill_folder(root, [*chain, *singles])
    # The head of the chain is the oldest file of all; the rest ages in the order x, 2, 3, y.
    for age, page in enumerate([chain[0], singles[0], chain[1], chain[2], singles[1]]):
        os.utime(existing_file(root, page.key), ns=(0, (1000 + age) * 10**9))

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
        assert store.stats().used_bytes == 2 * PAGE_BYTES == bytes_in(root)
        assert await present_on_disk(store, chain) == [0, 1]

    run_on_disk(root, test, 2 * PAGE_BYTES + 1)


def test_pages_of_another_identity_count_and_can_be_evicted_but_are_never_returned(root: Path) -> None:
    fill_folder(root, [make_page(n, component="other model's") for n in range(3)])

    async def test(store: DiskStore) -> None:
        assert store.stats().used_bytes == 3 * PAGE_BYTES
        mine = make_chain(1, 4, prefix="mine ")
        assert await store.exists([page.key for page in mine]) == [False] * 4
        assert await store.put(mine) == [True] * 4
        assert (store.stats().pages_evicted, bytes_in(root)) == (3, 4 * PAGE_BYTES)

    run_on_disk(root, test, 4 * PAGE_BYTES)


def test_a_file_cut_short_by_a_power_cut_is_removed_at_open(root: Path) -> None:
    pages = [make_page(n) for n in range(3)]
    fill_folder(root, pages)
    os.truncate(existing_file(root, pages[1].key), 500)

    async def test(store: DiskStore) -> None:
        assert (store.stats().pages_corrupt, store.stats().used_bytes) == (1, 2 * PAGE_BYTES)
        assert bytes_in(root) == 2 * PAGE_BYTES

    run_on_disk(root, test)


def test_of_two_files_with_one_key_the_later_is_kept_at_open(root: Path) -> None:
    page = make_page("a")
    fill_folder(root, [page])
    path = existing_file(root, page.key)
    older = path.with_name(f"{page.key.hex()}-{'0' * 64}-{PAGE_BYTES}.page")
    older.write_bytes(path.read_bytes())
    os.utime(older, ns=(0, 10**9))

    async def test(store: DiskStore) -> None:
        assert (store.stats().used_bytes, bytes_in(root)) == (PAGE_BYTES, PAGE_BYTES)
        assert await present_on_disk(store, [page]) == [0]
        assert store.stats().pages_corrupt == 0

    run_on_disk(root, test)


# ---- O-43: the bound --------------------------------------------------------------------------------------------


def test_the_disk_never_holds_more_than_the_capacity_not_even_in_between(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 0
    real_publish = PageFiles.publish

    def measuring_publish(files: PageFiles, temporary: TemporaryFile, entry: PageEntry) -> None:
        nonlocal most
        most = max(most, bytes_in(root))
        real_publish(files, temporary, entry)

    async def test(store: DiskStore) -> None:
        pages = [make_page(n) for n in range(25)]
        for page in pages[:12]:
            assert await store.put([page]) == [True]
            assert bytes_in(root) <= 10 * PAGE_BYTES
        assert await store.put(pages[12:]) == [True] * 13
        assert bytes_in(root) == 10 * PAGE_BYTES == store.stats().used_bytes
        assert await present_on_disk(store, pages) == list(range(15, 25))

    monkeypatch.setattr(PageFiles, "publish", measuring_publish)
    # With one thread no file can appear while the folder is being measured.
    run_on_disk(root, test, 10 * PAGE_BYTES, num_threads=1)
    assert most == 10 * PAGE_BYTES


def test_a_low_file_system_evicts_without_any_capacity(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageFiles, "free_bytes", lambda files: 20 * PAGE_BYTES - bytes_in(root))

    async def test(store: DiskStore) -> None:
        pages = [make_page(n) for n in range(25)]
        assert await store.put(pages) == [True] * 25
        assert bytes_in(root) == 10 * PAGE_BYTES
        assert await present_on_disk(store, pages) == list(range(15, 25))

    run_on_disk(root, test, None, num_threads=1, min_free_bytes=10 * PAGE_BYTES)


def test_a_full_file_system_refuses_and_takes_nobodys_page(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = [make_page(n) for n in range(3)]
    fill_folder(root, pages)
    monkeypatch.setattr(PageFiles, "free_bytes", lambda files: 0)

    async def test(store: DiskStore) -> None:
        assert await store.put([make_page("new"), pages[0]]) == [False, True]
        assert await present_on_disk(store, pages) == [0, 1, 2]
        assert store.stats().pages_refused == 1

    run_on_disk(root, test, None, min_free_bytes=100 * PAGE_BYTES)
