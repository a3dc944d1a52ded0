"""One request's hold on the tree, as the core keeps it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hicache.radix.actions import Slots
from hicache.radix.interface import ProbeResult, Tokens
from hicache.radix.node import Node
from hicache.radix.rules.base import Lock
from hicache.types import LeaseId, TicketId, Tier

NO_SLOTS: Slots = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Origin:
    """A stop on a matched path, and where each component's payload lay when it was found."""

    start: int
    end: int
    tiers: tuple[Tier | None, ...]


@dataclass(slots=True, eq=False)
class LeaseState:
    """One request, in regions.

    ::

        0                published          reserved
        |---- tree ----|---- owned slots ----|
                       ^ node.end

    Attributes:
        node: where the published prefix ends; the root for nothing.
        found: the vote of the match (boundary, sources) that the lease was opened with.
        origins: where the payload of each stop lay at the match.
        prompt_len: tokens of the prompt.
        priority: the request's, for what it uses and publishes.
        base: the reuse that was settled; what lies behind it this lease published itself.
        tokens: the published tokens, to check that the caller extends them.
        owned: per component, slots of the pages from ``published`` on (empty for a checkpoint).
        doubtful: pages that L3 was believed to have proved missing since the match.
        reserved: tokens the owned slots were asked for.
        states: private state slot per component; None unless a checkpoint that has one.
        claims: running copies from or to a private state, per component.
        arriving, lost_load: loads it was settled on before they ended, and whether one of them failed
            (``hicache.radix.trust``).
    """

    id: LeaseId
    node: Node
    found: ProbeResult
    num_components: int
    origins: list[Origin]
    tokens: Tokens
    prompt_len: int
    priority: int = 0
    base: int = 0
    settled: bool = False
    doubtful: bool = False
    reserved: int = 0
    locks: list[Lock] = field(default_factory=list)
    owned: list[Slots] = field(default_factory=list)
    states: list[int | None] = field(default_factory=list)
    claims: dict[int, TicketId] = field(default_factory=dict)
    arriving: set[TicketId] = field(default_factory=set)
    lost_load: bool = False

    def __post_init__(self) -> None:
        self.owned = [NO_SLOTS] * self.num_components
        self.states = [None] * self.num_components

    @property
    def published(self) -> int:
        return self.node.end


@dataclass(slots=True, eq=False)
class Stray:
    """Slots that a load filled for pages which another request had put in the tree meanwhile.

    Args:
        readers: the leases that were told these slots and may read them until they end.
    """

    component: int
    slots: Slots
    readers: set[LeaseId]
