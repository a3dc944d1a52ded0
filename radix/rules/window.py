"""Window: only the last *w* tokens are needed (sliding-window attention)."""

from __future__ import annotations

from hicache.radix.node import Node
from hicache.radix.rules.base import Has, Lock, Rule, SpanLock, Validator
from hicache.types import Tier


def window_frontier(key_len: int, window_tokens: int, page_size: int) -> int:
    """First token (a page start) whose window payload a prefix of ``key_len`` tokens still needs.

    With ``b`` the whole pages of the key: ``floor((b - max(w, page)) / page) * page``, at least 0.
    What lies before may be gone; what lies after, at least ``min(w, b)`` tokens, may not.
    """
    whole = key_len // page_size * page_size
    reach = max(window_tokens, page_size)
    return max(0, (whole - reach) // page_size * page_size)


class WindowRule(Rule):
    def validator(self, has: Has) -> Validator:
        run_start: int | None = None  # where the unbroken payload that reaches up to here began

        def vote(node: Node, end: int) -> bool:
            nonlocal run_start
            if not has(node):
                run_start = None
                return False
            if run_start is None:
                run_start = node.start
            return run_start <= self.span(end)

        return vote

    def span(self, end: int) -> int:
        return window_frontier(end, self.spec.window_tokens, self.page_size)

    def lock(self, node: Node) -> Lock:
        return SpanLock(self.index, node, self.span(node.end))

    def may_leave(self, node: Node, tier: Tier) -> bool:
        return self.is_duplicate(node, tier) or not node.locks[self.index]
