"""``hicache store`` in process: what it finds, moves and refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hicache.cli import main
from hicache.testing.disk_folder import (
    fill_folder,
    open_ledger,
    pages_in,
    present_on_disk,
    run_on_disk,
    spoil_slot,
)
from hicache.testing.store_pages import Corruption, make_chain, make_page
from hicache.tiers.disk import DiskStore
from hicache.tiers.framing import encode_header
from hicache.tiers.store import StoredPage

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
