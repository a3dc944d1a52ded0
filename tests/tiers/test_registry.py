"""Stores by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hicache.errors import ConfigError
from hicache.tiers.disk import DiskStore
from hicache.tiers.memory import MemoryStore
from hicache.tiers.registry import open_store


def test_a_store_is_made_by_its_kind_and_settings(tmp_path: Path) -> None:
    disk = open_store("disk", path=tmp_path, capacity_bytes=1000, num_threads=2)
    assert isinstance(disk, DiskStore)
    assert (disk.path, disk.stats().capacity_bytes) == (str(tmp_path), 1000)
    memory = open_store("memory", capacity_bytes=500)
    assert isinstance(memory, MemoryStore)
    assert memory.stats().capacity_bytes == 500


def test_redis_is_refused_as_not_there_yet() -> None:
    with pytest.raises(ConfigError, match="this version has no Redis store yet"):
        open_store("redis", url="redis://cache")


@pytest.mark.parametrize(
    ("kind", "settings", "problem"),
    [
        ("tape", {}, "'tape' is not known; known are disk, memory"),
        (
            "disk",
            {"pth": "/tmp"},
            "settings are path, capacity_bytes, num_threads, durable, direct, min_free_bytes",
        ),
        ("disk", {}, "path"),
        ("disk", {"path": "auto", "num_threads": 0}, "num_threads is 0, 1 or more expected"),
        ("memory", {"capacity_bytes": -1}, "capacity_bytes is -1"),
    ],
    ids=["kind", "unknown", "missing", "range", "negative"],
)
def test_a_wrong_kind_or_setting_is_refused_by_name(
    kind: str, settings: dict[str, object], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        open_store(kind, **settings)


def test_choosing_one_store_imports_no_other_and_no_torch() -> None:
    script = (
        "import sys; from hicache.tiers.registry import open_store; open_store('memory');"
        "print(sorted({'hicache.tiers.disk', 'torch', 'redis'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
