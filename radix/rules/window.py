"""Window: only the last *w* tokens are needed (sliding-window attention)."""

from __future__ import annotations

from hicache.radix.node import Node
from hicache.radix.rules.base import Has, Lock, Rule, Validator
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
        """Lock the nodes that the window touches, each with the window's edge.

        A split hands the edge to the prefix only if the window reaches into it::

              prefix | suffix            prefix | suffix
            ....[====|======]            .......|.[=====]
              locked | locked              free | locked
        """
        edge = self.span(node.end)
        for place in node.up():
            if place.end <= edge:
                break
            place.edges[self.index].append(edge)
            place.locks[self.index] += 1
        return _Window(self.index, node, edge)

    def may_leave(self, node: Node, tier: Tier) -> bool:
        return self.is_duplicate(node, tier) or not node.locks[self.index]


class _Window:
    """A lock on the trailing window at a node's end."""

    def __init__(self, component: int, node: Node, edge: int) -> None:
        self.component = component
        self._node: Node | None = node
        self._edge = edge

    def nodes(self) -> list[Node]:
        held = []
        for place in self._node.up() if self._node is not None else ():
            if place.end <= self._edge:
                break
            held.append(place)
        return held

    def release(self) -> list[Node]:
        released = self.nodes()
        self._node = None
        for place in released:
            place.edges[self.component].remove(self._edge)
            place.locks[self.component] -= 1
        return released
