"""Who used a node last, and what the caller thinks that is worth.

A *turn* is a lease as the tree remembers it once it has ended: the nodes that no later lease used. There
are never more turns than nodes and open leases. What supersedes a turn, and when it loses worth, is the
business of the caller, who is told which turns are over; here a worth is a number.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hicache.radix.node import NO_TURN, Node
from hicache.types import MOST_WORTH, LeaseId, NodeId, SessionId

SHARED_BONUS = 8
"""What a node of several sessions is worth more: with the hazard index of ``session`` one octave."""


@dataclass(slots=True)
class Turn:
    """One lease's nodes. ``MOST_WORTH`` until it is rated: a request at work goes last."""

    session: SessionId | None = None
    worth: int = MOST_WORTH
    is_open: bool = True
    is_rated: bool = False
    end: int = 0  # how far what is left of it goes, in tokens from the start
    nodes: dict[NodeId, Node] = field(default_factory=dict)


class Turns:
    """All turns of a forest; a no-op unless ``is_on``."""

    def __init__(self, *, is_on: bool, page_size: int) -> None:
        self._page_size = page_size
        self.is_on = is_on
        self.by_lease: dict[LeaseId, Turn] = {}
        self._over: list[LeaseId] = []

    def open(self, lease: LeaseId, session: SessionId | None) -> None:
        if self.is_on:
            self.by_lease[lease] = Turn(session)

    def close(self, lease: LeaseId) -> None:
        """The lease has ended; its turn stays as long as it has nodes."""
        turn = self.by_lease.get(lease)
        if turn is not None:
            turn.is_open = False
            self._drop_if_over(lease, turn)

    def own(self, node: Node, lease: LeaseId) -> None:
        """``lease`` used the node last."""
        if not self.is_on or lease in (node.turn, NO_TURN):
            return
        self.disown(node)
        node.turn = lease
        turn = self.by_lease[lease]
        turn.nodes[node.id] = node
        turn.end = max(turn.end, node.end)

    def disown(self, node: Node) -> None:
        """The node leaves the tree, or changes hands."""
        turn = self.by_lease.get(node.turn)
        if turn is not None:
            turn.nodes.pop(node.id, None)
            self._drop_if_over(node.turn, turn)
            node.turn = NO_TURN

    def cut(self, node: Node) -> None:
        """The node will leave the tree: its turn goes no further than to its start."""
        turn = self.by_lease.get(node.turn)
        if turn is not None and turn.end == node.end:
            turn.end = node.start

    def end_of(self, lease: LeaseId) -> int:
        """How far what is left of a turn goes, in tokens from the start."""
        turn = self.by_lease.get(lease)
        return 0 if turn is None else turn.end

    def _drop_if_over(self, lease: LeaseId, turn: Turn) -> None:
        if not turn.nodes and not turn.is_open:
            del self.by_lease[lease]
            if turn.is_rated:  # whoever rates turns keeps them, and wants to know
                self._over.append(lease)

    def take_over(self) -> tuple[LeaseId, ...]:
        """The turns that were rated and are over since the last call, by number."""
        over, self._over = tuple(sorted(self._over)), []
        return over

    def goes_on(self, lease: LeaseId, session: SessionId | None, num_missed: int) -> bool:
        """A request of ``session`` that met the turn, but for ``num_missed`` tokens, belongs to its session.

        A request that names no session goes on with what it contains all of but the last page.
        """
        if session is None:
            return num_missed <= self._page_size
        turn = self.by_lease.get(lease)
        return turn is not None and turn.session == session

    def is_over(self, lease: LeaseId) -> bool:
        """Whether the turn was rated worth nothing."""
        turn = self.by_lease.get(lease)
        return turn is not None and turn.worth == 0

    def nodes_of(self, lease: LeaseId) -> list[Node]:
        """What the turn was the last to use, by number."""
        turn = self.by_lease.get(lease)
        return [] if turn is None else [turn.nodes[number] for number in sorted(turn.nodes)]

    def worth(self, node: Node) -> int:
        turn = self.by_lease.get(node.turn)
        if turn is None or not turn.worth:
            return 0
        return turn.worth + SHARED_BONUS * node.is_shared

    def rate(self, lease: LeaseId, worth: int) -> Iterable[Node]:
        """Set what a turn is worth; returns the nodes whose rank fell, by number."""
        turn = self.by_lease.get(lease)
        if turn is None:
            if self.is_on:
                self._over.append(lease)
            return ()
        before, turn.worth, turn.is_rated = turn.worth, worth, True
        return self.nodes_of(lease) if worth < before else ()
