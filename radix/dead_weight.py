"""How much of each tier no vote can accept again, kept up to date and never walked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hicache.radix.node import Node
from hicache.types import NodeId, Tier

if TYPE_CHECKING:
    from hicache.radix.forest import Forest

Weights = tuple[tuple[int, Tier, int], ...]
"""(component, tier, slots) of one node."""


class DeadWeight:
    """Slots of dead weight, per component and tier.

    Whatever may change a node's answer doubts it; when the operation ends, those nodes are asked again, so
    the cost is that of the change and not of the tree. What lies above dead ends counts once they are gone.
    """

    def __init__(self, forest: Forest) -> None:
        self._forest = forest
        # A model whose components need nothing beside them has none.
        self._is_on = any(forest.needed_beside)
        self._counted: dict[NodeId, Weights] = {}
        self._doubtful: dict[NodeId, Node] = {}
        self.slots = [[0, 0, 0] for _ in forest.specs]

    def doubt(self, node: Node) -> None:
        """The node's payload, children, leases or transfers changed, or it left the tree."""
        if self._is_on:
            self._doubtful[node.id] = node

    def settle(self) -> None:
        """Ask those nodes again."""
        for node_id, node in self._doubtful.items():
            for i, tier, num_slots in self._counted.pop(node_id, ()):
                self.slots[i][tier] -= num_slots
            weights = tuple(weights_of(self._forest, node))
            if weights:
                self._counted[node_id] = weights
            for i, tier, num_slots in weights:
                self.slots[i][tier] += num_slots
        self._doubtful.clear()


def weights_of(forest: Forest, node: Node) -> Iterator[tuple[int, Tier, int]]:
    """What is dead weight here: nothing while a lease stands on it, nor once it has left the tree."""
    if node.parent is None or node.holders:
        return
    for i in range(forest.num_components):
        if forest.is_dead_weight(node, i):
            for tier in Tier:
                if node.has(i, tier):
                    yield i, tier, forest.num_slots(node, i)
