"""A node: a run of pages on one edge of the tree, and what is stored there.

Residency is uniform: within a node every component is, per tier, present for all of its pages or for
none. Whatever changes only part of a node cuts it first.

::

    start                                   end
      |  page 0  |  page 1  |  ...  | page n-1 |
      tokens[0:P] tokens[P:2P]                 ^ a checkpoint's state belongs here
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from hicache.radix.actions import Slots
from hicache.types import LeaseId, Namespace, NodeId, TicketId, Tier

DEVICE, HOST, STORE = Tier.DEVICE, Tier.HOST, Tier.STORE
MOST_USES = (1 << 18) - 1
NO_TURN = LeaseId(-1)
NO_TOKENS: NDArray[np.int32] = np.empty(0, dtype=np.int32)


class Node:
    """State only; the forest keeps it consistent.

    Attributes:
        slots: ``[component][DEVICE | HOST]``, int64, one a page (a checkpoint: one); None if absent.
        stored: ``[component]``, whether L3 is believed to have all of it.
        kids: ``[component][tier]``, how many children have the component there.
        pins: ``[DEVICE | HOST]``, running copies that read this node's payload in that tier.
        incoming: tickets that bring the component into the tier, by (component, tier).
        locks: ``[component]``, open leases that need the payload of this node in particular.
        edges: ``[component]``, for windows the first needed token of each lock.
        holders: open leases whose published prefix ends here.
        used, created, uses: recency per component, birth tick, number of uses up to ``MOST_USES``.
        priority: the highest of the requests that used it.
        reach: the longest sequence of a request that went through it, in tokens.
        turn: the last lease that used it, or ``NO_TURN`` (``session``).
        is_shared: leases of more than one session used it (``session``).
        is_kept: on the way to a prefix that is to be kept.
        is_protected: hit, and not pushed out of the protected share since (``slru``).
        queued, sheltered: what its valid entry in a queue says, by (component, tier).
        mark: the end is a boundary kept on purpose.
        links: the token chain's digests, one a page, computed when first needed.
        wants_store: to be written to L3 as soon as the parent is there.
    """

    __slots__ = (
        "children",
        "created",
        "edges",
        "holders",
        "id",
        "incoming",
        "is_kept",
        "is_protected",
        "is_shared",
        "kids",
        "links",
        "locks",
        "mark",
        "namespace",
        "parent",
        "pins",
        "priority",
        "queued",
        "reach",
        "seed",
        "sheltered",
        "slots",
        "start",
        "store_failures",
        "stored",
        "tickets",
        "tokens",
        "turn",
        "used",
        "uses",
        "wants_store",
    )

    def __init__(
        self,
        node_id: NodeId,
        parent: Node | None,
        tokens: NDArray[np.int32],
        num_components: int,
        namespace: Namespace,
        seed: bytes,
    ) -> None:
        self.id = node_id
        self.parent = parent
        self.tokens = tokens
        self.namespace = namespace
        self.seed = seed
        self.start = 0 if parent is None else parent.end
        self.children: dict[bytes, Node] = {}
        self.slots: list[list[Slots | None]] = [[None, None] for _ in range(num_components)]
        self.stored = [False] * num_components
        self.kids = [[0, 0, 0] for _ in range(num_components)]
        self.pins = [0, 0]
        self.incoming: dict[tuple[int, Tier], TicketId] = {}
        self.tickets: set[TicketId] = set()
        self.locks = [0] * num_components
        self.edges: list[list[int]] = [[] for _ in range(num_components)]
        self.holders = 0
        self.used = [0] * num_components
        self.created = 0
        self.uses = 0
        self.priority = 0
        self.reach = 0
        self.is_protected = False
        self.turn = NO_TURN
        self.is_shared = False
        self.is_kept = False
        self.mark = False
        self.links: list[bytes] | None = None
        self.wants_store = False
        self.store_failures = 0
        self.queued: dict[tuple[int, Tier], tuple[int, int, int, int]] = {}
        self.sheltered: dict[tuple[int, Tier], tuple[int, int, int]] = {}

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def is_root(self) -> bool:
        return self.parent is None

    def has(self, component: int, tier: Tier) -> bool:
        """Whether the component is resident in this tier."""
        if tier == STORE:
            return self.stored[component]
        return self.slots[component][tier] is not None

    def fastest(self, component: int) -> Tier | None:
        """The fastest tier that has the component here."""
        held = self.slots[component]
        if held[DEVICE] is not None:
            return DEVICE
        if held[HOST] is not None:
            return HOST
        return STORE if self.stored[component] else None

    def is_empty(self) -> bool:
        """No payload of any component in any tier."""
        return not any(self.stored) and all(
            held[DEVICE] is None and held[HOST] is None for held in self.slots
        )

    def up(self) -> Iterator[Node]:
        """This node and its ancestors, without the root."""
        node: Node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def path(self) -> list[Node]:
        """From below the root to this node."""
        nodes = list(self.up())
        nodes.reverse()
        return nodes
