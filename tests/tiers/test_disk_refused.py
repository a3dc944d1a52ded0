"""What a disk store refuses to open, and the remedy that it names."""

from __future__ import annotations

import errno
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from hicache.testing.disk_folder import (
    fill_folder,
    refusal,
    run_on_disk,
)
from hicache.testing.store_pages import make_page
from hicache.tiers.disk import DiskStore
from hicache.tiers.disk_folder import FORMAT
from hicache.tiers.framing import encode_header


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
