"""What changes to a serving cache report; see ``hicache.admin``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClearReport:
    """What went.

    Args:
        slots: pages and states that went, by tier (``device``, ``host``, ``store``) and component. Where
            everything was cleared ``store`` is one number, under ``""``: pages of all stores.
        kept_slots: what open leases still held when the time was over; it goes when it is cleared again.
        undeleted_pages: what L3 may still have: a deletion failed, took too long, or was dropped, because too many
            were queued.
    """

    slots: Mapping[str, Mapping[str, int]]
    kept_slots: int
    undeleted_pages: int = 0

    @property
    def is_complete(self) -> bool:
        return not (self.kept_slots or self.undeleted_pages)


@dataclass(frozen=True, slots=True)
class CapacityReport:
    """Slots in use by component before and after, and whether the new number is reached.

    A pool that is full of locked payload gets there as leases end. ``freed_bytes`` is what went back to the
    system: of L2, where it is not pinned.
    """

    before: Mapping[str, int]
    after: Mapping[str, int]
    is_reached: bool
    freed_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StoreReport:
    """The stores of L3 by name, in the order in which they are asked."""

    stores: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """What changed: key under ``policy`` to (before, after)."""

    changed: Mapping[str, tuple[object, object]]
