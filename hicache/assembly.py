"""The parts of a cache, as its configuration wants them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from hicache.clock import Clock
from hicache.config import (
    HiCacheConfig,
    config_warnings,
    device_budget,
    device_slots,
    host_budget,
    host_slots,
)
from hicache.config.marks import spacing_of
from hicache.errors import ConfigError
from hicache.explain import Explainer
from hicache.ledger import Ledger
from hicache.policy.session_order import SessionOrder
from hicache.policy.shadows import block_tokens_of, make_order
from hicache.radix.interface import TreeConfig
from hicache.radix.keys import Identity
from hicache.ranks.opening import Room
from hicache.stats import CacheStats
from hicache.stores import max_stored_pages
from hicache.tiers.device import DevicePool
from hicache.tiers.host import HostPool
from hicache.tiers.shared_device import SharedDevicePool
from hicache.tiers.shared_host import SharedHostPool
from hicache.types import ReuseRule
from hicache.version import hicache_version

if TYPE_CHECKING:
    from hicache.kvevents.publisher import EventPublisher
    from hicache.metrics import MetricsServer

logger = logging.getLogger(__name__)


def identity_of(config: HiCacheConfig) -> Identity:
    """What tells this cache's pages from others' in L3."""
    ranks = config.ranks
    return Identity(
        model=config.model.name,
        weights=config.model.weights,
        dtype=config.model.dtype,
        page_size=config.model.page_size,
        tp_size=ranks.tp_size,
        tp_rank=ranks.tp_rank,
        pp_size=ranks.pp_size,
        pp_rank=ranks.pp_rank,
        cp_size=ranks.cp_size,
        cp_rank=ranks.cp_rank,
    )


def log_warnings(config: HiCacheConfig) -> None:
    """Say once what works but is unlikely to be meant: a pool too small to reuse anything, and the like."""
    for warning in config_warnings(config):
        logger.warning("%s", warning)


# ---- the tree and its memory -------------------------------------------------------------------
def own_room(config: HiCacheConfig) -> Room:
    """What this rank's tree can hold."""
    units = [
        0 if budget is None else budget.num_units for budget in (host_budget(config), device_budget(config))
    ]
    return Room(device_slots(config), host_slots(config), max_stored_pages(config), *units)


def tree_of(
    config: HiCacheConfig, room: Room, identity: bytes, *, has_store: bool, emits_events: bool
) -> TreeConfig:
    """The tree's configuration; ``room`` is what all ranks have."""
    specs, policy = config.model.specs(), config.policy
    host, device = host_budget(config), device_budget(config)
    return TreeConfig(
        page_size=config.model.page_size,
        components=specs,
        device_slots=room.device,
        host_slots=room.host,
        host_units=room.host_units,
        host_costs={} if host is None else host.costs,
        device_units=room.device_units,
        device_costs={} if device is None else device.costs,
        has_store=has_store,
        max_stored_pages=room.max_stored_pages,
        write=policy.write,
        eviction=policy.eviction,
        granularity=policy.granularity,
        tail_tokens=policy.tail_tokens,
        admission=policy.admission,
        store_admission=policy.store_admission,
        mark_spacing=spacing_of(specs, config.model.page_size),
        identity=identity,
        emit_events=emits_events,
    )


def make_device_pool(
    config: HiCacheConfig, room: Room, device: torch.device, kind: type[DevicePool]
) -> DevicePool:
    """L1's memory: one budget for all components, or a pool of this kind with room for each.

    Raises:
        ConfigError, PoolMemoryError: it does not fit this machine, or a budget cannot be had of the kind.
    """
    specs, page_size = config.model.specs(), config.model.page_size
    if not room.device_units:
        return kind(specs, page_size, room.device, device=str(device))
    if kind is not DevicePool:
        raise ConfigError(
            [f"tiers.device.split: a {kind.__name__} has room for each component; set it to fixed"]
        )
    return SharedDevicePool(specs, page_size, room.device, capacity_bytes=room.device_units)


def host_pool(config: HiCacheConfig, room: Room, device: torch.device) -> HostPool | SharedHostPool | None:
    """L2's memory: one budget for all components, or a pool for each; None without L2.

    Raises:
        ConfigError, PoolMemoryError: it does not fit this machine.
    """
    host, specs, budget = config.tiers.host, config.model.specs(), host_budget(config)
    if host is None:
        return None
    if budget is None:
        return HostPool(specs, config.model.page_size, room.host, pinned=host.pinned, near=device)
    return SharedHostPool(
        specs,
        config.model.page_size,
        num_units=room.host_units,
        unit_bytes=budget.unit_bytes,
        costs=budget.costs,
        pinned=host.pinned,
        near=device,
    )


# ---- who watches -------------------------------------------------------------------------------
def session_order(config: HiCacheConfig, room: Room, core_kind: str, eviction: str) -> SessionOrder | None:
    """What rates sessions for a policy; its shadows are as large as L1 and L2 together, the same on all ranks."""
    specs, page_size = config.model.specs(), config.model.page_size
    primary = next((spec for spec in specs if spec.rule == ReuseRule.PATH), specs[0]).name
    slots = room.device[primary] + room.host.get(primary, 0)
    return make_order(
        eviction, core_kind, capacity_tokens=slots * page_size, block_tokens=block_tokens_of(page_size)
    )


def explainer_of(config: HiCacheConfig, identity: bytes, clock: Clock) -> Explainer | None:
    """What says why requests missed; None unless ``explain.enabled``."""
    explain, page_size = config.explain, config.model.page_size
    if not explain.enabled:
        return None
    ledger = Ledger(clock, page_size=page_size, max_departures=explain.ledger_pages)
    return Explainer(ledger, config.model.specs(), page_size=page_size, identity=identity)


def serve_metrics(config: HiCacheConfig, port: int, read_stats: Callable[[], CacheStats]) -> MetricsServer:
    """Answer scrapes. Raises ``ConfigError`` if the port is taken, or a package is missing."""
    try:
        from hicache.metrics import CacheCollector, MetricsServer, registry_of
    except ImportError as error:
        raise ConfigError(
            ["metrics.port: needs the package prometheus-client; pip install 'hicache[metrics]'"]
        ) from error
    collector = CacheCollector(read_stats, config.model.specs(), version=hicache_version())
    return MetricsServer(registry_of(collector), port=port, host=config.metrics.host)


def publish_events(config: HiCacheConfig, endpoint: str) -> EventPublisher:
    """Send events to who listens there. Raises ``ConfigError`` if it is taken, or a package is missing."""
    try:
        from hicache.kvevents.publisher import EventPublisher
        from hicache.kvevents.wire import BatchEncoder
    except ImportError as error:
        raise ConfigError(
            ["events.endpoint: needs the packages pyzmq and msgspec; pip install 'hicache[events]'"]
        ) from error
    events = config.events
    encoder = BatchEncoder(
        config.model.specs(),
        config.model.page_size,
        is_map=events.format == "map",
        has_int_hashes=events.hashes == "int",
    )
    return EventPublisher(
        encoder,
        endpoint=endpoint,
        replay_endpoint=events.replay_endpoint,
        topic=events.topic,
        buffer_batches=events.buffer_batches,
        queue_batches=events.queue_batches,
    )
