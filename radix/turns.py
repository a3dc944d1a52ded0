"""Who used a node last, and what the caller thinks that is worth.

A *turn* is a lease as the tree remembers it once it has ended: the nodes that no later lease used. There
are never more turns than nodes and open leases. What supersedes a turn, and when it loses worth, is the
business of the caller; here a worth is a number.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hicache.radix.node import NO_TURN, Node
from hicache.types import MOST_WORTH, LeaseId, NodeId

SHARED_BONUS = 8
"""What a node of several sessions is worth more: with the hazard index of ``session`` one octave."""


@dataclass(slots=True)
class Turn:
    """One lease's nodes. ``MOST_WORTH`` until it is rated: a request at work goes last."""

    worth: int = MOST_WORTH
    is_open: bool = True
    nodes: dict[NodeId, Node] = field(default_factory=dict)


class Turns:
    """All turns of a forest; a no-op unless ``is_on``."""

    def __init__(self, *, is_on: bool) -> None:
        self.is_on = is_on
        self.by_lease: dict[LeaseId, Turn] = {}

    def open(self, lease: LeaseId) -> None:
        if self.is_on:
            self.by_lease[lease] = Turn()

    def close(self, lease: LeaseId) -> None:
        """The lease has ended; its turn stays as long as it has nodes."""
        turn = self.by_lease.get(lease)
        if turn is not None:
            turn.is_open = False
            self._drop_if_over(lease, turn)

    def own(self, node: Node, lease: LeaseId) -> None:
        """``lease`` used the node last."""
        if not self.is_on or lease in (node.turn, NO_TURN):
            return
        self.disown(node)
        node.turn = lease
        self.by_lease[lease].nodes[node.id] = node

    def disown(self, node: Node) -> None:
        """The node leaves the tree, or changes hands."""
        turn = self.by_lease.get(node.turn)
        if turn is not None:
            turn.nodes.pop(node.id, None)
            self._drop_if_over(node.turn, turn)
            node.turn = NO_TURN

    def _drop_if_over(self, lease: LeaseId, turn: Turn) -> None:
        if not turn.nodes and not turn.is_open:
            del self.by_lease[lease]

    def worth(self, node: Node) -> int:
        turn = self.by_lease.get(node.turn)
        if turn is None or not turn.worth:
            return 0
        return turn.worth + SHARED_BONUS * node.is_shared

    def rate(self, lease: LeaseId, worth: int) -> Iterable[Node]:
        """Set what a turn is worth; returns the nodes whose rank fell, by number."""
        turn = self.by_lease.get(lease)
        if turn is None:
            return ()
        before, turn.worth = turn.worth, worth
        return [turn.nodes[number] for number in sorted(turn.nodes)] if worth < before else ()
