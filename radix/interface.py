"""The one interface of the tree.

A core decides and accounts; it never touches bytes. Callers run the returned ``actions`` in order
and report every ticket back. All lengths are tokens unless the name says pages or slots.

*Thread*: a core is not thread-safe; ``HiCache`` holds one lock around every call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from hicache.events import ResidencyEvent
from hicache.radix.actions import Action, Slots
from hicache.radix.page_keys import PageKeys
from hicache.radix.records import (
    MAX_CHOICES,
    MAX_STORED_PAGES,
    Choice,
    Cleared,
    Inserted,
    MatchResult,
    NodeView,
    PlanStep,
    PoolCount,
    ProbeResult,
    Reserved,
    Room,
    Settled,
    Started,
    StoreQuery,
    Tokens,
    TreeConfig,
)
from hicache.types import (
    DEFAULT_NAMESPACE,
    DEFAULT_PRIORITY,
    LeaseId,
    Namespace,
    Regard,
    SessionId,
    TicketId,
    Tier,
)

__all__ = [
    "MAX_CHOICES",
    "MAX_STORED_PAGES",
    "Choice",
    "Cleared",
    "Inserted",
    "MatchResult",
    "NodeView",
    "PageKeys",
    "PlanStep",
    "PoolCount",
    "ProbeResult",
    "Reserved",
    "Room",
    "Settled",
    "Started",
    "StoreQuery",
    "Tokens",
    "TreeConfig",
    "TreeCore",
]


class TreeCore(Protocol):
    """The unified radix tree.

    Tokens are buffers as ``hicache.radix.keys.token_buffer`` has them (int32 or int64, contiguous,
    writeable), each ``0 <= id < 2**31``, and are read where they lie: nobody may write to them during
    the call. What is refused raises ``ValueError`` and changes nothing. Methods that name a lease or
    a ticket raise ``ProtocolError`` when it is unknown, already ended, or from before a ``reset``,
    and change nothing then.
    """

    config: TreeConfig

    # ---- look up -----------------------------------------------------------------------------
    def probe(
        self, tokens: Tokens, namespace: Namespace = DEFAULT_NAMESPACE, *, cap: bool = True
    ) -> ProbeResult:
        """Read-only match: no split, no recency, no lock.

        Args:
            cap: keep one token to compute (boundary at most ``len - 1``, floored to a page).
        """
        ...

    def store_query(
        self, tokens: Tokens, namespace: Namespace = DEFAULT_NAMESPACE, *, cap: bool = True
    ) -> StoreQuery:
        """The pages an L3 probe has to ask for: what L1 and L2 do not cover. Empty without L3."""
        ...

    def learn(
        self,
        tokens: Tokens,
        found: Mapping[str, Mapping[int, bool]],
        namespace: Namespace = DEFAULT_NAMESPACE,
    ) -> None:
        """Take over a probe's answer: per component, page index -> present in L3.

        *Changes*: stubs appear for pages that only L3 has; a belief that proved wrong is dropped.
        Path pages count only as far as they are unbroken.
        """
        ...

    def match(
        self,
        tokens: Tokens,
        namespace: Namespace = DEFAULT_NAMESPACE,
        *,
        session: SessionId | None = None,
        priority: int = DEFAULT_PRIORITY,
        cap: bool = True,
    ) -> MatchResult:
        """Open a lease on the deepest boundary that every component accepts.

        Args:
            session: what another session used last is shared by sessions then (policy ``session``).
            priority: 0 to 100; the policy ``priority`` keeps what higher ones use or publish longer.

        *Changes*: splits where the match ends inside a node; locks every component's needed span;
        refreshes the recency of what the request will use. A match that reuses nothing changes
        nothing but the lease table.
        """
        ...

    # ---- restore -----------------------------------------------------------------------------
    def plan(self, lease: LeaseId) -> tuple[PlanStep, ...]:
        """What is missing in L1 for the lease's boundary, and from which tier it can come."""
        ...

    def choices(self, lease: LeaseId) -> tuple[Choice, ...]:
        """Boundaries that the lease could settle for, deepest first: legal ones at ends of nodes.

        At most ``MAX_CHOICES``. The last one needs nothing moved; it may be 0. Empty once the lease has settled.
        """
        ...

    def lower(self, lease: LeaseId, boundary: int) -> None:
        """Have the lease go for a shallower boundary, 0 or that of a choice: what lies behind is computed again.

        *Raises*: ``ProtocolError`` for any other boundary, or once the lease has settled.
        """
        ...

    def fetch(self, lease: LeaseId) -> Started:
        """Begin L3 -> L2 for the plan's store steps, as many leading pages as L2 has room for.

        Call again when the tickets have ended: where pages proved missing, the boundary is lowered
        to the deepest one still to be had, and what that needs is begun.
        """
        ...

    def load(self, lease: LeaseId) -> Started:
        """Begin L2 -> L1 for what the plan has in L2, as many leading pages as L1 has room for.

        When room waits for a demotion, its ticket is among ``tickets``; call again once done.
        """
        ...

    def settle(self, lease: LeaseId, *, arriving: bool = False) -> Settled:
        """Lower the boundary to the deepest one that L1 holds now, move the locks, claim states.

        Idempotent after the first call, but for a lease that counted on a load which failed: the next
        call lowers it to nothing and takes back what it had reserved. ``reserve`` and ``insert`` settle
        by themselves.

        Args:
            arriving: count pages that a running load brings as there (states not). ``lease_slots`` names
                their slots; ``insert`` and a ``release`` with tokens are refused until these loads end.
        """
        ...

    # ---- compute and publish -----------------------------------------------------------------
    def reserve(self, lease: LeaseId, num_tokens: int) -> Reserved:
        """Give the lease device slots for ``num_tokens`` more tokens, and its private states."""
        ...

    def insert(self, lease: LeaseId, tokens: Tokens, *, mark: bool = True, verified_len: int = 0) -> Inserted:
        """Publish ``tokens`` (the request's tokens from its start), floored to a page.

        Pages the tree already has on the device: the lease is re-pointed first, then its duplicates
        are freed. With ``mark`` the end becomes a boundary kept on purpose: the trailing window is
        kept, and, if the length is a whole number of pages, the private state is copied into a slot
        of the tree's (a ``Copy`` within L1; the state is resident once that is committed, and the
        request must not write its state before). Without ``mark`` only the path payload and the
        window that the lease itself still needs are left. ``release`` hands the private state over
        without a copy.

        Args:
            verified_len: so many leading tokens are known to be those of the lease's match and of
                its earlier inserts. They are not compared again, so that a turn costs what it adds.

        *Caller guarantees*: payload of these tokens is written; each checkpoint component's private
        state is the state after exactly ``len(tokens)`` tokens.
        *Raises*: ``ProtocolError`` when ``tokens`` is not an extension of what the lease published
        or needs more slots than were reserved.
        """
        ...

    def release(self, lease: LeaseId, tokens: Tokens | None = None, *, verified_len: int = 0) -> Inserted:
        """End the lease: publish ``tokens`` as ``insert`` does, free what is left, drop the locks."""
        ...

    def lease_slots(self, lease: LeaseId, component: str) -> Slots:
        """Device slots of the whole prefix, one a page, int64; ``NO_SLOT`` outside a window."""
        ...

    def lease_state(self, lease: LeaseId, component: str) -> int | None:
        """The private state slot of a checkpoint component; None before ``reserve``/``settle``."""
        ...

    def rate(
        self, leases: Sequence[LeaseId], worths: Sequence[int], regards: Sequence[Regard] | None = None
    ) -> tuple[LeaseId, ...]:
        """Say what keeping it is worth, for all that each lease was the last to use (policy ``session``).

        What is worth least leaves first, among equals the least recently used; 0 is over. A lease is
        worth ``MOST_WORTH`` until it is rated, also once it has ended. A lease of which nothing is left,
        or any under another policy, is ignored. What L3 has of it and no other session used is named in the
        actions of the next call (``Hint``) when it is regarded otherwise than before.

        Args:
            worths: 0 to ``MOST_WORTH`` each.
            regards: how L3 is to regard the pages, where the worth is not 0; None for plain. Until it is rated
                a lease is regarded by its priority.

        Returns:
            the leases rated so far of which nothing is left since the last call.

        Raises:
            ValueError: a worth out of range, or no ``Regard``, or not one for each lease; nothing has changed then.
        """
        ...

    # ---- keeping -----------------------------------------------------------------------------
    def keep(self, tokens: Tokens, namespace: Namespace = DEFAULT_NAMESPACE) -> int:
        """Prefer to keep what the tree has of a prefix, floored to a page, in every tier and under every policy.

        It goes after all else that may go, and is no pin. What comes later is not of it: say it again then.

        Returns:
            how many tokens the tree has of it.
        """
        ...

    def unkeep(self, tokens: Tokens, namespace: Namespace = DEFAULT_NAMESPACE) -> None:
        """Prefer it no longer, nor any part of it, whoever asked for that."""
        ...

    # ---- pressure ----------------------------------------------------------------------------
    def make_room(self, component: str, tier: Tier, free_slots: int) -> Room:
        """Demote or drop until ``free_slots`` are free, or as far as can be (watermarks use this)."""
        ...

    def persist(self) -> Started:
        """Begin what is needed for all payload to be in L3; call until it returns no tickets."""
        ...

    def retry_stores(self) -> Started:
        """Try again what L3 did not take, as far as L2 still has it. The caller waits between tries."""
        ...

    # ---- change while serving ----------------------------------------------------------------
    def clear(
        self, namespace: Namespace | None = None, tokens: Tokens | None = None, *, alone: bool = False
    ) -> Cleared:
        """Throw payload away in every tier, as far as nobody holds it.

        Args:
            namespace: of what; with None and no tokens: of everything.
            tokens: only what begins with these, floored to a page: the page in which they end, and all
                below it. Pages before it may belong to others and stay. In ``namespace``, else the default one.
            alone: with tokens: the pages before, too, as far as they lead nowhere else.

        Of L3 only what the tree remembers is named (``Forget``).
        *Raises*: ``ProtocolError`` for less than a page of tokens.
        """
        ...

    def forget_store(self) -> None:
        """Believe of no page that L3 has it. *Caller guarantees*: no store is in flight.

        The next call's actions take back what L3 was told to keep longer (``Hint``).
        """
        ...

    def resize(self, component: str, tier: Tier, num_slots: int) -> Room:
        """Use at most so many slots of a pool; outlives a ``reset``.

        Where components share a budget it becomes what so many slots of this one take.
        What is too much leaves in the policy's order; call again when ``tickets`` have ended, until the
        pool's capacity is there.

        *Raises*: ``ProtocolError`` for less than 1 or more than the pool was made with.
        """
        ...

    def withheld_slots(self, component: str, tier: Tier) -> Slots:
        """Slots that a pool does not use because it was resized; nobody reads or writes them.

        None of a shared budget, whose slots have no places of their own.
        """
        ...

    def surplus_slots(self) -> Mapping[str, Slots]:
        """Slots of an L1 with one budget that are free, and whose memory has to go back to the system now.

        Each component has as many slots as the whole budget would hold, and memory for those it has used. Empty as
        long as all that was ever used fits the budget, so while shares do not move nothing is given back.

        *Changes*: their memory counts as gone. *Caller guarantees*: it gives it back before it lets anyone write.
        """
        ...

    def reconfigure(self, config: TreeConfig) -> None:
        """Go on with another eviction policy (and its knobs), write policy, or with or without L3.

        What slots, components and keys rely on must be as before. A policy that follows sessions knows
        nothing of requests that ended before it, so what they left goes first.

        *Raises*: ``ConfigError``; ``ProtocolError`` if anything else differs. Nothing has changed then.
        """
        ...

    # ---- tickets -----------------------------------------------------------------------------
    def commit(self, ticket: TicketId) -> tuple[Action, ...]:
        """The whole transfer arrived and was verified. A ticket from before ``reset`` is ignored."""
        ...

    def abort(self, ticket: TicketId, done_slots: int = 0, *, missing: bool = True) -> tuple[Action, ...]:
        """Only the first ``done_slots`` arrived; the rest is as it was before.

        Args:
            missing: for a fetch, whether the first page not done proved not to be in L3 (a miss,
                a corrupt page) and is no longer believed there; False for a time limit, a full
                queue, a cancelled job or a store that does not answer.
        """
        ...

    def in_flight(self) -> tuple[TicketId, ...]:
        """Tickets not reported back yet, oldest first."""
        ...

    # ---- inspect -----------------------------------------------------------------------------
    def audit(self) -> list[str]:
        """Every broken invariant of DESIGN section 10, one sentence each; empty when sound."""
        ...

    def free_slots(self, component: str, tier: Tier) -> tuple[int, int]:
        """Capacity of a pool and how much of it is free; O(1)."""
        ...

    def held_slots(self, component: str, tier: Tier) -> int:
        """Slots of a pool that this component has, for whatever; O(1)."""
        ...

    def pool_count(self, component: str, tier: Tier) -> PoolCount:
        """Slots by owner, counted from scratch: O(tree)."""
        ...

    def dead_slots(self, component: str, tier: Tier) -> int:
        """Slots whose payload no vote can accept again and no lease stands on; kept up to date, O(1).

        Those at the ends: what lies above them counts once they are gone.
        """
        ...

    def counters(self) -> Mapping[str, int]:
        """Monotonic counts; a name never counted yet may be missing.

        Among them: ``matches``; ``fork_tokens`` (path payload that matches could not use for lack of
        a state or a window); ``removed_<tier>_<cause>`` in slots and the same by component, L3 too:
        ``left_<tier>_<cause>_<component>``; ``backups_refused``,
        ``states_refused``, ``claims_refused``; ``stores_declined`` (slots that left L2 and that L3 does
        not have since they were over); ``beliefs_forgotten`` (nodes whose L3 copy the tree no longer remembers); ``aborted_<kind>`` and ``dropped_<kind>`` transfers;
        ``priority_evaluations``.
        """
        ...

    def snapshot(self) -> tuple[NodeView, ...]:
        """All nodes but the roots, parents before children."""
        ...

    def drain_events(self) -> tuple[ResidencyEvent, ...]: ...

    def reset(self) -> None:
        """Become as new. Open leases and tickets are void; late reports on them are ignored.

        The next call's actions take back what L3 was told to keep longer (``Hint``).
        """
        ...
