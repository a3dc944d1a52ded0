"""Doubt everything: each invariant recomputed from scratch by its definition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from hicache.radix.actions import Slots
from hicache.radix.dead_weight import weights_of
from hicache.radix.forest import Forest
from hicache.radix.interface import NodeView, PoolCount
from hicache.radix.node import DEVICE, HOST, NO_TURN, STORE, Node
from hicache.types import NO_SLOT, NodeId, Tier

_POOLED = (DEVICE, HOST)


def nodes_of(forest: Forest) -> Iterator[Node]:
    """All nodes but the roots, parents first."""
    pending = list(forest.roots.values())
    while pending:
        node = pending.pop()
        if not node.is_root:
            yield node
        pending.extend(reversed(node.children.values()))


def audit(forest: Forest) -> list[str]:
    """One sentence for each broken invariant (DESIGN section 10)."""
    nodes = list(nodes_of(forest))
    findings: list[str] = []
    findings += _structure(forest, nodes)
    findings += _slot_owners(forest, nodes)
    findings += _closures(forest, nodes)
    findings += _locks(forest, nodes)
    findings += _transfers(forest, nodes)
    findings += _trust(forest)
    findings += _queues(forest, nodes)
    findings += _protection(forest, nodes)
    findings += _turns(forest, nodes)
    findings += _dead_weight(forest, nodes)
    return findings


def _turns(forest: Forest, nodes: list[Node]) -> Iterator[str]:
    owners = {node.id: node.turn for node in nodes if node.turn != NO_TURN}
    listed = {number: lease for lease, turn in forest.turns.by_lease.items() for number in turn.nodes}
    if owners != listed:
        yield f"the turns list {len(listed)} nodes, {len(owners)} nodes name a turn, or others"
    for lease, turn in forest.turns.by_lease.items():
        if turn.is_open != (lease in forest.leases) or not (turn.is_open or turn.nodes):
            yield f"turn {lease} is open or kept although its lease is not"


def _protection(forest: Forest, nodes: list[Node]) -> Iterator[str]:
    for i, spec in enumerate(forest.specs):
        for tier in _POOLED:
            slots = (node.slots[i][tier] for node in nodes if node.is_protected)
            found = sum(len(held) for held in slots if held is not None)
            counted = forest.num_protected[i][tier]
            if found != counted:
                yield f"{spec.name} in {tier.name}: {counted} protected slots counted, {found} there"


def _dead_weight(forest: Forest, nodes: list[Node]) -> Iterator[str]:
    found: Counter[tuple[int, Tier]] = Counter()
    for node in nodes:
        for i, tier, num_slots in weights_of(forest, node):
            found[i, tier] += num_slots
    for i, spec in enumerate(forest.specs):
        for tier in Tier:
            counted = forest.dead_weight.slots[i][tier]
            if found[i, tier] != counted:
                yield f"{spec.name} in {tier.name}: {counted} dead slots counted, {found[i, tier]} there"


def _structure(forest: Forest, nodes: list[Node]) -> Iterator[str]:
    page = forest.page_size
    if forest.num_nodes != len(nodes):
        yield f"{forest.num_nodes} nodes counted, {len(nodes)} reachable"
    for node in nodes:
        parent = node.parent
        assert parent is not None
        if len(node.tokens) == 0 or len(node.tokens) % page:
            yield f"node {node.id} has {len(node.tokens)} tokens, not whole pages of {page}"
        if node.start != parent.end:
            yield f"node {node.id} starts at {node.start}, its parent ends at {parent.end}"
        if parent.children.get(forest.edge_key(node.tokens)) is not node:
            yield f"node {node.id} is not found under its first page"
        if not (node.children or node.holders or node.tickets) and node.is_empty():
            yield f"node {node.id} is an empty leaf"
        for i, spec in enumerate(forest.specs):
            expected = forest.num_slots(node, i)
            for tier in _POOLED:
                held = node.slots[i][tier]
                if held is not None and len(held) != expected:
                    yield f"node {node.id} has {len(held)} {spec.name} slots in {tier.name}, not {expected}"
            for tier in Tier:
                kids = sum(child.has(i, tier) for child in node.children.values())
                if kids != node.kids[i][tier]:
                    yield (
                        f"node {node.id} counts {node.kids[i][tier]} children with {spec.name} "
                        f"in {tier.name}, has {kids}"
                    )
    stored = sum(
        forest.num_slots(node, i) for node in nodes for i in range(forest.num_components) if node.stored[i]
    )
    if stored != forest.num_stored_pages:
        yield f"{forest.num_stored_pages} stored pages counted, {stored} found"


def _owners(forest: Forest, nodes: list[Node], component: int, tier: Tier) -> dict[str, Slots]:
    """Slots of one pool by owner; every slot has to turn up exactly once."""
    tree = [node.slots[component][tier] for node in nodes]
    targets = [
        part.target
        for ticket in forest.tickets.values()
        if ticket.component == component and ticket.target == tier
        for part in ticket.parts
    ]
    leases: list[Slots | None] = []
    orphans: list[Slots | None] = []
    if tier == DEVICE:
        leases += [stray.slots for stray in forest.strays if stray.component == component]
        for lease in forest.leases.values():
            owned = lease.owned[component]
            leases.append(owned[owned != NO_SLOT])
            state = lease.states[component]
            if state is not None:
                leases.append(np.array([state], dtype=np.int64))
        orphans += [
            np.array([ticket.lease_slot], dtype=np.int64)
            for ticket in forest.tickets.values()
            if ticket.orphan and ticket.component == component
        ]
    return {
        "free": forest.pools[component][tier].free_slots(),
        "withheld": forest.pools[component][tier].withheld_slots(),
        "tree": _concatenate(tree),
        "lease": _concatenate(leases),
        "in flight": _concatenate(targets + orphans),
    }


def _concatenate(runs: list[Slots | None]) -> Slots:
    return np.concatenate([np.empty(0, dtype=np.int64), *(run for run in runs if run is not None)])


def _slot_owners(forest: Forest, nodes: list[Node]) -> Iterator[str]:
    held: Counter[tuple[int, Tier]] = Counter()
    for i, spec in enumerate(forest.specs):
        for tier in _POOLED:
            pool = forest.pools[i][tier]
            capacity = pool.total
            owners = _owners(forest, nodes, i, tier)
            held[forest.purse(i, tier)] += pool.cost * sum(
                len(owners[name]) for name in ("tree", "lease", "in flight")
            )
            every = np.concatenate(list(owners.values()))
            where = f"{spec.name} in {tier.name}"
            if len(every) and (every.min() < 0 or every.max() >= capacity):
                yield f"{where}: a slot outside 0 to {capacity - 1} has an owner"
                continue
            times = np.bincount(every, minlength=capacity)
            if (times != 1).any():
                slot = int(np.argmax(times != 1))
                held_by = [name for name, slots in owners.items() if slot in slots]
                yield f"{where}: slot {slot} has {times[slot]} owners ({', '.join(held_by) or 'none'})"
    for (i, tier), units in held.items():
        budget = forest.pools[i][tier].budget
        if budget.num_free + units != budget.capacity:
            names = ", ".join(forest.specs[j].name for j in forest.sharers(i, tier))
            yield (
                f"{names} in {tier.name}: {budget.num_free} units free and {units} held, of {budget.capacity}"
            )


def _closures(forest: Forest, nodes: list[Node]) -> Iterator[str]:
    for node in nodes:
        parent = node.parent
        assert parent is not None
        for i, rule in enumerate(forest.rules):
            name = forest.specs[i].name
            held, above = node.slots[i], parent.slots[i]
            near = held[DEVICE] is not None or held[HOST] is not None
            if rule.is_prefix and not parent.is_root:
                if held[DEVICE] is not None and above[DEVICE] is None:
                    yield f"node {node.id} has {name} in DEVICE under a parent without"
                if near and above[DEVICE] is None and above[HOST] is None:
                    yield f"node {node.id} has {name} in L1 or L2 under a parent with neither"
            for base in rule.depends_on:
                if near and node.slots[base][DEVICE] is None and node.slots[base][HOST] is None:
                    yield f"node {node.id} has {name} without {forest.specs[base].name}"


def _locks(forest: Forest, nodes: list[Node]) -> Iterator[str]:
    holders: Counter[NodeId] = Counter()
    locks: Counter[tuple[NodeId, int]] = Counter()
    for lease in forest.leases.values():
        holders[lease.node.id] += 1
        for lock in lease.locks:
            for node in lock.nodes():
                locks[node.id, lock.component] += 1
    for node in nodes:
        if holders[node.id] != node.holders:
            yield f"node {node.id} counts {node.holders} leases, {holders[node.id]} stand there"
        for i, spec in enumerate(forest.specs):
            if node.locks[i] != locks[node.id, i]:
                yield f"node {node.id} has {node.locks[i]} {spec.name} locks, {locks[node.id, i]} are held"


def _trust(forest: Forest) -> Iterator[str]:
    for lease in forest.leases.values():
        ended = sorted(lease.arriving - forest.tickets.keys())
        if ended:
            yield f"lease {lease.id} counts on tickets {ended}, which have ended"


def _transfers(forest: Forest, nodes: list[Node]) -> Iterator[str]:
    pins: Counter[tuple[NodeId, Tier]] = Counter()
    touching: dict[NodeId, set[int]] = {}
    leaving: Counter[tuple[int, Tier]] = Counter()
    alive = {node.id for node in nodes}
    for ticket in forest.tickets.values():
        for part in ticket.parts:
            if part.node.id not in alive:
                yield f"ticket {ticket.id} touches node {part.node.id}, which is gone"
            touching.setdefault(part.node.id, set()).add(ticket.id)
            if ticket.pins_source:
                pins[part.node.id, ticket.source] += 1
                if part.node.slots[ticket.component][ticket.source] is None:
                    yield f"ticket {ticket.id} reads node {part.node.id}, which has nothing there"
            if ticket.leaves:
                leaving[ticket.component, ticket.source] += part.num_slots
    for node in nodes:
        if node.tickets != touching.get(node.id, set()):
            yield f"node {node.id} knows tickets {sorted(node.tickets)}, not {sorted(touching.get(node.id, ()))}"
        for tier in _POOLED:
            if node.pins[tier] != pins[node.id, tier]:
                yield f"node {node.id} has {node.pins[tier]} pins in {tier.name}, not {pins[node.id, tier]}"
    for i, spec in enumerate(forest.specs):
        for tier in _POOLED:
            if forest.leaving[i][tier] != leaving[i, tier]:
                yield (
                    f"{forest.leaving[i][tier]} {spec.name} slots counted as leaving {tier.name}, "
                    f"not {leaving[i, tier]}"
                )


def _queues(forest: Forest, nodes: list[Node]) -> Iterator[str]:
    """Whatever may leave a tier is queued to be found."""
    for node in nodes:
        for i, spec in enumerate(forest.specs):
            for tier in Tier:
                if forest.may_leave(node, i, tier) and (i, tier) not in node.queued:
                    yield f"node {node.id} may leave {tier.name} with its {spec.name}, but is not queued"


# ---- views -----------------------------------------------------------------------------------
def _path_locks(forest: Forest) -> Counter[NodeId]:
    """Leases that need a node's path payload: those that stand at or below it."""
    held: Counter[NodeId] = Counter()
    for lease in forest.leases.values():
        for node in lease.node.up():
            held[node.id] += 1
    return held


def pool_count(forest: Forest, component: int, tier: Tier) -> PoolCount:
    """Slots by owner, counted from scratch."""
    nodes = list(nodes_of(forest))
    owners = _owners(forest, nodes, component, tier)
    path_locks = _path_locks(forest)
    is_prefix = forest.rules[component].is_prefix
    evictable = protected = pinned = 0
    for node in nodes:
        held = node.slots[component][tier]
        if held is None:
            continue
        locked = path_locks[node.id] if is_prefix else node.locks[component]
        if node.pins[tier]:
            pinned += len(held)
        elif locked:
            protected += len(held)
        else:
            evictable += len(held)
    pool = forest.pools[component][tier]
    lease_owned, in_flight = len(owners["lease"]), len(owners["in flight"]) + pinned
    own = evictable + protected + lease_owned + in_flight
    return PoolCount(
        capacity=pool.capacity,
        free=pool.num_free if pool.is_shared else len(owners["free"]),
        evictable=evictable,
        protected=protected,
        lease_owned=lease_owned,
        in_flight=in_flight,
        others=pool.capacity - pool.num_free - own if pool.is_shared else 0,
    )


def snapshot(forest: Forest) -> tuple[NodeView, ...]:
    """All nodes but the roots, parents before children."""
    nodes = list(nodes_of(forest))
    path_locks = _path_locks(forest)
    primary = forest.prefixes[0] if forest.prefixes else 0
    last_use = {node.id: node.used[primary] for node in nodes}
    if forest.prefixes:
        for node in reversed(nodes):
            parent = node.parent
            if parent is not None and parent.id in last_use:
                last_use[parent.id] = max(last_use[parent.id], last_use[node.id])
    views = []
    for node in nodes:
        slots: dict[tuple[str, Tier], tuple[int, ...]] = {}
        for i, spec in enumerate(forest.specs):
            for tier in _POOLED:
                held = node.slots[i][tier]
                if held is not None:
                    slots[spec.name, tier] = tuple(held.tolist())
            if node.stored[i]:
                slots[spec.name, STORE] = ()
        parent = node.parent
        views.append(
            NodeView(
                node=node.id,
                parent=None if parent is None or parent.is_root else parent.id,
                namespace=node.namespace,
                start=node.start,
                tokens=tuple(node.tokens.tolist()),
                slots=slots,
                locks={
                    spec.name: path_locks[node.id] if forest.rules[i].is_prefix else node.locks[i]
                    for i, spec in enumerate(forest.specs)
                },
                last_use=last_use[node.id],
                num_uses=node.uses,
                mark=node.mark,
                priority=node.priority,
                reach=node.reach,
                is_protected=node.is_protected,
                is_shared=node.is_shared,
                is_kept=node.is_kept,
                turn=node.turn,
            )
        )
    return tuple(views)
