"""What goes first: one small class per policy, and the queue of candidates they order."""

from __future__ import annotations

import heapq
import importlib
import logging
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

from hicache.errors import ConfigError
from hicache.radix.node import DEVICE, HOST, Node
from hicache.types import Tier

logger = logging.getLogger(__name__)

Rank = tuple[int, int, int, int]
MOST_RANK = 2**61 - 1
"""How great a policy's key may be, either way; with its group it fits 64 bits, which the Rust core relies on."""


class Facts(NamedTuple):
    """What a policy knows of a node's payload of one component.

    Args:
        used: when it was last used, as a count of the tree's operations.
        created: when its node came, counted the same way.
        uses: how many requests used the node.
    """

    used: int
    created: int
    uses: int


class Ordering(ABC):
    """A policy: the smaller the rank, the earlier the payload leaves its tier.

    A user's own is a subclass without arguments, named by its dotted path in ``policy.eviction``; it
    runs on both cores.
    """

    tells_uses_apart: bool = True
    """Whether two halves of a path that differ in ``uses`` only may rank differently."""
    tells_ages_apart: bool = True
    """The same for ``created``."""

    @abstractmethod
    def rank(self, facts: Facts) -> int:
        """The key.

        *Implementation must* depend on the facts alone, and stay within plus and minus ``MOST_RANK``.
        *Thread*: that of the call on the core; it must not call the core.
        """


class Lru(Ordering):
    tells_uses_apart = tells_ages_apart = False

    def rank(self, facts: Facts) -> int:
        return facts.used


class Mru(Ordering):
    tells_uses_apart = tells_ages_apart = False

    def rank(self, facts: Facts) -> int:
        return -facts.used


class Fifo(Ordering):
    tells_uses_apart = False

    def rank(self, facts: Facts) -> int:
        return facts.created


class Filo(Ordering):
    tells_uses_apart = False

    def rank(self, facts: Facts) -> int:
        return -facts.created


class Lfu(Ordering):
    """Fewest uses first; among equals the least recently used. Uses beyond ``MOST_USES`` are alike."""

    tells_ages_apart = False
    MOST_USES = (1 << 17) - 1
    _RECENCY_BITS = 44

    def rank(self, facts: Facts) -> int:
        return (min(facts.uses, self.MOST_USES) << self._RECENCY_BITS) + facts.used


class Guarded(Ordering):
    """A user's policy; where it fails, payload is ranked as ``lru`` does, and the log says so once."""

    def __init__(self, name: str, ordering: Ordering) -> None:
        self._name = name
        self._ordering = ordering
        self._has_failed = False
        self.tells_uses_apart = ordering.tells_uses_apart
        self.tells_ages_apart = ordering.tells_ages_apart

    def rank(self, facts: Facts) -> int:
        try:
            rank = operator.index(self._ordering.rank(facts))
            if not -MOST_RANK <= rank <= MOST_RANK:
                raise ValueError(f"rank {rank} is not within {-MOST_RANK} to {MOST_RANK}")
        except Exception:
            if not self._has_failed:
                self._has_failed = True
                logger.warning(
                    "policy.eviction: %s failed on %s; lru ranks instead", self._name, facts, exc_info=True
                )
            return facts.used
        return rank


ORDERINGS: dict[str, type[Ordering]] = {
    "lru": Lru,
    "lfu": Lfu,
    "fifo": Fifo,
    "mru": Mru,
    "filo": Filo,
}


def make_ordering(name: str) -> Ordering:
    """The policy of that name or dotted path. Raises ``ConfigError`` for one that cannot be had."""
    if name in ORDERINGS:
        return ORDERINGS[name]()
    module_name, _, class_name = name.rpartition(".")
    if not module_name:
        known = ", ".join(sorted(ORDERINGS))
        raise ConfigError(
            [f"policy.eviction: {name!r} is not a policy; known are {known}, or a class by its dotted path"]
        )
    try:
        loaded = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError([f"policy.eviction: cannot load {name!r}: {error}"]) from error
    if not (isinstance(loaded, type) and issubclass(loaded, Ordering)):
        raise ConfigError([f"policy.eviction: {name!r} is not a subclass of hicache.radix.ordering.Ordering"])
    try:
        ordering = loaded()
    except Exception as error:
        raise ConfigError([f"policy.eviction: {name!r} cannot be made without arguments: {error}"]) from error
    return Guarded(name, ordering)


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
        facts = Facts(node.used[self._component], node.created, node.uses)
        return (self._group(node), self._ordering.rank(facts), -node.end, node.id)

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
