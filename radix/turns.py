"""Who used a node last, and what the caller thinks that is worth.

A *turn* is a lease as the tree remembers it once it has ended: the nodes that no later lease used. There
are never more turns than nodes and open leases. What supersedes a turn, and when it loses worth, is the
business of the caller, who is told which turns are over; here a worth is a number.

**Grace.** Where recency orders, what more than one session used counts as used later than it was: by so many
times the age at which the rest leaves now. So it stays if it is used again within that time, and what was
popular once goes at last; and where grace leaves the rest no time to be used again, grace shrinks by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hicache.radix.node import NO_TURN, Node
from hicache.types import (
    MOST_WORTH,
    POPULAR_WORTH,
    RECENCY_WORTH,
    SHARED_WORTH,
    LeaseId,
    NodeId,
    Regard,
    SessionId,
    Tier,
)

SHARED_BONUS = 8
"""What a node of several sessions is worth more: with the hazard index of ``session`` one octave."""
SHARED_GRACE, POPULAR_GRACE = 4, 64
"""Ages: what is shared is kept so much longer, by the range of its turn's worth."""
AGE_SHIFT = 4
"""A new age counts for a sixteenth in the smoothed one."""


@dataclass(slots=True)
class Turn:
    """One lease's nodes. ``MOST_WORTH`` until it is rated: a request at work goes last."""

    session: SessionId | None = None
    worth: int = MOST_WORTH
    regard: Regard = Regard.PLAIN
    grace: int = 0  # of what is shared, as a count of the tree's operations
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
        # By tier, how long ago what goes first and is not shared was used: smoothed, in 16ths of an operation.
        self._ages = {Tier.DEVICE: 0, Tier.HOST: 0}

    def open(self, lease: LeaseId, session: SessionId | None, regard: Regard) -> None:
        """A lease begins, to be regarded so until it is rated."""
        if self.is_on:
            self.by_lease[lease] = Turn(session, regard=regard)

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

    def regard(self, lease: LeaseId) -> Regard:
        """How the turn's pages are to be regarded; plain where there is none."""
        turn = self.by_lease.get(lease)
        return Regard.PLAIN if turn is None else turn.regard

    def nodes_of(self, lease: LeaseId) -> list[Node]:
        """What the turn was the last to use, by number."""
        turn = self.by_lease.get(lease)
        return [] if turn is None else [turn.nodes[number] for number in sorted(turn.nodes)]

    def worth(self, node: Node) -> int:
        turn = self.by_lease.get(node.turn)
        if turn is None or not turn.worth:
            return 0
        return turn.worth + SHARED_BONUS * (turn.worth < RECENCY_WORTH and node.is_shared)

    def grace(self, node: Node) -> int:
        """By how much later the node counts as used."""
        turn = self.by_lease.get(node.turn)
        return turn.grace if turn is not None and node.is_shared else 0

    def learn_age(self, node: Node, tier: Tier, worth: int, age: int) -> None:
        """The node is what goes first in the tier, and was not used for so long.

        Also where recency does not order, so that what is shared has its grace from the first on when it does.
        """
        if 0 < worth <= MOST_WORTH and not node.is_shared and tier in self._ages:
            self._ages[tier] += age - (self._ages[tier] >> AGE_SHIFT)

    def _grace_of(self, worth: int) -> int:
        if worth < SHARED_WORTH:
            return 0
        num_ages = POPULAR_GRACE if worth >= POPULAR_WORTH else SHARED_GRACE
        return num_ages * max(self._ages.values()) >> AGE_SHIFT

    def rate(self, lease: LeaseId, worth: int, regard: Regard) -> Iterable[Node]:
        """Set what a turn is worth, nothing if it is over; returns the nodes whose rank fell, by number."""
        turn = self.by_lease.get(lease)
        if turn is None:
            if self.is_on:
                self._over.append(lease)
            return ()
        before = turn.worth, turn.grace
        turn.worth, turn.grace, turn.is_rated = worth, self._grace_of(worth), True
        turn.regard = regard if worth else Regard.OVER
        fell = turn.worth < before[0] or turn.grace < before[1]
        return self.nodes_of(lease) if fell else ()
