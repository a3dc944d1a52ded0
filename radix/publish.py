"""From computed payload to nodes: reserve, insert, release."""

from __future__ import annotations

import numpy as np

from hicache.errors import ProtocolError
from hicache.events import Cause
from hicache.radix.actions import Copy, Slots
from hicache.radix.admission import is_too_much, never_fits
from hicache.radix.demote import Demoter
from hicache.radix.forest import Forest
from hicache.radix.interface import Inserted, Reserved, Tokens
from hicache.radix.leases import NO_SLOTS, LeaseState
from hicache.radix.lookup import walk
from hicache.radix.node import DEVICE, HOST, Node
from hicache.radix.restore import Restorer
from hicache.radix.tickets import Kind, Part
from hicache.radix.trust import leave_strays
from hicache.types import NO_SLOT, LeaseId, TicketId

MAX_TOKENS = 2**31 - 1
"""Of one request; the Rust core counts positions in 32 bits."""


class Publisher:
    """Gives leases slots and turns what they filled into nodes."""

    def __init__(self, forest: Forest, demoter: Demoter, restorer: Restorer) -> None:
        self._forest = forest
        self._demoter = demoter
        self._restorer = restorer

    # ---- reserve -----------------------------------------------------------------------------
    def reserve(self, lease: LeaseState, num_tokens: int) -> Reserved:
        forest = self._forest
        if not 0 <= num_tokens <= MAX_TOKENS:
            raise ProtocolError(f"cannot reserve {num_tokens} tokens")
        self._restorer.settle(lease)
        never = never_fits(forest, lease)
        if never:
            return Reserved(never)
        page = forest.page_size
        reserved = max(lease.reserved, lease.published) + num_tokens
        pages = -(-reserved // page) - lease.published // page
        wanted = [
            pages - len(lease.owned[i]) if rule.keeps_pages else int(lease.states[i] is None)
            for i, rule in enumerate(forest.rules)
        ]
        needs = forest.needs(wanted, DEVICE)
        waits: list[TicketId] = []
        # Nothing leaves for what is refused all the same.
        for i in () if is_too_much(forest, lease, wanted) else forest.bases_first:
            if needs[i] > forest.pools[i][DEVICE].num_free:
                waits += self._restorer.make_room(i, DEVICE, needs[i])
        needs = forest.needs(wanted, DEVICE)
        short = {
            spec.name: needs[i] - forest.pools[i][DEVICE].num_free
            for i, spec in enumerate(forest.specs)
            if needs[i] > forest.pools[i][DEVICE].num_free
        }
        if short:
            return Reserved(short, tuple(dict.fromkeys(waits)))
        for i, rule in enumerate(forest.rules):
            if wanted[i] <= 0:
                continue
            taken = forest.pools[i][DEVICE].allocate(wanted[i])
            if rule.keeps_pages:
                lease.owned[i] = np.concatenate([lease.owned[i], taken])
            else:
                lease.states[i] = int(taken[0])
        lease.reserved = reserved
        return Reserved({})

    # ---- insert ------------------------------------------------------------------------------
    def check(self, lease: LeaseState, tokens: Tokens, verified_len: int) -> None:
        """Raise ``ProtocolError`` unless ``tokens`` extends what the lease holds."""
        forest = self._forest
        self._restorer.settle(lease)
        if lease.arriving:
            raise ProtocolError(
                f"lease {lease.id} still loads ({len(lease.arriving)} transfers); it may publish when they end"
            )
        published = lease.published
        if len(tokens) < published:
            raise ProtocolError(
                f"lease {lease.id} published {published} tokens already, got only {len(tokens)}"
            )
        if not 0 <= verified_len <= len(tokens):
            raise ProtocolError(f"{verified_len} tokens are said to be verified, got {len(tokens)}")
        differs = tokens[verified_len:published] != lease.tokens[verified_len:]
        if differs.any():
            position = verified_len + int(np.argmax(differs))
            raise ProtocolError(
                f"lease {lease.id} holds token {int(lease.tokens[position])} at position "
                f"{position}, got {int(tokens[position])}"
            )
        whole = len(tokens) // forest.page_size - published // forest.page_size
        for i, rule in enumerate(forest.rules):
            if rule.keeps_pages and whole > len(lease.owned[i]):
                raise ProtocolError(
                    f"lease {lease.id} reserved {len(lease.owned[i])} pages of "
                    f"{forest.specs[i].name} beyond {published}, needs {whole}"
                )

    def insert(self, lease: LeaseState, tokens: Tokens, *, mark: bool, final: bool) -> Inserted:
        """Publish. *Caller guarantees*: ``check`` passed."""
        forest = self._forest
        page = forest.page_size
        begin, end = lease.published, len(tokens) // page * page
        node, duplicate, adopted = self._overlap(lease, tokens, begin, end)
        new = end - node.end
        if new:
            node = self._grow(lease, node, tokens, end)
        if end > begin:
            lease.tokens = np.concatenate([lease.tokens, np.asarray(tokens[begin:end], dtype=np.int32)])
            self._restorer.stand_at(lease, node)
            touch(forest, node, lease.id)
            forest.note_use(node, lease.priority, end)
        states: tuple[str, ...] = ()
        tickets: tuple[TicketId, ...] = ()
        if mark and not node.is_root:
            if len(tokens) == end:
                states, tickets = self._leave_states(lease, node, final=final)
            if end > begin or states:
                node.mark = True
        if end > begin:
            self._drop_unneeded_windows(lease, node)
        if mark:
            self._demoter.after_use(node)
        return Inserted(end, duplicate, adopted, new, states, tickets)

    def _overlap(self, lease: LeaseState, tokens: Tokens, begin: int, end: int) -> tuple[Node, int, int]:
        """Follow what the tree already has of ``tokens[begin:end]``, settling who owns each slot.

        ::

            lease owns     [ s0 s1 | s2 s3 | s4 s5 ]
            tree           [ d0 d1 | ----- ]              on the device | known, no device payload
            outcome          freed | adopted | new leaf
        """
        forest = self._forest
        page = forest.page_size
        node, duplicate, adopted = lease.node, 0, 0
        while node.end < end:
            found = walk(forest, node, tokens, node.end, end)
            if found.path:
                child = found.path[0]
            elif found.last is not None and found.inside:
                child = forest.split(found.last, found.inside // page)
            else:
                break
            child = self._cut_at_frontier(child, end)
            held = [
                child.slots[i][DEVICE] is not None for i in (forest.prefixes or range(forest.num_components))
            ]
            if all(held):
                duplicate += len(child.tokens)
            else:
                adopted += len(child.tokens)
            for i, rule in enumerate(forest.rules):
                if rule.keeps_pages:
                    self._hand_over(lease, child, i, end)
            node = child
        return node, duplicate, adopted

    def _cut_at_frontier(self, child: Node, end: int) -> Node:
        """A node that a window's edge runs through, and that lacks its payload, is cut there."""
        forest = self._forest
        for i, rule in enumerate(forest.rules):
            edge = rule.span(end)
            inside = rule.keeps_pages and child.start < edge < child.end
            if inside and child.slots[i][DEVICE] is None:
                child = forest.split(child, (edge - child.start) // forest.page_size)
        return child

    def _hand_over(self, lease: LeaseState, node: Node, component: int, end: int) -> None:
        """The lease's slots of this node's pages: to the tree if it lacks them, else freed."""
        forest = self._forest
        slots = self._take(lease, component, forest.num_slots(node, component))
        wanted = node.start >= forest.rules[component].span(end)
        complete = not (slots == NO_SLOT).any()
        if wanted and complete and node.slots[component][DEVICE] is None:
            forest.attach(node, component, DEVICE, slots, Cause.INSERT)
        else:
            forest.free(component, DEVICE, slots[slots != NO_SLOT])

    def _take(self, lease: LeaseState, component: int, count: int) -> Slots:
        owned = lease.owned[component]
        lease.owned[component] = owned[count:]
        return owned[:count].copy()

    def _grow(self, lease: LeaseState, node: Node, tokens: Tokens, end: int) -> Node:
        """New nodes for the rest, cut where a window begins: before it a tombstone."""
        forest = self._forest
        edges = {rule.span(end) for rule in forest.rules if rule.keeps_pages}
        cuts = sorted(edge for edge in edges if node.end < edge < end)
        for cut in [*cuts, end]:
            node = forest.add_child(node, tokens[node.end : cut])
            node.uses = 1
            forest.note_use(node, lease.priority, end)
            forest.turns.own(node, lease.id)
            for i, rule in enumerate(forest.rules):
                if rule.keeps_pages:
                    self._hand_over(lease, node, i, end)
        return node

    def _leave_states(
        self, lease: LeaseState, node: Node, *, final: bool
    ) -> tuple[tuple[str, ...], tuple[TicketId, ...]]:
        """Attach the states at the end: at release the private slots, before it copies of them."""
        forest = self._forest
        left: list[str] = []
        tickets: list[TicketId] = []
        for i, rule in enumerate(forest.rules):
            private = lease.states[i]
            if rule.keeps_pages or private is None or i in lease.claims:
                continue
            if node.slots[i][DEVICE] is not None or (i, DEVICE) in node.incoming:
                continue
            source = np.array([private], dtype=np.int64)
            if final:
                lease.states[i] = None
                forest.attach(node, i, DEVICE, source, Cause.INSERT)
                node.used[i] = forest.tick
                left.append(forest.specs[i].name)
                continue
            pool = forest.pools[i][DEVICE]
            if not pool.num_free:
                self._demoter.make_room(i, DEVICE, 1)
            if not pool.num_free:
                forest.counters["states_refused"] += 1
                continue
            target = pool.allocate(1)
            ticket = forest.open_ticket(Kind.LEAVE, i, [Part(node, target, 1)])
            ticket.lease, ticket.lease_slot = lease.id, private
            lease.claims[i] = ticket.id
            name = forest.specs[i].name
            forest.actions.append(Copy(ticket.id, name, DEVICE, source, DEVICE, target))
            tickets.append(ticket.id)
            left.append(name)
        return tuple(left), tuple(tickets)

    def _drop_unneeded_windows(self, lease: LeaseState, last: Node) -> None:
        """Window payload that this lease published and that no mark needs is dropped at once."""
        forest = self._forest
        for i, rule in enumerate(forest.rules):
            if not rule.keeps_pages or rule.is_prefix:
                continue
            needed_from = rule.span(last.end)
            for node in list(last.up()):
                if node.end <= lease.base:
                    break
                if node is not last and (node.mark or len(node.children) > 1):
                    needed_from = min(needed_from, rule.span(node.end))
                if node.end <= needed_from:
                    self._drop_window(node, i)

    def _drop_window(self, node: Node, component: int) -> None:
        forest = self._forest
        if node.locks[component] or node.pins[DEVICE] or node.pins[HOST]:
            return
        forest.detach(node, component, DEVICE, Cause.WINDOW)
        forest.detach(node, component, HOST, Cause.WINDOW)

    # ---- release -----------------------------------------------------------------------------
    def end(self, lease: LeaseState) -> None:
        """Free what the lease still owns and drop its locks."""
        forest = self._forest
        for i, rule in enumerate(forest.rules):
            if rule.keeps_pages:
                owned, lease.owned[i] = lease.owned[i], NO_SLOTS
                forest.free(i, DEVICE, owned[owned != NO_SLOT])
        self._restorer.drop_states(lease)
        leave_strays(forest, lease)
        lease.node.holders -= 1
        locks, lease.locks = lease.locks, []
        self._restorer.unlock(locks)
        # As old as the end, so that depth settles which of them goes first.
        touch_spare_marks(forest, lease.node, lease.id)
        forest.turns.close(lease.id)
        forest.offer(lease.node)
        forest.soil(lease.node)
        forest.dead_weight.doubt(lease.node)
        del forest.leases[lease.id]


def touch(forest: Forest, node: Node, lease: LeaseId) -> None:
    """Refresh the recency of what a request that ends at ``node`` uses, per component.

    A path needs only its end, since the parent inherits it when the last child leaves; and where the
    end is below L1, what stands between, since nothing will leave L1 there. A window refreshes its
    own nodes, a checkpoint the one state that is there.
    """
    for i in range(forest.num_components):
        _touch_component(forest, node, i, lease)
    forest.offer(node)


def touch_spare_marks(forest: Forest, node: Node, lease: LeaseId) -> None:
    """Have a mark at ``node`` and the spare ones on the way to it equally fresh: these insure what lies behind them."""
    spacing = forest.config.mark_spacing
    for place in node.up() if spacing else ():
        if place.mark and (place is node or place.end % spacing == 0):
            for i, rule in enumerate(forest.rules):
                if not rule.is_prefix:
                    _touch_component(forest, place, i, lease)


def _touch_component(forest: Forest, node: Node, component: int, lease: LeaseId) -> None:
    rule = forest.rules[component]
    first = rule.span(node.end)
    for place in node.up():
        place.used[component] = forest.tick
        forest.own(place, lease)
        if rule.is_prefix:
            if place.slots[component][DEVICE] is not None:
                break
        elif not rule.keeps_pages or place.start <= first:
            break
