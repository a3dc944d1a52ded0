"""Which pages a store holds, what they cost, and which go first: the rules, no bytes.

One page is in one of four states, and counts against the capacity in all of them::

               reserve                 commit                   take, evict
    (absent) ──────────▶ RESERVED ──────────────▶ PRESENT ◀──────────────▶ LEAVING
        ▲                    │        add ───────▶   │      restore           │
        └────────────────────┴───────────────────────┴────────────────────────┘
                                     drop

The order of eviction is LRU among *leaves*: pages with no resident child. A page's recency is the
latest use of itself or of anything that hung below it: when a parent's last child goes, the parent
inherits the child's recency. So a use of a page never leaves its ancestors less recent than it, and
costs O(1) however deep the page is; choosing a victim costs O(log n).

How a page is *regarded* goes before its use; recency holds both. A use makes a page plain again that was less::

    first to go  | OVER | LOW | PLAIN | HIGH | KEPT |  last to go; each by its last use

Of what hangs below it a parent inherits the use, and a regard that is not above plain and not below its own.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from hicache.errors import ProtocolError
from hicache.types import PageKey, Regard

USE_BITS = 60
"""A recency is a regard, and below it so many bits for when the page was used: more than there are ticks."""


class PageEntry(NamedTuple):
    """One page: its key, the page it hangs under, what it costs in bytes, and where it lies.

    A tuple, since a store makes a million of them when it opens. ``place`` means something to the
    store alone.
    """

    key: PageKey
    parent: PageKey | None
    size_bytes: int
    place: int = 0


class Outcome(Enum):
    """What became of a request for room."""

    GRANTED = "granted"
    """Room is reserved; first remove the victims, then write, then commit (or drop)."""
    PRESENT = "present"
    """The page is there already and counts as used now."""
    BUSY = "busy"
    """The page is being written, is being removed, or is not ours to overwrite; nothing changed."""
    REFUSED = "refused"
    """There is no room for it, whatever may be evicted; nothing changed."""


class Admission(NamedTuple):
    """The answer to ``reserve``. ``victims``: LEAVING now, in order of removal, suffix first."""

    outcome: Outcome
    victims: tuple[PageEntry, ...] = ()


class _State(Enum):
    RESERVED = 0
    PRESENT = 1
    LEAVING = 2


class _Page:
    __slots__ = ("entry", "in_heap", "readable", "recency", "state")

    def __init__(self, entry: PageEntry, state: _State, recency: int) -> None:
        self.entry = entry
        self.state = state
        self.recency = recency
        self.readable = True
        self.in_heap = False


def _recency(page: _Page) -> int:
    return page.recency


def _with_use(recency: int, tick: int) -> int:
    """The recency of a page that is used now."""
    return (max(recency >> USE_BITS, Regard.PLAIN) << USE_BITS) + tick


def _inherited(own: int, below: int) -> int:
    """The recency of a page when one with recency ``below``, which hung below it, goes."""
    regard = min(below >> USE_BITS, max(own >> USE_BITS, Regard.PLAIN))
    return max(own, (regard << USE_BITS) + below % (1 << USE_BITS))


class PageIndex:
    """Keys, sizes, parents and recency of a store's pages under a hard limit in bytes.

    Args:
        capacity_bytes: what all pages together may cost; None for no limit.

    *Thread*: any; every call takes one short lock and does no I/O.
    """

    def __init__(self, capacity_bytes: int | None) -> None:
        if capacity_bytes is not None and capacity_bytes < 0:
            raise ValueError(f"capacity_bytes is {capacity_bytes}, 0 or more expected")
        self.capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._pages: dict[PageKey, _Page] = {}
        self._num_children: dict[PageKey, int] = {}  # by the parent's key, whether it is there or not
        # Leaves. Each has an entry whose recency is its own or lags behind it; one that leads, from when
        # the page was regarded more highly, means nothing.
        self._heap: list[tuple[int, PageKey, _Page]] = []
        self._clock = 0
        self._used_bytes = 0
        self._outside_bytes = 0
        self._num_present = 0

    # ---- questions -------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """How many pages are PRESENT."""
        return self._num_present

    @property
    def used_bytes(self) -> int:
        """Bytes of all pages, in every state."""
        return self._used_bytes

    def find(self, key: PageKey) -> PageEntry | None:
        """The page if it may be read: PRESENT and not hidden."""
        with self._lock:
            page = self._pages.get(key)
            if page is None or page.state is not _State.PRESENT or not page.readable:
                return None
            return page.entry

    def knows(self, key: PageKey) -> bool:
        """Whether the page is here in any state."""
        with self._lock:
            return key in self._pages

    def is_reserved(self, key: PageKey) -> bool:
        """Whether room is reserved for the page and it is not committed yet."""
        with self._lock:
            page = self._pages.get(key)
            return page is not None and page.state is _State.RESERVED

    def entries(self) -> list[PageEntry]:
        """All PRESENT pages, in no order."""
        with self._lock:
            return [page.entry for page in self._pages.values() if page.state is _State.PRESENT]

    def by_recency(self) -> list[PageEntry]:
        """All PRESENT pages, least recently used first."""
        with self._lock:
            present = [page for page in self._pages.values() if page.state is _State.PRESENT]
        present.sort(key=_recency)
        return [page.entry for page in present]

    def entry_of(self, key: PageKey) -> PageEntry | None:
        """The page in whatever state it is, hidden or not."""
        with self._lock:
            page = self._pages.get(key)
            return None if page is None else page.entry

    # ---- changes ---------------------------------------------------------------------------------------------

    def touch(self, key: PageKey) -> None:
        """Make a page the most recent one; its ancestors follow (see the module's head)."""
        with self._lock:
            page = self._pages.get(key)
            if page is not None:
                page.recency = _with_use(page.recency, self._tick())

    def hint(self, keys: Iterable[PageKey], regard: Regard) -> None:
        """Have pages go among those that are regarded so; of pages that are not here nothing is remembered."""
        with self._lock:
            for key in keys:
                page = self._pages.get(key)
                if page is None:
                    continue
                before = page.recency
                page.recency = (regard << USE_BITS) + before % (1 << USE_BITS)
                if page.recency < before and page.in_heap:
                    heapq.heappush(self._heap, (page.recency, key, page))
            if len(self._heap) > 2 * len(self._pages) + 64:
                self._rebuild_heap()

    def reserve(self, key: PageKey, parent: PageKey | None, size_bytes: int) -> Admission:
        """Ask for room for one page and choose who leaves for it: all that is needed, or nobody.

        The page's ancestors are never chosen. A page whose parent is not here is of no use until
        that is put: it may take free room but makes nobody leave.

        *Changes*: GRANTED: the page is RESERVED, the victims are LEAVING.
        *Caller guarantees*: victims are removed from the medium and dropped (or restored) before
        anything is written; every reservation ends in ``commit`` or ``drop``.
        """
        with self._lock:
            known = self._pages.get(key)
            if known is not None:
                if known.state is not _State.PRESENT or not known.readable:
                    return Admission(Outcome.BUSY)
                known.recency = _with_use(known.recency, self._tick())
                return Admission(Outcome.PRESENT)
            victims: list[PageEntry] = []
            if self.capacity_bytes is not None:
                if size_bytes > self.capacity_bytes:
                    return Admission(Outcome.REFUSED)
                missing_bytes = self._used_bytes + self._outside_bytes + size_bytes - self.capacity_bytes
                if missing_bytes > 0:
                    if self._is_orphan(parent):
                        return Admission(Outcome.REFUSED)
                    chosen = self._choose_victims(missing_bytes, protected=parent)
                    if chosen is None:
                        return Admission(Outcome.REFUSED)
                    victims = chosen
            self._insert(PageEntry(key, parent, size_bytes), _State.RESERVED)
            return Admission(Outcome.GRANTED, tuple(victims))

    def commit(self, key: PageKey, place: int = 0) -> None:
        """A reserved page is on the medium now, at ``place``: PRESENT, and the most recent one."""
        with self._lock:
            page = self._expect(key, _State.RESERVED)
            if place:
                page.entry = PageEntry(page.entry.key, page.entry.parent, page.entry.size_bytes, place)
            page.recency = _with_use(page.recency, self._tick())
            self._become_present(page)

    def add(self, entry: PageEntry) -> bool:
        """Take in a page that was found on the medium, as the most recent one; False if known.

        The capacity is not looked at: the page is there. The next reservation makes up for it.
        """
        with self._lock:
            if entry.key in self._pages:
                return False
            self._become_present(self._insert(entry, _State.PRESENT))
            return True

    def load(self, entries: Iterable[PageEntry]) -> None:
        """Take in many pages at once, least recent first; of two with one key the later counts."""
        with self._lock:
            pages, children = self._pages, self._num_children
            clock, used_bytes = self._clock, self._used_bytes
            num_before = len(pages)
            for entry in entries:
                clock += 1
                key, parent, size_bytes, _ = entry
                if key in pages:
                    page = pages[key]
                    used_bytes -= page.entry.size_bytes
                    self._release_child(page.entry.parent)
                    page.entry, page.recency = entry, clock
                else:
                    pages[key] = _Page(entry, _State.PRESENT, clock)
                used_bytes += size_bytes
                if parent is not None:
                    children[parent] = children.get(parent, 0) + 1
            self._clock, self._used_bytes = clock, used_bytes
            self._num_present += len(pages) - num_before
            self._heap = [
                (page.recency, key, page)
                for key, page in pages.items()
                if page.state is _State.PRESENT and key not in children
            ]
            for page in pages.values():
                page.in_heap = False
            for _, _, page in self._heap:
                page.in_heap = True
            heapq.heapify(self._heap)

    def set_outside(self, num_bytes: int) -> None:
        """How much of the capacity is taken by what is not in the index: others' pages to come."""
        with self._lock:
            self._outside_bytes = num_bytes

    def take(self, key: PageKey, *, only: PageEntry | None = None) -> PageEntry | None:
        """Begin to remove a PRESENT page (LEAVING); None if there is none.

        Args:
            only: what ``find`` gave; if the page was removed or put anew since, nothing is taken.
        """
        with self._lock:
            page = self._pages.get(key)
            if page is None or page.state is not _State.PRESENT:
                return None
            if only is not None and page.entry is not only:
                return None
            self._leave(page)
            return page.entry

    def restore(self, key: PageKey) -> None:
        """A LEAVING page could not be removed: PRESENT again, and the most recent one."""
        with self._lock:
            page = self._expect(key, _State.LEAVING)
            self._count_child(page.entry.parent)
            page.recency = _with_use(page.recency, self._tick())
            self._become_present(page)

    def drop(self, key: PageKey) -> PageEntry | None:
        """Forget a page that is not on the medium (any more); its bytes are free. None if unknown."""
        with self._lock:
            page = self._pages.pop(key, None)
            if page is None:
                return None
            if page.state is _State.PRESENT:
                self._num_present -= 1
            if page.state is not _State.LEAVING:
                self._uncount_child(page)
            self._used_bytes -= page.entry.size_bytes
            return page.entry

    def hide(self, key: PageKey) -> None:
        """Keep counting a page that is there but cannot be read; it can still be evicted."""
        with self._lock:
            page = self._pages.get(key)
            if page is not None:
                page.readable = False

    def evict(self, missing_bytes: int, *, protected: PageKey | None = None) -> tuple[PageEntry, ...]:
        """Choose least recent leaves that free ``missing_bytes``; LEAVING now, in order of removal.

        All that is needed or, when not everything together suffices, none.

        Args:
            protected: this page and its ancestors stay.
        """
        with self._lock:
            return tuple(self._choose_victims(missing_bytes, protected=protected) or ())

    def check_integrity(self) -> list[str]:
        """Recount everything; one sentence for each thing found wrong."""
        with self._lock:
            findings = []
            used_bytes = sum(page.entry.size_bytes for page in self._pages.values())
            if used_bytes != self._used_bytes:
                findings.append(f"used bytes are {self._used_bytes}, pages sum to {used_bytes}")
            present = [page for page in self._pages.values() if page.state is _State.PRESENT]
            if len(present) != self._num_present:
                findings.append(f"{self._num_present} pages are counted, {len(present)} are present")
            children: dict[PageKey, int] = {}
            for page in self._pages.values():
                if page.entry.parent is not None and page.state is not _State.LEAVING:
                    children[page.entry.parent] = children.get(page.entry.parent, 0) + 1
            if children != self._num_children:
                findings.append("counts of children differ from the pages")
            queued = {id(page) for recency, _, page in self._heap if recency <= page.recency}
            findings.extend(
                f"leaf {page.entry.key.hex()} can never be evicted"
                for page in present
                if page.entry.key not in children and id(page) not in queued
            )
            return findings

    # ---- helpers; the lock is held ---------------------------------------------------------------------------

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _expect(self, key: PageKey, state: _State) -> _Page:
        page = self._pages.get(key)
        if page is None or page.state is not state:
            found = "absent" if page is None else page.state.name
            raise ProtocolError(f"page {key.hex()} is {found}, {state.name} expected")
        return page

    def _is_orphan(self, parent: PageKey | None) -> bool:
        if parent is None:
            return False
        page = self._pages.get(parent)
        return page is None or page.state is _State.LEAVING

    def _insert(self, entry: PageEntry, state: _State) -> _Page:
        page = _Page(entry, state, self._tick())
        self._pages[entry.key] = page
        self._used_bytes += entry.size_bytes
        self._count_child(entry.parent)
        return page

    def _become_present(self, page: _Page) -> None:
        page.state = _State.PRESENT
        self._num_present += 1
        self._offer(page)

    def _leave(self, page: _Page) -> None:
        page.state = _State.LEAVING
        self._num_present -= 1
        self._uncount_child(page)

    def _count_child(self, parent: PageKey | None) -> None:
        if parent is not None:
            self._num_children[parent] = self._num_children.get(parent, 0) + 1

    def _uncount_child(self, child: _Page) -> None:
        parent = self._pages.get(child.entry.parent) if child.entry.parent is not None else None
        if parent is not None:
            parent.recency = _inherited(parent.recency, child.recency)
        self._release_child(child.entry.parent)

    def _release_child(self, parent: PageKey | None) -> None:
        if parent is None:
            return
        self._num_children[parent] -= 1
        if self._num_children[parent] == 0:
            del self._num_children[parent]
            if (page := self._pages.get(parent)) is not None:
                self._offer(page)

    def _offer(self, page: _Page) -> None:
        """Queue a page as a candidate if it is one and is not queued yet."""
        if page.state is _State.PRESENT and not page.in_heap and page.entry.key not in self._num_children:
            page.in_heap = True
            heapq.heappush(self._heap, (page.recency, page.entry.key, page))
            if len(self._heap) > 2 * len(self._pages) + 64:
                self._rebuild_heap()

    def _rebuild_heap(self) -> None:
        """Throw out entries of pages that are gone: every n-th insertion at most, so O(1) each."""
        live = []
        for _, _, page in self._heap:
            page.in_heap = False
        for _, key, page in self._heap:
            if not page.in_heap and self._pages.get(key) is page and page.state is _State.PRESENT:
                page.in_heap = True
                live.append((page.recency, key, page))
        heapq.heapify(live)
        self._heap = live

    def _choose_victims(self, missing_bytes: int, *, protected: PageKey | None) -> list[PageEntry] | None:
        chosen: list[_Page] = []
        freed_bytes = 0
        self._count_child(protected)  # what has a child to come is no leaf
        while freed_bytes < missing_bytes:
            page = self._pop_oldest_leaf()
            if page is None:
                break
            self._leave(page)
            chosen.append(page)
            freed_bytes += page.entry.size_bytes
        if freed_bytes < missing_bytes:
            for page in reversed(chosen):
                self._count_child(page.entry.parent)
                self._become_present(page)
            chosen = []
        self._release_child(protected)
        return [page.entry for page in chosen] if freed_bytes >= missing_bytes else None

    def _pop_oldest_leaf(self) -> _Page | None:
        while self._heap:
            recency, key, page = heapq.heappop(self._heap)
            if recency > page.recency:
                continue  # from when it was regarded more highly; there is another entry
            page.in_heap = False
            if self._pages.get(key) is not page or page.state is not _State.PRESENT:
                continue
            if key in self._num_children:
                continue  # a parent; it is offered again when its last child goes
            if recency != page.recency:
                self._offer(page)  # used since it was queued
                continue
            return page
        return None
