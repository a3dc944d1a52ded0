"""Reuse rules as a user would write them, for tests of what is named by dotted path."""

from __future__ import annotations

from hicache.radix.node import Node
from hicache.radix.rules.base import Has, SpanRule, Validator
from hicache.types import Tier

CHUNK_PAGES = 3


class ChunkedRule(SpanRule):
    """Chunked attention: a token sees its own chunk only, so a chunk's end needs nothing before it."""

    def span(self, end: int) -> int:
        chunk = CHUNK_PAGES * self.page_size
        return end // chunk * chunk


class PickyRule(ChunkedRule):
    """Accepts whole chunks alone."""

    def validator(self, has: Has) -> Validator:
        chunk = CHUNK_PAGES * self.page_size
        return lambda _node, end: end % chunk == 0


class UnreliableRule(SpanRule):
    """Fails in every way that a rule can."""

    def span(self, end: int) -> int:
        match end // self.page_size % 4:
            case 0:
                raise ZeroDivisionError("a rule's own mistake")
            case 1:
                return end + self.page_size
            case 2:
                return None  # type: ignore[return-value]  # on purpose
            case _:
                return end - self.page_size

    def validator(self, has: Has) -> Validator:
        def vote(node: Node, end: int) -> bool:
            if end // self.page_size % 3 == 0:
                raise RuntimeError("a vote's own mistake")
            return has(node)

        return vote


class StubbornRule(SpanRule):
    """Overrides what the Rust core decides itself: nothing ever leaves."""

    def span(self, end: int) -> int:
        return 0

    def may_leave(self, node: Node, tier: Tier) -> bool:
        return False
