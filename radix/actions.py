"""What a tree core asks the cache to do. Records only; nothing here touches bytes.

Slots and keys of one action stand in order from the root outwards, so "the first k arrived" always
names a usable prefix. Every action with a ticket is reported back exactly once, through
``TreeCore.commit`` or ``TreeCore.abort``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hicache.types import PageKey, Regard, TicketId, Tier

Slots = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Free:
    """Slots that went back to their pool's free list."""

    component: str
    tier: Tier
    slots: Slots


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """Copy slot by slot between L1 and L2, or within L1 (the claim of a state)."""

    ticket: TicketId
    component: str
    source: Tier
    source_slots: Slots
    target: Tier
    target_slots: Slots

    @property
    def num_slots(self) -> int:
        return len(self.source_slots)


@dataclass(frozen=True, slots=True, eq=False)
class Store:
    """Write host slots to L3. ``parents[i]`` is the page that must be there for ``keys[i]`` to be of use."""

    ticket: TicketId
    component: str
    keys: tuple[PageKey, ...]
    parents: tuple[PageKey | None, ...]
    slots: Slots

    @property
    def num_slots(self) -> int:
        return len(self.slots)


@dataclass(frozen=True, slots=True, eq=False)
class Fetch:
    """Read L3 pages into host slots."""

    ticket: TicketId
    component: str
    keys: tuple[PageKey, ...]
    slots: Slots

    @property
    def num_slots(self) -> int:
        return len(self.slots)


@dataclass(frozen=True, slots=True, eq=False)
class Forget:
    """Delete pages from L3."""

    component: str
    keys: tuple[PageKey, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Hint:
    """Tell L3 how these pages are regarded from now on."""

    component: str
    keys: tuple[PageKey, ...]
    regard: Regard


Ticketed = Copy | Store | Fetch
Action = Free | Copy | Store | Fetch | Forget | Hint
