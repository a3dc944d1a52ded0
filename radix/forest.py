"""The state of all subtrees and the few moves that keep it consistent.

Everything above (look-up, publishing, demotion) changes the tree only through ``attach``, ``detach``,
``set_stored``, ``split`` and ``merging.merge_up``; so counters, queues and events cannot drift.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

import numpy as np

from hicache.errors import ProtocolError
from hicache.events import Cause, ResidencyChange, ResidencyEvent
from hicache.radix.actions import Action, Cool, Free, Slots, Warm
from hicache.radix.dead_weight import DeadWeight
from hicache.radix.declining import unqueue
from hicache.radix.interface import Tokens, TreeConfig
from hicache.radix.keys import ComponentKeys, chain_links, namespace_seed
from hicache.radix.leases import LeaseState, Stray
from hicache.radix.merging import merge_up
from hicache.radix.node import DEVICE, HOST, NO_TOKENS, NO_TURN, STORE, Node
from hicache.radix.ordering import RECENCY_BITS, SOLE, Candidates, make_ordering
from hicache.radix.rules.base import Rule, make_rule
from hicache.radix.slot_pool import Budget, SlotPool
from hicache.radix.tickets import Kind, Part, Ticket
from hicache.radix.turns import Turns
from hicache.types import LeaseId, Namespace, NodeId, PageKey, ReuseRule, TicketId, Tier


class Forest:
    """One subtree per namespace, the pools they draw on, leases, tickets and pending actions."""

    def __init__(self, config: TreeConfig) -> None:
        self.config = config
        self.page_size = config.page_size
        self.specs = config.components
        self.num_components = len(self.specs)
        self.index = {spec.name: i for i, spec in enumerate(self.specs)}
        paths = tuple(i for i, spec in enumerate(self.specs) if spec.rule == ReuseRule.PATH)
        self.rules: list[Rule] = [
            make_rule(i, spec, config.page_size, () if i in paths else paths)
            for i, spec in enumerate(self.specs)
        ]
        self.prefixes = tuple(i for i, rule in enumerate(self.rules) if rule.is_prefix)
        # Per component the others without whose payload at a node no boundary stands there; what a user's
        # own rule needs is not known.
        needed = [
            i for i, spec in enumerate(self.specs) if spec.rule in (ReuseRule.WINDOW, ReuseRule.CHECKPOINT)
        ]
        self.needed_beside = [[j for j in needed if j != i] for i in range(self.num_components)]
        self.bases_first = sorted(range(self.num_components), key=lambda i: bool(self.rules[i].depends_on))
        # Where two go at the same time, what depends on a path before it: it cannot outlive it.
        sharers = [i for i, spec in enumerate(self.specs) if spec.name in config.host_costs]
        self._sharers = tuple(sorted(sharers, key=lambda i: i in paths))
        self._component_keys = [ComponentKeys(spec) for spec in self.specs]
        # Numbers never start again, so that a report from before a reset is known as such.
        self.next_node = 0
        self.next_lease = 0
        self.next_ticket = 0
        self.first_live_lease = 0
        self.first_live_ticket = 0
        self.limits: dict[
            tuple[int, Tier], int
        ] = {}  # units of budgets that may not be used whole, by ``purse``
        self.counters: Counter[str] = Counter()
        self.start_empty()

    def start_empty(self) -> None:
        """The state of a new forest; numbering and counters go on."""
        config = self.config
        self._set_ordering()
        self.roots: dict[Namespace, Node] = {}
        self.leases: dict[LeaseId, LeaseState] = {}
        self.tickets: dict[TicketId, Ticket] = {}
        self.strays: list[Stray] = []
        shared = Budget(config.host_units)
        self.pools = [
            [
                SlotPool(Budget(config.device_slots.get(spec.name, 0))),
                SlotPool(shared, config.host_costs[spec.name], is_shared=True)
                if i in self._sharers
                else SlotPool(Budget(config.host_slots.get(spec.name, 0))),
            ]
            for i, spec in enumerate(self.specs)
        ]
        for (i, tier), limit in self.limits.items():
            self.pools[i][tier].budget.limit = limit
        self.is_resizing = bool(self.limits)
        self.approach_limits()
        self.queues = self._new_queues()
        self.turns = self._new_turns()
        self.num_protected = [[0, 0] for _ in self.specs]  # slots of protected nodes
        self.leaving = [[0, 0] for _ in self.specs]  # slots that running demotions will free
        self.dead_weight = DeadWeight(self)
        self.num_stored_pages = 0
        self.failed_stores: dict[NodeId, Node] = {}  # what L3 did not take since the last retry
        self.has_holes = False  # L3 has lost a page while it still had what hangs below
        self.num_nodes = 0
        self.tick = 0
        self.actions: list[Action] = []
        self.events: list[ResidencyEvent] = []
        self.dirty: dict[NodeId, Node] = {}
        self.shielded: Collection[Node] = ()  # what must not leave L2 while room is made for others
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
        then. So nothing is over, and L3 hears of it.
        """
        self._set_ordering()
        follows = self.ordering.follows_turns
        if follows != self.turns.is_on or (follows and is_another):
            over = [node for node in nodes if self.is_over(node)]
            self.turns = self._new_turns()
            for lease in self.leases:
                self.turns.open(lease, None)
            for node in nodes:
                node.turn = NO_TURN
            for node in over:
                self._hint_all(node)
        self.queues = self._new_queues()
        for node in nodes:
            if not self.ordering.protects_hits:
                self.protect(node, False)
            node.queued.clear()
            node.sheltered.clear()
        for node in nodes:
            self.offer(node)

    def approach_limits(self) -> None:
        """Take free slots out of pools that have too many, or give them back."""
        if self.is_resizing:
            reached = [self.pools[i][tier].budget.approach_limit() for i, tier in self.limits]
            self.is_resizing = not all(reached)

    # ---- budgets -----------------------------------------------------------------------------
    def sharers(self, component: int, tier: Tier) -> tuple[int, ...]:
        """The components whose slots come out of the same budget."""
        return self._sharers if tier == HOST and component in self._sharers else (component,)

    def purse(self, component: int, tier: Tier) -> tuple[int, Tier]:
        """What names the budget: the first that draws on it."""
        return self.sharers(component, tier)[0], tier

    def num_short(self, component: int, tier: Tier, wanted: int) -> int:
        """Units lacking for ``wanted`` free slots, with what running demotions will free."""
        pool = self.pools[component][tier]
        coming = sum(self.leaving[i][tier] * self.pools[i][tier].cost for i in self.sharers(component, tier))
        return wanted * pool.cost - pool.budget.num_free - coming

    def num_protected_units(self, component: int, tier: Tier) -> int:
        """What protected nodes take of the budget."""
        sharers = self.sharers(component, tier)
        return sum(self.num_protected[i][tier] * self.pools[i][tier].cost for i in sharers)

    def pop_candidate(self, component: int, tier: Tier) -> tuple[Node, int] | None:
        """Take out what goes first of all that draws on the budget: the node, and whose payload."""
        sharers = self.sharers(component, tier)
        for i in sharers:
            self.queues[i][tier].limit_protection()
        heads = ((self.queues[i][tier].first(), i) for i in sharers)
        first = min(
            ((rank, i) for rank, i in heads if rank is not None), key=lambda head: head[0], default=None
        )
        if first is None:
            return None
        (group, key, *_), i = first
        node = self.queues[i][tier].take()
        if self.turns.is_on and group == SOLE:
            worth, used = key >> RECENCY_BITS, key & ((1 << RECENCY_BITS) - 1)
            self.turns.learn_age(node, tier, worth, self.tick - used)
        return node, i

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

    def edge_key(self, tokens: Tokens) -> bytes:
        """What tells siblings apart: the bytes of the first page."""
        return tokens[: self.page_size].tobytes()

    def num_slots(self, node: Node, component: int) -> int:
        """Slots the component has at this node when it is there."""
        return len(node.tokens) // self.page_size if self.rules[component].keeps_pages else 1

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

    def soil(self, node: Node) -> None:
        """Remember a node whose chain may be merged or pruned when the operation ends."""
        self.dirty[node.id] = node

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
        if stored:
            self.offer(node)
            if self.is_over(node):
                self._hint(node, component)
        else:
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

    def note_use(self, node: Node, priority: int, length: int) -> None:
        """A request of that priority, ``length`` tokens long so far, used the path to ``node``.

        Like recency, its parents learn it when their last child leaves.
        """
        node.priority = max(node.priority, priority)
        node.reach = max(node.reach, length)

    def protect(self, node: Node, is_protected: bool) -> None:
        """Have the node among the protected, or no longer."""
        if node.is_protected == is_protected:
            return
        node.is_protected = is_protected
        sign = 1 if is_protected else -1
        for counts, slots in zip(self.num_protected, node.slots, strict=True):
            for tier in (DEVICE, HOST):
                held = slots[tier]
                if held is not None:
                    counts[tier] += sign * len(held)

    # ---- what is over --------------------------------------------------------------------------
    def is_over(self, node: Node) -> bool:
        """Whether the last to use the node is over, nobody else used it, and nobody wants it kept."""
        return not node.is_shared and not node.is_kept and self.turns.is_over(node.turn)

    def own(self, node: Node, lease: LeaseId) -> None:
        """``lease`` used the node last. L3 hears of it if that makes it over, or not any more."""
        was_over = self.is_over(node)
        self.turns.own(node, lease)
        if self.is_over(node) != was_over:
            self._hint_all(node)

    def share(self, node: Node) -> None:
        """Leases of more than one session used the node."""
        was_over = self.is_over(node)
        node.is_shared = True
        if was_over:
            self._hint_all(node)

    def set_kept(self, node: Node, is_kept: bool) -> None:
        """The node goes last of what may go, or is not to be kept any more."""
        was_over = self.is_over(node)
        node.is_kept = is_kept
        if self.is_over(node) != was_over:
            self._hint_all(node)

    def rate(self, lease: LeaseId, worth: int) -> None:
        """Set what a turn is worth; where that fell, let its nodes' new rank be known."""
        was_over = self.turns.is_over(lease)
        for node in self.turns.rate(lease, worth):
            self.offer(node)
        if self.turns.is_over(lease) != was_over:
            for node in self.turns.nodes_of(lease):
                if not (node.is_shared or node.is_kept):
                    self._hint_all(node)

    def _hint_all(self, node: Node) -> None:
        """The node is over now, or no longer: what waits for L3 may not have to, and what is there may go first."""
        unqueue(self, node)
        for i, stored in enumerate(node.stored):
            if stored:
                self._hint(node, i)

    def _hint(self, node: Node, component: int) -> None:
        """Have L3 told whether what it has of the node is over."""
        kind = Cool if self.is_over(node) else Warm
        self.actions.append(kind(self.specs[component].name, self.keys(node, component)))

    # ---- worth -----------------------------------------------------------------------------------
    def worth(self, node: Node) -> int:
        """What the node's last turn was rated, and something for being shared."""
        return self.turns.worth(node)

    def grace(self, node: Node) -> int:
        """By how much later than it was the node counts as used, for being shared."""
        return self.turns.grace(node)

    def is_spare(self, node: Node) -> bool:
        """Whether the node's last page lies wholly in the tail that ``tlru`` gives up first."""
        return self.num_spare_pages(node) > 0

    def num_spare_pages(self, node: Node) -> int:
        """How many of the node's last pages lie wholly in that tail."""
        if not self.tail_len:
            return 0
        return max(0, node.end - max(node.start, node.reach - self.tail_len)) // self.page_size

    def free(self, component: int, tier: Tier, slots: Slots) -> None:
        """Slots go back to their pool. What goes there one after the other is one action."""
        if not len(slots):
            return
        self.pools[component][tier].free(slots)
        name = self.specs[component].name
        last = self.actions[-1] if self.actions else None
        if isinstance(last, Free) and (last.component, last.tier) == (name, tier):
            slots = np.concatenate([last.slots, slots])
            self.actions.pop()
        self.actions.append(Free(name, tier, slots))

    # ---- who may leave -----------------------------------------------------------------------
    def may_leave(self, node: Node, component: int, tier: Tier) -> bool:
        """May the component's payload of this node leave the tier now?"""
        if not node.has(component, tier) or node.parent is None:
            return False
        if tier == STORE:
            return (
                node.kids[component][STORE] == 0
                and not node.holders
                and not node.tickets
                and node.slots[component][DEVICE] is None
                and node.slots[component][HOST] is None
            )
        if node.pins[tier] or (tier == HOST and (node.pins[DEVICE] or node in self.shielded)):
            return False
        if tier == DEVICE and node.pins[HOST] and node.slots[component][HOST] is None:
            return False  # what depends on it may be the payload that is being read in L2
        return self.rules[component].may_leave(node, tier)

    def is_dead_weight(self, node: Node, component: int) -> bool:
        """Whether no vote can accept what the component has here: nothing hangs on it, and no boundary
        stands in this node for lack of a state or a window.
        """
        if self.rules[component].keeps_pages and any(node.kids[component]):
            return False
        return any(
            node.fastest(i) is None and (i, DEVICE) not in node.incoming
            for i in self.needed_beside[component]
        )

    def may_end_at(self, node: Node, num_pages: int) -> bool:
        """Whether states and windows allow a boundary after the first ``num_pages``, which end inside the node."""
        end = node.start + num_pages * self.page_size
        for i, rule in enumerate(self.rules):
            if rule.is_prefix:
                continue
            first = rule.span(end)
            if not rule.keeps_pages:
                return False
            for place in node.up() if first < end else ():
                if place.end <= first:
                    break
                if place.fastest(i) is None:
                    return False
        return True

    def offer(self, node: Node) -> None:
        """Queue whatever of the node may leave now."""
        if node.parent is None:
            return
        for i, queues in enumerate(self.queues):
            held = node.slots[i]
            if held[DEVICE] is not None:
                queues[DEVICE].offer(node)
            if held[HOST] is not None:
                queues[HOST].offer(node)
            if node.stored[i]:
                queues[STORE].offer(node)

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

    # ---- keys and events ---------------------------------------------------------------------
    def links(self, node: Node) -> list[bytes]:
        """The token chain's digests of this node's pages."""
        if node.links is None:
            missing = []
            for place in node.up():
                if place.links is not None:
                    break
                missing.append(place)
            for place in reversed(missing):
                parent = place.parent
                assert parent is not None
                last = parent.seed if parent.is_root else self.links(parent)[-1]
                place.links = chain_links(last, place.tokens, self.page_size)
        assert node.links is not None
        return node.links

    def keys(self, node: Node, component: int) -> tuple[PageKey, ...]:
        """Page keys of the component at this node, one a slot."""
        links = self.links(node)
        if not self.rules[component].keeps_pages:
            links = links[-1:]
        return self._component_keys[component].keys(links)

    def key_of(self, component: int, link: bytes) -> PageKey:
        return self._component_keys[component].key(link)

    def _emit(self, change: ResidencyChange, node: Node, component: int, tier: Tier, cause: Cause) -> None:
        if not self.config.emit_events:
            return
        name, keys = self.specs[component].name, self.keys(node, component)
        if change is ResidencyChange.REMOVED:
            self.events.append(ResidencyEvent(change, tier, name, keys, cause))
            return
        links = self.links(node)
        first = 0 if self.rules[component].keeps_pages else len(links) - 1
        parent = node.parent
        assert parent is not None
        before = links[first - 1] if first else None if parent.is_root else self.links(parent)[-1]
        self.events.append(
            ResidencyEvent(
                change,
                tier,
                name,
                keys,
                cause,
                parent=None if before is None else self.key_of(component, before),
                tokens=node.tokens[first * self.page_size :].astype("<i4").tobytes(),
                namespace=node.namespace,
            )
        )

    def note_removed(self, node: Node, component: int, tier: Tier, cause: Cause) -> None:
        """Tell of payload that goes with the whole forest."""
        self._emit(ResidencyChange.REMOVED, node, component, tier, cause)

    def take_actions(self) -> tuple[Action, ...]:
        actions, self.actions = tuple(self.actions), []
        return actions
