"""What a forest knows: all its state, and the budgets of its pools. ``forest`` fills it and moves it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np

from hicache.events import ResidencyEvent
from hicache.radix.actions import Action, Free, Slots
from hicache.radix.dead_weight import DeadWeight
from hicache.radix.interface import Tokens, TreeConfig
from hicache.radix.keys import ComponentKeys
from hicache.radix.leases import LeaseState, Stray
from hicache.radix.node import Node
from hicache.radix.ordering import Candidates, Ordering
from hicache.radix.rules.base import Rule, make_rule
from hicache.radix.slot_pool import SlotPool
from hicache.radix.tickets import Ticket
from hicache.radix.turns import Turns
from hicache.types import LeaseId, Namespace, NodeId, ReuseRule, TicketId, Tier


class ForestState:
    """The fields of a ``Forest``, and what needs no more than them.

    Attributes:
        limits: units of budgets that may not be used whole, by ``purse``.
        pools, queues: ``[component][tier]``.
        tail_len: how much of a conversation's end is spare (``tlru``).
        num_protected: ``[component][DEVICE | HOST]``, slots of protected nodes.
        leaving: ``[component][DEVICE | HOST]``, slots that running demotions will free.
        failed_stores: what L3 did not take since the last retry.
        has_holes: L3 has lost a page while it still had what hangs below.
        dirty: nodes whose chain may be merged or pruned when the operation ends.
        shielded: what must not leave L2 while room is made for others.
    """

    ordering: Ordering
    tail_len: int
    roots: dict[Namespace, Node]
    leases: dict[LeaseId, LeaseState]
    tickets: dict[TicketId, Ticket]
    strays: list[Stray]
    pools: list[list[SlotPool]]
    is_resizing: bool
    queues: list[list[Candidates]]
    turns: Turns
    num_protected: list[list[int]]
    leaving: list[list[int]]
    dead_weight: DeadWeight
    num_stored_pages: int
    failed_stores: dict[NodeId, Node]
    has_holes: bool
    num_nodes: int
    tick: int
    actions: list[Action]
    events: list[ResidencyEvent]
    dirty: dict[NodeId, Node]
    shielded: Collection[Node]

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
        dependents_first = sorted(range(self.num_components), key=lambda i: i in paths)
        self._sharers = {
            tier: tuple(i for i in dependents_first if self.specs[i].name in costs)
            for tier, costs in ((Tier.DEVICE, config.device_costs), (Tier.HOST, config.host_costs))
        }
        self._component_keys = [ComponentKeys(spec) for spec in self.specs]
        # Numbers never start again, so that a report from before a reset is known as such.
        self.next_node = 0
        self.next_lease = 0
        self.next_ticket = 0
        self.first_live_lease = 0
        self.first_live_ticket = 0
        self.limits: dict[tuple[int, Tier], int] = {}
        self.counters: Counter[str] = Counter()

    # ---- budgets -----------------------------------------------------------------------------
    def sharers(self, component: int, tier: Tier) -> tuple[int, ...]:
        """The components whose slots come out of the same budget."""
        shared = self._sharers.get(tier, ())
        return shared if component in shared else (component,)

    def purse(self, component: int, tier: Tier) -> tuple[int, Tier]:
        """What names the budget: the first that draws on it."""
        return self.sharers(component, tier)[0], tier

    def num_short(self, component: int, tier: Tier, wanted: int) -> int:
        """Units lacking for ``wanted`` free slots, with what running demotions will free."""
        pool = self.pools[component][tier]
        coming = sum(self.leaving[i][tier] * self.pools[i][tier].cost for i in self.sharers(component, tier))
        return wanted * pool.cost - pool.budget.num_free - coming

    def needs(self, wanted: Sequence[int], tier: Tier) -> list[int]:
        """Free slots to ask for of each component, so that there is room for ``wanted`` of all together.

        Where a budget is shared all is asked for in slots of the cheapest, which waste least. What fits the units
        that are free, or all there are, is not to fail as slots are rounded up: it is as many as those units hold.
        """
        needed = [max(0, count) for count in wanted]
        for sharers in {self.sharers(i, tier) for i in range(self.num_components)}:
            costs = {i: self.pools[i][tier].cost for i in sharers}
            units = sum(needed[i] * cost for i, cost in costs.items())
            cheapest = min(sharers, key=costs.__getitem__)
            budget = self.pools[cheapest][tier].budget
            slots = -(-units // costs[cheapest])
            for there in (budget.num_free, budget.capacity):
                if units <= there:
                    slots = min(slots, there // costs[cheapest])
            for i in sharers:
                needed[i] = slots if i == cheapest else 0
        return needed

    def surplus_slots(self) -> dict[str, Slots]:
        """Free slots of a shared L1 whose memory is needed elsewhere."""
        pools = {i: self.pools[i][Tier.DEVICE] for i in self._sharers[Tier.DEVICE]}
        if all(pool.budget.num_touched <= pool.budget.total for pool in pools.values()):
            return {}
        return {self.specs[i].name: pools[i].take_touched() for i in sorted(pools)}

    def num_protected_units(self, component: int, tier: Tier) -> int:
        """What protected nodes take of the budget."""
        sharers = self.sharers(component, tier)
        return sum(self.num_protected[i][tier] * self.pools[i][tier].cost for i in sharers)

    def approach_limits(self) -> None:
        """Take free slots out of pools that have too many, or give them back."""
        if self.is_resizing:
            reached = [self.pools[i][tier].budget.approach_limit() for i, tier in self.limits]
            self.is_resizing = not all(reached)

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

    # ---- nodes -------------------------------------------------------------------------------
    def edge_key(self, tokens: Tokens) -> bytes:
        """What tells siblings apart: the bytes of the first page."""
        return tokens[: self.page_size].tobytes()

    def num_slots(self, node: Node, component: int) -> int:
        """Slots the component has at this node when it is there."""
        return len(node.tokens) // self.page_size if self.rules[component].keeps_pages else 1

    def soil(self, node: Node) -> None:
        """Remember a node whose chain may be merged or pruned when the operation ends."""
        self.dirty[node.id] = node

    def take_actions(self) -> tuple[Action, ...]:
        actions, self.actions = tuple(self.actions), []
        return actions
