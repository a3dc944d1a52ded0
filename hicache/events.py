"""Frozen records of what changed in which tier."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hicache.types import DEFAULT_NAMESPACE, Namespace, PageKey, Tier


class ResidencyChange(StrEnum):
    """What happened to pages in a tier."""

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
    CLEAR = "clear"


@dataclass(frozen=True, slots=True)
class ResidencyEvent:
    """Pages of one component that arrived in a tier or left it.

    ``keys`` are the component's page keys, parents first. Replaying all events in order gives the
    residency exactly (DESIGN section 10, rule 8).

    Args:
        parent: key of the page before the first of ``keys``; None for a prompt's first page. Like the
            two that follow it is told when something arrived, for those who do not know the tree.
        tokens: of the pages named, int32 little-endian; a state's are those of the page it follows.
        namespace: of the tokens.
    """

    change: ResidencyChange
    tier: Tier
    component: str
    keys: tuple[PageKey, ...]
    cause: Cause
    parent: PageKey | None = None
    tokens: bytes = b""
    namespace: Namespace = DEFAULT_NAMESPACE
