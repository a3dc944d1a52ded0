"""The records of the tree: what it is told once, and what its calls return.

All lengths are tokens unless the name says pages or slots. ``actions`` are to be run in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hicache.radix.actions import Action
from hicache.radix.page_keys import PageKeys
from hicache.types import (
    DEFAULT_TAIL_TOKENS,
    ComponentSpec,
    LeaseId,
    Namespace,
    NodeId,
    TicketId,
    Tier,
    TierTokens,
)

Tokens = NDArray[np.int32]


MAX_CHOICES = 16
"""How many boundaries of one lease are compared at most."""
MAX_STORED_PAGES = 4_000_000
"""How many pages of L3 a tree remembers where nothing else is said."""


@dataclass(frozen=True, slots=True)
class TreeConfig:
    """All a core needs to know.

    Args:
        page_size: tokens a page, 1 to ``MAX_PAGE_SIZE``.
        components: the model's components; names are unique.
        device_slots, host_slots: capacity per component name, in slots; a component missing from
            ``host_slots`` has no L2.
        host_units, host_costs: where the components of L2 share one budget: how many units there are, and
            how many a slot of each takes; ``host_slots`` is then what each could have alone. Empty:
            each has its own.
        device_units, device_costs: the same of L1.
        has_store: whether an L3 exists.
        max_stored_pages: how many L3 pages the tree remembers; beyond that the least recently used
            beliefs are forgotten (the store keeps its bytes).
        write: ``write_through``, ``write_through_selective`` or ``write_back``.
        admission: ``all``, or ``ranked``: a full L2 declines what would be the first to leave it again.
        store_admission: ``all``, or ``unless_over``: L3 declines what is over and nobody else used.
        pauses_writes: nothing is copied down because it was used; what is queued for L3 goes on.
        eviction: name of the ordering, or the dotted path of a class; see ``hicache.radix.ordering``.
        granularity: ``page`` trims leaf tails, ``leaf`` frees whole leaves.
        tail_tokens: what ``tlru`` gives up of each conversation's end before anything else.
        mark_spacing: tokens between spare marks, whole pages; a mark at a multiple of it is as fresh as the path
            through it. 0: there are none.
        identity: digest of model, weights, dtype, layout and rank geometry; seeds the page keys.
        emit_events: keep residency events for ``drain_events``.
    """

    page_size: int
    components: tuple[ComponentSpec, ...]
    device_slots: Mapping[str, int]
    host_slots: Mapping[str, int] = field(default_factory=dict)
    host_units: int = 0
    host_costs: Mapping[str, int] = field(default_factory=dict)
    device_units: int = 0
    device_costs: Mapping[str, int] = field(default_factory=dict)
    has_store: bool = False
    max_stored_pages: int = MAX_STORED_PAGES
    write: str = "write_through"
    pauses_writes: bool = False
    admission: str = "all"
    store_admission: str = "all"
    eviction: str = "lru"
    granularity: str = "page"
    tail_tokens: int = DEFAULT_TAIL_TOKENS
    mark_spacing: int = 0
    identity: bytes = b""
    emit_events: bool = False


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a match would find, from a read-only walk.

    Args:
        boundary: the deepest length that every component accepts.
        walked: length of the longest path of equal pages, whatever its payload.
        source: where the ``boundary`` tokens come from, by the primary component (the first path
            component, else the first).
        by_component: the same per component; a window counts its trailing pages, a checkpoint the
            whole boundary.
        fork: where a prefill should pause and leave a state and a window because path payload (in a
            model without: equal tokens) goes deeper than the boundary; None if nothing was lost.
    """

    boundary: int
    walked: int
    source: TierTokens
    by_component: Mapping[str, TierTokens]
    fork: int | None


@dataclass(frozen=True, slots=True)
class StoreQuery:
    """Page keys whose presence in L3 decides the match, per component that has any."""

    keys: Mapping[str, PageKeys]

    @property
    def num_keys(self) -> int:
        return sum(len(k) for k in self.keys.values())


@dataclass(frozen=True, slots=True)
class MatchResult:
    """A lease was opened on ``found.boundary`` tokens; its payload is locked in every tier.

    Args:
        met: the lease that had used last what was matched (policy ``session``).
        met_end: how far what is left of that lease's sequence goes, in tokens from its start.
    """

    lease: LeaseId
    found: ProbeResult
    actions: tuple[Action, ...] = ()
    met: LeaseId | None = None
    met_end: int = 0


@dataclass(frozen=True, slots=True)
class PlanStep:
    """Slots of one component missing in L1: page range [first_page, last_page), and where they are.

    For a checkpoint the range is the single page that the state follows.
    """

    component: str
    source: Tier
    first_page: int
    last_page: int

    @property
    def num_slots(self) -> int:
        return self.last_page - self.first_page


@dataclass(frozen=True, slots=True)
class Choice:
    """A boundary that a lease may settle for, and what would have to be moved for it."""

    boundary: int
    steps: tuple[PlanStep, ...]


@dataclass(frozen=True, slots=True)
class Started:
    """Work that was begun. ``tickets`` also names copies of other leases that this one waits for."""

    tickets: tuple[TicketId, ...] = ()
    actions: tuple[Action, ...] = ()


@dataclass(frozen=True, slots=True)
class Settled:
    """The reuse that L1 really holds now. ``tickets`` are claims to wait for before computing.

    ``source`` and ``by_component`` say from where the tokens of ``boundary`` came *at the match*.
    """

    boundary: int
    source: TierTokens
    by_component: Mapping[str, TierTokens]
    tickets: tuple[TicketId, ...] = ()
    actions: tuple[Action, ...] = ()


@dataclass(frozen=True, slots=True)
class Reserved:
    """Outcome of a reservation: all components or none.

    A prompt of a model with states or windows that the whole pools could not hold together with its mark is
    refused before anything is displaced for it. ``short`` is empty on success. Otherwise it names the slots still lacking per component;
    ``tickets`` are demotions under way that may free some. Ask again when they are done; if there
    are none, the pool is full of locked payload.
    """

    short: Mapping[str, int]
    tickets: tuple[TicketId, ...] = ()
    actions: tuple[Action, ...] = ()


@dataclass(frozen=True, slots=True)
class Inserted:
    """What publishing did.

    Args:
        published: tokens of this lease now in the tree (a multiple of the page).
        duplicate_tokens: tokens that the tree already held on the device; the lease now uses the
            tree's slots there.
        adopted_tokens: tokens that the tree knew without device payload and that got this lease's.
        new_tokens: tokens of new nodes.
        states: checkpoint components that left a state at ``published``.
        tickets: claims (copies of the state for the request to go on with) to wait for.
    """

    published: int
    duplicate_tokens: int
    adopted_tokens: int
    new_tokens: int
    states: tuple[str, ...]
    tickets: tuple[TicketId, ...] = ()
    actions: tuple[Action, ...] = ()


@dataclass(frozen=True, slots=True)
class Room:
    """Outcome of making room in one pool."""

    free_slots: int
    tickets: tuple[TicketId, ...] = ()
    actions: tuple[Action, ...] = ()


@dataclass(frozen=True, slots=True)
class Cleared:
    """What was thrown away on purpose.

    Args:
        removed: slots (in L3: pages and states) that went, by component and tier.
        kept: slots in the scope that open leases hold or transfers touch.
        tickets: those transfers; when they have ended, ask again.
    """

    removed: Mapping[tuple[str, Tier], int]
    kept: int
    tickets: tuple[TicketId, ...] = ()
    actions: tuple[Action, ...] = ()


@dataclass(frozen=True, slots=True)
class PoolCount:
    """Slots of one component in one tier by owner; all sum to ``capacity`` (DESIGN 10.1).

    Args:
        others: where components share a budget: what is not free and not this one's, in its slots.
    """

    capacity: int
    free: int
    evictable: int
    protected: int
    lease_owned: int
    in_flight: int
    others: int = 0


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node as tests and reports see it. ``slots`` maps (component, tier) to slots; L3 to ()."""

    node: NodeId
    parent: NodeId | None
    namespace: Namespace
    start: int
    tokens: tuple[int, ...]
    slots: Mapping[tuple[str, Tier], tuple[int, ...]]
    locks: Mapping[str, int]
    last_use: int
    num_uses: int
    mark: bool
    priority: int
    reach: int
    is_protected: bool
    is_shared: bool
    is_kept: bool
    turn: LeaseId
