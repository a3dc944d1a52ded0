"""The contract of an L3 store.

A store keeps payload under 32-byte page keys. It frames every page with a header (see
``hicache.tiers.framing``) and checks it on every read, so what it hands back is what was put, or a
miss. It never raises for a page it cannot serve: a failed, short or corrupt read is a miss with a
counter. It raises ``TierUnavailableError`` or ``TierTimeoutError`` only when it cannot serve at all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from hicache.errors import ProtocolError
from hicache.tiers.framing import CODEC_NONE, PageHeader, UnsupportedFormatError
from hicache.types import PageKey, Regard


@dataclass(frozen=True, slots=True)
class StoredPage:
    """One page to write.

    Args:
        key: what the page is called.
        parent: the page that must be present for this one to be of use; None for a first page.
            Stores evict children before parents. A page whose parent is not there may take free room,
            but no page is evicted for it; in one batch, what hangs below a page that failed fails too.
        component: name of the component, kept in the header.
        payload: the bytes; a view that stays valid until ``put`` returns.
        codec: how the bytes are encoded, for the header; 0 if they are not.
    """

    key: PageKey
    parent: PageKey | None
    component: str
    payload: memoryview
    codec: int = CODEC_NONE


@dataclass(frozen=True, slots=True)
class PageTarget:
    """One page to read, and the writable buffer that gets exactly its payload's length.

    Args:
        on_parent: called on a hit with the parent that the page's header names, from any thread; for
            whoever wants to put the page somewhere else.
        receive: called with the codec and the stored bytes of a page that has a codec, verified, from any
            thread; they are only lent. ``payload`` is then unspecified, and the page counts as a hit.
            Without it such a page cannot be read: a miss, counted as ``unsupported``.
    """

    key: PageKey
    component: str
    payload: memoryview
    on_parent: Callable[[PageKey | None], None] | None = None
    receive: Callable[[int, memoryview], None] | None = None

    def check(self, header: PageHeader) -> bool:
        """Whether a page with this header is what was asked for.

        Raises ``UnsupportedFormatError`` for a codec that nobody here can decode.
        """
        if header.codec == CODEC_NONE:
            return header.component == self.component and header.payload_bytes == self.payload.nbytes
        if self.receive is None:
            raise UnsupportedFormatError(f"codec {header.codec:#06x} is not known to who reads the page")
        return header.component == self.component

    def hand_over(self, header: PageHeader, stored: memoryview) -> None:
        """Tell of a hit. *Caller guarantees*: ``check`` said yes, and ``stored`` is the header's payload."""
        if header.codec != CODEC_NONE:
            assert self.receive is not None
            self.receive(header.codec, stored)
        if self.on_parent is not None:
            self.on_parent(header.parent)


class BreakerState(StrEnum):
    """Whether a store is used."""

    CLOSED = "closed"
    """It is."""
    OPEN = "open"
    """It is left alone for a while."""
    PROBING = "probing"
    """It is being tried, without anybody waiting for it."""


@dataclass(frozen=True, slots=True)
class BreakerStats:
    """What a circuit breaker did and does.

    Args:
        state: now.
        num_opened: how often it has opened.
        num_rejected: calls answered in the store's place.
        reason: why it opened last; None if it never did.
        retry_in_s: seconds until the next probe; None unless open.
    """

    state: BreakerState
    num_opened: int
    num_rejected: int
    reason: str | None
    retry_in_s: float | None


@dataclass(slots=True)
class StoreStats:
    """Monotonic counters and present gauges of one store.

    Args:
        name: what the configuration calls it, if it does.
        breaker: of this store, if it has one.
        stores: of a stack, its stores, first to last; its own counters are those of the whole.
    """

    kind: str
    num_pages: int = 0
    used_bytes: int = 0
    capacity_bytes: int | None = None
    pages_read: int = 0
    pages_written: int = 0
    pages_missed: int = 0
    pages_corrupt: int = 0
    pages_evicted: int = 0
    pages_refused: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    name: str | None = None
    breaker: BreakerStats | None = None
    stores: tuple[StoreStats, ...] = ()


class Store(ABC):
    """Batch operations on pages.

    *Thread*: all coroutines run on one event loop and must not block it; blocking work goes to the
    store's own bounded pool, at most one hop per batch. ``stats`` may be called from any thread and
    returns at once. A cancelled call leaves the store usable and no half-written page visible, and
    ends only when nothing touches the buffers it was given any more.

    *Raises*, all batch calls: ``ProtocolError`` on arguments that no store could serve (a key that is
    not 32 bytes, a read-only target), before anything is changed; ``TierUnavailableError`` if not open.
    """

    @property
    def is_private(self) -> bool:
        """Whether it was empty at ``open`` and nobody else can write to it.

        Then whoever did all the writing knows what is there, and need not ask.
        """
        return False

    @abstractmethod
    async def open(self) -> None:
        """Connect, or index what is on disk. Raises ``TierUnavailableError`` with the remedy."""

    @abstractmethod
    async def exists(self, keys: Sequence[PageKey]) -> list[bool]:
        """One answer per key, in order. A page whose header is known to be bad does not exist."""

    @abstractmethod
    async def get(self, targets: Sequence[PageTarget]) -> list[bool]:
        """Fill each target and say which ones hold verified payload now. A miss leaves the
        target's bytes unspecified.
        """

    @abstractmethod
    async def put(self, pages: Sequence[StoredPage]) -> list[bool]:
        """Write pages in order and say which ones are durable and visible now. Putting a key that
        is there already is a success. Never exceeds the capacity: evicts, or refuses.
        """

    @abstractmethod
    async def delete(self, keys: Sequence[PageKey]) -> int:
        """Remove pages, whatever they hold; how many were there."""

    async def hint(self, keys: Sequence[PageKey], regard: Regard) -> None:  # noqa: B027  most make nothing of it
        """Have these pages go before all that are regarded more highly, suffix before prefix.

        It holds until the next hint; a page that is less than plain is plain again once it is used. Nothing is
        removed, refused or pinned for it, and pages that are not there are passed over. Default: nothing.

        *Implementation must*: do no I/O for it, and tell nobody else: that this process is done with a page does
        not mean that others are.
        """

    @abstractmethod
    async def clear(self) -> int:
        """Remove all pages of this store; how many there were."""

    async def resize(self, capacity_bytes: int) -> None:
        """Hold at most so many bytes from now on; what is too much is evicted before this returns.

        *Raises*: ``ProtocolError`` for a store whose size is not its own affair.
        """
        raise ProtocolError(f"a {self.stats().kind} store has no capacity that could be changed here")

    @abstractmethod
    async def close(self) -> None:
        """Finish writing and let go of files, threads and connections. Idempotent."""

    @abstractmethod
    def stats(self) -> StoreStats:
        """A copy of the counters."""
