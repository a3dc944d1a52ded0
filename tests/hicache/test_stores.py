"""Stores by configuration: which, in which order, behind which breaker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hicache.clock import ManualClock
from hicache.config import HiCacheConfig, load_config
from hicache.errors import ConfigError
from hicache.stores import make_store
from hicache.tiers import registry
from hicache.tiers.breaker import BreakerStore
from hicache.tiers.disk import DiskStore
from hicache.tiers.memory import MemoryStore
from hicache.tiers.stacked import StackedStore
from hicache.tiers.store import BreakerState, Store

IDENTITY = bytes(range(32))


def config(*stores: dict[str, object], **overrides: object) -> HiCacheConfig:
    keys: dict[str, object] = {name.replace("__", "."): value for name, value in overrides.items()}
    return load_config("cpu", overrides={"tiers.stores": list(stores), **keys}, environ={})


def made(*stores: dict[str, object], **overrides: object) -> Store | None:
    return make_store(config(*stores, **overrides), IDENTITY, ManualClock())


def redis_settings(monkeypatch: pytest.MonkeyPatch, **keys: object) -> dict[str, Any]:  # Any: RedisStore's
    """What a configured Redis store is made with."""
    found: dict[str, Any] = {}

    def make(**settings: Any) -> Store:  # Any: as above
        found.update(settings)
        return MemoryStore()

    monkeypatch.setitem(registry._KINDS, "redis", lambda: make)
    assert made({"kind": "redis", "url": "redis://h", **keys}) is not None
    return found


def test_without_stores_there_is_none() -> None:
    assert made() is None


def test_a_store_stands_behind_a_breaker_and_bears_its_name(tmp_path: Path) -> None:
    store = made({"kind": "disk", "name": "local", "path": str(tmp_path), "capacity": "1GiB"})
    assert isinstance(store, BreakerStore)
    assert isinstance(store.inner, DiskStore)
    stats = store.stats()
    assert stats.breaker is not None
    assert (stats.name, stats.kind, stats.breaker.state) == ("local", "disk", BreakerState.CLOSED)


def test_a_breaker_can_be_switched_off() -> None:
    assert isinstance(made({"kind": "memory", "breaker": {"enabled": False}}), MemoryStore)


def test_several_stores_are_a_stack_in_their_order() -> None:
    store = made({"kind": "memory", "name": "b"}, {"kind": "memory", "name": "a"}, {"kind": "memory"})
    assert isinstance(store, StackedStore)
    assert [part.name for part in store.stats().stores] == ["b", "a", "memory"]


@pytest.mark.parametrize("mode", ["first", "all", "later"])
def test_a_stack_writes_as_configured(mode: str) -> None:
    store = made({"kind": "memory"}, {"kind": "memory"}, tiers__stack={"write": mode, "promote": False})
    assert isinstance(store, StackedStore)
    assert (store._write, store._promote) == (mode, False)


def test_redis_gets_what_was_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = redis_settings(
        monkeypatch, ttl="1d", ttl_refresh=False, prefix="p", value_size="1MiB", timeout="1s", connections=3
    )
    assert settings["url"] == "redis://h"
    assert settings["namespace"] == "0001020304050607"
    assert (settings["ttl_s"], settings["refresh_ttl"], settings["prefix"]) == (86400.0, False, "p")
    assert (settings["value_bytes"], settings["timeout_s"], settings["max_connections"]) == (1 << 20, 1.0, 3)
    assert settings["password"] is None
    assert settings["node_breaker"].failures == 2


def test_a_redis_time_limit_leaves_room_for_a_second_try(monkeypatch: pytest.MonkeyPatch) -> None:
    assert redis_settings(monkeypatch)["timeout_s"] == 2.0  # of 5 s


def test_a_password_is_read_when_it_is_needed_and_not_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CACHE_PASSWORD", raising=False)
    from_variable = redis_settings(monkeypatch, password_env="CACHE_PASSWORD")["password"]
    with pytest.raises(ConfigError, match="the variable CACHE_PASSWORD is not set"):
        from_variable()
    monkeypatch.setenv("CACHE_PASSWORD", "one")
    assert from_variable() == "one"

    path = tmp_path / "secret"
    from_file = redis_settings(monkeypatch, password_file=str(path))["password"]
    with pytest.raises(ConfigError, match="secret cannot be read: No such file or directory"):
        from_file()
    path.write_text("")
    with pytest.raises(ConfigError, match="secret is empty; expected the password"):
        from_file()
    path.write_text("two\n")
    assert from_file() == "two"
    path.write_text("three\r\n")
    assert from_file() == "three"
