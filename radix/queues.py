"""Who may leave a tier, and who goes first of them."""

from __future__ import annotations

from hicache.radix.digests import Digests
from hicache.radix.node import DEVICE, HOST, STORE, Node
from hicache.radix.ordering import RECENCY_BITS, SOLE
from hicache.types import Tier


class Queues(Digests):
    """A forest that keeps what may leave queued, for each component and tier."""

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

    # ---- who goes first ----------------------------------------------------------------------
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

    # ---- tails -------------------------------------------------------------------------------
    def note_use(self, node: Node, priority: int, length: int) -> None:
        """A request of that priority, ``length`` tokens long so far, used the path to ``node``.

        Like recency, its parents learn it when their last child leaves.
        """
        node.priority = max(node.priority, priority)
        node.reach = max(node.reach, length)

    def is_spare(self, node: Node) -> bool:
        """Whether the node's last page lies wholly in the tail that ``tlru`` gives up first."""
        return self.num_spare_pages(node) > 0

    def num_spare_pages(self, node: Node) -> int:
        """How many of the node's last pages lie wholly in that tail."""
        if not self.tail_len:
            return 0
        return max(0, node.end - max(node.start, node.reach - self.tail_len)) // self.page_size
