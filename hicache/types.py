"""The vocabulary every layer shares: components, tiers, namespaces, ids.

Imports nothing of ours, so any module may import it. Three units never mix in one name:

* *token*: an integer id, ``0 <= id < 2**31``.
* *page*: ``page_size`` consecutive tokens.
* *slot*: the place of one page (path, window) or of one state (checkpoint) in a tier's pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NewType

NodeId = NewType("NodeId", int)
LeaseId = NewType("LeaseId", int)
TicketId = NewType("TicketId", int)
SessionId = NewType("SessionId", int)
"""0 or more for a session that a client named, below 0 for one that was inferred."""
PageKey = NewType("PageKey", bytes)
"""32 bytes: what a page is called in L3 (see ``hicache.radix.keys``)."""

MAX_TOKEN_ID = 2**31 - 1
MAX_SESSIONS = 100_000
"""Named sessions that are remembered; beyond that the least recently used are forgotten."""
MAX_SESSION_NAME = 1024
"""Characters in the name of a session, at most."""
MAX_PAGE_SIZE = 65_536
"""Tokens a page, at most: hybrid models have blocks of hundreds, so that attention's are as large as a state."""
MAX_PRIORITY = 100
DEFAULT_PRIORITY = 50
MOST_WORTH = 65535
RECENCY_WORTH = 0x8000
"""Of turns rated so or higher, all that has the same worth leaves by recency alone."""
SHARED_WORTH = 0xA000
"""Of turns rated so or higher, what is shared leaves later; see ``radix/turns.py``."""
POPULAR_WORTH = 0xC000
"""Of turns rated so or higher, much later."""
DEFAULT_TAIL_TOKENS = 1024
"""What a short chat turn computes anyway, roughly."""
NO_SLOT = -1
"""Stands in a slot array where a component keeps nothing for that page (outside a window)."""


class Regard(IntEnum):
    """How what L3 has of a page is regarded; the lower go first, and only then does the last use count."""

    OVER = -2
    """Whoever used it said to be done with it."""
    LOW = -1
    """Of a session of low priority."""
    PLAIN = 0
    """Nobody said anything of it."""
    HIGH = 1
    """Of a session of high priority, or of one that is awaited."""
    KEPT = 2
    """Of a prefix that is to be kept."""

    @classmethod
    def of_priority(cls, priority: int) -> Regard:
        """How the pages of a request of this priority are regarded if nothing else is said."""
        if priority == DEFAULT_PRIORITY:
            return cls.PLAIN
        return cls.LOW if priority < DEFAULT_PRIORITY else cls.HIGH


class Tier(IntEnum):
    """Where payload lives. The order is the order of promotion: smaller is faster."""

    DEVICE = 0
    HOST = 1
    STORE = 2


class ReuseRule(StrEnum):
    """What a component needs resident so that a prefix may be reused (DESIGN section 1)."""

    PATH = "path"
    WINDOW = "window"
    CHECKPOINT = "checkpoint"


@dataclass(frozen=True, slots=True)
class ComponentSpec:
    """One kind of payload of a model, as data.

    Args:
        name: unique within the model, for example ``full``, ``swa``, ``mamba``.
        rule: ``path``, ``window``, ``checkpoint``, or the dotted path of a
            ``hicache.radix.rules.base.Rule`` subclass.
        window_tokens: how many trailing tokens a window needs; 0 for the other rules.
        num_layers: layers that carry this payload; the payload divides evenly over them.
        bytes_per_token: over all layers; 0 for a checkpoint.
        state_bytes: one state over all layers; 0 for path and window.
    """

    name: str
    rule: str = ReuseRule.PATH
    window_tokens: int = 0
    num_layers: int = 1
    bytes_per_token: int = 0
    state_bytes: int = 0

    @property
    def is_checkpoint(self) -> bool:
        return self.rule == ReuseRule.CHECKPOINT

    def slot_bytes(self, page_size: int) -> int:
        """Bytes of one slot: a page of tokens, or one state."""
        return self.state_bytes if self.is_checkpoint else self.bytes_per_token * page_size


@dataclass(frozen=True, slots=True, order=True)
class Namespace:
    """What makes equal tokens *not* equal. ``None`` (absent) differs from ``""`` (empty).

    Model, weights and geometry are the cache's identity, not the request's; they enter the page
    keys through ``hicache.radix.keys.Identity``.
    """

    salt: str | None = None
    lora: str | None = None
    extra: str | None = None


DEFAULT_NAMESPACE = Namespace()


@dataclass(frozen=True, slots=True)
class TierTokens:
    """Tokens of one component's reused payload, by the tier they came from."""

    device: int = 0
    host: int = 0
    store: int = 0

    @property
    def total(self) -> int:
        return self.device + self.host + self.store

    def __add__(self, other: TierTokens) -> TierTokens:
        return TierTokens(self.device + other.device, self.host + other.host, self.store + other.store)
