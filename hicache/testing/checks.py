"""Invariants of a core that can be seen from outside, computed from scratch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from hicache.radix.interface import NodeView, TreeConfig, TreeCore
from hicache.testing.payloads import PayloadExecutor, Place, PlainKeys
from hicache.types import NO_SLOT, Namespace, NodeId, PageKey, ReuseRule, Tier


class SlotHolder(Protocol):
    """A lease, as far as its slots are concerned."""

    slots: dict[str, list[int]]
    states: dict[str, int]


def residency_keys(
    config: TreeConfig, keys: PlainKeys, walked: Iterable[tuple[NodeView, bytes]]
) -> set[tuple[Tier, str, PageKey]]:
    """What a snapshot, walked with ``walk_views``, says is where, by page key."""
    checkpoints = {spec.name for spec in config.components if spec.is_checkpoint}
    resident: set[tuple[Tier, str, PageKey]] = set()
    for view, path in walked:
        num_pages = len(view.tokens) // config.page_size
        for component, tier in view.slots:
            own = keys.of(component, view.namespace, path)
            count = 1 if component in checkpoints else num_pages
            resident.update((tier, component, key) for key in own[-count:])
    return resident


def check_closure(config: TreeConfig, views: Sequence[NodeView]) -> None:
    """The shape of the tree, and path residency closed under parent (DESIGN section 10, rules 2 and 6)."""
    by_id = {view.node: view for view in views}
    assert len(by_id) == len(views), "a node stands twice in the snapshot"
    first_pages: set[tuple[NodeId | Namespace, tuple[int, ...]]] = set()
    paths = [spec.name for spec in config.components if spec.rule == ReuseRule.PATH]
    for view in views:
        page = config.page_size
        assert view.tokens, f"{view} has an empty key"
        assert len(view.tokens) % page == 0, f"{view} is no whole number of pages"
        branch = (view.parent if view.parent is not None else view.namespace, view.tokens[:page])
        assert branch not in first_pages, f"{view} has a sibling with the same first page"
        first_pages.add(branch)
        assert all(count >= 0 for count in view.locks.values()), f"{view} has a negative lock"
        above = None if view.parent is None else by_id[view.parent]
        start = 0 if above is None else above.start + len(above.tokens)
        assert view.start == start, f"{view} does not start where its parent ends"
        for component in paths if above is not None else ():
            assert above is not None
            for tiers in ((Tier.DEVICE,), (Tier.DEVICE, Tier.HOST)):
                here = any((component, tier) in view.slots for tier in tiers)
                there = any((component, tier) in above.slots for tier in tiers)
                assert there or not here, f"{component} of {view} has lost its parent in {tiers}"


def check_owners(
    core: TreeCore,
    executor: PayloadExecutor,
    views: Iterable[NodeView],
    leases: Iterable[SlotHolder],
) -> None:
    """Every slot has an owner or is free, and the counts by owner sum up (rule 1).

    A slot that is held but that no node, lease or transfer knows has leaked.
    """
    owned = Counter(
        (component, tier, slot)
        for view in views
        for (component, tier), slots in view.slots.items()
        for slot in slots
    )
    doubled = [place for place, count in owned.items() if count > 1]
    assert not doubled, f"slots with two owners: {doubled}"
    private = _lease_places(leases) - set(owned)
    moving = executor.places_in_flight()
    known = set(owned) | private | moving
    held = {(name, tier, slot) for (name, tier), slots in executor.held.items() for slot in slots}
    assert held == known, f"leaked: {sorted(held - known)}, lost: {sorted(known - held)}"
    for (component, tier), slots in executor.held.items():
        count = core.pool_count(component, tier)
        where = f"{component} in {tier.name}"
        parts = (count.free, count.evictable, count.protected, count.lease_owned, count.in_flight)
        assert min(*parts, count.others) >= 0, f"{where}: {count}"
        assert sum(parts) + count.others == count.capacity, f"{where} does not sum up: {count}"
        assert sum(parts) - count.free == len(slots), f"{where}: {len(slots)} held, {count}"
        is_alone = not (core.config.device_costs if tier == Tier.DEVICE else core.config.host_costs)
        assert count.others == 0 or not is_alone, f"{where} shares with nobody: {count}"
        assert core.free_slots(component, tier) == (count.capacity, count.free), where
        assert core.held_slots(component, tier) == len(slots), where
    _check_budget(core, executor, Tier.DEVICE, core.config.device_costs)
    _check_budget(core, executor, Tier.HOST, core.config.host_costs)


def _check_budget(core: TreeCore, executor: PayloadExecutor, tier: Tier, costs: Mapping[str, int]) -> None:
    """What is free of a shared budget is what nobody holds."""
    if not costs:
        return
    held = sum(len(executor.held[name, tier]) * cost for name, cost in costs.items())
    name, least = min(costs.items(), key=lambda item: item[1])
    lowest = core.free_slots(name, tier)[0] * least - held  # a resized budget may have a part of a slot more
    for name, cost in costs.items():
        _, free = core.free_slots(name, tier)
        bounds = (lowest // cost, (lowest + least - 1) // cost)
        assert bounds[0] <= free <= bounds[1], f"{name}: {free} slots free, {held} units held"


def check_idle(core: TreeCore, views: Iterable[NodeView]) -> None:
    """With no lease open and nothing in flight, nothing is held (rule 3)."""
    locked = [view for view in views if any(view.locks.values())]
    assert not locked, f"locks at idle: {locked}"
    for tier, capacities in (
        (Tier.DEVICE, core.config.device_slots),
        (Tier.HOST, core.config.host_slots),
    ):
        for component in capacities:
            count = core.pool_count(component, tier)
            busy = count.protected + count.lease_owned + count.in_flight
            assert not busy, f"{component} in {tier.name} at idle: {count}"


def _lease_places(leases: Iterable[SlotHolder]) -> set[Place]:
    places = set()
    for lease in leases:
        for component, slots in lease.slots.items():
            places |= {(component, Tier.DEVICE, slot) for slot in slots if slot != NO_SLOT}
        places |= {(component, Tier.DEVICE, slot) for component, slot in lease.states.items()}
    return places


def in_host_without_parent(core: TreeCore) -> list[NodeView]:
    """Nodes whose path is in L2 while their parent's is not."""
    views = {view.node: view for view in core.snapshot()}
    return [
        view
        for view in views.values()
        if ("full", Tier.HOST) in view.slots
        and view.parent is not None
        and ("full", Tier.HOST) not in views[view.parent].slots
    ]
