"""What all processes at work in a disk store's folder agree on, as one of them knows it.

The journal is the truth; this is its image in memory, brought up to date before every batch. All changes
are made under the folder's lock by a process that has read to the journal's end.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import threading
from collections.abc import Iterator, Sequence

import numpy as np

from hicache.tiers.counters import StoreCounters, error_name
from hicache.tiers.disk_folder import DiskFolder, OwnerState, PrivateFolder
from hicache.tiers.extents import BLOCK_BYTES
from hicache.tiers.journal import FolderReplacedError, Journal, NewRecords, NoJournal
from hicache.tiers.journal_records import (
    KIND_GONE,
    KIND_OWNER,
    RECORD_BYTES,
    NewPage,
    Records,
    entries_of,
    gone_records,
    last_of_each_slot,
    owner_record,
    places_of,
)
from hicache.tiers.page_index import PageEntry, PageIndex
from hicache.tiers.segment_files import SegmentFiles, grain_of
from hicache.tiers.segment_slots import SegmentSlots, Slot
from hicache.types import PageKey

MAX_RECORDS = 3
"""Records of a journal for each page; it is written anew before it has more."""
INDEX_BYTES = (MAX_RECORDS + 1) * RECORD_BYTES
"""What a page costs besides its slot: its share of the journal, and of the one that takes its place."""
SPARE_RECORDS = 64
"""So many more the journal may have: a small store need not write it anew at every step."""
OVERHEAD_BYTES = 16 << 10
"""What a folder may hold over its capacity: spare records, the owners' and other small files."""


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Make millions of objects that all stay, without the collector looking at them time and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class FolderState:
    """The pages of one folder, its slots, and who is at work in it.

    Args:
        root: the folder.
        capacity_bytes: hard limit of what all processes keep in it; None for none.
        durable: fsync what a page needs before it counts as written.
        min_free_bytes: pages leave, or are refused, rather than let the file system fall below this.
        counters: where everything is counted.
        is_private: the folder is temporary and nobody else's; no journal is kept.
        direct: large pages bypass the page cache.

    *Thread*: any; calls block on the file system and on other processes (for at most 5 s).
    """

    def __init__(
        self,
        root: str,
        capacity_bytes: int | None,
        *,
        durable: bool,
        min_free_bytes: int,
        counters: StoreCounters,
        is_private: bool,
        direct: bool = False,
    ) -> None:
        self.root = root
        self.index = PageIndex(capacity_bytes)
        self.index_bytes = 0 if is_private else INDEX_BYTES
        self.files = SegmentFiles(root, unlinked=is_private, direct=direct)
        self._durable = durable
        self._min_free_bytes = min_free_bytes
        self._counters = counters
        self._is_private = is_private
        self._direct = direct
        self._journal: Journal | NoJournal = NoJournal() if is_private else Journal(root, durable=durable)
        self._folder = PrivateFolder(root) if is_private else DiskFolder(root)
        self._lock = threading.RLock()
        self._full: int | None = None  # the error by which the file system last said so
        self._generation = 0
        self._retired: list[SegmentFiles] = []
        self.slots = SegmentSlots(self.files, counters)
        self._writing_bytes = 0
        self._others: dict[int, OwnerState] = {}
        self._overtaken: dict[PageKey, PageEntry] = {}  # pages others committed while we were writing them

    # ---- life --------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Read the journal, take over what dead processes left, evict down to the capacity.

        Raises:
            OSError: the folder cannot be used.
            TierUnavailableError: it must not be used; says what to do.
        """
        with self._lock:
            self._folder.make()
            self._journal.open()
            try:
                with self._journal.locked():
                    self._folder.check_format()
                    self._folder.enter()
                    self.slots.owner = self._folder.owner
                    found = self._journal.read()
                    self._hear()
                    self._load_records(found)
                    self._shrink()
                    try:
                        self._tell()
                    except OSError as error:  # a full disk can be read, and pages of it can be removed
                        self.count_error(error)
            except BaseException:
                self._folder.leave()
                self._journal.close()
                raise

    def close(self) -> None:
        """Let go of the folder. *Caller guarantees*: no call is running."""
        with self._lock:
            self._folder.leave()
            self._journal.close()
            for files in (self.files, *self._retired):
                files.close()
            self._retired.clear()

    # ---- asking ------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Learn what other processes did; one system call if nothing. Raises ``OSError``."""
        if not self._lock.acquire(blocking=False):
            return  # whoever holds it looks as well
        try:
            found = self._journal.peek()
            if found is not None:
                self._take_in(found)
        except FolderReplacedError:
            self._start_over()
        finally:
            self._lock.release()

    def listing(self) -> list[NewPage]:
        """All pages with their component's name (its first 32 bytes), as written; oldest first.

        For a private folder, which keeps no journal, an empty list.
        """
        with self._exclusive():
            live = last_of_each_slot(self._journal.read_all())
        names = [bytes(name).decode(errors="replace") for name in live["component"].tolist()]
        entries = entries_of(live, self.index_bytes)
        return [NewPage(entry, name) for entry, name in zip(entries, names, strict=True)]

    @property
    def num_owners(self) -> int:
        """How many processes have the folder open, this one included."""
        with self._exclusive():
            return 1 + len(self._others)

    @property
    def journal_bytes(self) -> int:
        """Length of the journal."""
        return self._journal.num_records * RECORD_BYTES

    def count_error(self, error: OSError) -> None:
        """Count an error of the file system by its name; that it is full is remembered for the next page."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            self._full = error.errno
        self._counters.error(error_name(error), error)

    # ---- what others did; the folder's lock --------------------------------------------------------------

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Hold the folder's lock and know all that others did."""
        with self._lock, contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._journal.locked())
            except FolderReplacedError:
                self._start_over()
                stack.enter_context(self._journal.locked())
            self._take_in(self._journal.read())
            self._hear()
            yield

    def _hear(self) -> None:
        """Learn what other processes tell of themselves; it holds as long as the folder's lock is held."""
        self._others = self._folder.other_owners()
        read = {
            owner: state.num_records
            for owner, state in self._others.items()
            if state.journal == self._journal.inode
        }
        self.slots.heard(read)

    def _take_in(self, found: NewRecords) -> None:
        if found.num_bad:
            self._counters.error("journal", f"{found.num_bad} records of {self.root} are not whole")
        if found.is_all:
            self._take_in_all(found.records)
            return
        records = found.records
        if not len(records):
            return
        is_owner = records["kind"] == KIND_OWNER
        for record in records[is_owner]:
            self.slots.set_owner(int(record["segment"]), int(record["offset"]))
        records = records[~is_owner]
        is_gone = (records["kind"] == KIND_GONE).tolist()
        for entry, gone in zip(entries_of(records, self.index_bytes), is_gone, strict=True):
            if gone:
                self._forget(entry)
            else:
                self._learn(entry)

    def _learn(self, entry: PageEntry) -> None:
        """Another process made a page visible."""
        if self.index.add(entry):
            return
        if self.index.is_reserved(entry.key):
            self._overtaken[entry.key] = entry
            return
        known = self.index.drop(entry.key)  # the record that took it away was lost
        if known is not None and self.slots.is_ours(known.place):
            self._retain([known])
        self.index.add(entry)

    def _forget(self, gone: PageEntry) -> None:
        """Another process removed a page and punched its slot."""
        if (overtaken := self._overtaken.get(gone.key)) is not None and overtaken.place == gone.place:
            del self._overtaken[gone.key]
        known = self.index.entry_of(gone.key)
        if known is None or known.place != gone.place:
            return
        self.index.drop(gone.key)
        self.slots.punched(*self._slot(known))

    def _take_in_all(self, records: Records) -> None:
        """Another process wrote the journal anew."""
        owners = records[records["kind"] == KIND_OWNER]
        for segment, owner in zip(owners["segment"].tolist(), owners["offset"].tolist(), strict=True):
            self.slots.set_owner(segment, owner)
        self.slots.restart()
        there = entries_of(last_of_each_slot(records), self.index_bytes)
        known = {entry.key: entry for entry in self.index.entries()}
        for entry in there:
            before = known.pop(entry.key, None)
            if before is None or before.place != entry.place:
                if before is not None:
                    self._forget(before)
                self._learn(entry)
        for entry in known.values():
            self._forget(entry)

    # ---- opening -----------------------------------------------------------------------------------------

    def _start_over(self) -> None:
        """The folder was removed or replaced: forget all that is known of it and open what is there now."""
        self._counters.error("folder-replaced", f"{self.root} was removed or replaced; opening it anew")
        self._folder.leave()
        self._journal.close()
        self._retired.append(self.files)  # open until the end: others may be reading or writing there
        self._generation += 1
        self.index = PageIndex(self.index.capacity_bytes)
        self.files = SegmentFiles(self.root, unlinked=self._is_private, direct=self._direct)
        self.slots = SegmentSlots(self.files, self._counters)
        self._overtaken, self._writing_bytes = {}, 0
        self.load()

    def _load_records(self, found: NewRecords) -> None:
        """Fill an empty index and adopt the segments of the dead."""
        if found.num_bad:
            self._counters.error("journal", f"{found.num_bad} records of {self.root} are not whole")
        owners = found.records[found.records["kind"] == KIND_OWNER]
        self.slots.owners = dict(zip(owners["segment"].tolist(), owners["offset"].tolist(), strict=True))
        live = last_of_each_slot(found.records)
        segments = live["segment"]
        sizes = {segment: self.files.size(segment) for segment in np.unique(segments).tolist()}
        for segment in sizes:
            self.slots.owners.setdefault(segment, 0)
        limits = np.zeros(len(live), dtype=np.int64)
        for segment, size in sizes.items():
            limits[segments == segment] = size
        is_whole = live["offset"].astype(np.int64) + live["slot_bytes"].astype(np.int64) <= limits
        with _no_collection():
            self.index.load(entries_of(live[is_whole], self.index_bytes))
        lost = entries_of(live[~is_whole], self.index_bytes)
        if lost:
            self._counters.add(pages_corrupt=len(lost))
            self._journal.append(gone_records(lost, self.index_bytes))
        self._adopt(live[is_whole])

    def _adopt(self, live: Records) -> None:
        """Take over the segments whose owner is gone: what no page holds there is free.

        What the journal has no room for is left until there is some.
        """
        try:
            for segment in self.slots.orphans(self._others):
                mine = live[live["segment"] == segment]
                if not self.files.size(segment):
                    self.slots.forget(segment)
                    continue
                starts = np.sort(places_of(mine))
                order = np.argsort(mine["offset"])
                ends = starts + mine["slot_bytes"][order].astype(np.int64)
                grain = grain_of(int(ends[0] - starts[0])) if len(mine) else BLOCK_BYTES
                self._claim(segment, grain)
                self.slots.adopt(segment, grain, starts.tolist(), ends.tolist())
        except OSError as error:
            self.count_error(error)

    def _claim(self, segment: int, grain: int) -> None:
        """Let the journal say that a segment is ours, before it is: nobody else may make one of that number."""
        appended = self._journal.append(owner_record(segment, self._folder.owner, grain))
        if appended.error is not None:
            raise appended.error

    # ---- the bound ---------------------------------------------------------------------------------------

    def _leaving(self, victims: Sequence[PageEntry]) -> list[PageEntry]:
        """Evicted pages are in the index no more: their bytes are free, and a page of the same key may come."""
        for victim in victims:
            self.index.drop(victim.key)
        return list(victims)

    def _let_go(self, victims: list[PageEntry]) -> list[PageEntry]:
        """Evicted pages leave: what is ours is used again, blocks in others' segments are given back.

        Returns:
            those that stay (``_stay``), because the journal did not take them.
        """
        appended = self._journal.append(gone_records(victims, self.index_bytes))
        gone, spared = victims[: appended.num_records], victims[appended.num_records :]
        self._counters.add(pages_evicted=len(gone))
        self._retain(gone)
        if appended.error is not None:
            self.count_error(appended.error)
        return spared

    def _stay(self, spared: Sequence[PageEntry]) -> None:
        for entry in reversed(spared):
            self.index.add(entry)

    def _outside_bytes(self) -> int:
        """What counts besides pages and free slots of ours."""
        told = sum(state.reserved_bytes for state in self._others.values())
        left = sum(sum(state.left_bytes.values()) for state in self._others.values())
        known = sum(
            state.left_bytes.get(self._folder.owner, 0) for state in self._others.values()
        )  # now ours
        return told + left - known + sum(self.slots.left_bytes().values())

    def _excess_bytes(self) -> int:
        """How much more there is than the capacity allows."""
        assert self.index.capacity_bytes is not None
        own_bytes = self.index.used_bytes + self.slots.retained_bytes
        return own_bytes + self._outside_bytes() - self.index.capacity_bytes

    def _shrink(self) -> int:
        """Keep the bound: give blocks of free slots back, and evict if fragments too small for that remain.

        Returns:
            by how many bytes it cannot be kept, so many must not be written; 0 if it can.
        """
        if self._min_free_bytes and (missing := self._min_free_bytes - self._folder.free_bytes()) > 0:
            self.slots.shrink(missing)
        if self.index.capacity_bytes is None:
            return 0
        while (excess := self._excess_bytes()) > 0:
            if self.slots.shrink(excess) >= excess:
                break
            excess = self._excess_bytes()
            victims = self._leaving(self.index.evict(excess))
            spared = self._let_go(victims)
            self._stay(spared)
            if spared or not victims:
                return excess
        return 0

    def _tell(self) -> None:
        """Let other processes know what is not in the journal, and how far we have read that."""
        reserved_bytes = self._writing_bytes + self.slots.retained_bytes
        self._folder.tell(
            OwnerState(
                reserved_bytes, self._journal.inode, self._journal.num_records, self.slots.left_bytes()
            )
        )

    def _compact_if_due(self, num_more: int = 0) -> None:
        """Write the journal anew, in order of recency, before it takes more than a page's share.

        Args:
            num_more: records that are to be appended.
        """
        if isinstance(self._journal, NoJournal):
            return
        if self._journal.num_records + num_more <= MAX_RECORDS * len(self.index) + SPARE_RECORDS:
            return
        try:
            records = self._journal.read_all()
            live = last_of_each_slot(records)
            owners = records[records["kind"] == KIND_OWNER]
            _, from_end = np.unique(owners["segment"][::-1], return_index=True)
            places = np.fromiter((entry.place for entry in self.index.by_recency()), dtype=np.int64)
            order = np.argsort(places_of(live), kind="stable")
            ranks = np.full(len(live), len(places))
            ranks[order[np.searchsorted(places_of(live)[order], places)]] = np.arange(len(places))
            live = live[np.argsort(ranks, kind="stable")]
            self._journal.replace(np.concatenate([owners[len(owners) - 1 - from_end], live]))
            self.slots.restart()
        except OSError as error:
            self.count_error(error)

    def _retain(self, entries: Sequence[PageEntry]) -> None:
        """Pages are gone; their slots are free."""
        self.slots.retain([self._slot(entry) for entry in entries], self._journal.num_records)

    def _slot(self, entry: PageEntry) -> Slot:
        return entry.place, entry.size_bytes - self.index_bytes
