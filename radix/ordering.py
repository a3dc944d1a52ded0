"""What goes first: one small class per policy, and the queue of candidates they order."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable

from hicache.errors import ConfigError
from hicache.radix.node import DEVICE, HOST, Node
from hicache.types import Tier

Rank = tuple[int, int, int, int]


class Ordering(ABC):
    """A policy: the smaller the rank, the earlier the payload leaves its tier."""

    @abstractmethod
    def rank(self, node: Node, component: int) -> int:
        """*Implementation must* depend only on ``used``, ``created`` and ``uses``."""


class Lru(Ordering):
    def rank(self, node: Node, component: int) -> int:
        return node.used[component]


class Mru(Ordering):
    def rank(self, node: Node, component: int) -> int:
        return -node.used[component]


class Fifo(Ordering):
    def rank(self, node: Node, component: int) -> int:
        return node.created


class Filo(Ordering):
    def rank(self, node: Node, component: int) -> int:
        return -node.created


class Lfu(Ordering):
    """Fewest uses first; among equals the least recently used. Uses beyond ``MOST_USES`` are alike."""

    MOST_USES = (1 << 17) - 1  # with the recency this fits 62 bits, which the Rust core relies on
    _RECENCY_BITS = 44

    def rank(self, node: Node, component: int) -> int:
        return (min(node.uses, self.MOST_USES) << self._RECENCY_BITS) + node.used[component]


ORDERINGS: dict[str, type[Ordering]] = {
    "lru": Lru,
    "lfu": Lfu,
    "fifo": Fifo,
    "mru": Mru,
    "filo": Filo,
}


def make_ordering(name: str) -> Ordering:
    """Raises ``ConfigError`` naming the known policies."""
    if name not in ORDERINGS:
        known = ", ".join(sorted(ORDERINGS))
        raise ConfigError([f"policy.eviction: {name!r} is not a policy; known are {known}"])
    return ORDERINGS[name]()


class Candidates:
    """A heap of the nodes whose payload of one component may leave one tier.

    Each (node, component, tier) has at most one valid entry, kept in ``node.queued``. A rank that
    grew is noticed when its entry surfaces (the entry goes back in with the new rank), so a touch
    costs nothing; a rank that shrank is pushed again at once. Freeing k nodes is O(k log n).
    """

    def __init__(
        self,
        component: int,
        tier: Tier,
        ordering: Ordering,
        may_leave: Callable[[Node, int, Tier], bool],
        counters: dict[str, int],
    ) -> None:
        self._component = component
        self._tier = tier
        self._ordering = ordering
        self._may_leave = may_leave
        self._counters = counters
        self._heap: list[tuple[Rank, Node]] = []

    def _rank(self, node: Node) -> Rank:
        self._counters["priority_evaluations"] += 1
        return (self._group(node), self._ordering.rank(node, self._component), -node.end, node.id)

    def _group(self, node: Node) -> int:
        """In L2 a copy of what L1 holds goes before anything that lives only there, tails first."""
        if self._tier != HOST or node.slots[self._component][DEVICE] is None:
            return 2
        return int(node.kids[self._component][HOST] > 0)

    def offer(self, node: Node) -> None:
        """Let the node's present rank and standing be known."""
        where = (self._component, self._tier)
        if not self._may_leave(node, self._component, self._tier):
            return
        rank = self._rank(node)
        queued = node.queued.get(where)
        if queued is None or rank < queued:
            node.queued[where] = rank
            heapq.heappush(self._heap, (rank, node))

    def pop(self) -> Node | None:
        """Take out the node that goes first; None if none may leave. Offer it again if it stays."""
        where = (self._component, self._tier)
        while self._heap:
            rank, node = heapq.heappop(self._heap)
            if node.queued.get(where) != rank:
                continue
            del node.queued[where]
            if not self._may_leave(node, self._component, self._tier):
                continue
            now = self._rank(node)
            if now > rank:
                node.queued[where] = now
                heapq.heappush(self._heap, (now, node))
                continue
            return node
        return None

    def __len__(self) -> int:
        return len(self._heap)
