"""What changes to a serving cache report; see ``hicache.admin``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClearReport:
    """What went.

    Args:
        slots: pages and states that went, by tier (``device``, ``host``, ``store``) and component. Stores that
            are emptied as a whole do not tell components apart: ``store`` says nothing then.
        kept_slots: what open leases still held when the time was over; it goes when it is cleared again.
        undeleted_pages: what L3 may still have: a deletion failed, took too long, or was dropped, because too many
            were queued.
        store_pages: pages and states that left L3, of all components.
    """

    slots: Mapping[str, Mapping[str, int]]
    kept_slots: int
    undeleted_pages: int = 0
    store_pages: int = 0

    @property
    def is_complete(self) -> bool:
        return not (self.kept_slots or self.undeleted_pages)


@dataclass(frozen=True, slots=True)
class CapacityReport:
    """Slots in use by component before and after, and whether the new number is reached.

    A pool that is full of locked payload gets there as leases end. ``freed_bytes`` is what went back to the
    system: of L2, where it is not pinned. ``warnings`` as ``config_warnings`` has them: those that are new.
    """

    before: Mapping[str, int]
    after: Mapping[str, int]
    is_reached: bool
    freed_bytes: int = 0
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StoreReport:
    """The stores of L3 by name, in the order in which they are asked, and warnings that are new."""

    stores: tuple[str, ...]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """What changed: key under ``policy`` to (before, after); and all warnings about policies, new or not.

    A policy that has no effect in this cache is warned of.
    """

    changed: Mapping[str, tuple[object, object]]
    warnings: tuple[str, ...] = ()
