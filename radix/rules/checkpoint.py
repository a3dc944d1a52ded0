"""Checkpoint: the exact state at the boundary is needed (Mamba, linear attention)."""

from __future__ import annotations

from hicache.radix.node import Node
from hicache.radix.rules.base import Has, Lock, NodeLock, Rule, Validator
from hicache.types import Tier


class CheckpointRule(Rule):
    """One state at the end of a node; it locks that node alone."""

    keeps_pages = False

    def validator(self, has: Has) -> Validator:
        def vote(node: Node, end: int) -> bool:
            return end == node.end and has(node)

        return vote

    def span(self, end: int) -> int:
        return end

    def lock(self, node: Node) -> Lock:
        return NodeLock(self.index, [] if node.is_root else [node])

    def may_leave(self, node: Node, tier: Tier) -> bool:
        return self.is_duplicate(node, tier) or not node.locks[self.index]
