"""Who used a node last, what that is worth, and how L3 is to regard it."""

from __future__ import annotations

from hicache.radix.actions import Hint
from hicache.radix.declining import unqueue
from hicache.radix.node import Node
from hicache.radix.queues import Queues
from hicache.types import LeaseId, Regard


class Worth(Queues):
    """A forest that knows by whom its nodes are used; L3 hears of what is not plain, and of what is so again."""

    def regard(self, node: Node) -> Regard:
        """What somebody wants kept, else what the last to use the node is told to be, if nobody else used it."""
        return self._regarded(node, self.turns.regard(node.turn))

    def _regarded(self, node: Node, turn: Regard) -> Regard:
        """With its last turn regarded so. What is shared is plain: it stays for what hangs below it."""
        if node.is_kept:
            return Regard.KEPT
        return Regard.PLAIN if node.is_shared else turn

    def own(self, node: Node, lease: LeaseId) -> None:
        """``lease`` used the node last. L3 hears of it if the node is regarded otherwise for it."""
        before = self.regard(node)
        self.turns.own(node, lease)
        self._hint_if_changed(node, before)

    def share(self, node: Node) -> None:
        """Leases of more than one session used the node."""
        before = self.regard(node)
        node.is_shared = True
        self._hint_if_changed(node, before)

    def set_kept(self, node: Node, is_kept: bool) -> None:
        """The node goes last of what may go, or is not to be kept any more."""
        before = self.regard(node)
        node.is_kept = is_kept
        self._hint_if_changed(node, before)

    def rate(self, lease: LeaseId, worth: int, regard: Regard) -> None:
        """Set what a turn is worth; where that fell, let its nodes' new rank be known."""
        before = self.turns.regard(lease)
        for node in self.turns.rate(lease, worth, regard):
            self.offer(node)
        if self.turns.regard(lease) != before:
            for node in self.turns.nodes_of(lease):
                self._hint_if_changed(node, self._regarded(node, before))

    def _hint_if_changed(self, node: Node, before: Regard) -> None:
        """Where the node is over now, what waits for L3 may not have to."""
        regard = self.regard(node)
        if regard == before:
            return
        unqueue(self, node)
        for i, stored in enumerate(node.stored):
            if stored:
                self.hint(node, i, regard)

    def hint(self, node: Node, component: int, regard: Regard) -> None:
        """Have L3 told how to regard what it has of the node."""
        self.actions.append(Hint(self.specs[component].name, self.keys(node, component), regard))

    def worth(self, node: Node) -> int:
        """What the node's last turn was rated, and something for being shared."""
        return self.turns.worth(node)

    def grace(self, node: Node) -> int:
        """By how much later than it was the node counts as used, for being shared."""
        return self.turns.grace(node)
