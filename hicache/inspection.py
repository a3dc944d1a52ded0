"""What a cache is asked about itself: whether all is sound, what it counted, who holds how much."""

from __future__ import annotations

from collections.abc import Mapping

from hicache.radix.interface import TreeCore
from hicache.runtime import POOLED, Runtime
from hicache.stats import CacheStats, Usage, copy_counts
from hicache.stores import StoreSet
from hicache.tiers.host import HostPool
from hicache.tiers.shared_host import SharedHostPool
from hicache.types import Tier


def audited(runtime: Runtime, host: HostPool | SharedHostPool | None) -> list[str]:
    """Every broken invariant, one sentence each; empty when all is sound."""
    with runtime.lock:
        runtime.pump()
        findings = runtime.core.audit()
        counts = runtime.requests.tokens
        if counts.hit + counts.computed != counts.prompt:
            findings.append(
                f"{counts.hit} reused and {counts.computed} computed tokens are not the "
                f"{counts.prompt} of the prompts"
            )
        running = set(runtime.transfers.outstanding())
        unknown = running - set(runtime.core.in_flight())
        if unknown:
            findings.append(f"transfers {sorted(unknown)} run without a ticket")
        findings += _audited_places(runtime.core, host)
        runtime.num_audits += 1
        runtime.num_audit_findings += len(findings)
    return findings


def _audited_places(core: TreeCore, host: HostPool | SharedHostPool | None) -> list[str]:
    """Whether a shared L2 has a place for just what the tree keeps there (lock held)."""
    if not isinstance(host, SharedHostPool):
        return []
    placement = host.placement
    findings = placement.check_integrity()
    for name in placement.costs:
        placed, held = placement.num_placed(name), core.held_slots(name, Tier.HOST)
        if placed != held:
            findings.append(f"{name} in HOST: {placed} slots have a place, {held} are held")
    return findings


def read_stats(
    runtime: Runtime, stores: StoreSet, *, core: str, eviction: str, event_batches: Mapping[str, int]
) -> CacheStats:
    """A moment's view of all counters."""
    with runtime.lock:
        runtime.pump()
        counts, store = runtime.requests, stores.top
        pools = {
            (spec.name, tier.name.lower()): runtime.core.pool_count(spec.name, tier)
            for spec in runtime.specs
            for tier in POOLED
        }
        slot_bytes = {spec.name: spec.slot_bytes(runtime.page_size) for spec in runtime.specs}
        return CacheStats(
            requests=counts.num_requests,
            tokens=copy_counts(counts.tokens),
            by_component=dict(counts.by_component),
            pools=pools,
            tree=runtime.core.counters(),
            transfers=runtime.transfers.stats(),
            store=None if store is None else store.stats(),
            sessions=runtime.sessions.count(),
            faults=dict(runtime.faults),
            core=core,
            lost_tokens=dict(runtime.lost_tokens),
            event_batches=event_batches,
            recomputed_tokens=runtime.num_recomputed,
            hints=runtime.sessions.hints() | runtime.kept.hints(),
            kept=(len(runtime.kept), runtime.kept.num_tokens),
            agreement=runtime.ranks.stats(),
            policy=(eviction, runtime.sessions.followed or eviction),
            audits=runtime.num_audits,
            audit_findings=runtime.num_audit_findings,
            dead_weight_bytes={
                (name, tier.name.lower()): num_bytes * runtime.core.dead_slots(name, tier)
                for name, num_bytes in slot_bytes.items()
                for tier in Tier
            },
            used_bytes={
                (name, tier.name.lower()): runtime.core.held_slots(name, tier) * num_bytes
                for name, num_bytes in slot_bytes.items()
                for tier in POOLED
            },
        )


def read_usage(runtime: Runtime, stores: StoreSet) -> Usage:
    """Who holds how much; costs next to nothing, however large the tree."""
    with runtime.lock:
        pools = {}
        for spec in runtime.specs:
            for tier in POOLED:
                capacity, _ = runtime.core.free_slots(spec.name, tier)
                used = runtime.core.held_slots(spec.name, tier)
                pools[spec.name, tier.name.lower()] = (capacity, used)
        store = stores.top
        return Usage(pools, None if store is None else store.stats().used_bytes)
