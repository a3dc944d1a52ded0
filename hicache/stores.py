"""Makes the stores that a configuration asks for: each with its codec behind its breaker, several as a stack."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hicache.clock import Clock
from hicache.config import (
    BreakerConfig,
    CodecConfig,
    DiskStoreConfig,
    HiCacheConfig,
    MemoryStoreConfig,
    RedisStoreConfig,
    store_bytes,
)
from hicache.config.secrets import said_file, said_variable
from hicache.config.tiers import AUTO_PATH
from hicache.errors import ConfigError
from hicache.radix.interface import MAX_STORED_PAGES
from hicache.tiers.breaker import BreakerSettings, BreakerStore
from hicache.tiers.codecs import Codec, CodecSettings, parse_key
from hicache.tiers.encoded import EncodedStore
from hicache.tiers.registry import open_store
from hicache.tiers.stacked import StackedStore, WriteMode
from hicache.tiers.store import Store
from hicache.tiers.traced import TracedStore
from hicache.tracing import OFF, Tracing

OPEN_TIMEOUT_S = 60.0
"""Opening a store, or emptying it, takes longer than any single batch."""
MIN_STORED_PAGES = 1024
"""The tree remembers at least so many pages of L3, however small the stores."""
NAMESPACE_DIGITS = 16
"""So much of the identity's digest stands in the names of entries; a page's key has all of it."""
NODE_FAILURES = 2
"""A node of a cluster that hangs holds up every batch, so it is left alone early."""
_MOST_SECRET = 4096
"""Letters of a key or password; a file of more is something else."""
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
    members = make_members(config, identity, clock)
    if len(members) < 2:
        return members[0] if members else None
    return make_stack(members, config)


def make_members(config: HiCacheConfig, identity: bytes, clock: Clock) -> list[Store]:
    """Each store of ``tiers.stores`` by itself; takes and raises what ``make_store`` does."""
    return [make_member(config, place, identity, clock) for place in range(len(config.tiers.stores))]


def make_member(config: HiCacheConfig, place: int, identity: bytes, clock: Clock) -> Store:
    """One of ``tiers.stores``, not opened yet; takes and raises what ``make_store`` does."""
    section, capacity_bytes = config.tiers.stores[place], member_bytes(config, place)
    match section:
        case DiskStoreConfig():
            store = open_store(
                "disk",
                path=AUTO_PATH if section.directory is None else str(section.directory),
                capacity_bytes=capacity_bytes,
                num_threads=section.threads,
                durable=section.durable,
                direct=section.direct,
                min_free_bytes=section.min_free or 0,
            )
        case MemoryStoreConfig():
            store = open_store("memory", capacity_bytes=capacity_bytes)
        case RedisStoreConfig():
            store = _redis(section, identity, config.policy.store_timeout, clock)
    store = EncodedStore(store, _codec(section.codec, f"tiers.stores.{place}.codec", config.model.dtype))
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
    return store


def member_bytes(config: HiCacheConfig, place: int) -> int | None:
    """What one of ``tiers.stores`` may hold in this process; None for no limit of ours."""
    section = config.tiers.stores[place]
    if isinstance(section, DiskStoreConfig) and section.directory is not None:
        return section.capacity  # the folder's, whoever works in it
    return store_bytes(config)[place]


def make_stack(stores: list[Store], config: HiCacheConfig) -> StackedStore:
    """Several stores as one, as ``tiers.stack`` has it."""
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


def _codec(codec: CodecConfig, place: str, dtype: str) -> Codec:
    """How a store's pages are written, with the key it needs for that and for reading."""
    key = None
    if codec.key_env is not None or codec.key_file is not None:
        key = _key(codec, place)
    settings = CodecSettings(
        compression=codec.compression,
        level=codec.level,
        width=_number_bytes(dtype) if codec.shuffle else 1,
        key=key,
        encrypts=codec.encryption != "none",
    )
    try:
        return Codec(settings)
    except ConfigError as error:
        raise ConfigError([f"{place}: {problem}" for problem in error.problems]) from error


def _key(codec: CodecConfig, place: str) -> bytes:
    if codec.key_env is not None:
        place = f"{place}.key_env"
        text = _from_environment(codec.key_env, place)
    else:
        place = f"{place}.key_file"
        text = _from_file(str(codec.key_file), place, "key")
    try:
        return parse_key(text)
    except ValueError as error:
        raise ConfigError([f"{place}: {error}"]) from None


def _number_bytes(dtype: str) -> int:
    """Bytes of one number by the label of its type: ``bf16``, ``float16``, ``fp8_e4m3``, ``int8``."""
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) // 8 if bits and bits[0] in ("16", "32", "64") else 1


def _password(section: RedisStoreConfig) -> Callable[[], str] | None:
    """What gives the password, as often as it is asked; None if there is none."""
    if section.password_env is not None:
        return partial(_from_environment, section.password_env, "stores.redis.password_env")
    if section.password_file is not None:
        return partial(_from_file, section.password_file, "stores.redis.password_file", "password")
    return None


def _from_environment(variable: str, place: str) -> str:
    """A secret; ``place`` is the key of the configuration that names the variable."""
    secret = os.environ.get(variable)
    if not secret:
        raise ConfigError([f"{place}: {said_variable(variable)} is not set; set it"])
    return secret


def _from_file(path: str, place: str, what: str) -> str:
    """The same from a file, without the line's end."""
    said = said_file(path)
    try:
        place_of = Path(path).expanduser()
        if place_of.exists() and not place_of.is_file():
            raise ConfigError([f"{place}: {said} is no plain file; expected one with the {what}"])
        with place_of.open(encoding="utf-8") as file:
            secret = file.read(_MOST_SECRET + 1).rstrip("\r\n")
        if len(secret) > _MOST_SECRET:
            raise ConfigError([f"{place}: {said} is longer than {_MOST_SECRET} letters; expected the {what}"])
    except (OSError, RuntimeError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise ConfigError([f"{place}: {said} cannot be read: {reason}"]) from None
    if not secret:
        raise ConfigError([f"{place}: {said} is empty; expected the {what}"])
    return secret


def max_stored_pages(config: HiCacheConfig) -> int:
    """How many pages of L3 the tree remembers: no more than the stores can hold, where that is known."""
    capacities = store_bytes(config)
    known = [capacity for capacity in capacities if capacity is not None]
    if not known or len(known) < len(capacities):
        return MAX_STORED_PAGES
    smallest = min(spec.slot_bytes(config.model.page_size) for spec in config.model.specs())
    return min(MAX_STORED_PAGES, max(MIN_STORED_PAGES, sum(known) // smallest))


class StoreSet:
    """The stores of one cache by name, and what they are together; both change while it serves.

    Args:
        config, identity, clock: see ``make_store``.
        given: a store to use instead of the configured ones, called ``given``.
        tracing: makes a span for each call of a store.

    *Thread*: the cache's lock for ``top``, ``must_ask`` and ``epoch``; one change at a time.
    """

    def __init__(
        self,
        config: HiCacheConfig,
        identity: bytes,
        clock: Clock,
        given: Store | None,
        tracing: Tracing = OFF,
    ) -> None:
        self._identity, self._clock, self._tracing = identity, clock, tracing
        members = [given] if given is not None else make_members(config, identity, clock)
        names = ["given"] if given is not None else [section.name or "" for section in config.tiers.stores]
        members = [self._traced(store, name) for store, name in zip(members, names, strict=True)]
        self.members = dict(zip(names, members, strict=True))
        self.top: Store | None = members[0] if members else None
        if len(members) > 1:
            self.top = make_stack(members, config)
        self.must_ask = False
        """Pages came or went that the tree has not heard of."""
        self.epoch = 0
        """Raised when pages leave on purpose, and with each store that does: what was asked before says nothing of now."""

    def make_last(self, config: HiCacheConfig) -> Store:
        """The last of ``tiers.stores``, not opened yet; takes and raises what ``make_store`` does."""
        last = make_member(config, len(config.tiers.stores) - 1, self._identity, self._clock)
        return self._traced(last, config.tiers.stores[-1].name or "")

    def _traced(self, store: Store, name: str) -> Store:
        return store if self._tracing is OFF else TracedStore(store, name, self._tracing)
