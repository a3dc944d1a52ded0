"""What happens when a transfer ends: commit, abort, and who goes on next."""

from __future__ import annotations

import numpy as np

from hicache.events import Cause
from hicache.radix.demote import Demoter
from hicache.radix.forest import Forest
from hicache.radix.node import DEVICE, HOST, STORE, Node
from hicache.radix.restore import Restorer
from hicache.radix.tickets import Kind, Part, Ticket
from hicache.radix.trust import end_trust, kept_by_readers

_ARRIVAL = {
    Kind.BACKUP: Cause.BACKUP,
    Kind.LOAD: Cause.LOAD,
    Kind.FETCH: Cause.FETCH,
    Kind.LEAVE: Cause.INSERT,
}


class TicketEnds:
    """Books finished transfers. Payload becomes resident here and nowhere else."""

    def __init__(self, forest: Forest, demoter: Demoter, restorer: Restorer) -> None:
        self._forest = forest
        self._demoter = demoter
        self._restorer = restorer

    def commit(self, ticket: Ticket) -> None:
        self._end(ticket, sum(part.num_slots for part in ticket.parts), missing=False)

    def abort(self, ticket: Ticket, done_slots: int, *, missing: bool) -> None:
        self._forest.counters[f"aborted_{ticket.kind}"] += 1
        self._cut_at(ticket, done_slots)
        self._end(ticket, done_slots, missing=missing)

    def _cut_at(self, ticket: Ticket, done_slots: int) -> None:
        """Make the arrived slots end where a node ends."""
        before = 0
        for part in ticket.parts:
            inside = done_slots - before
            if 0 < inside < part.num_slots:
                self._forest.split(part.node, inside)
                return
            before += part.num_slots

    def _end(self, ticket: Ticket, done_slots: int, *, missing: bool) -> None:
        forest = self._forest
        del forest.tickets[ticket.id]
        arrived: list[Part] = []
        failed: list[Part] = []
        before = 0
        for part in ticket.parts:
            (arrived if before + part.num_slots <= done_slots else failed).append(part)
            before += part.num_slots
            forest.close_part(ticket, part)
        self._end_claim(ticket, arrived=not failed)
        for part in arrived:
            self._arrived(ticket, part)
        for part in failed:
            if part.target is not None:
                forest.free(ticket.component, ticket.target, part.target)
            forest.offer(part.node)
        if failed:
            self._failed(ticket, failed[0].node, missing=missing)
        end_trust(forest, ticket, arrived=not failed)
        for part in ticket.parts:
            self._go_on(ticket, part.node)

    def _end_claim(self, ticket: Ticket, *, arrived: bool) -> None:
        if ticket.lease_slot is None:
            return
        forest = self._forest
        if ticket.orphan:
            slot = np.array([ticket.lease_slot], dtype=np.int64)
            forest.free(ticket.component, DEVICE, slot)
            return
        lease = forest.leases.get(ticket.lease) if ticket.lease is not None else None
        if lease is None:
            return
        lease.claims.pop(ticket.component, None)
        if ticket.kind == Kind.CLAIM and not arrived:
            self._restorer.come_to_nothing(lease)

    def _arrived(self, ticket: Ticket, part: Part) -> None:
        forest, node, i = self._forest, part.node, ticket.component
        if ticket.kind == Kind.STORE:
            node.store_failures = 0
            forest.set_stored(node, i, True, Cause.STORE)
        elif part.target is not None:
            if node.slots[i][ticket.target] is None and self._has_base(ticket, node):
                forest.attach(node, i, ticket.target, part.target, _ARRIVAL[ticket.kind])
                if ticket.kind == Kind.LEAVE:
                    node.used[i] = forest.tick
            else:
                forest.counters[f"dropped_{ticket.kind}"] += part.num_slots
                if node.slots[i][ticket.target] is None:
                    end_trust(forest, ticket, arrived=False)
                if not kept_by_readers(forest, ticket, part):
                    forest.free(i, ticket.target, part.target)
        if ticket.leaves and forest.may_leave(node, i, ticket.source):
            self._demoter.leave(node, i, ticket.source)
        forest.offer(node)

    def _has_base(self, ticket: Ticket, node: Node) -> bool:
        """What arrives must hang on something: a path on its parent, a dependent on its path."""
        forest, i = self._forest, ticket.component
        rule = forest.rules[i]
        for base in rule.depends_on:
            if node.slots[base][DEVICE] is None and node.slots[base][HOST] is None:
                return False
        parent = node.parent
        if not rule.is_prefix or parent is None or parent.is_root:
            return parent is not None
        if ticket.target == DEVICE:
            return parent.slots[i][DEVICE] is not None
        return parent.slots[i][DEVICE] is not None or parent.slots[i][HOST] is not None

    def _failed(self, ticket: Ticket, node: Node, *, missing: bool) -> None:
        """The first part that did not arrive."""
        forest, i = self._forest, ticket.component
        if ticket.kind == Kind.STORE:
            node.store_failures += 1
            node.wants_store = False
            forest.failed_stores[node.id] = node
        elif ticket.kind == Kind.FETCH and missing:
            if forest.rules[i].keeps_pages and len(node.tokens) > forest.page_size:
                node = forest.split(node, 1)
            if (i, STORE) not in node.incoming:
                forest.set_stored(node, i, False, Cause.MISSING)
            for lease in forest.leases.values():
                lease.doubtful = not lease.settled

    def _go_on(self, ticket: Ticket, node: Node) -> None:
        """Stores that waited for this copy may begin; a state that was left here is copied down."""
        if node.parent is not None and ticket.kind == Kind.LEAVE:
            self._demoter.after_use(node)
        if node.parent is None or ticket.kind not in (Kind.BACKUP, Kind.STORE, Kind.FETCH):
            return
        if ticket.kind == Kind.BACKUP:
            self._demoter.storer.follow_to_store(node, ticket.component)
        self._demoter.storer.pump_store(node)
        if ticket.kind == Kind.STORE and node.stored[ticket.component]:
            for child in node.children.values():
                self._demoter.storer.pump_store(child)
