"""Copies under way, and which nodes they touch.

A ticket is one component's transfer, made of parts in order from the root outwards; a part is a run
of one node's slots. While a part is open its source is pinned, and a split of the node cuts the part
too, so pins and ticket move to all fragments.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from hicache.radix.actions import Slots
from hicache.radix.node import Node
from hicache.types import LeaseId, TicketId, Tier


class Kind(StrEnum):
    """What a ticket moves, by where from and where to."""

    BACKUP = "backup"
    """L1 -> L2."""
    LOAD = "load"
    """L2 -> L1."""
    FETCH = "fetch"
    """L3 -> L2."""
    STORE = "store"
    """L2 -> L3."""
    CLAIM = "claim"
    """Within L1, a shared state into a request's private slot."""
    LEAVE = "leave"
    """Within L1, a request's private state into a slot of the tree's."""


SOURCE: dict[Kind, Tier] = {
    Kind.BACKUP: Tier.DEVICE,
    Kind.LOAD: Tier.HOST,
    Kind.FETCH: Tier.STORE,
    Kind.STORE: Tier.HOST,
    Kind.CLAIM: Tier.DEVICE,
    Kind.LEAVE: Tier.DEVICE,
}
TARGET: dict[Kind, Tier] = {
    Kind.BACKUP: Tier.HOST,
    Kind.LOAD: Tier.DEVICE,
    Kind.FETCH: Tier.HOST,
    Kind.STORE: Tier.STORE,
    Kind.CLAIM: Tier.DEVICE,
    Kind.LEAVE: Tier.DEVICE,
}
PINS_SOURCE = frozenset({Kind.BACKUP, Kind.LOAD, Kind.STORE, Kind.CLAIM})
"""A fetch reads L3, and a LEAVE reads a slot that the lease owns: no node payload to pin."""


@dataclass(slots=True, eq=False)
class Part:
    """A run of one node's slots. ``target`` is None for a store."""

    node: Node
    target: Slots | None
    num_slots: int


@dataclass(slots=True, eq=False)
class Ticket:
    """One transfer of one component.

    Args:
        leaves: the source is given up on success (a demotion).
        lease: the request whose private state is source or target.
        orphan: that request ended meanwhile; its slot is freed when the copy ends.
        trusted_by: requests that compute already while this load runs.
    """

    id: TicketId
    kind: Kind
    component: int
    parts: list[Part] = field(default_factory=list)
    leaves: bool = False
    lease: LeaseId | None = None
    lease_slot: int | None = None
    orphan: bool = False
    trusted_by: set[LeaseId] = field(default_factory=set)

    @property
    def pins_source(self) -> bool:
        return self.kind in PINS_SOURCE

    @property
    def source(self) -> Tier:
        return SOURCE[self.kind]

    @property
    def target(self) -> Tier:
        return TARGET[self.kind]

    def split(self, suffix: Node, prefix: Node, prefix_slots: int) -> None:
        """The node of a part was cut: cut the part at the same place."""
        parts: list[Part] = []
        for part in self.parts:
            if part.node is not suffix:
                parts.append(part)
                continue
            head = None if part.target is None else part.target[:prefix_slots]
            tail = None if part.target is None else part.target[prefix_slots:]
            parts.append(Part(prefix, head, prefix_slots))
            parts.append(Part(suffix, tail, part.num_slots - prefix_slots))
        self.parts = parts
