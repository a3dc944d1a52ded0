"""YAML to validated models."""

from hicache.config.checks import config_warnings
from hicache.config.document import preset_names
from hicache.config.load import dump_config, explain_config, load_config
from hicache.config.model import ComponentConfig, ModelConfig, RanksConfig
from hicache.config.operate import AdminConfig, EventsConfig, ExplainConfig, MetricsConfig
from hicache.config.policy import (
    EVICTION_POLICIES,
    GRANULARITIES,
    PolicyConfig,
    PrefetchConfig,
    SessionsConfig,
)
from hicache.config.schema import HiCacheConfig
from hicache.config.sizing import (
    TierBudget,
    device_budget,
    device_slots,
    host_budget,
    host_slots,
    slots_bytes,
    store_bytes,
)
from hicache.config.tiers import (
    BreakerConfig,
    CodecConfig,
    DeviceConfig,
    DiskStoreConfig,
    HostConfig,
    MemoryStoreConfig,
    RedisStoreConfig,
    TiersConfig,
)
from hicache.config.units import (
    format_bytes,
    format_duration,
    parse_bytes,
    parse_duration,
    parse_fraction,
)

__all__ = [
    "EVICTION_POLICIES",
    "GRANULARITIES",
    "AdminConfig",
    "BreakerConfig",
    "CodecConfig",
    "ComponentConfig",
    "DeviceConfig",
    "DiskStoreConfig",
    "EventsConfig",
    "ExplainConfig",
    "HiCacheConfig",
    "HostConfig",
    "MemoryStoreConfig",
    "MetricsConfig",
    "ModelConfig",
    "PolicyConfig",
    "PrefetchConfig",
    "RanksConfig",
    "RedisStoreConfig",
    "SessionsConfig",
    "TierBudget",
    "TiersConfig",
    "config_warnings",
    "device_budget",
    "device_slots",
    "dump_config",
    "explain_config",
    "format_bytes",
    "format_duration",
    "host_budget",
    "host_slots",
    "load_config",
    "parse_bytes",
    "parse_duration",
    "parse_fraction",
    "preset_names",
    "slots_bytes",
    "store_bytes",
]
