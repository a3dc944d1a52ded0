"""The state of all subtrees and the few moves that keep it consistent.

Everything above (look-up, publishing, demotion) changes the tree only through ``attach``, ``detach``,
``set_stored``, ``split`` and ``merging.merge_up``; so counters, queues and events cannot drift.

In layers, each a class that knows those before it alone: ``forest_state`` (fields, budgets), ``digests``
(keys, events), ``queues`` (who may leave), ``worth`` (who used it last), and the moves here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np

from hicache.errors import ProtocolError
from hicache.events import Cause, ResidencyChange
from hicache.radix.actions import Slots
from hicache.radix.dead_weight import DeadWeight
from hicache.radix.interface import Tokens, TreeConfig
from hicache.radix.keys import namespace_seed
from hicache.radix.merging import merge_up
from hicache.radix.node import DEVICE, HOST, NO_TOKENS, NO_TURN, STORE, Node
from hicache.radix.ordering import Candidates, make_ordering
from hicache.radix.slot_pool import Budget, SlotPool
from hicache.radix.tickets import Kind, Part, Ticket
from hicache.radix.turns import Turns
from hicache.radix.worth import Worth
from hicache.types import Namespace, NodeId, Regard, TicketId, Tier


class Forest(Worth):
    """One subtree per namespace, the pools they draw on, leases, tickets and pending actions."""

    def __init__(self, config: TreeConfig) -> None:
        super().__init__(config)
        self.start_empty()

    def start_empty(self) -> None:
        """The state of a new forest; numbering and counters go on."""
        config = self.config
        self._set_ordering()
        self.roots = {}
        self.leases = {}
        self.tickets = {}
        self.strays = []
        budgets = (
            (Budget(config.device_units), config.device_costs, config.device_slots),
            (Budget(config.host_units), config.host_costs, config.host_slots),
        )
        self.pools = [
            [
                SlotPool(shared, costs[spec.name], is_shared=True)
                if spec.name in costs
                else SlotPool(Budget(slots.get(spec.name, 0)))
                for shared, costs, slots in budgets
            ]
            for spec in self.specs
        ]
        for (i, tier), limit in self.limits.items():
            self.pools[i][tier].budget.limit = limit
        self.is_resizing = bool(self.limits)
        self.approach_limits()
        self.queues = self._new_queues()
        self.turns = self._new_turns()
        self.num_protected = [[0, 0] for _ in self.specs]
        self.leaving = [[0, 0] for _ in self.specs]
        self.dead_weight = DeadWeight(self)
        self.num_stored_pages = 0
        self.failed_stores = {}
        self.has_holes = False
        self.num_nodes = 0
        self.tick = 0
        self.actions = []
        self.events = []
        self.dirty = {}
        self.shielded = ()
        self.first_live_lease = self.next_lease
        self.first_live_ticket = self.next_ticket

    def _set_ordering(self) -> None:
        config = self.config
        self.ordering = make_ordering(config.eviction)
        # Without a state or a window at its new end, what a cut tail leaves could not be reused.
        may_spare = self.ordering.spares_tails and all(rule.is_prefix for rule in self.rules)
        self.tail_len = config.tail_tokens if may_spare else 0

    def _new_turns(self) -> Turns:
        return Turns(is_on=self.ordering.follows_turns, page_size=self.config.page_size)

    def _new_queues(self) -> list[list[Candidates]]:
        tiers = (DEVICE, HOST, STORE)
        return [[Candidates(self, i, tier) for tier in tiers] for i in range(self.num_components)]

    def reorder(self, nodes: Collection[Node], *, is_another: bool) -> None:
        """What leaves first may be other nodes: ``nodes``, which are all there are, queue anew.

        Under another policy turns begin with the leases that are open, since whoever rates turns knows no others
        then. So all is plain but what is kept, and L3 hears of it.
        """
        self._set_ordering()
        follows = self.ordering.follows_turns
        if follows != self.turns.is_on or (follows and is_another):
            before = [(node, self.regard(node)) for node in nodes]
            self.turns = self._new_turns()
            for lease in self.leases:
                self.turns.open(lease, None, Regard.PLAIN)
            for node in nodes:
                node.turn = NO_TURN
            for node, regard in before:
                self._hint_if_changed(node, regard)
        self.queues = self._new_queues()
        for node in nodes:
            if not self.ordering.protects_hits:
                self.protect(node, False)
            node.queued.clear()
            node.sheltered.clear()
        for node in nodes:
            self.offer(node)

    # ---- nodes -------------------------------------------------------------------------------
    def root(self, namespace: Namespace) -> Node:
        """The namespace's root, made when first asked for."""
        root = self.roots.get(namespace)
        if root is None:
            seed = namespace_seed(self.config.identity, namespace)
            root = self._new_node(None, NO_TOKENS, namespace, seed)
            self.roots[namespace] = root
        return root

    def _new_node(self, parent: Node | None, tokens: Tokens, namespace: Namespace, seed: bytes) -> Node:
        node = Node(NodeId(self.next_node), parent, tokens, self.num_components, namespace, seed)
        self.next_node += 1
        return node

    def add_child(self, parent: Node, tokens: Tokens) -> Node:
        """Hang a new node, without payload, under ``parent``. The tokens are copied."""
        node = self._new_node(parent, np.array(tokens, dtype=np.int32), parent.namespace, parent.seed)
        node.created = self.tick
        node.used = [self.tick] * self.num_components
        node.reach = node.end
        parent.children[self.edge_key(node.tokens)] = node
        self.num_nodes += 1
        return node

    def split(self, node: Node, num_pages: int) -> Node:
        """Cut a node after ``num_pages``; returns the new prefix. The suffix keeps its identity.

        ::

            parent ── node(abcd)    =>    parent ── prefix(ab) ── node(cd)

        Both halves have the recency, the uses and the pins of the whole; a window's lock reaches the
        prefix only if the window does; states, leases and the mark belong to the end, so they stay.
        """
        cut = num_pages * self.page_size
        parent = node.parent
        if parent is None or not 0 < cut < len(node.tokens):
            raise ProtocolError(f"node {node.id} of {len(node.tokens)} tokens cannot be cut at {cut}")
        prefix = self._new_node(parent, node.tokens[:cut], node.namespace, node.seed)
        parent.children[self.edge_key(prefix.tokens)] = prefix
        node.parent = prefix
        node.tokens = node.tokens[cut:]
        node.start += cut
        prefix.children[self.edge_key(node.tokens)] = node
        prefix.created, prefix.uses = node.created, node.uses
        prefix.priority, prefix.reach = node.priority, node.reach
        prefix.is_protected, prefix.is_shared = node.is_protected, node.is_shared
        prefix.is_kept = node.is_kept
        self.turns.own(prefix, node.turn)
        prefix.used = node.used.copy()
        prefix.wants_store = node.wants_store
        prefix.store_failures = node.store_failures
        if node.links is not None:
            prefix.links, node.links = node.links[:num_pages], node.links[num_pages:]
        for i, rule in enumerate(self.rules):
            if not rule.keeps_pages:
                self.move_kid(node, i, parent, prefix)
                continue
            for tier in (DEVICE, HOST):
                whole = node.slots[i][tier]
                if whole is not None:
                    prefix.slots[i][tier] = whole[:num_pages]
                    node.slots[i][tier] = whole[num_pages:]
                    prefix.kids[i][tier] = 1
            prefix.stored[i] = node.stored[i]
            prefix.kids[i][STORE] = int(node.stored[i])
            prefix.edges[i] = [edge for edge in node.edges[i] if edge < prefix.end]
            prefix.locks[i] = len(prefix.edges[i])
        for ticket_id in node.tickets:
            self._split_ticket(self.tickets[ticket_id], node, prefix, num_pages)
        self.num_nodes += 1
        if not all(rule.keeps_pages for rule in self.rules):
            self.offer(parent)  # it may have lost the child that kept its own state from being forgotten
        self.offer(prefix)
        self.offer(node)
        self.soil(node)
        self.dead_weight.doubt(node)
        return prefix

    def move_kid(self, node: Node, component: int, old: Node, new: Node) -> None:
        for tier in (DEVICE, HOST, STORE):
            if node.has(component, tier):
                old.kids[component][tier] -= 1
                new.kids[component][tier] += 1

    def _split_ticket(self, ticket: Ticket, node: Node, prefix: Node, num_pages: int) -> None:
        if not self.rules[ticket.component].keeps_pages:
            return
        ticket.split(node, prefix, num_pages)
        prefix.tickets.add(ticket.id)
        if ticket.pins_source:
            prefix.pins[ticket.source] += 1
        where = (ticket.component, ticket.target)
        if node.incoming.get(where) == ticket.id:
            prefix.incoming[where] = ticket.id

    def tidy(self) -> None:
        """Prune empty leaves and merge chains around the nodes this operation touched."""
        while self.dirty:
            _, node = self.dirty.popitem()
            while node.parent is not None and self._is_dead(node):
                parent = node.parent
                del parent.children[self.edge_key(node.tokens)]
                node.parent = None
                self.dead_weight.doubt(node)
                node.queued.clear()
                node.sheltered.clear()
                self.turns.cut(node)
                self.turns.disown(node)
                self.num_nodes -= 1
                node = parent
            if node.parent is None:
                self._drop_empty_root(node)
                continue
            while merge_up(self, node):
                pass
            if len(node.children) == 1:
                merge_up(self, next(iter(node.children.values())))

    def _is_dead(self, node: Node) -> bool:
        return not (node.children or node.holders or node.tickets) and node.is_empty()

    def _drop_empty_root(self, node: Node) -> None:
        if self.roots.get(node.namespace) is node and not node.children and not node.holders:
            del self.roots[node.namespace]

    # ---- payload -----------------------------------------------------------------------------
    def attach(self, node: Node, component: int, tier: Tier, slots: Slots, cause: Cause) -> None:
        """Payload is in the tier now. *Caller guarantees*: it was not, and the bytes are there."""
        node.slots[component][tier] = slots
        if node.is_protected:
            self.num_protected[component][tier] += len(slots)
        self._count_kid(node, component, tier, 1)
        self._emit(ResidencyChange.STORED, node, component, tier, cause)
        self.offer(node)
        self.soil(node)

    def detach(self, node: Node, component: int, tier: Tier, cause: Cause) -> int:
        """Free the payload's slots in the tier; returns how many."""
        slots = node.slots[component][tier]
        if slots is None:
            return 0
        node.slots[component][tier] = None
        if node.is_protected:
            self.num_protected[component][tier] -= len(slots)
        self._count_kid(node, component, tier, -1)
        self._emit(ResidencyChange.REMOVED, node, component, tier, cause)
        self.free(component, tier, slots)
        self.counters[f"removed_{tier.name.lower()}_{cause}"] += len(slots)
        self._count_left(component, tier, cause, len(slots))
        self._left(node, component, tier)
        return len(slots)

    def set_stored(self, node: Node, component: int, stored: bool, cause: Cause) -> None:
        """What is believed of L3."""
        if node.stored[component] == stored:
            return
        node.stored[component] = stored
        sign = 1 if stored else -1
        self._count_kid(node, component, STORE, sign)
        self.num_stored_pages += sign * self.num_slots(node, component)
        change = ResidencyChange.STORED if stored else ResidencyChange.REMOVED
        self._emit(change, node, component, STORE, cause)
        regard = self.regard(node)
        if stored:
            self.offer(node)
            if regard is not Regard.PLAIN:
                self.hint(node, component, regard)
        else:
            if regard > Regard.PLAIN:  # L3 may have it still, and nobody would take that back later
                self.hint(node, component, Regard.PLAIN)
            self._count_left(component, STORE, cause, self.num_slots(node, component))
            self.has_holes = self.has_holes or node.kids[component][STORE] > 0
            self._left(node, component, STORE)
        self.soil(node)

    def _count_left(self, component: int, tier: Tier, cause: Cause, num_slots: int) -> None:
        self.counters[f"left_{tier.name.lower()}_{cause}_{self.specs[component].name}"] += num_slots

    def _count_kid(self, node: Node, component: int, tier: Tier, step: int) -> None:
        self.dead_weight.doubt(node)
        if node.parent is not None:
            node.parent.kids[component][tier] += step
            self.dead_weight.doubt(node.parent)

    def _left(self, node: Node, component: int, tier: Tier) -> None:
        """Payload left a tier: the parent may follow, and inherits the recency of its child."""
        parent = node.parent
        if parent is not None and not parent.is_root:
            if self.rules[component].is_prefix:
                if parent.used[component] <= node.used[component]:
                    self.own(parent, node.turn)
                    if node.is_shared:
                        self.share(parent)
                parent.used[component] = max(parent.used[component], node.used[component])
                parent.uses = max(parent.uses, node.uses)
                parent.priority = max(parent.priority, node.priority)
                parent.reach = max(parent.reach, node.reach)
                if node.is_protected:
                    self.protect(parent, True)
            self.offer(parent)
        self.offer(node)
        self.soil(node)

    # ---- tickets -----------------------------------------------------------------------------
    def open_ticket(
        self, kind: Kind, component: int, parts: Iterable[Part] = (), *, leaves: bool = False
    ) -> Ticket:
        """Begin a transfer: pin its sources and note what it brings."""
        ticket = Ticket(TicketId(self.next_ticket), kind, component, list(parts), leaves)
        self.next_ticket += 1
        self.tickets[ticket.id] = ticket
        for part in ticket.parts:
            part.node.tickets.add(ticket.id)
            self.dead_weight.doubt(part.node)
            if ticket.pins_source:
                part.node.pins[ticket.source] += 1
            if kind != Kind.CLAIM:
                part.node.incoming[component, ticket.target] = ticket.id
            if leaves:
                self.leaving[component][ticket.source] += part.num_slots
        return ticket

    def close_part(self, ticket: Ticket, part: Part) -> None:
        """A part is over: unpin, and let the node be considered again."""
        node = part.node
        node.tickets.discard(ticket.id)
        if ticket.pins_source:
            node.pins[ticket.source] -= 1
        where = (ticket.component, ticket.target)
        if node.incoming.get(where) == ticket.id:
            del node.incoming[where]
        if ticket.leaves:
            self.leaving[ticket.component][ticket.source] -= part.num_slots
        self.soil(node)
        self.dead_weight.doubt(node)
