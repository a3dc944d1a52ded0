"""HiCache: a hierarchical KV-cache tier manager for LLM inference.

Names are loaded when first used, so that reading a configuration needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hicache.cache import HiCache
    from hicache.config import HiCacheConfig, load_config
    from hicache.errors import (
        CapacityError,
        ConfigError,
        CoreUnavailableError,
        EngineUnavailableError,
        HiCacheError,
        ProtocolError,
        TierError,
        TraceError,
    )
    from hicache.lease import Lease
    from hicache.types import NO_SLOT, ComponentSpec, Namespace, Tier, TierTokens

_HOMES = {
    "CapacityError": "hicache.errors",
    "ComponentSpec": "hicache.types",
    "ConfigError": "hicache.errors",
    "CoreUnavailableError": "hicache.errors",
    "EngineUnavailableError": "hicache.errors",
    "HiCache": "hicache.cache",
    "HiCacheConfig": "hicache.config",
    "HiCacheError": "hicache.errors",
    "Lease": "hicache.lease",
    "NO_SLOT": "hicache.types",
    "Namespace": "hicache.types",
    "ProtocolError": "hicache.errors",
    "Tier": "hicache.types",
    "TierError": "hicache.errors",
    "TierTokens": "hicache.types",
    "TraceError": "hicache.errors",
    "load_config": "hicache.config",
}

__all__ = [
    "NO_SLOT",
    "CapacityError",
    "ComponentSpec",
    "ConfigError",
    "CoreUnavailableError",
    "EngineUnavailableError",
    "HiCache",
    "HiCacheConfig",
    "HiCacheError",
    "Lease",
    "Namespace",
    "ProtocolError",
    "Tier",
    "TierError",
    "TierTokens",
    "TraceError",
    "load_config",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return __all__
