"""A core, simulated payload and the brute-force model in step, with everything checked after each call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from hicache.radix.actions import Fetch
from hicache.radix.interface import (
    Cleared,
    Inserted,
    PlanStep,
    ProbeResult,
    Reserved,
    Room,
    Settled,
    Started,
    StoreQuery,
)
from hicache.radix.keys import as_tokens
from hicache.testing.checked_core import CheckedCore, OpenLease, TokensLike
from hicache.testing.payloads import TOKEN_BYTES, Stamp, path_bytes
from hicache.types import (
    DEFAULT_NAMESPACE,
    DEFAULT_PRIORITY,
    NO_SLOT,
    LeaseId,
    Namespace,
    SessionId,
    TicketId,
    Tier,
)

MAX_ROUNDS = 600
"""More rounds of fetch, load or reserve than any test needs: a core that asks for ever fails."""


@dataclass(frozen=True, slots=True)
class Served:
    """One request from match to release. ``reused`` is what ``settle`` left of ``found``."""

    found: ProbeResult
    reused: int
    settled: Settled
    released: Inserted
    was_served: bool = True


class Harness(CheckedCore):
    """Comfortable calls on a core; every one is followed by ``check()``."""

    # ---- look up -----------------------------------------------------------------------------
    def store_query(
        self, tokens: TokensLike, namespace: Namespace = DEFAULT_NAMESPACE, *, cap: bool = True
    ) -> StoreQuery:
        return self.core.store_query(as_tokens(tokens), namespace, cap=cap)

    def learn(
        self, tokens: TokensLike, namespace: Namespace = DEFAULT_NAMESPACE, *, cap: bool = True
    ) -> StoreQuery:
        """Ask the simulated L3 what the core wants to know, and tell it. Returns the question."""
        query = self.store_query(tokens, namespace, cap=cap)
        path = path_bytes(tokens)
        found: dict[str, dict[int, bool]] = {}
        for component, pages in query.keys.items():
            plain = self.executor.keys.of(component, namespace, path)
            for page, key in pages:
                assert key == plain[page], f"{component} page {page} is asked for under a wrong key"
            found[component] = {page: key in self.executor.store for page, key in pages}
        self.core.learn(as_tokens(tokens), found, namespace)
        self.check()
        return query

    def match(
        self,
        tokens: TokensLike,
        namespace: Namespace = DEFAULT_NAMESPACE,
        *,
        session: SessionId | None = None,
        priority: int = DEFAULT_PRIORITY,
        cap: bool = True,
    ) -> OpenLease:
        array = as_tokens(tokens)
        result = self.core.match(array, namespace, session=session, priority=priority, cap=cap)
        self.executor.run(result.actions)
        found, missing = result.found, self._num_missing
        lease = OpenLease(result.lease, namespace, array, found, found.boundary, missing)
        self.leases[result.lease] = lease
        self.check()
        return lease

    # ---- restore -----------------------------------------------------------------------------
    def plan(self, lease: OpenLease) -> tuple[PlanStep, ...]:
        return self.core.plan(lease.lease)

    def fetch(self, lease: OpenLease) -> Started:
        """Begin L3 -> L2; every page must be asked for under its plain key."""
        started = self.core.fetch(lease.lease)
        for action in started.actions:
            if isinstance(action, Fetch):
                plain = self.executor.keys.of(action.component, lease.namespace, lease.path)
                places = [plain.index(key) for key in action.keys]
                assert places == sorted(places), f"{action} is not in order from the root"
        return self._started(started)

    def load(self, lease: OpenLease) -> Started:
        started = self.core.load(lease.lease)
        self.executor.run(started.actions)
        self._note_states(lease)
        self.check()
        return started

    def settle(self, lease: OpenLease) -> Settled:
        held = lease.boundary
        if self.is_checked and not lease.is_settled:
            self.model.rebuild(self.core.snapshot())
            held = self.model.deepest(lease.namespace, lease.path, held, (Tier.DEVICE,))
        has_no_room_for_a_state = any(
            c not in lease.states and self.core.pool_count(c, Tier.DEVICE).free == 0 for c in self.checkpoints
        )
        settled = self.core.settle(lease.lease)
        self.executor.run(settled.actions)
        if self.is_checked and not (settled.boundary == 0 and has_no_room_for_a_state):
            legal = {held}
            if self._num_missing > lease.num_missing and not lease.is_settled:
                # Pages proved missing meanwhile, so a fetch may have aimed lower.
                legal |= {
                    end
                    for end in range(0, held, self.config.page_size)
                    if self.model.is_legal(lease.namespace, lease.path, end, (Tier.DEVICE,))
                }
            assert settled.boundary in legal, f"settled at {settled.boundary}, L1 has {held}"
        self._note_settled(lease, settled)
        self.check()
        return settled

    def restore(self, lease: OpenLease) -> Settled:
        """Run the whole restore plan, complete what it starts, and settle.

        A load makes host slots duplicates, which makes room to fetch more.
        """
        for _ in range(MAX_ROUNDS):
            fetched = self._until_idle(lambda: self.fetch(lease))
            loaded = self._until_idle(lambda: self.load(lease))
            if not fetched and not loaded:
                break
        settled = self.settle(lease)
        self.complete_all(lease.waits)
        return settled

    # ---- compute and publish -----------------------------------------------------------------
    def reserve(self, lease: OpenLease, num_tokens: int) -> Reserved:
        """One attempt. ``short`` is empty if the lease got its slots."""
        if not lease.is_settled:
            self.settle(lease)
        reserved = self.core.reserve(lease.lease, num_tokens)
        self.executor.run(reserved.actions)
        if not reserved.short:
            lease.reserved += num_tokens
        self._note_slots(lease)
        self.check()
        return reserved

    def reserve_waiting(self, lease: OpenLease, num_tokens: int) -> bool:
        """Reserve, completing what the core waits for. False if the pool is full of locked payload."""
        for _ in range(MAX_ROUNDS):
            reserved = self.reserve(lease, num_tokens)
            if not reserved.short:
                return True
            waiting = [t for t in reserved.tickets if t in self.executor.pending]
            if not waiting and not self.executor.pending:
                return False
            self.complete_all(waiting or None)
        raise AssertionError(f"reserve({num_tokens}) is still short after {MAX_ROUNDS} rounds")

    def compute(self, lease: OpenLease, length: int) -> None:
        """Be the engine: check what is reused and write payload and states up to ``length``."""
        self.complete_all(lease.waits)
        lease.waits = ()
        self.check_lease(lease)
        page_size = self.config.page_size
        path = lease.path
        for component in self.paged:
            for page in range(lease.written // page_size, -(-length // page_size)):
                end = min(length, (page + 1) * page_size)
                stamp = Stamp(component, lease.namespace, path[: end * TOKEN_BYTES])
                slot = lease.slots[component][page]
                assert slot != NO_SLOT, f"{component}: no slot for page {page} that is computed"
                self.executor.write(component, slot, stamp)
        for component in self.checkpoints:
            if length > lease.written:
                stamp = Stamp(component, lease.namespace, path[: length * TOKEN_BYTES])
                self.executor.write(component, lease.states[component], stamp)
        lease.written = length

    def insert(self, lease: OpenLease, length: int | None = None, *, mark: bool = True) -> Inserted:
        """Publish the first ``length`` tokens (default: all that is written)."""
        end = lease.written if length is None else length
        if not lease.is_settled:
            self.settle(lease)
        inserted = self.core.insert(lease.lease, lease.tokens[:end], mark=mark)
        self.executor.run(inserted.actions)
        self._note_inserted(lease, inserted, end)
        lease.waits += inserted.tickets
        self._note_slots(lease)
        self.check()
        return inserted

    def release(self, lease: OpenLease, length: int | None = None) -> Inserted:
        """End the lease. ``length``: publish so many tokens; None: publish nothing more."""
        tokens = None if length is None else lease.tokens[:length]
        released = self.core.release(lease.lease, tokens)
        del self.leases[lease.lease]
        self.executor.run(released.actions)
        if length is not None:
            self._note_inserted(lease, released, length)
        self.check()
        return released

    # ---- pressure and tickets ----------------------------------------------------------------
    def make_room(self, component: str, tier: Tier, free_slots: int) -> Room:
        room = self.core.make_room(component, tier, free_slots)
        self.executor.run(room.actions)
        self.check()
        return room

    def empty(self, component: str, tier: Tier) -> int:
        """Drive a pool down as far as can be, completing all transfers. Returns its free slots."""
        count = self.core.pool_count(component, tier)
        for _ in range(MAX_ROUNDS):
            free = self.make_room(component, tier, count.capacity).free_slots
            if free == count.capacity or (free == count.free and not self.executor.pending):
                return free
            self.complete_all()
            count = self.core.pool_count(component, tier)
        raise AssertionError(f"{component} in {tier.name}: no end after {MAX_ROUNDS} rounds, {count}")

    def persist(self) -> Started:
        return self._started(self.core.persist())

    def retry_stores(self) -> Started:
        return self._started(self.core.retry_stores())

    def persist_all(self) -> None:
        """Call ``persist`` until it has nothing to do."""
        self._until_idle(self.persist)
        self.complete_all()

    def complete(self, ticket: TicketId) -> None:
        """Let a ticket's transfer arrive, or as much of it as L3 really has."""
        arrivable = self.executor.num_arrivable(ticket)
        if arrivable < self.executor.pending[ticket].num_slots:
            self.abort(ticket, arrivable)
            return
        self.executor.move(ticket)
        self.executor.run(self.core.commit(ticket))
        self.check()

    def abort(self, ticket: TicketId, done_slots: int = 0, *, missing: bool = True) -> None:
        self._num_missing += missing and isinstance(self.executor.pending[ticket], Fetch)
        self.executor.move(ticket, done_slots)
        self.executor.run(self.core.abort(ticket, done_slots, missing=missing))
        self.check()

    def complete_all(self, tickets: Iterable[TicketId] | None = None) -> None:
        """Complete these tickets as far as they are pending; None: all, and what they bring about."""
        if tickets is not None:
            for ticket in tickets:
                if ticket in self.executor.pending:
                    self.complete(ticket)
            return
        while self.executor.pending:
            self.complete(next(iter(self.executor.pending)))

    # ---- change while serving ----------------------------------------------------------------
    def clear(
        self,
        namespace: Namespace | None = None,
        tokens: TokensLike | None = None,
        *,
        alone: bool = False,
    ) -> Cleared:
        array = None if tokens is None else as_tokens(tokens)
        cleared = self.core.clear(namespace, array, alone=alone)
        self.executor.run(cleared.actions)
        self.check()
        return cleared

    def resize(self, component: str, tier: Tier, num_slots: int) -> Room:
        room = self.core.resize(component, tier, num_slots)
        self.executor.run(room.actions)
        self.check()
        return room

    def reconfigure(self, **changes: Any) -> None:  # Any: as the fields of ``TreeConfig``
        self.core.reconfigure(replace(self.core.config, **changes))
        self.check()

    def reset(self) -> None:
        self.core.reset()
        self.executor.reset()
        self.leases.clear()
        self.check()

    # ---- a whole request ---------------------------------------------------------------------
    def serve_into_store(
        self, tokens: TokensLike, session: SessionId, priority: int = DEFAULT_PRIORITY
    ) -> LeaseId:
        """One turn, written to L3 in full; its lease's number, by which it is rated."""
        lease = self.match(tokens, session=session, priority=priority)
        self.restore(lease)
        assert self.reserve_waiting(lease, len(tokens) - lease.boundary)
        self.compute(lease, len(tokens))
        self.release(lease, len(tokens))
        self.persist_all()
        return lease.lease

    def serve(
        self,
        prompt: TokensLike,
        namespace: Namespace = DEFAULT_NAMESPACE,
        *,
        output: TokensLike = (),
        session: SessionId | None = None,
        priority: int = DEFAULT_PRIORITY,
        written: int | None = None,
        marks: Iterable[int] | None = None,
        is_idle_after: bool = True,
    ) -> Served:
        """Serve a request as an engine would.

        Args:
            output: tokens that are decoded.
            written: how many tokens of prompt and output have payload at the end (default: all).
            marks: where the prefill pauses and leaves a mark. Default: at the fork and at the last
                page end that the same prompt could reuse, unless the model is path only.
            is_idle_after: complete all transfers that the request left behind.
        """
        lease = self.match(prompt, namespace, session=session, priority=priority)
        settled = self.restore(lease)
        whole = np.concatenate([lease.tokens, as_tokens(output)])
        total = len(whole) if written is None else written
        if marks is None:
            marks = self._default_marks(lease, total)
        if not self.reserve_waiting(lease, len(prompt) - lease.boundary):
            return Served(lease.found, lease.boundary, settled, self.release(lease), was_served=False)
        lease.tokens = whole
        prompt_end = {len(prompt)} if len(output) else set()
        for end in sorted({*marks} | prompt_end):
            if lease.boundary < end <= total:
                if end > lease.reserved and not self.reserve_waiting(lease, end - lease.reserved):
                    break
                self.compute(lease, end)
                self.insert(lease)
        if total > lease.reserved and not self.reserve_waiting(lease, total - lease.reserved):
            total = lease.written
        self.compute(lease, max(total, lease.written))
        reused = lease.boundary
        released = self.release(lease, total)
        if is_idle_after:
            self.complete_all()
        return Served(lease.found, reused, settled, released)

    def _default_marks(self, lease: OpenLease, total: int) -> set[int]:
        if self._has_only_paths:
            return set()
        page_size = self.config.page_size
        prompt_end = (len(lease.tokens) - 1) // page_size * page_size
        return {lease.found.fork or 0, prompt_end, total // page_size * page_size} - {0}

    def _started(self, started: Started) -> Started:
        self.executor.run(started.actions)
        self.check()
        return started

    def _until_idle(self, begin: Callable[[], Started]) -> int:
        """Begin and complete until nothing begins. Returns how many rounds did something."""
        for rounds in range(MAX_ROUNDS):
            waiting = [t for t in begin().tickets if t in self.executor.pending]
            if not waiting:
                return rounds
            self.complete_all(waiting)
        raise AssertionError(f"still tickets after {MAX_ROUNDS} rounds")


class BuildHarness(Protocol):
    """What a test asks for to get a harness: ``build("full+swa", page_size=4, ...)``.

    The keywords are those of ``hicache.testing.trees.tree_config``, and ``store`` and ``is_checked`` of
    ``Harness``.
    """

    def __call__(self, model: str = "full", /, **options: Any) -> Harness:  # Any: passed on unread
        ...
