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
from hicache.tiers.codecs import CodecSettings
from hicache.tiers.disk import DiskStore
from hicache.tiers.encoded import EncodedStore
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
    assert isinstance(store.inner, EncodedStore)
    assert isinstance(store.inner.inner, DiskStore)
    stats = store.stats()
    assert stats.breaker is not None
    assert (stats.name, stats.kind, stats.breaker.state) == ("local", "disk", BreakerState.CLOSED)


def test_a_breaker_can_be_switched_off() -> None:
    store = made({"kind": "memory", "breaker": {"enabled": False}})
    assert isinstance(store, EncodedStore)
    assert isinstance(store.inner, MemoryStore)


# ---- codecs --------------------------------------------------------------------------------------------------------
SECRET = "ab" * 32


def codec_of(codec: dict[str, object], **overrides: object) -> CodecSettings:
    store = made({"kind": "memory", "codec": codec, "breaker": {"enabled": False}}, **overrides)
    assert isinstance(store, EncodedStore)
    return store.codec.settings


@pytest.mark.parametrize(
    ("dtype", "width"),
    [("bf16", 2), ("float16", 2), ("float32", 4), ("fp8_e4m3", 1), ("uint8", 1), ("int8", 1), ("mixed", 1)],
)
def test_the_byte_shuffle_knows_the_numbers(dtype: str, width: int) -> None:
    assert codec_of({"compression": "zstd"}, model__dtype=dtype).width == width
    assert codec_of({"compression": "zstd", "shuffle": False}, model__dtype=dtype).width == 1


@pytest.mark.parametrize("where", ["key_env", "key_file"])
def test_a_key_comes_from_the_environment_or_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str
) -> None:
    monkeypatch.setenv("HICACHE_TEST_KEY", SECRET)
    (tmp_path / "key").write_text(SECRET + "\n")
    place = "HICACHE_TEST_KEY" if where == "key_env" else str(tmp_path / "key")
    settings = codec_of({"encryption": "aes-gcm", where: place})
    assert (settings.key, settings.encrypts) == (bytes.fromhex(SECRET), True)
    assert not codec_of({where: place}).encrypts  # what was encrypted once can still be read


@pytest.mark.parametrize(
    ("codec", "told"),
    [
        (
            {"encryption": "aes-gcm", "key_env": "HICACHE_TEST_NONE"},
            "key_env: the variable HICACHE_TEST_NONE",
        ),
        ({"encryption": "aes-gcm", "key_env": "HICACHE_TEST_BAD"}, "key_env: not a key of 32 bytes"),
        ({"encryption": "aes-gcm", "key_file": "/nowhere/key"}, "key_file: /nowhere/key cannot be read"),
        ({"encryption": "aes-gcm", "key_file": "/dev/zero"}, "key_file: /dev/zero is no plain file"),
    ],
)
def test_a_key_that_cannot_be_had_is_refused(
    monkeypatch: pytest.MonkeyPatch, codec: dict[str, object], told: str
) -> None:
    monkeypatch.setenv("HICACHE_TEST_BAD", "deadbeef")
    with pytest.raises(ConfigError, match=told) as raised:
        codec_of(codec)
    assert str(raised.value).startswith("tiers.stores.0.codec.")
    assert "deadbeef" not in str(raised.value)


@pytest.mark.parametrize("key", ["password_env", "password_file"])
def test_a_password_that_stands_where_its_place_is_named_is_not_repeated(
    monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    password = redis_settings(monkeypatch, **{key: "hunter2"})["password"]
    with pytest.raises(ConfigError, match=f"{key}: the (variable|file) that it names .not shown") as raised:
        password()
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("key", ["key_env", "key_file"])
def test_a_key_that_stands_where_its_place_is_named_is_not_repeated(key: str) -> None:
    with pytest.raises(
        ConfigError, match=f"codec.{key}: the (variable|file) that it names .not shown"
    ) as raised:
        codec_of({"encryption": "aes-gcm", key: SECRET})
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize(
    ("codec", "told"),
    [
        ({"encryption": "aes-gcm"}, "codec.encryption.*add key_env or key_file"),
        ({"key_env": "A", "key_file": "b"}, "codec.key_file.*keep one"),
        ({"compression": "gzip"}, "codec.compression.*lz4"),
        ({"level": 30}, "codec.level"),
    ],
)
def test_codecs_that_make_no_sense_are_refused(codec: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        config({"kind": "memory", "codec": codec})


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
