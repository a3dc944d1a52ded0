"""Makes stores by name; choosing one imports no other."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from hicache.errors import ConfigError
from hicache.tiers.store import Store


def open_store(kind: str, **settings: Any) -> Store:  # Any: each kind has its own settings
    """Make the store called ``kind``; ``await store.open()`` connects it.

    Args:
        kind: ``disk``, ``memory`` or ``redis``.
        settings: arguments of that store's class, by name.

    Raises:
        ConfigError: an unknown kind or setting, a missing setting, a value out of range, or a client
            library that is not installed.
    """
    find_class = _KINDS.get(kind)
    if find_class is None:
        raise ConfigError([f"stores.kind: {kind!r} is not known; known are {', '.join(sorted(_KINDS))}"])
    store_class = find_class()
    try:
        arguments = inspect.signature(store_class).bind(**settings)
    except TypeError as error:
        known = ", ".join(inspect.signature(store_class).parameters)
        raise ConfigError([f"stores.{kind}: {error}; settings are {known}"]) from error
    try:
        return store_class(*arguments.args, **arguments.kwargs)
    except ValueError as error:
        raise ConfigError([f"stores.{kind}: {error}"]) from error


def _disk() -> Callable[..., Store]:
    from hicache.tiers.disk import DiskStore

    return DiskStore


def _memory() -> Callable[..., Store]:
    from hicache.tiers.memory import MemoryStore

    return MemoryStore


def _redis() -> Callable[..., Store]:
    try:
        from hicache.tiers.redis import RedisStore
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "redis":
            raise
        raise ConfigError(["stores.redis: needs redis-py; pip install 'hicache[redis]'"]) from error
    return RedisStore


_KINDS: dict[str, Callable[[], Callable[..., Store]]] = {"disk": _disk, "memory": _memory, "redis": _redis}
