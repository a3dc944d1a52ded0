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


def test_redis_without_its_client_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("hicache.tiers.redis")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "redis", None)
    monkeypatch.setitem(sys.modules, "redis.credentials", None)
    with pytest.raises(ConfigError, match=r"needs redis-py; pip install 'hicache\[redis\]'"):
        open_store("redis", url="redis://cache")


def test_a_redis_store_is_made_without_connecting() -> None:
    store = open_store("redis", url="redis://nobody.invalid", prefix="p", ttl_s=60.0)
    assert store.stats().kind == "redis"


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
        ("redis", {"url": "http://h"}, "stores.redis: expected redis://"),
        ("redis", {"url": "redis://h", "timeout_s": 0}, "timeout_s is 0, more than 0 expected"),
    ],
    ids=["kind", "unknown", "missing", "range", "negative", "url", "no-time"],
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
