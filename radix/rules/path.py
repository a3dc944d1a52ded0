"""Path: every token from the root is needed (full attention)."""

from __future__ import annotations

from hicache.radix.node import DEVICE, HOST, Node
from hicache.radix.rules.base import Has, Lock, Rule, SpanLock, Validator
from hicache.types import Tier


class PathRule(Rule):
    """Unbroken payload from the root on; it holds the whole path."""

    is_prefix = True

    def validator(self, has: Has) -> Validator:
        unbroken = True

        def vote(node: Node, _end: int) -> bool:
            nonlocal unbroken
            unbroken = unbroken and has(node)
            return unbroken

        return vote

    def span(self, end: int) -> int:
        return 0

    def lock(self, node: Node) -> Lock:
        """Hold the path from its end up to where L1 begins.

        What has a child in L1 never leaves L1, so the deepest node there protects all above it.
        Below, every node is held, for payload may arrive there piece by piece::

            root ── L1 ── L1 ── L2 ── L2 ── L3
                           ^     ^     ^     ^
        """
        edge = 0
        for place in node.up():
            if place.slots[self.index][DEVICE] is not None:
                edge = place.start
                break
        return SpanLock(self.index, node, edge)

    def may_leave(self, node: Node, tier: Tier) -> bool:
        if self.is_duplicate(node, tier):
            return True
        kids = node.kids[self.index]
        return kids[DEVICE] == 0 and (tier == DEVICE or kids[HOST] == 0) and not node.locks[self.index]
