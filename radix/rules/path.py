"""Path: every token from the root is needed (full attention)."""

from __future__ import annotations

from hicache.radix.node import DEVICE, HOST, Node
from hicache.radix.rules.base import Has, Lock, NodeLock, Rule, Validator
from hicache.types import Tier


class PathRule(Rule):
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
        """Hold the path without walking it.

        A lease stands at the path's end, and what has a resident child never leaves a tier, so it
        is enough to lock the deepest node of each tier on the way::

            root ── L1 ── L1 ── L2 ── L2 ── L3
                           ^           ^
        """
        held = []
        found_host = False
        for place in node.up():
            slots = place.slots[self.index]
            if slots[DEVICE] is not None:
                held.append(place)
                break
            if slots[HOST] is not None and not found_host:
                held.append(place)
                found_host = True
        return NodeLock(self.index, held)

    def may_leave(self, node: Node, tier: Tier) -> bool:
        if self.is_duplicate(node, tier):
            return True
        kids = node.kids[self.index]
        return kids[DEVICE] == 0 and (tier == DEVICE or kids[HOST] == 0) and not node.locks[self.index]
