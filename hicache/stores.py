"""Makes the stores that a configuration asks for: each behind its breaker, several as a stack."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hicache.clock import Clock
from hicache.config import (
    BreakerConfig,
    DiskStoreConfig,
    HiCacheConfig,
    MemoryStoreConfig,
    RedisStoreConfig,
    store_bytes,
)
from hicache.errors import ConfigError
from hicache.tiers.breaker import BreakerSettings, BreakerStore
from hicache.tiers.registry import open_store
from hicache.tiers.stacked import StackedStore, WriteMode
from hicache.tiers.store import Store

AUTO_PATH = "auto"
NAMESPACE_DIGITS = 16
"""So much of the identity's digest stands in the names of entries; a page's key has all of it."""
NODE_FAILURES = 2
"""A node of a cluster that hangs holds up every batch, so it is left alone early."""
_TIMEOUT_SHARE = 0.4
"""Of the time for a call to a store: room for a second try at a server that took another's place."""


def make_store(config: HiCacheConfig, identity: bytes, clock: Clock) -> Store | None:
    """The store of ``tiers.stores``, not opened yet; None if there is none.

    Args:
        identity: digest of what makes equal tokens equal bytes; caches that differ in it share a server
            without seeing each other's pages.

    Raises:
        ConfigError: a client library is missing, or settings contradict each other.
    """
    sections = config.tiers.stores
    stores: list[Store] = []
    for section, capacity_bytes in zip(sections, store_bytes(config), strict=True):
        match section:
            case DiskStoreConfig():
                is_shared = section.directory is not None  # its capacity is the folder's, whoever works in it
                store = open_store(
                    "disk",
                    path=str(section.directory) if is_shared else AUTO_PATH,
                    capacity_bytes=section.capacity if is_shared else capacity_bytes,
                    num_threads=section.threads,
                    durable=section.durable,
                    direct=section.direct,
                    min_free_bytes=section.min_free or 0,
                )
            case MemoryStoreConfig():
                store = open_store("memory", capacity_bytes=capacity_bytes)
            case RedisStoreConfig():
                store = _redis(section, identity, config.policy.store_timeout, clock)
        if section.breaker.enabled:
            store = BreakerStore(
                store,
                _settings(section.breaker),
                clock=clock,
                randomness=random.Random(),
                # A server that is away for a moment keeps no engine from starting.
                must_open=section.kind != "redis",
                probe_timeout_s=config.policy.store_timeout,
                name=section.name,
            )
        stores.append(store)
    if len(stores) < 2:
        return stores[0] if stores else None
    stack = config.tiers.stack
    return StackedStore(
        stores,
        write=WriteMode(stack.write),
        promote=stack.promote,
        backlog_bytes=stack.backlog,
        backlog_timeout_s=config.policy.store_timeout,
    )


def _settings(breaker: BreakerConfig, *, failures: int | None = None) -> BreakerSettings:
    return BreakerSettings(
        failures=failures or breaker.failures,
        slow_s=breaker.slow,
        slow_fraction=breaker.slow_fraction,
        window=breaker.window,
        backoff_s=breaker.backoff,
        backoff_max_s=breaker.backoff_max,
        jitter=breaker.jitter,
    )


def _redis(section: RedisStoreConfig, identity: bytes, store_timeout_s: float, clock: Clock) -> Store:
    files = {
        key: None if path is None else str(Path(path).expanduser())
        for key, path in (
            ("ca_file", section.ca_file),
            ("cert_file", section.cert_file),
            ("key_file", section.key_file),
        )
    }
    return open_store(
        "redis",
        url=section.url,
        prefix=section.prefix,
        namespace=identity.hex()[:NAMESPACE_DIGITS],
        ttl_s=section.ttl,
        refresh_ttl=section.ttl_refresh,
        value_bytes=section.value_size,
        username=section.username,
        password=_password(section),
        login_at_sentinels=section.sentinel_login,
        **files,
        check_hostname=section.check_hostname,
        timeout_s=_TIMEOUT_SHARE * store_timeout_s if section.timeout is None else section.timeout,
        max_connections=section.connections,
        clock=clock,
        node_breaker=_settings(section.breaker, failures=NODE_FAILURES) if section.breaker.enabled else None,
        randomness=random.Random(),
    )


def _password(section: RedisStoreConfig) -> Callable[[], str] | None:
    """What gives the password, as often as it is asked; None if there is none."""
    if section.password_env is not None:
        return partial(_from_environment, section.password_env)
    if section.password_file is not None:
        return partial(_from_file, section.password_file)
    return None


def _from_environment(variable: str) -> str:
    password = os.environ.get(variable)
    if not password:
        raise ConfigError([f"stores.redis.password_env: the variable {variable} is not set; set it"])
    return password


def _from_file(path: str) -> str:
    try:
        password = Path(path).expanduser().read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, RuntimeError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise ConfigError([f"stores.redis.password_file: {path} cannot be read: {reason}"]) from None
    if not password:
        raise ConfigError([f"stores.redis.password_file: {path} is empty; expected the password"])
    return password
