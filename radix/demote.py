"""Pressure: who leaves a tier, what is copied down first.

::

    L1 victim   in L2?  ── yes ──> free at once
                    no      (admission ranked: and would it go first of a full L2? free at once or drop)
                may it enter L2 (used twice, under the selective policy), or are descendants there?
                    yes, and there is room  ──> copy to L2, free at commit
                    no
                free at once if L3 has it, else drop

    L2 victim   in L3?  ── yes ──> free at once
                    no
                also in L1, with nothing below it in L2?  ── yes ──> free at once
                    no
                wanted in L3 (queued, or write_back unless ``declining``)?  ── yes ──> store (parents first), free at commit
                    no
                drop, with everything that depends on it

L3 takes parents first, and what it takes goes through L2. So a page whose path is not all in L2 or L3
may not take the last slots of L2: they are the *staging* slots, through which that path will go. Without
them an L2 full of suffixes could only be emptied by losing some.

Where components share the budget of L2, what goes first is the lesser of their queues' heads, whoever
asked for the room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hicache.events import Cause
from hicache.radix.actions import Copy, Slots
from hicache.radix.declining import is_unwanted
from hicache.radix.forest import Forest
from hicache.radix.node import DEVICE, HOST, STORE, Node
from hicache.radix.storing import Storer
from hicache.radix.tickets import Kind, Part
from hicache.types import TicketId, Tier

WRITE_BACK = "write_back"
SELECTIVE = "write_through_selective"
SELECTIVE_USES = 2
STAGING_SHARE = 64
"""One slot in so many of L2 is for staging, but at least one of two."""


@dataclass(frozen=True, slots=True)
class Blocked:
    """A victim has to wait for these transfers; ask again then."""

    tickets: tuple[TicketId, ...] = ()


class Demoter:
    """Makes room in L1 and L2, and backs up; its ``storer`` writes to L3."""

    def __init__(self, forest: Forest) -> None:
        self._forest = forest
        self.storer = Storer(forest, self)

    @property
    def writes_back(self) -> bool:
        """Whether payload goes down only when it has to leave."""
        return self._forest.config.write == WRITE_BACK

    @property
    def has_store(self) -> bool:
        """Whether there is an L3."""
        return self._forest.config.has_store

    @property
    def has_host(self) -> bool:
        """Whether there is an L2."""
        return any(self._forest.config.host_slots.values())

    # ---- making room -------------------------------------------------------------------------
    def make_room(self, component: int, tier: Tier, wanted: int) -> tuple[TicketId, ...]:
        """Free slots until ``wanted`` are free or nothing more may leave.

        Returns the transfers that will free more when they end; none means that all is done that
        can be done.
        """
        forest = self._forest
        pool = forest.pools[component][tier]
        wanted = min(wanted, pool.capacity)
        kept: list[Node] = []
        waiting: tuple[TicketId, ...] = ()
        while (short := forest.num_short(component, tier, wanted)) > 0:
            found = forest.pop_candidate(component, tier)
            if found is None:
                break
            victim, i = found
            victim = self.trim(victim, i, tier, -(-short // forest.pools[i][tier].cost))
            outcome = self._leave_device(victim, i) if tier == DEVICE else self._leave_host(victim, i)
            if outcome is not None:
                kept.append(victim)
                if outcome.tickets:
                    waiting = outcome.tickets
                    break
        for node in kept:
            forest.offer(node)
        if pool.num_free >= wanted:
            return ()
        return tuple(dict.fromkeys((*self._holding(component, tier), *waiting)))

    def _holding(self, component: int, tier: Tier) -> tuple[TicketId, ...]:
        """Transfers that keep payload in the tier until they end; those that free slots here first."""
        sharers = self._forest.sharers(component, tier)
        freeing: list[TicketId] = []
        pinning: list[TicketId] = []
        for ticket in self._forest.tickets.values():
            if not ticket.pins_source:
                continue
            frees = ticket.leaves and ticket.component in sharers and ticket.source == tier
            (freeing if frees else pinning).append(ticket.id)
        return (*freeing, *pinning)

    def trim(self, node: Node, component: int, tier: Tier, short: int) -> Node:
        """Cut so that only the tail pages that are needed go, and no more at once than L2 can take."""
        forest = self._forest
        if not forest.rules[component].is_prefix:
            return node
        pages = len(node.tokens) // forest.page_size
        wanted = pages if forest.config.granularity == "leaf" else min(pages, short)
        spare = forest.num_spare_pages(node)
        if spare:
            wanted = min(wanted, spare)  # what stands before the tail has a rank of its own
        if tier == DEVICE and self.has_store and not (node.has(component, HOST) or node.stored[component]):
            capacity = forest.pools[component][HOST].capacity
            wanted = min(wanted, max(1, capacity - self._staging_slots(component)))
        if wanted < pages and (
            forest.may_end_at(node, pages - wanted) or not self._will_be_lost(node, component, tier)
        ):
            forest.split(node, pages - wanted)
        return node

    def _will_be_lost(self, node: Node, component: int, tier: Tier) -> bool:
        """Whether no other tier has this payload when it has left this one."""
        held = node.slots[component]
        if node.stored[component] or held[HOST if tier == DEVICE else DEVICE] is not None:
            return False
        if tier == HOST:
            return not (self.has_store and self.goes_to_store(node, component, False))
        return not self._forest.pools[component][HOST].capacity or not self._belongs_in_host(node, component)

    def _leave_device(self, node: Node, component: int) -> Blocked | None:
        """Take a victim out of L1, now or when its copy is done. None if that is under way.

        What L3 has and L2 lacks goes to L2 all the same: it is the most recently used payload that
        leaves L1, and L2 is where it is looked for next. Only if L2 has no room does it go at once.
        """
        forest = self._forest
        if node.slots[component][HOST] is not None:
            self.drop(node, component, DEVICE, Cause.DEMOTE)
            return None
        rule = forest.rules[component]
        stored = node.stored[component]
        has_lower_kids = rule.is_prefix and node.kids[component][HOST] > 0
        if has_lower_kids or (
            self._belongs_in_host(node, component) and not self._is_declined(node, component)
        ):
            blocked = self._demote(node, component)
            if blocked is None:
                return None
            if has_lower_kids or (blocked.tickets and not stored):
                return blocked
        self.drop(node, component, DEVICE, Cause.DEMOTE if stored else Cause.EVICT)
        return None

    def _belongs_in_host(self, node: Node, component: int) -> bool:
        """Whether there is an L2, this payload is worth a place in it, and the write policy lets it in at all."""
        if not self.has_host or self._forest.is_dead_weight(node, component):
            return False
        return self._forest.config.write != SELECTIVE or node.uses >= SELECTIVE_USES

    def _is_declined(self, node: Node, component: int) -> bool:
        """Whether a full L2 would lose for it what goes after it. What L3 lacks has to go through L2."""
        forest = self._forest
        if (
            forest.config.admission != "ranked"
            or (self.has_store and not node.stored[component])
            or forest.pools[component][HOST].num_free >= forest.num_slots(node, component)
        ):
            return False
        found = forest.pop_candidate(component, HOST)
        if found is None:
            return False
        first, i = found
        queue = forest.queues[i][HOST]
        # As it would stand in L2 alone; as in L3 it is no duplicate there.
        is_first = forest.queues[component][STORE].rank(node)[:2] < queue.rank(first)[:2]
        queue.offer(first)
        return is_first

    def _demote(self, node: Node, component: int) -> Blocked | None:
        """Copy down and leave at commit. None if begun; no tickets if there is no way."""
        forest = self._forest
        if not self.base_is_near(node, component):
            return Blocked()
        wanted = forest.num_slots(node, component) + self._staging(node, component)
        waiting = self._host_room(node, component, wanted)
        if forest.pools[component][HOST].num_free < wanted:
            return Blocked(waiting)
        self.begin_backup(component, [node], leaves=True)
        for dependent in self._dependents(component):
            slots = node.slots[dependent]
            if slots[DEVICE] is None or slots[HOST] is not None or node.stored[dependent]:
                continue
            need = forest.num_slots(node, dependent) + self._staging(node, dependent)
            self._host_room(node, dependent, need)
            if forest.pools[dependent][HOST].num_free >= need:
                self.begin_backup(dependent, [node], leaves=True)
        return None

    def base_is_near(self, node: Node, component: int) -> bool:
        """A dependent may enter L2 only while what it depends on is in L1 or L2."""
        return all(
            node.slots[base][HOST] is not None or node.slots[base][DEVICE] is not None
            for base in self._forest.rules[component].depends_on
        )

    def _staging(self, node: Node, component: int) -> int:
        """Slots of L2 to leave free when this node goes there: those its path needs on its way to L3."""
        staging = self._staging_slots(component)
        for place in node.up() if staging else ():
            if place is node and self._forest.rules[component].is_prefix:
                continue
            if self.storer.is_stored(place):
                break
            for i in self._forest.prefixes:
                if place.slots[i][HOST] is None and not place.stored[i] and (i, HOST) not in place.incoming:
                    return staging
        return 0

    def _staging_slots(self, component: int) -> int:
        forest = self._forest
        if not self.has_store:
            return 0
        pools = [forest.pools[i][HOST] for i in forest.sharers(component, HOST) if i in forest.prefixes]
        units = sum(max(1, pool.capacity // STAGING_SHARE) * pool.cost for pool in pools if pool.capacity > 1)
        return -(-units // forest.pools[component][HOST].cost)

    def _host_room(self, node: Node, component: int, wanted: int) -> tuple[TicketId, ...]:
        """Make room for what the node has, but not from the node: it may hang on what it has there."""
        if self._forest.pools[component][HOST].num_free >= wanted:
            return ()
        return self._room_beside(frozenset((node,)), component, wanted)

    def _host_room_beside(self, node: Node, component: int, wanted: int) -> None:
        """Make room, but not from the path to ``node`` itself.

        A prefix in L2 is worth more than its suffix, unless L3 has it.
        """
        self._room_beside(
            frozenset(place for place in node.up() if not place.stored[component]), component, wanted
        )

    def _room_beside(self, shielded: frozenset[Node], component: int, wanted: int) -> tuple[TicketId, ...]:
        forest = self._forest
        outer, forest.shielded = forest.shielded, shielded.union(forest.shielded)
        waiting = self.make_room(component, HOST, wanted)
        forest.shielded = outer
        for place in shielded:
            forest.offer(place)
        return waiting

    def _leave_host(self, node: Node, component: int) -> Blocked | None:
        """Take a victim out of L2, now or when L3 has it. None if that is under way."""
        forest = self._forest
        if node.stored[component]:
            unsaved = self.unsaved(node, component)
            if unsaved:
                return Blocked(tuple(self.storer.begin_store(dependent, node) for dependent in unsaved))
            self.drop(node, component, HOST, Cause.DEMOTE)
            return None
        is_duplicate = forest.rules[component].is_duplicate(node, HOST)
        if self._is_queued(node, component):
            assert node.parent is not None
            return Blocked(() if is_duplicate else (node.parent.incoming[component, STORE],))
        if self.has_store and self.goes_to_store(node, component, is_duplicate):
            tickets = self.storer.request_store(node, as_victim=True)
            begun = node.incoming.get((component, STORE))
            if begun is not None:
                self._mark_leaving(begun)
                return None
            if tickets:
                return Blocked(tickets)
        self.lose(node, component)
        return None

    def lose(self, node: Node, component: int) -> None:
        """L2 gives up what L3 does not have."""
        forest = self._forest
        if self.has_store and node.slots[component][DEVICE] is None and is_unwanted(forest, node):
            forest.counters["stores_declined"] += forest.num_slots(node, component)
        self.drop(node, component, HOST, Cause.EVICT)

    def goes_to_store(self, node: Node, component: int, is_duplicate: bool) -> bool:
        """Must this victim be in L3 before L2 may lose it?

        A duplicate loses nothing, but what hangs below it in L2 could not be stored without it.
        """
        if self._forest.is_dead_weight(node, component):
            return False
        if is_duplicate:
            return node.kids[component][HOST] > 0 and self._forest.rules[component].is_prefix
        return node.wants_store or (self.writes_back and not is_unwanted(self._forest, node))

    def unsaved(self, node: Node, component: int) -> list[int]:
        """What would leave L2 together with this payload, has to be in L3 before, and can be written now."""
        if not self.has_store or node.store_failures or node.slots[component][DEVICE] is not None:
            return []
        return [
            dependent
            for dependent in self._dependents(component)
            if node.slots[dependent][HOST] is not None
            and not node.stored[dependent]
            and (dependent, STORE) not in node.incoming
            and all(node.stored[base] for base in self._forest.rules[dependent].depends_on)
            and self.goes_to_store(node, dependent, False)
        ]

    def _mark_leaving(self, ticket_id: TicketId) -> None:
        ticket = self._forest.tickets[ticket_id]
        if not ticket.leaves:
            ticket.leaves = True
            for part in ticket.parts:
                self._forest.leaving[ticket.component][HOST] += part.num_slots

    def _is_queued(self, node: Node, component: int) -> bool:
        """Waits for its parent to arrive in L3; it must not leave L2 before it got there itself."""
        parent = node.parent
        return (
            node.wants_store
            and not node.stored[component]
            and parent is not None
            and (component, STORE) in parent.incoming
        )

    def leave(self, node: Node, component: int, tier: Tier) -> None:
        """A demotion's copy arrived: give up the upper copy, unless something that would go along is not safe."""
        unsaved = self.unsaved(node, component) if tier == HOST else ()
        if not unsaved:
            self.drop(node, component, tier, Cause.DEMOTE)
        for dependent in unsaved:
            self.storer.begin_store(dependent, node)

    def drop(self, node: Node, component: int, tier: Tier, cause: Cause) -> None:
        """Payload leaves the tier, and takes along what is worth nothing without it."""
        forest = self._forest
        forest.detach(node, component, tier, cause)
        for dependent in self._dependents(component):
            held = node.slots[dependent]
            gone = node.slots[component][DEVICE] is None and node.slots[component][HOST] is None
            for place in (DEVICE, HOST):
                if held[place] is None or node.pins[place] or not (gone or place == tier == DEVICE):
                    continue
                if (
                    place == DEVICE
                    and not gone
                    and held[HOST] is None
                    and self._demote_dependent(node, dependent)
                ):
                    continue
                lower = place == DEVICE and held[HOST] is not None
                kept = not gone and (lower or node.stored[dependent])
                forest.detach(node, dependent, place, Cause.DEMOTE if kept else Cause.CASCADE)
        if node.fastest(component) is None:
            for dependent in self._dependents(component):
                if (dependent, STORE) not in node.incoming:
                    forest.set_stored(node, dependent, False, Cause.CASCADE)

    def _demote_dependent(self, node: Node, component: int) -> bool:
        if node.stored[component] or not self._belongs_in_host(node, component):
            return False
        return self._demote(node, component) is None

    def _dependents(self, component: int) -> list[int]:
        return [i for i, rule in enumerate(self._forest.rules) if component in rule.depends_on]

    def forget_beliefs(self) -> None:
        """Keep what the tree remembers of L3 within its limit."""
        forest = self._forest
        while forest.num_stored_pages > forest.config.max_stored_pages:
            components = range(forest.num_components)
            popped = (forest.pop_candidate(i, STORE) for i in components)
            found = next((each for each in popped if each is not None), None)
            if found is None:
                return
            forest.counters["beliefs_forgotten"] += 1
            for i in components:
                forest.set_stored(found[0], i, False, Cause.EVICT)

    # ---- copying down ------------------------------------------------------------------------
    def after_use(self, node: Node) -> None:
        """A request published or used the path to ``node``: copy down what the policy asks for."""
        if node.is_root or not self.has_host or self.writes_back or self._forest.config.pauses_writes:
            return
        if self._forest.config.write == SELECTIVE and node.uses < SELECTIVE_USES:
            return
        self.backup_path(node)
        if self.has_store:
            self.storer.request_store(node)

    def backup_path(self, node: Node) -> tuple[TicketId, ...]:
        """Copy to L2 what of the path is nowhere but in L1, parents first.

        A child is not backed up before its parent is in L2 or L3: where L2 has no room, the rest of
        the path stays in L1 only.
        """
        forest = self._forest
        begun: list[TicketId] = []
        for i in forest.bases_first:
            rule = forest.rules[i]
            missing: list[Node] = []
            first = rule.span(node.end)
            for place in node.up():
                if rule.keeps_pages and place.end <= first:
                    break
                held = place.slots[i]
                lower = held[HOST] is not None or place.stored[i]
                if rule.is_prefix and lower:
                    break
                if held[DEVICE] is not None and not lower and (i, HOST) not in place.incoming:
                    missing.append(place)
                if not rule.keeps_pages:
                    break
            missing.reverse()
            if rule.depends_on:
                missing = [place for place in missing if self._will_be_in_host(place, i)]
            ready = self.with_room(i, missing)
            if ready:
                begun.append(self.begin_backup(i, ready))
        return tuple(begun)

    def _will_be_in_host(self, node: Node, component: int) -> bool:
        return all(
            node.slots[base][HOST] is not None or (base, HOST) in node.incoming
            for base in self._forest.rules[component].depends_on
        )

    def with_room(self, component: int, nodes: Sequence[Node]) -> list[Node]:
        """The leading nodes that L2 has room for; of a path also the leading pages of the next."""
        forest = self._forest
        wanted = sum(forest.num_slots(node, component) for node in nodes)
        if not wanted:
            return []
        kept = self._staging(nodes[0], component)
        if forest.pools[component][HOST].num_free < wanted + kept:
            self._host_room_beside(nodes[-1], component, wanted + kept)
        return self.fitting(component, nodes, forest.pools[component][HOST].num_free - kept)

    def fitting(self, component: int, nodes: Sequence[Node], free: int) -> list[Node]:
        """The leading nodes that ``free`` slots hold; of a path also the leading pages of the next."""
        forest = self._forest
        ready: list[Node] = []
        for node in nodes:
            need = forest.num_slots(node, component)
            if need > free:
                forest.counters["backups_refused"] += 1
                if free > 0 and forest.rules[component].is_prefix:
                    ready.append(forest.split(node, free))
                break
            free -= need
            ready.append(node)
        return ready

    def begin_backup(self, component: int, nodes: Sequence[Node], *, leaves: bool = False) -> TicketId:
        """Copy payload from L1 to L2; with ``leaves`` L1 gives it up at commit."""
        forest = self._forest
        parts: list[Part] = []
        sources: list[Slots] = []
        for node in nodes:
            held = node.slots[component][DEVICE]
            assert held is not None
            target = forest.pools[component][HOST].allocate(len(held))
            parts.append(Part(node, target, len(held)))
            sources.append(held)
        ticket = forest.open_ticket(Kind.BACKUP, component, parts, leaves=leaves)
        forest.actions.append(
            Copy(
                ticket.id,
                forest.specs[component].name,
                DEVICE,
                join(sources),
                HOST,
                join([part.target for part in parts if part.target is not None]),
            )
        )
        return ticket.id


def join(runs: Sequence[Slots]) -> Slots:
    """Slots of several runs as one array."""
    return np.concatenate(runs) if len(runs) != 1 else runs[0].copy()
