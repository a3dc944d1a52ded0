"""What is in which tier, and what left the last one that had it: when, and why.

Fed by residency events, so it stands above the tree and knows nothing of its shape. What left is remembered for a
bounded number of pages, oldest departures forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from hicache.clock import Clock
from hicache.events import Cause, ResidencyChange, ResidencyEvent
from hicache.types import DEFAULT_NAMESPACE, Namespace, PageKey, Tier

MAX_FIRST_PAGES = 100_000
MAX_NAMESPACES = 8
"""So many namespaces are remembered for prompts that begin alike."""


@dataclass(frozen=True, slots=True)
class Departure:
    """How a page left the last tier that had it; ``at_s`` is the clock's time when that was booked."""

    tier: Tier
    cause: Cause
    at_s: float


class Ledger:
    """Residency and departures by page key.

    Args:
        clock: gives departures their time.
        page_size: tokens a page.
        max_departures: how many to remember.

    *Thread*: one at a time; the cache's lock.
    """

    def __init__(self, clock: Clock, *, page_size: int, max_departures: int) -> None:
        self._clock = clock
        self._page_bytes = 4 * page_size
        self._max_departures = max_departures
        self._tiers: dict[PageKey, int] = {}
        self._departures: OrderedDict[PageKey, Departure] = OrderedDict()
        self._namespaces: OrderedDict[bytes, tuple[Namespace, ...]] = OrderedDict()
        self.num_forgotten = 0

    def record(self, events: Iterable[ResidencyEvent]) -> None:
        """Take over what changed."""
        for event in events:
            bit = 1 << event.tier
            if event.change is ResidencyChange.STORED:
                for key in event.keys:
                    self._tiers[key] = self._tiers.get(key, 0) | bit
                    self._departures.pop(key, None)
                if event.parent is None and event.tokens:
                    self._note_namespace(event.tokens[: self._page_bytes], event.namespace)
                continue
            departure = Departure(event.tier, event.cause, self._clock.now_s())
            for key in event.keys:
                left = self._tiers.get(key, 0) & ~bit
                if left:
                    self._tiers[key] = left
                    continue
                self._tiers.pop(key, None)
                self._departures[key] = departure
                self._departures.move_to_end(key)
        while len(self._departures) > self._max_departures:
            self._departures.popitem(last=False)
            self.num_forgotten += 1

    def is_resident(self, key: PageKey) -> bool:
        """Whether any tier has it."""
        return key in self._tiers

    def tiers_of(self, key: PageKey) -> tuple[Tier, ...]:
        """The tiers that have it, fastest first."""
        held = self._tiers.get(key, 0)
        return tuple(tier for tier in Tier if held >> tier & 1)

    def departure(self, key: PageKey) -> Departure | None:
        """How it left the last tier; None if one has it, none ever had, or that is forgotten."""
        return self._departures.get(key)

    def knows(self, key: PageKey) -> bool:
        return key in self._tiers or key in self._departures

    def namespaces(self, first_page: bytes) -> tuple[Namespace, ...]:
        """Namespaces in which prompts began with this page (int32 little-endian), oldest first."""
        return self._namespaces.get(first_page, ())

    def __len__(self) -> int:
        """Departures remembered."""
        return len(self._departures)

    def _note_namespace(self, first_page: bytes, namespace: Namespace = DEFAULT_NAMESPACE) -> None:
        seen = self._namespaces.get(first_page, ())
        if namespace not in seen:
            self._namespaces[first_page] = (*seen, namespace)[-MAX_NAMESPACES:]
        self._namespaces.move_to_end(first_page)
        if len(self._namespaces) > MAX_FIRST_PAGES:
            self._namespaces.popitem(last=False)
