"""From a vote to payload in L1: plan, fetch, load, settle."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import numpy as np

from hicache.errors import ProtocolError
from hicache.radix.actions import Copy, Fetch, Slots
from hicache.radix.admission import never_fits
from hicache.radix.demote import Demoter, join
from hicache.radix.forest import Forest
from hicache.radix.interface import MAX_CHOICES, Choice, PlanStep, Settled, Started
from hicache.radix.leases import LeaseState
from hicache.radix.lookup import anywhere, judge, on_device, sources, vote
from hicache.radix.node import DEVICE, HOST, Node
from hicache.radix.rules.base import Lock
from hicache.radix.tickets import Kind, Part
from hicache.radix.trust import leave_strays, on_device_or_arriving, trust
from hicache.types import PageKey, TicketId, Tier


class Restorer:
    """One plan drives fetch, load and settle, so they cannot disagree."""

    def __init__(self, forest: Forest, demoter: Demoter) -> None:
        self._forest = forest
        self._demoter = demoter

    # ---- the plan ----------------------------------------------------------------------------
    def missing(self, last: Node, component: int) -> list[Node]:
        """Nodes whose payload a boundary at the end of ``last`` needs in L1 and does not have, root first."""
        rule = self._forest.rules[component]
        nodes: list[Node] = []
        first = rule.span(last.end)
        for node in last.up():
            there = on_device(node, component)
            if not rule.keeps_pages:
                return [] if there else [node]
            if node.end <= first or (there and rule.is_prefix):
                break
            if not there:
                nodes.append(node)
        nodes.reverse()
        return nodes

    def plan(self, lease: LeaseState) -> tuple[PlanStep, ...]:
        return () if lease.settled else self._steps(lease.node)

    def _steps(self, place: Node) -> tuple[PlanStep, ...]:
        """What a boundary at the end of ``place`` needs moved."""
        steps: list[PlanStep] = []
        page = self._forest.page_size
        for i, spec in enumerate(self._forest.specs):
            rule = self._forest.rules[i]
            first = rule.span(place.end) // page
            for node in self.missing(place, i):
                tier = node.fastest(i)
                if tier is None:
                    continue
                last_page = node.end // page
                first_page = max(first, node.start // page) if rule.keeps_pages else last_page - 1
                last = steps[-1] if steps else None
                if (
                    last is not None
                    and (last.component, last.source) == (spec.name, tier)
                    and last.last_page == first_page
                ):
                    steps[-1] = PlanStep(spec.name, tier, last.first_page, last_page)
                else:
                    steps.append(PlanStep(spec.name, tier, first_page, last_page))
        return tuple(steps)

    # ---- less than was found -----------------------------------------------------------------
    def choices(self, lease: LeaseState) -> tuple[Choice, ...]:
        if lease.settled:
            return ()
        found: list[Choice] = []
        for node in reversed(self._legal(lease)):
            steps = self._steps(node)
            found.append(Choice(node.end, steps))
            if not steps:
                return tuple(found)
            if len(found) == MAX_CHOICES - 1:
                break
        stops = [(node, node.end) for node in lease.node.path()]
        verdict = vote(self._forest, stops, on_device)
        found.append(Choice(stops[verdict.index][1] if verdict.index >= 0 else 0, ()))
        return tuple(found)

    def lower(self, lease: LeaseState, boundary: int) -> None:
        if lease.settled:
            raise ProtocolError(f"lease {lease.id} has settled")
        ends = {0: self._root_of(lease)} | {node.end: node for node in self._legal(lease)}
        node = ends.get(boundary)
        if node is None:
            raise ProtocolError(f"lease {lease.id} cannot settle for {boundary} tokens")
        self.stand_at(lease, node)
        lease.tokens = lease.tokens[: node.end]

    def _legal(self, lease: LeaseState) -> list[Node]:
        """Where on the lease's path every component accepts a boundary, root first."""
        path = lease.node.path()
        stops = [(node, node.end) for node in path]
        return [path[at] for at, is_legal in judge(self._forest, stops, anywhere) if is_legal]

    def _cut_at_window_edge(self, lease: LeaseState, component: int) -> None:
        """Only what the window needs is restored, not the whole node it begins in."""
        forest = self._forest
        rule = forest.rules[component]
        edge = rule.span(lease.node.end)
        if not rule.keeps_pages or rule.is_prefix:
            return
        nodes = self.missing(lease.node, component)
        if nodes and nodes[0].start < edge < nodes[0].end:
            forest.split(nodes[0], (edge - nodes[0].start) // forest.page_size)

    # ---- room --------------------------------------------------------------------------------
    def make_room(self, component: int, tier: Tier, wanted: int) -> tuple[TicketId, ...]:
        """Free slots for a lease, if need be beside the windows that leases hold; what to wait for.

        A lock takes whole nodes, so it may hold pages before its window, too. Cutting them off makes two nodes
        of one, so it is done only where nothing else may go.
        """
        waits = self._demoter.make_room(component, tier, wanted)
        if self._forest.num_short(component, tier, wanted) > 0 and self._cut_at_locks(component, tier):
            return self._demoter.make_room(component, tier, wanted)
        return waits

    def _cut_at_locks(self, component: int, tier: Tier) -> bool:
        """Have no window's lock hold pages that it does not need, where the tier can free them; whether one did."""
        forest = self._forest
        windows = [
            i
            for i in forest.sharers(component, tier)
            if forest.rules[i].keeps_pages and not forest.rules[i].is_prefix
        ]
        locks = [
            lock for lease in forest.leases.values() for lock in lease.locks if lock.component in windows
        ]
        has_cut = False
        for place, i in [(node, lock.component) for lock in locks for node in lock.nodes()]:
            edge = min(place.edges[i], default=0)
            if place.start < edge and place.fastest(i) == tier and not place.tickets:
                forest.split(place, (edge - place.start) // forest.page_size)
                has_cut = True
        return has_cut

    # ---- L3 -> L2 ----------------------------------------------------------------------------
    def fetch(self, lease: LeaseState) -> Started:
        forest = self._forest
        waits: list[TicketId] = []
        if lease.settled:
            return Started()
        if lease.doubtful:
            self._vote_again(lease)
        for i in forest.bases_first:
            self._cut_at_window_edge(lease, i)
            wanted: list[Node] = []
            for node in self.missing(lease.node, i):
                running = node.incoming.get((i, HOST))
                if running is not None:
                    waits.append(running)
                elif node.slots[i][HOST] is None and node.stored[i]:
                    wanted.append(node)
            waits += self._begin_fetch(i, wanted)
        return Started(tuple(dict.fromkeys(waits)))

    def _vote_again(self, lease: LeaseState) -> None:
        """Pages turned out to be missing: go for the deepest boundary that is still to be had."""
        path = lease.node.path()
        verdict = vote(self._forest, [(node, node.end) for node in path], anywhere)
        node = path[verdict.index] if verdict.index >= 0 else self._root_of(lease)
        if node is not lease.node:
            self.stand_at(lease, node)
            lease.tokens = lease.tokens[: node.end]
        lease.doubtful = False

    def _begin_fetch(self, component: int, nodes: list[Node]) -> list[TicketId]:
        forest = self._forest
        parts, waits = self._targets(component, HOST, nodes)
        if not parts:
            return list(waits)
        ticket = forest.open_ticket(Kind.FETCH, component, parts)
        keys: list[PageKey] = []
        for part in parts:
            keys += forest.keys(part.node, component)
        name = forest.specs[component].name
        forest.actions.append(Fetch(ticket.id, name, tuple(keys), _targets_of(parts)))
        return [ticket.id, *waits]

    def _targets(
        self, component: int, tier: Tier, nodes: list[Node]
    ) -> tuple[list[Part], tuple[TicketId, ...]]:
        """Slots for as many leading pages as the tier has room for."""
        forest = self._forest
        pool = forest.pools[component][tier]
        wanted = sum(forest.num_slots(node, component) for node in nodes)
        waits: tuple[TicketId, ...] = ()
        if pool.num_free < wanted:
            waits = self.make_room(component, tier, wanted)
        parts: list[Part] = []
        for node in nodes:
            count = min(forest.num_slots(node, component), pool.num_free)
            if not count:
                break
            whole = count == forest.num_slots(node, component)
            place = node if whole else forest.split(node, count)
            parts.append(Part(place, pool.allocate(count), count))
            if not whole:
                break
        return parts, waits

    # ---- L2 -> L1 ----------------------------------------------------------------------------
    def load(self, lease: LeaseState) -> Started:
        forest = self._forest
        waits: list[TicketId] = []
        # What is loaded for a prompt that is then refused would only displace what can be reused.
        if lease.settled or never_fits(forest, lease):
            return Started()
        self.stand_at(lease, lease.node)  # what an earlier call brought up is locked, too
        for i in forest.bases_first:
            if lease.node.end and not forest.rules[i].keeps_pages and lease.states[i] is None:
                waits += self.take_state(lease, i)
            self._cut_at_window_edge(lease, i)
            wanted: list[Node] = []
            for node in self.missing(lease.node, i):
                running = node.incoming.get((i, DEVICE))
                if running is not None:
                    waits.append(running)
                elif node.slots[i][HOST] is not None:
                    wanted.append(node)
                elif forest.rules[i].is_prefix:
                    break
            waits += self._begin_load(i, wanted)
        return Started(tuple(dict.fromkeys(waits)))

    def _begin_load(self, component: int, nodes: list[Node]) -> list[TicketId]:
        forest = self._forest
        parts, waits = self._targets(component, DEVICE, nodes)
        if not parts:
            return list(waits)
        ticket = forest.open_ticket(Kind.LOAD, component, parts)
        held = (part.node.slots[component][HOST] for part in parts)
        forest.actions.append(
            Copy(
                ticket.id,
                forest.specs[component].name,
                HOST,
                join([slots for slots in held if slots is not None]),
                DEVICE,
                _targets_of(parts),
            )
        )
        return [ticket.id, *waits]

    def take_state(self, lease: LeaseState, component: int) -> tuple[TicketId, ...]:
        """Give the lease a private state slot if one can be had; what to wait for if not."""
        pool = self._forest.pools[component][DEVICE]
        waits: tuple[TicketId, ...] = ()
        if not pool.num_free:
            waits = self._demoter.make_room(component, DEVICE, 1)
        if pool.num_free:
            lease.states[component] = int(pool.allocate(1)[0])
            return ()
        return waits

    # ---- what really is there ----------------------------------------------------------------
    def settle(self, lease: LeaseState, *, arriving: bool = False) -> Settled:
        """Lower the boundary to what L1 holds, or what loads bring there, lock that, and claim the states."""
        forest = self._forest
        if lease.lost_load:
            self.come_to_nothing(lease)
        if not lease.settled:
            path = lease.node.path()
            has = partial(on_device_or_arriving, forest) if arriving else on_device
            verdict = vote(forest, [(node, node.end) for node in path], has)
            node = path[verdict.index] if verdict.index >= 0 else self._root_of(lease)
            self.stand_at(lease, node)
            lease.tokens = lease.tokens[: node.end]
            claimed = self._claim(lease)
            lease.settled = True
            if claimed:
                self.stand_at(lease, node)  # a claimed state needs no lock any more
                for i, rule in enumerate(forest.rules if arriving else ()):
                    if rule.keeps_pages:
                        trust(forest, lease, i, self.missing(lease.node, i))
            else:
                self._lower_to_nothing(lease)
            lease.base = lease.node.end
        by_component, source = sources(forest, lease.origins, lease.base)
        return Settled(lease.base, source, by_component, tuple(lease.claims.values()))

    def _root_of(self, lease: LeaseState) -> Node:
        return self._forest.root(lease.node.namespace)

    def _claim(self, lease: LeaseState) -> bool:
        """Copy each shared state into the request's own slot; False if a slot is lacking."""
        forest = self._forest
        states = [i for i, rule in enumerate(forest.rules) if not rule.keeps_pages]
        if lease.node.is_root:
            self.drop_states(lease)
            return True
        for i in states:
            if lease.states[i] is None:
                self.take_state(lease, i)
            if lease.states[i] is None:
                forest.counters["claims_refused"] += 1
                return False
        for i in states:
            held, private = lease.node.slots[i][DEVICE], lease.states[i]
            assert held is not None
            assert private is not None
            ticket = forest.open_ticket(Kind.CLAIM, i, [Part(lease.node, None, 1)])
            ticket.lease, ticket.lease_slot = lease.id, private
            lease.claims[i] = ticket.id
            name = forest.specs[i].name
            target = np.array([private], dtype=np.int64)
            forest.actions.append(Copy(ticket.id, name, DEVICE, held.copy(), DEVICE, target))
        return True

    def _lower_to_nothing(self, lease: LeaseState) -> None:
        self.stand_at(lease, self._root_of(lease))
        lease.tokens = lease.tokens[:0]
        self.drop_states(lease)

    def come_to_nothing(self, lease: LeaseState) -> None:
        """A state or a page did not arrive, so nothing may be reused."""
        leave_strays(self._forest, lease)
        if lease.published != lease.base:
            return
        forest = self._forest
        for i, owned in enumerate(lease.owned):  # they were meant for pages behind the boundary
            lease.owned[i] = owned[:0]
            forest.free(i, DEVICE, owned)
        lease.reserved = 0
        self._lower_to_nothing(lease)
        lease.base = 0

    def drop_states(self, lease: LeaseState) -> None:
        """Give the private slots back; one that a copy still uses is freed when the copy ends."""
        forest = self._forest
        for i, slot in enumerate(lease.states):
            if slot is None:
                continue
            lease.states[i] = None
            running = lease.claims.pop(i, None)
            if running is not None and running in forest.tickets:
                forest.tickets[running].orphan = True
            else:
                forest.free(i, DEVICE, np.array([slot], dtype=np.int64))

    def stand_at(self, lease: LeaseState, node: Node) -> None:
        """Move the lease's locks to ``node``: the new ones first, so that nothing slips between."""
        forest = self._forest
        old_node, old_locks = lease.node, lease.locks
        node.holders += 1
        lease.node = node
        lease.locks = [rule.lock(node) for rule in forest.rules if rule.keeps_pages or not lease.settled]
        old_node.holders -= 1
        self.unlock(old_locks)
        forest.offer(old_node)
        forest.soil(old_node)
        forest.dead_weight.doubt(old_node)
        forest.dead_weight.doubt(node)

    def unlock(self, locks: Iterable[Lock]) -> None:
        """Release locks, and offer again what nothing else holds."""
        forest = self._forest
        for lock in locks:
            for node in lock.release():
                forest.offer(node)
                forest.soil(node)


def _targets_of(parts: list[Part]) -> Slots:
    return join([part.target for part in parts if part.target is not None])
