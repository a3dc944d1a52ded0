"""Who used a node last, what that is worth, and what is over."""

from __future__ import annotations

from hicache.radix.actions import Cool, Warm
from hicache.radix.declining import unqueue
from hicache.radix.node import Node
from hicache.radix.queues import Queues
from hicache.types import LeaseId


class Worth(Queues):
    """A forest that knows by whom its nodes are used; L3 hears of what is over."""

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

    def worth(self, node: Node) -> int:
        """What the node's last turn was rated, and something for being shared."""
        return self.turns.worth(node)

    def grace(self, node: Node) -> int:
        """By how much later than it was the node counts as used, for being shared."""
        return self.turns.grace(node)
