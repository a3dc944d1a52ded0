"""What goes first: one small class per policy, and the queue of candidates they order."""

from __future__ import annotations

import heapq
import importlib
import logging
import operator
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from hicache.errors import ConfigError
from hicache.radix.node import DEVICE, HOST, STORE, Node
from hicache.types import Tier

if TYPE_CHECKING:
    from hicache.radix.forest import Forest

logger = logging.getLogger(__name__)

Rank = tuple[int, int, int, int]
Recency = tuple[int, int, int]
MOST_RANK = 2**61 - 1
"""How great a policy's key may be, either way; with its group it fits 64 bits, which the Rust core relies on."""
RECENCY_BITS = 44
SOLE = 2
"""The group in which the policy decides; see ``Candidates._group``."""
SLACK = 64
"""So many entries of a queue may be out of date beside as many as there are nodes."""
PROTECTED_SHARE = (4, 5)
"""Of the larger tier's slots, L1's or L2's, how many ``slru`` protects at most."""


class Facts(NamedTuple):
    """What a policy knows of a node's payload of one component.

    Args:
        used: when it was last used, as a count of the tree's operations; with ``adaptive`` later where it is shared.
        created: when its node came, counted the same way.
        uses: how many requests used the node.
        priority: the highest that a request which used it was given, 0 to 100.
        is_protected: it was hit, and the protected share of its tier has room for it (``slru`` only).
        is_spare: it is the tail of a conversation that may be computed again (``tlru`` only).
        worth: what the caller said that keeping what its last request used is worth (``session``
            and ``adaptive`` only).
    """

    used: int
    created: int
    uses: int
    priority: int = 0
    is_protected: bool = False
    is_spare: bool = False
    worth: int = 0


class Ordering(ABC):
    """A policy: the smaller the rank, the earlier the payload leaves its tier.

    A user's own is a subclass without arguments, named by its dotted path in ``policy.eviction``; it
    runs on both cores.
    """

    tells_uses_apart: bool = True
    """Whether two halves of a path that differ in ``uses`` only may rank differently."""
    tells_ages_apart: bool = True
    """The same for ``created``."""
    tells_priorities_apart: bool = True
    """The same for ``priority``."""
    protects_hits: ClassVar[bool] = False
    """Whether the tree keeps ``is_protected``."""
    spares_tails: ClassVar[bool] = False
    """Whether the tree keeps ``is_spare``."""
    follows_turns: ClassVar[bool] = False
    """Whether the tree keeps ``worth``."""

    @abstractmethod
    def rank(self, facts: Facts) -> int:
        """The key.

        *Implementation must* depend on the facts alone, and stay within plus and minus ``MOST_RANK``.
        *Thread*: that of the call on the core; it must not call the core.
        """


class Lru(Ordering):
    """The least recently used first."""

    tells_uses_apart = tells_ages_apart = tells_priorities_apart = False

    def rank(self, facts: Facts) -> int:
        return facts.used


class Mru(Ordering):
    """The most recently used first."""

    tells_uses_apart = tells_ages_apart = tells_priorities_apart = False

    def rank(self, facts: Facts) -> int:
        return -facts.used


class Fifo(Ordering):
    """The oldest node first."""

    tells_uses_apart = tells_priorities_apart = False

    def rank(self, facts: Facts) -> int:
        return facts.created


class Filo(Ordering):
    """The youngest node first."""

    tells_uses_apart = tells_priorities_apart = False

    def rank(self, facts: Facts) -> int:
        return -facts.created


class Lfu(Ordering):
    """Fewest uses first; among equals the least recently used. Uses beyond ``MOST_USES`` are alike."""

    tells_ages_apart = tells_priorities_apart = False
    MOST_USES = (1 << 17) - 1

    def rank(self, facts: Facts) -> int:
        return (min(facts.uses, self.MOST_USES) << RECENCY_BITS) + facts.used


class Slru(Ordering):
    """Segmented LRU: what no request came back for goes first.

    A hit protects; at most ``PROTECTED_SHARE`` of the larger tier is protected, beyond that the least recently
    used loses it and stands where its last use puts it. Protection is the node's and goes with it from tier to
    tier; were it lost to the bounds of a small L1, nothing in L2 would have any.
    """

    tells_uses_apart = tells_ages_apart = tells_priorities_apart = False
    protects_hits = True

    def rank(self, facts: Facts) -> int:
        return (int(facts.is_protected) << RECENCY_BITS) + facts.used


class Priority(Ordering):
    """Lowest priority first; among equals the least recently used."""

    tells_uses_apart = tells_ages_apart = False

    def rank(self, facts: Facts) -> int:
        return (facts.priority << RECENCY_BITS) + facts.used


class Tlru(Ordering):
    """Tail-optimised LRU: the last ``tail_tokens`` of every conversation first, then as LRU does.

    A turn has to compute its new tokens anyway, so losing a short tail hardly shows; losing a whole
    conversation does. What the tails leave room for keeps more conversations.
    """

    tells_uses_apart = tells_ages_apart = tells_priorities_apart = False
    spares_tails = True

    def rank(self, facts: Facts) -> int:
        return facts.used - (int(facts.is_spare) << RECENCY_BITS)


class Session(Ordering):
    """Least worth first, as ``TreeCore.rate`` told it; among equals the least recently used."""

    tells_uses_apart = tells_ages_apart = tells_priorities_apart = False
    follows_turns = True

    def rank(self, facts: Facts) -> int:
        return (facts.worth << RECENCY_BITS) + facts.used


class Adaptive(Session):
    """As ``session``; whoever rates may also have recency order, with more grace or less for what is shared."""


class Guarded(Ordering):
    """A user's policy; where it fails, payload is ranked as ``lru`` does, and the log says so once."""

    def __init__(self, name: str, ordering: Ordering) -> None:
        self._name = name
        self._ordering = ordering
        self._has_failed = False
        self.tells_uses_apart = ordering.tells_uses_apart
        self.tells_ages_apart = ordering.tells_ages_apart
        self.tells_priorities_apart = ordering.tells_priorities_apart

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
    "slru": Slru,
    "priority": Priority,
    "tlru": Tlru,
    "session": Session,
    "adaptive": Adaptive,
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


def _goes_from_the_tail(forest: Forest, component: int, tier: Tier) -> bool:
    """Which of equals goes first: the deepest, or of marks that have a pool of their own the shallowest.

    A spare mark insures what lies before it. Where its room can go to a path it stays longer than the tail behind
    it; where room for marks alone is short, the path stays, and the conversation's end is worth more.
    """
    if forest.rules[component].is_prefix or tier == STORE:
        return True
    return forest.pools[component][tier].is_shared


class Candidates:
    """A heap of the nodes whose payload of one component may leave one tier.

    Each (node, component, tier) has at most one valid entry, kept in ``node.queued``. A rank that
    grew is noticed when its entry surfaces (the entry goes back in with the new rank), so a touch
    costs nothing; a rank that shrank is pushed again at once. Freeing k nodes is O(k log n). Entries
    that are no longer valid are dropped when they are more than the nodes there are.

    Where hits are protected there is a second heap of the same kind, of the protected nodes by
    recency alone: its first loses protection when too much is protected.
    """

    def __init__(self, forest: Forest, component: int, tier: Tier) -> None:
        self._forest = forest
        self._where = (component, tier)
        self._component = component
        self._tier = tier
        self._heap: list[tuple[Rank, Node]] = []
        self._protected: list[tuple[Recency, Node]] = []
        self._protects_hits = forest.ordering.protects_hits and tier != STORE
        self._goes_from_the_tail = _goes_from_the_tail(forest, component, tier)

    def rank(self, node: Node) -> Rank:
        """Where it stands in this queue, if it may leave."""
        forest = self._forest
        forest.counters["priority_evaluations"] += 1
        facts = Facts(
            node.used[self._component] + forest.grace(node),
            node.created,
            node.uses,
            node.priority,
            node.is_protected,
            forest.is_spare(node),
            forest.worth(node),
        )
        height = -node.end if self._goes_from_the_tail else node.end
        return (self._group(node), forest.ordering.rank(facts), height, node.id)

    def _group(self, node: Node) -> int:
        """Dead weight first; in L2 a copy of what L1 holds before anything that lives only there, tails first;
        what is to be kept last.
        """
        if self._forest.is_dead_weight(node, self._component):
            return 0
        if self._tier != HOST or node.slots[self._component][DEVICE] is None:
            return SOLE + node.is_kept
        return int(node.kids[self._component][HOST] > 0)

    def _may_leave(self, node: Node) -> bool:
        return self._forest.may_leave(node, self._component, self._tier)

    def _recency(self, node: Node) -> Recency:
        return (node.used[self._component], -node.end, node.id)

    def offer(self, node: Node) -> None:
        """Let the node's present rank and standing be known."""
        if not self._may_leave(node):
            return
        rank = self.rank(node)
        queued = node.queued.get(self._where)
        if queued is None or rank < queued:
            node.queued[self._where] = rank
            heapq.heappush(self._heap, (rank, node))
            if len(self._heap) > 2 * self._forest.num_nodes + SLACK:
                self._heap = [entry for entry in self._heap if entry[1].queued.get(self._where) == entry[0]]
                heapq.heapify(self._heap)
        if self._limits_protection() and node.is_protected and self._where not in node.sheltered:
            node.sheltered[self._where] = self._recency(node)
            heapq.heappush(self._protected, (node.sheltered[self._where], node))
            if len(self._protected) > 2 * self._forest.num_nodes + SLACK:
                self._protected = [
                    entry for entry in self._protected if entry[1].sheltered.get(self._where) == entry[0]
                ]
                heapq.heapify(self._protected)

    def first(self) -> Rank | None:
        """The rank of the node that goes first; None if none may leave."""
        while self._heap:
            rank, node = self._heap[0]
            if node.queued.get(self._where) != rank:
                heapq.heappop(self._heap)
                continue
            if not self._may_leave(node):
                heapq.heappop(self._heap)
                del node.queued[self._where]
                continue
            now = self.rank(node)
            if now > rank:
                node.queued[self._where] = now
                heapq.heapreplace(self._heap, (now, node))
                continue
            return rank
        return None

    def take(self) -> Node:
        """Take out the node whose rank ``first`` gave. Offer it again if it stays."""
        _, node = heapq.heappop(self._heap)
        del node.queued[self._where]
        return node

    def _limits_protection(self) -> bool:
        """Whether the tier is the larger of L1 and L2; L2 of two that are as large."""
        if not self._protects_hits:
            return False
        pools = self._forest.pools[self._component]
        is_host = pools[HOST].capacity >= pools[DEVICE].capacity
        return self._tier == (HOST if is_host else DEVICE)

    def limit_protection(self) -> None:
        """Take protection from the least recently used, until no more is protected than may be."""
        if not self._limits_protection():
            return
        forest = self._forest
        share, whole = PROTECTED_SHARE
        most = forest.pools[self._component][self._tier].budget.capacity * share // whole
        while self._protected and forest.num_protected_units(self._component, self._tier) > most:
            recency, node = heapq.heappop(self._protected)
            if node.sheltered.get(self._where) != recency:
                continue
            del node.sheltered[self._where]
            if not node.is_protected or not self._may_leave(node):
                continue
            now = self._recency(node)
            if now > recency:
                node.sheltered[self._where] = now
                heapq.heappush(self._protected, (now, node))
                continue
            forest.protect(node, False)
            forest.offer(node)

    def __len__(self) -> int:
        return len(self._heap)
