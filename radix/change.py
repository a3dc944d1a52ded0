"""Changes to a tree that goes on serving: payload thrown away on purpose, other limits, other policies.

What open leases hold and what transfers touch is left alone, so each of these may come at any moment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hicache.errors import ProtocolError
from hicache.events import Cause
from hicache.radix.actions import Forget, Hint
from hicache.radix.audit import nodes_of
from hicache.radix.check import check_change
from hicache.radix.demote import Demoter
from hicache.radix.forest import Forest
from hicache.radix.interface import Cleared, Tokens, TreeConfig
from hicache.radix.lookup import walk
from hicache.radix.node import DEVICE, HOST, STORE, Node
from hicache.types import DEFAULT_NAMESPACE, Namespace, Regard, TicketId, Tier


class Changer:
    """Clears, resizes and reconfigures one forest."""

    def __init__(self, forest: Forest, demoter: Demoter) -> None:
        self._forest = forest
        self._demoter = demoter

    # ---- clearing ----------------------------------------------------------------------------
    def clear(self, namespace: Namespace | None, tokens: Tokens | None, *, alone: bool) -> Cleared:
        """Throw away what the scope has in all tiers, children first."""
        tops = self._tops(namespace, tokens)
        scope: list[Node] = []
        pending = list(tops)
        while pending:
            node = pending.pop()
            scope.append(node)
            pending.extend(node.children.values())
        scope.reverse()
        if alone and tops:
            scope += _only_way_to(tops[0])
        removed: Counter[tuple[str, Tier]] = Counter()
        kept = 0
        tickets: list[TicketId] = []
        for node in scope:
            self._clear_node(node, removed)
            kept += self._num_held(node)
            tickets += sorted(node.tickets)
        return Cleared(dict(removed), kept, tuple(dict.fromkeys(tickets)))

    def _tops(self, namespace: Namespace | None, tokens: Tokens | None) -> list[Node]:
        forest = self._forest
        if tokens is None:
            roots = forest.roots.values() if namespace is None else [forest.roots.get(namespace)]
            return [child for root in roots if root is not None for child in root.children.values()]
        page = forest.page_size
        length = len(tokens) // page * page
        if not length:
            raise ProtocolError(f"a prefix of {len(tokens)} tokens is less than a page of {page}")
        found = walk(
            forest, forest.roots.get(DEFAULT_NAMESPACE if namespace is None else namespace), tokens, 0, length
        )
        if found.length < length:
            return []
        node = found.path[-1] if found.last is None else found.last
        if node.start < length - page:
            forest.split(node, (length - page - node.start) // page)
        return [node]

    def _clear_node(self, node: Node, removed: Counter[tuple[str, Tier]]) -> None:
        forest = self._forest
        is_idle = not (node.holders or any(node.locks))
        for i in reversed(forest.bases_first):
            name, num_slots = forest.specs[i].name, forest.num_slots(node, i)
            for tier in (DEVICE, HOST):
                if forest.may_leave(node, i, tier) and not self._is_base_of_pinned(node, i, tier):
                    self._demoter.drop(node, i, tier, Cause.CLEAR)
                    removed[name, tier] += num_slots
            held = node.slots[i]
            is_near = held[DEVICE] is not None or held[HOST] is not None
            is_awaited = any((i, STORE) in child.incoming for child in node.children.values())
            is_free = node.stored[i] and not (node.tickets or node.kids[i][STORE] or is_awaited)
            if is_free and (is_idle or is_near):
                forest.actions.append(Forget(name, forest.keys(node, i)))
                forest.set_stored(node, i, False, Cause.CLEAR)
                removed[name, STORE] += num_slots

    def _is_base_of_pinned(self, node: Node, component: int, tier: Tier) -> bool:
        """Whether a path in L2, which a transfer keeps there, hangs on this payload of L1."""
        held, rule = node.slots[component], self._forest.rules[component]
        return tier == DEVICE and rule.is_prefix and held[HOST] is None and node.kids[component][HOST] > 0

    def _num_held(self, node: Node) -> int:
        forest = self._forest
        return sum(
            forest.num_slots(node, i)
            for i in range(forest.num_components)
            for tier in Tier
            if node.has(i, tier)
        )

    def take_hints_back(self) -> None:
        """All that L3 has is to be regarded no higher than plain, since nobody would take that back later."""
        forest = self._forest
        forest.actions = [action for action in forest.actions if isinstance(action, Hint)]
        for node in nodes_of(forest):
            if forest.regard(node) > Regard.PLAIN:
                for i in range(forest.num_components):
                    if node.stored[i]:
                        forest.hint(node, i, Regard.PLAIN)

    def forget_store(self) -> None:
        """Believe nothing of L3 any more."""
        forest = self._forest
        for node in reversed(list(nodes_of(forest))):
            for i in reversed(forest.bases_first):
                forest.set_stored(node, i, False, Cause.MISSING)

    # ---- limits ------------------------------------------------------------------------------
    def resize(self, component: int, tier: Tier, num_slots: int) -> tuple[TicketId, ...]:
        """Use no more than so many slots, from when they are free."""
        forest = self._forest
        if tier == STORE:
            raise ProtocolError("L3 has no pool of slots")
        pool = forest.pools[component][tier]
        if not 1 <= num_slots <= pool.total:
            where = f"{forest.specs[component].name} in {tier.name}"
            raise ProtocolError(f"{where}: {num_slots} slots asked, 1 to {pool.total} can be had")
        budget = pool.budget
        forest.limits[forest.purse(component, tier)] = budget.limit = num_slots * pool.cost
        forest.is_resizing = True
        excess = -((budget.limit - budget.capacity) // pool.cost)
        return self._demoter.make_room(component, tier, excess) if excess > 0 else ()

    # ---- policies ----------------------------------------------------------------------------
    def reconfigure(self, config: TreeConfig) -> None:
        """Go on under other settings."""
        forest = self._forest
        reorders = check_change(forest.config, config)
        is_another = forest.config.eviction != config.eviction
        forest.config = config
        if reorders:
            forest.reorder(list(nodes_of(forest)), is_another=is_another)


def _only_way_to(top: Node) -> Sequence[Node]:
    """The nodes above that lead nowhere else, deepest first."""
    above: list[Node] = []
    place = top.parent
    while place is not None and not place.is_root and len(place.children) == 1:
        above.append(place)
        place = place.parent
    return above
