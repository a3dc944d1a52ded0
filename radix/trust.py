r"""Loads that a request counts on before they have ended, so that it can compute its first layers meanwhile.

::

    settle(arriving=True)        its loads end
    lease.arriving = {T1, T2} --- commit --> as if the pages had been in L1 before
                              \-- abort ---> lease.lost_load --- next settle ---> nothing is reused

A request that has lost a load still writes into the slots it reserved, so these stay its own until its next
call: only then does it know.
"""

from __future__ import annotations

from hicache.radix.actions import Slots
from hicache.radix.forest import Forest
from hicache.radix.leases import LeaseState, Stray
from hicache.radix.node import DEVICE, Node
from hicache.radix.tickets import Part, Ticket


def on_device_or_arriving(forest: Forest, node: Node, component: int) -> bool:
    """Whether L1 has the payload or a load brings it. A state is claimed at once, so it has to be there."""
    if node.slots[component][DEVICE] is not None:
        return True
    return forest.rules[component].keeps_pages and (component, DEVICE) in node.incoming


def trust(forest: Forest, lease: LeaseState, component: int, nodes: list[Node]) -> None:
    """Have the lease count on the loads that bring these nodes' payload."""
    for node in nodes:
        ticket = node.incoming.get((component, DEVICE))
        if ticket is not None:  # a user's own rule may do without
            forest.tickets[ticket].trusted_by.add(lease.id)
            lease.arriving.add(ticket)


def arriving_slots(forest: Forest, lease: LeaseState, component: int) -> dict[int, Slots]:
    """By node id, the slots that loads which the lease counts on are filling."""
    return {
        part.node.id: part.target
        for ticket in (forest.tickets[number] for number in lease.arriving)
        if ticket.component == component
        for part in ticket.parts
        if part.target is not None
    }


def _trusting(forest: Forest, ticket: Ticket) -> list[LeaseState]:
    leases = (forest.leases.get(number) for number in sorted(ticket.trusted_by))
    return [lease for lease in leases if lease is not None and ticket.id in lease.arriving]


def kept_by_readers(forest: Forest, ticket: Ticket, part: Part) -> bool:
    """What arrived for a node that has other payload by now: whether somebody goes on reading it here."""
    readers = {lease.id for lease in _trusting(forest, ticket)}
    if not readers or part.target is None:
        return False
    forest.strays.append(Stray(ticket.component, part.target, readers))
    return True


def end_trust(forest: Forest, ticket: Ticket, *, arrived: bool) -> None:
    """The ticket has ended: its leases count on it no longer, or know that they counted in vain."""
    for lease in _trusting(forest, ticket):
        lease.arriving.discard(ticket.id)
        if not arrived:
            lease.lost_load = True
            lease.arriving.clear()


def leave_strays(forest: Forest, lease: LeaseState) -> None:
    """The lease reads nothing any more."""
    lease.arriving.clear()
    lease.lost_load = False
    for stray in forest.strays:
        stray.readers.discard(lease.id)
        if not stray.readers:
            forest.free(stray.component, DEVICE, stray.slots)
    if forest.strays:
        forest.strays = [stray for stray in forest.strays if stray.readers]
