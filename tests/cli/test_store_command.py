"""``hicache store`` in process: what it finds, moves and refuses."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from hicache.cli import main
from hicache.testing.disk_folder import (
    PAGE_BYTES,
    fill_folder,
    open_ledger,
    pages_in,
    present_on_disk,
    run_on_disk,
    spoil_slot,
)
from hicache.testing.store_pages import Corruption, make_chain, make_page
from hicache.tiers.disk import DiskStore
from hicache.tiers.disk_pages import DiskPages, StoredFrame
from hicache.tiers.disk_tools import export_pages
from hicache.tiers.framing import encode_header
from hicache.tiers.journal import Appended, Journal
from hicache.tiers.journal_records import Records
from hicache.tiers.page_index import PageEntry
from hicache.tiers.segment_files import SegmentFiles
from hicache.tiers.store import StoredPage
from hicache.tiers.workers import Workers

CHAIN = make_chain(1, 20)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    fill_folder(folder, [*CHAIN, make_page("state", component="mamba")])
    return folder


def run(*arguments: object) -> int:
    try:
        return main(["store", *map(str, arguments)])
    except SystemExit as stop:
        return int(stop.code or 0)


def report(
    capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0
) -> dict[str, Any]:  # Any: JSON
    assert run(*arguments, "--json", "-") == code
    loaded = json.loads(capsys.readouterr().out)
    assert isinstance(loaded, dict)
    return loaded


def holds(folder: Path, pages: list[StoredPage], positions: list[int]) -> None:
    async def test(store: DiskStore) -> None:
        assert await present_on_disk(store, pages) == positions

    run_on_disk(folder, test)


def test_stat_counts_pages_by_component(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, "stat", "--path", root)
    assert (found["pages"], found["capacity_bytes"], found["other_processes"]) == (21, None, 0)
    assert {name: part["pages"] for name, part in found["components"].items()} == {"full": 20, "mamba": 1}
    assert sum(part["bytes"] for part in found["components"].values()) == found["used_bytes"]


def test_stat_sees_who_else_is_at_work(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = open_ledger(root)
    assert report(capsys, "stat", "--path", root)["other_processes"] == 1
    other.close()


def test_the_store_of_a_configuration_is_found(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "hicache.yaml"
    file.write_text(
        "model:\n  name: m\n  page_size: 4\n  components:\n    full: {rule: path, layers: 1, bytes_per_token: 16}\n"
        "tiers:\n  device: {kind: cpu, capacity: 1MiB}\n  host: {capacity: 1MiB, pinned: false}\n"
        f"  stores:\n    - {{kind: disk, path: {root}, capacity: 16MiB}}\n"
    )
    found = report(capsys, "stat", "--config", file)
    assert (found["path"], found["capacity_bytes"]) == (str(root), 16 << 20)


def test_scrub_removes_what_is_bad_and_says_so(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(capsys, "scrub", "--path", root)["pages"] == 21
    spoil_slot(root, CHAIN[19].key, Corruption.FLIPPED_PAYLOAD)
    found = report(capsys, "scrub", "--path", root, code=1)
    assert (found["pages"], found["bad_pages_removed"], found["findings"]) == (20, 1, [])
    assert report(capsys, "scrub", "--path", root)["bad_pages_removed"] == 0
    assert CHAIN[19].key not in pages_in(root)


def test_an_archive_holds_everything_and_fills_another_store(root: Path, tmp_path: Path) -> None:
    archive, other = tmp_path / "pages.hic", tmp_path / "other"
    assert run("export", archive, "--path", root) == 0
    assert run("import", archive, "--path", other) == 0
    holds(other, CHAIN, list(range(20)))
    assert {key: entry.parent for key, entry in pages_in(other).items()} == {
        key: entry.parent for key, entry in pages_in(root).items()
    }


def test_a_store_too_small_for_an_archive_keeps_the_heads(root: Path, tmp_path: Path) -> None:
    archive, other = tmp_path / "pages.hic", tmp_path / "other"
    assert run("delete", "--component", "mamba", "--path", root) == 0
    assert run("export", archive, "--path", root) == 0
    assert run("import", archive, "--path", other, "--capacity", "10000") == 1
    kept = len(pages_in(other))
    assert 3 <= kept < 20
    holds(other, CHAIN, list(range(kept)))


def test_an_import_tells_what_the_quota_did_not_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Single pages that evict each other were stored, and are not there in the end."""
    archive, other = tmp_path / "pages.hic", tmp_path / "other"
    fill_folder(tmp_path / "full", [make_page(n) for n in range(20)])
    fill_folder(other, [make_page("before"), make_page("too")])
    assert run("export", archive, "--path", tmp_path / "full") == 0
    capsys.readouterr()
    assert run("import", archive, "--path", other, "--capacity", str(5 * PAGE_BYTES)) == 1
    assert len(pages_in(other)) == 5
    assert capsys.readouterr().out == (
        "5 pages stored, 15 stored and evicted again for want of room, 0 refused for want of room, 0 bad, "
        "2 others left the store\n"
    )
    assert run("import", archive, "--path", other, "--capacity", str(5 * PAGE_BYTES)) == 1
    assert "others" not in capsys.readouterr().out  # what it had is in the archive, too


def test_an_import_that_the_disk_has_no_room_for_says_so(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(files: SegmentFiles, frames: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert run("export", tmp_path / "pages.hic", "--path", root) == 0
    capsys.readouterr()
    monkeypatch.setattr(SegmentFiles, "write", refuse)
    assert run("import", tmp_path / "pages.hic", "--path", tmp_path / "other") == 1
    told = capsys.readouterr().out
    assert told.startswith(
        "0 pages stored, 0 stored and evicted again for want of room, 21 refused for want of room or for errors"
    )
    assert told.endswith("times ENOSPC\n")


def test_an_export_tells_what_it_had_to_leave_out(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil_slot(root, CHAIN[19].key, Corruption.FLIPPED_PAYLOAD)
    assert run("export", tmp_path / "pages.hic", "--path", root) == 1
    assert "20 pages written" in (told := capsys.readouterr().out)
    assert "1 left out" in told
    assert (tmp_path / "pages.hic").stat().st_mode & 0o777 == 0o600


def test_two_exports_to_one_file_at_once_leave_a_whole_archive(root: Path, tmp_path: Path) -> None:
    archive = tmp_path / "pages.hic"

    async def test(store: DiskStore) -> None:
        def second_one(num_done: int) -> None:
            if num_done == 3:
                assert export_pages(store.pages, archive).num_pages == 21

        result = await store.run(lambda pages: export_pages(pages, archive, second_one))
        assert (result.num_pages, result.num_left_out) == (21, 0)

    run_on_disk(root, test)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["pages.hic"]
    assert run("import", archive, "--path", tmp_path / "other") == 0


def test_an_export_that_cannot_be_written_leaves_what_was_there(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "pages.hic"
    archive.write_text("what was there")

    def refuse(path: Path, target: Path) -> Path:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "replace", refuse)
    assert run("export", archive, "--path", root) == 2
    assert f"{archive} cannot be written: Input/output error" in capsys.readouterr().err
    assert archive.read_text() == "what was there"
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["pages.hic"]


@pytest.mark.parametrize("command", ["export", "scrub"])
def test_what_takes_long_ends_at_the_next_page_when_it_is_interrupted(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """A signal arrives while the second page is read; the third one never is.

    It comes to the reading thread, so nothing but asyncio's wakeup descriptor tells the waiting one: so it is, too, when
    it comes to that one just before it waits.
    """
    real_frame = DiskPages._frame
    num_read = 0

    def interrupt(pages: DiskPages, entry: PageEntry) -> StoredFrame | None:
        nonlocal num_read
        num_read += 1
        if num_read == 2:
            signal.raise_signal(signal.SIGINT)
            told.append(stops[-1].wait(30.0))
        return real_frame(pages, entry)

    stops: list[threading.Event] = []
    told: list[bool] = []
    real_run = Workers.run

    async def noting_run(workers: Workers, shares: Any, stop: threading.Event) -> None:
        stops.append(stop)
        await real_run(workers, shares, stop)

    monkeypatch.setattr(DiskPages, "_frame", interrupt)
    monkeypatch.setattr(Workers, "run", noting_run)
    assert run(command, *([tmp_path / "pages.hic"] if command == "export" else []), "--path", root) == 130
    assert (num_read, told) == (2, [True])
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == []


def test_a_delete_that_the_folder_does_not_take_says_so(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(journal: Journal, records: Records) -> Appended:
        return Appended(0, OSError(errno.EIO, os.strerror(errno.EIO)))

    monkeypatch.setattr(Journal, "append", refuse)
    assert run("delete", "--component", "mamba", "--path", root) == 1
    assert "0 pages removed" in (told := capsys.readouterr().out)
    assert "times EIO" in told
    monkeypatch.undo()
    assert len(pages_in(root)) == 21


def test_a_source_that_cannot_be_read_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pages.hic").write_bytes(b"HICPAGES")

    def refuse(path: Path, mode: str) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "open", refuse)
    assert run("import", tmp_path / "pages.hic", "--path", tmp_path / "new") == 2
    assert "name a file that this user may read" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "keep", [0, 5, 9, 500, -1], ids=["empty", "magic-cut", "version-cut", "page-cut", "end-cut"]
)
def test_an_archive_cut_short_is_refused_where_it_ends(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], keep: int
) -> None:
    archive, other = tmp_path / "pages.hic", tmp_path / "other"
    run("export", archive, "--path", root)
    archive.write_bytes(archive.read_bytes()[:keep])
    assert run("import", archive, "--path", other) in (1, 2)
    capsys.readouterr()


def test_a_spoilt_page_of_an_archive_is_left_out(root: Path, tmp_path: Path) -> None:
    archive, other = tmp_path / "pages.hic", tmp_path / "other"
    run("export", archive, "--path", root)
    raw = bytearray(archive.read_bytes())
    raw[raw.index(bytes(CHAIN[19].payload)) + 10] ^= 1
    archive.write_bytes(raw)
    assert run("import", archive, "--path", other) == 1
    holds(other, CHAIN, list(range(19)))


def test_pages_of_the_older_format_are_taken_over(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    for page in CHAIN:
        name = f"{page.key.hex()}-{page.parent.hex() if page.parent else 'root'}-1160.page"
        path = folder / page.key.hex()[:2] / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode_header(page.key, "full", page.payload, parent=page.parent) + page.payload)
    fill_folder(folder, [])  # sets them aside
    holds(folder, CHAIN, [])
    assert run("import", folder / "old-format-1", "--path", folder) == 0
    holds(folder, CHAIN, list(range(20)))


def test_delete_takes_keys_components_or_everything(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("delete", CHAIN[19].key.hex()[:12].upper(), "--path", root) == 0
    assert run("delete", "--component", "mamba", "--path", root) == 0
    assert "1 pages removed" in capsys.readouterr().out
    holds(root, CHAIN, list(range(19)))
    assert run("delete", "--all", "--path", root) == 0
    assert pages_in(root) == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["stat"], "name the folder with --path"),
        (["stat", "--path", "/nowhere/at/all"], "holds no disk store"),
        (["stat", "--config", "cpu"], "no disk store with a folder of its own"),
        (["delete", "xyz", "--path", "."], "expected up to 64 hexadecimal digits"),
        (["delete", "--path", "."], "say what"),
        (["delete", "ab", "--all", "--path", "."], "say what"),
        (["import", "/nowhere/at/all", "--path", "."], "no such file or folder"),
        (["import", "/etc/hostname", "--path", "."], "no archive of pages"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value[:2]).replace("/", ""),
)
def test_what_cannot_be_done_is_refused_with_the_remedy(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    assert message in capsys.readouterr().err


def test_a_capacity_that_is_none_is_refused(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("export", tmp_path / "archive", "--path", root) == 0
    assert run("import", tmp_path / "archive", "--path", tmp_path / "new", "--capacity", "lots") == 2
    assert "--capacity" in capsys.readouterr().err


def test_an_archive_replaces_nothing_but_a_file(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipe, a link, and the store's own files stay what they are."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for target, told in (
        ("pipe", "no plain file"),
        ("link", "no plain file"),
        ("store/journal", "own folder"),
        ("nowhere/archive", "is no folder"),
    ):
        assert run("export", tmp_path / target, "--path", root) == 2
        assert told in capsys.readouterr().err
    assert run("stat", "--path", root, "--json", root / "format.json") == 2
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "link").is_symlink()
    holds(root, CHAIN, list(range(20)))


def test_what_is_no_archive_makes_no_store(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("import", root, "--path", tmp_path / "new") == 2
    assert "hicache store export" in capsys.readouterr().err
    (tmp_path / "text").write_text("hello")
    assert run("import", tmp_path / "text", "--path", tmp_path / "new") == 2
    assert not (tmp_path / "new").exists()


def test_a_folder_that_is_no_store_is_left_as_it_is(tmp_path: Path) -> None:
    assert run("stat", "--path", tmp_path) == 2
    assert list(tmp_path.iterdir()) == []
