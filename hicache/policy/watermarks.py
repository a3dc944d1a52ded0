"""Demotion ahead of need: below a low mark of free slots, make room up to a high one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Watermark:
    """Fractions of a pool that are to be free. Both 0: off.

    Between the two nothing happens, so that demotion goes in batches.
    """

    low: float = 0.0
    high: float = 0.0

    def wanted_free(self, *, free_slots: int, capacity_slots: int) -> int | None:
        """How many free slots to aim at now; None if there is enough."""
        if not capacity_slots or free_slots >= self.low * capacity_slots:
            return None
        return max(1, int(self.high * capacity_slots))
