"""Frozen records of what changed in which tier."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hicache.types import PageKey, Tier


class ResidencyChange(StrEnum):
    STORED = "stored"
    REMOVED = "removed"


class Cause(StrEnum):
    """Why payload arrived in a tier or left it."""

    INSERT = "insert"
    BACKUP = "backup"
    LOAD = "load"
    STORE = "store"
    FETCH = "fetch"
    PROBE = "probe"
    DEMOTE = "demote"
    EVICT = "evict"
    WINDOW = "window"
    MISSING = "missing"
    CASCADE = "cascade"
    RESET = "reset"


@dataclass(frozen=True, slots=True)
class ResidencyEvent:
    """Pages of one component that arrived in a tier or left it.

    ``keys`` are the component's page keys, parents first. Replaying all events in order gives the
    residency exactly (DESIGN section 10, rule 8).
    """

    change: ResidencyChange
    tier: Tier
    component: str
    keys: tuple[PageKey, ...]
    cause: Cause
