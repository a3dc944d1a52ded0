"""From L2 to L3, parents first.

A page is written when its parent is there, from L2; what is in L1 alone passes through L2, if need be by its
staging slots (see ``demote``). A window or state is written when the path it hangs on is there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.events import Cause
from hicache.radix.actions import Store
from hicache.radix.declining import is_unwanted
from hicache.radix.forest import Forest
from hicache.radix.node import DEVICE, HOST, STORE, Node
from hicache.radix.tickets import Kind, Part
from hicache.types import PageKey, TicketId

if TYPE_CHECKING:
    from hicache.radix.demote import Demoter

FREE_AT_ONCE_TRIES = 64
"""How many candidates are looked at for one that may leave L2 without a transfer."""


class Storer:
    """Has payload written to L3.

    Args:
        demoter: makes room in L2 on the way.
    """

    def __init__(self, forest: Forest, demoter: Demoter) -> None:
        self._forest = forest
        self._demoter = demoter

    def request_store(self, node: Node, *, as_victim: bool = False) -> tuple[TicketId, ...]:
        """Have the path to ``node`` written to L3, parents first.

        Args:
            as_victim: L2 needs the node's room. Then what L3 has refused since it was last used is not
                tried again.

        Returns the transfers under way that this waits for; none if nothing can be done now.
        """
        forest = self._forest
        if not self._demoter.has_store or (not as_victim and is_unwanted(forest, node)):
            return ()
        missing: list[Node] = []
        for place in node.up():
            if not self.is_stored(place):
                missing.append(place)
            elif not forest.has_holes:
                break  # parents went first, so all above is there, too
        if as_victim and any(place.store_failures for place in (node, *missing)):
            return ()
        for place in missing:
            place.wants_store = True
            place.store_failures = 0
        top = missing[-1] if missing else None
        if top is None:
            # The path itself is there; a state or a window of this node may not be.
            node.wants_store = True
            top = node
        return self.pump_store(top)

    def is_stored(self, node: Node) -> bool:
        """Whether L3 has the node; without a path, all that any tier has of it."""
        prefixes = self._forest.prefixes
        if prefixes:
            return all(node.stored[i] for i in prefixes)
        return node.is_root or all(
            node.stored[i] or node.fastest(i) is None for i in range(self._forest.num_components)
        )

    def pump_store(self, node: Node) -> tuple[TicketId, ...]:
        """Write what of this node L3 lacks, if its parent is there; wait for L2 where needed."""
        forest = self._forest
        parent = node.parent
        if parent is None or not node.wants_store or not self._demoter.has_store:
            return ()
        if not parent.is_root and forest.prefixes and not self.is_stored(parent):
            running = (parent.incoming.get((i, STORE)) for i in forest.prefixes)
            return tuple(dict.fromkeys(ticket for ticket in running if ticket is not None))
        tickets: list[TicketId] = []
        unfinished = False
        for i in forest.bases_first:
            if node.stored[i]:
                continue
            if not all(node.stored[base] for base in forest.rules[i].depends_on):
                unfinished = True  # pumped again when what it depends on has arrived
                continue
            running_store = node.incoming.get((i, STORE))
            running_backup = node.incoming.get((i, HOST))
            if running_store is not None:
                tickets.append(running_store)
            elif node.slots[i][HOST] is not None:
                tickets.append(self.begin_store(i, node))
            elif running_backup is not None:
                tickets.append(running_backup)
                unfinished = True
            elif node.slots[i][DEVICE] is not None and i in forest.prefixes:
                # Only this node: its parents are in L3 already, so L2 need not keep them.
                self._free_at_once(i, forest.num_slots(node, i))
                ready = self._demoter.fitting(i, [node], forest.pools[i][HOST].num_free)
                if ready:
                    tickets.append(self._demoter.begin_backup(i, ready))
                    node = ready[0]  # if only its leading pages found room: the rest comes after them
                else:
                    tickets += self._passing_host()
                unfinished = True
        if not tickets and not unfinished:
            node.wants_store = False
            forest.soil(node)
        return tuple(dict.fromkeys(tickets))

    def follow_to_store(self, node: Node, component: int) -> None:
        """A window or state that reached L2 when its path had been written to L3 already goes there, too."""
        rule, held = self._forest.rules[component], node.slots[component]
        if (
            self._demoter.has_store
            and not (self._demoter.writes_back or rule.is_prefix or node.store_failures)
            and held[HOST] is not None
            and not node.stored[component]
            and all(node.stored[base] for base in rule.depends_on)
            and not is_unwanted(self._forest, node)
        ):
            node.wants_store = True

    def _free_at_once(self, component: int, wanted: int) -> None:
        """Have ``wanted`` slots of L2 free, if giving up what need not go to L3 first is enough.

        If nothing is free then, what can go to L3 without help is sent there.
        """
        forest = self._forest
        pool = forest.pools[component][HOST]
        passed: list[tuple[Node, int]] = []
        while pool.num_free < wanted and len(passed) < FREE_AT_ONCE_TRIES:
            found = forest.pop_candidate(component, HOST)
            if found is None:
                break
            passed.append(found)
            node, i = found
            stored = node.stored[i]
            is_duplicate = forest.rules[i].is_duplicate(node, HOST)
            travels = self._demoter.has_store and self._demoter.goes_to_store(node, i, is_duplicate)
            if stored and self._demoter.unsaved(node, i):
                continue
            if stored or node.store_failures or not (travels or node.wants_store):
                short = wanted * pool.cost - pool.budget.num_free
                node = self._demoter.trim(node, i, HOST, -(-short // forest.pools[i][HOST].cost))
                if stored:
                    self._demoter.drop(node, i, HOST, Cause.DEMOTE)
                else:
                    self._demoter.lose(node, i)
        for node, _ in passed:
            forest.offer(node)
        if not pool.num_free:
            ready = next((found for found in passed if self._can_be_stored(*found)), None)
            if ready is not None:
                node, i = ready
                node.wants_store = True
                self.begin_store(i, node)

    def _can_be_stored(self, node: Node, component: int) -> bool:
        parent = node.parent
        return (
            parent is not None
            and (parent.is_root or self.is_stored(parent))
            and node.slots[component][HOST] is not None
            and not node.stored[component]
            and (component, STORE) not in node.incoming
            and all(node.stored[base] for base in self._forest.rules[component].depends_on)
        )

    def _passing_host(self) -> list[TicketId]:
        """Transfers that hold payload in L2 until they end.

        Not the fetch of a window or state: its end is reported after that of its path's.
        """
        rules = self._forest.rules
        return [
            ticket.id
            for ticket in self._forest.tickets.values()
            if HOST in (ticket.source, ticket.target)
            and not (ticket.kind == Kind.FETCH and rules[ticket.component].depends_on)
        ]

    def begin_store(self, component: int, node: Node) -> TicketId:
        """Open the ticket that writes the node's pages of a component from L2 to L3."""
        forest = self._forest
        held = node.slots[component][HOST]
        assert held is not None
        part = Part(node, None, len(held))
        ticket = forest.open_ticket(Kind.STORE, component, [part])
        keys = forest.keys(node, component)
        forest.actions.append(
            Store(
                ticket.id,
                forest.specs[component].name,
                keys,
                self._parents(component, node, keys),
                held.copy(),
            )
        )
        return ticket.id

    def _parents(self, component: int, node: Node, keys: tuple[PageKey, ...]) -> tuple[PageKey | None, ...]:
        """A path page hangs on the page before it; a window page or state on its own path page."""
        forest = self._forest
        if component in forest.prefixes:
            parent = node.parent
            above = None
            if parent is not None and not parent.is_root:
                above = forest.key_of(component, forest.links(parent)[-1])
            return (above, *keys[:-1])
        if not forest.prefixes:
            return (None,) * len(keys)
        return forest.keys(node, forest.prefixes[0])[-len(keys) :]

    def persist(self) -> tuple[TicketId, ...]:
        """Begin writing everything that L3 lacks, parents first."""
        forest = self._forest
        if not self._demoter.has_store:
            return ()
        tickets: list[TicketId] = []
        pending = [child for root in forest.roots.values() for child in root.children.values()]
        while pending:
            node = pending.pop()
            lacks = any(
                not node.stored[i] and node.fastest(i) is not None for i in range(forest.num_components)
            )
            if lacks:
                node.wants_store = True
                tickets += self._persist_node(node)
            pending.extend(node.children.values())
        return tuple(dict.fromkeys(tickets))

    def retry_stores(self) -> tuple[TicketId, ...]:
        """Ask L3 again for what it did not take and L2 still has, oldest failure first."""
        forest = self._forest
        failed, forest.failed_stores = forest.failed_stores, {}
        tickets: list[TicketId] = []
        for node in failed.values():
            if node.parent is not None and any(
                held[HOST] is not None and not stored
                for held, stored in zip(node.slots, node.stored, strict=True)
            ):
                tickets += self.request_store(node)
        return tuple(dict.fromkeys(tickets))

    def _persist_node(self, node: Node) -> tuple[TicketId, ...]:
        forest = self._forest
        for i in forest.bases_first:
            rule = forest.rules[i]
            held = node.slots[i]
            alone = held[DEVICE] is not None and held[HOST] is None and not node.stored[i]
            if alone and not rule.is_prefix and (i, HOST) not in node.incoming:
                if not self._demoter.base_is_near(node, i):
                    continue
                ready = self._demoter.with_room(i, [node])
                if ready:
                    self._demoter.begin_backup(i, ready)
        return self.pump_store(node)
