"""What L3 declines: payload that nobody is expected to come back for.

With ``store_admission: unless_over`` a node is declined when it is over (``Forest.regard``) and nothing below it
waits for L3 or is on its way there: prefixes are persisted no later than their suffixes, so what others need
below it takes it along. A node that waits for its turn to be written stops waiting when it is over; what is
being written already is written. Nothing is remembered of it: the next request that uses the node makes it worth
writing again, and the write policy asks for that as ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.radix.node import Node
from hicache.types import Regard

if TYPE_CHECKING:
    from hicache.radix.worth import Worth

UNLESS_OVER = "unless_over"


def is_unwanted(forest: Worth, node: Node) -> bool:
    """Whether L3 is not to have the node for its own sake, nor for what hangs on it."""
    return (
        forest.config.store_admission == UNLESS_OVER
        and forest.regard(node) is Regard.OVER
        and not any(child.wants_store for child in node.children.values())
    )


def unqueue(forest: Worth, node: Node) -> None:
    """The node may be over now: if it only waits for L3, it waits no longer, nor does what waited for its sake."""
    place: Node | None = node
    while place is not None and place.wants_store and is_unwanted(forest, place):
        place.wants_store = False
        forest.soil(place)
        place = place.parent
