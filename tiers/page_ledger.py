"""Who lies where in a disk store's folder: the one place where pages come, go and change hands.

::

    DiskPages ──▶ PageLedger ─┬─ PageIndex      which pages there are, who leaves next   (memory)
                              ├─ SegmentSlots   whose slots, which of ours are free      (memory)
                              ├─ Journal        what all processes agree on              (file)
                              ├─ DiskFolder     format, owners, what they reserved       (files)
                              └─ SegmentFiles   the slots                                (files)

A process writes only into slots of its own segments, and lets nobody know of a page before its slot is
written in full. So a kill at any moment leaves free space and no torn page. Any process may remove any
page: under the folder's lock it appends a GONE record and, in another's segment, punches the slot, which
its owner learns from the record. A slot is used again in place; a reader that was late finds another key
or a wrong checksum there, and a miss.

The bound, over all processes and at any moment::

    pages + free slots that still have blocks + pages being written + journal  <=  capacity

A page counts with its slot and ``INDEX_BYTES``, which is what the journal may take for it at most.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hicache.tiers.folder_state import FolderState
from hicache.tiers.journal import Appended
from hicache.tiers.journal_records import (
    NewPage,
    entries_of,
    gone_records,
    last_of_each_slot,
    page_records,
    split_place,
)
from hicache.tiers.page_index import Outcome, PageEntry
from hicache.tiers.segment_files import RUN_BYTES, SegmentFiles, grain_of
from hicache.types import PageKey

WINDOW_BYTES = 8 << 20
WINDOW_PAGES = 1024
"""How much a batch writes before it makes that visible: while it does, the disk has the next window to write."""
DURABLE_WINDOW_BYTES = 64 << 20
"""The same where each window costs a sync."""


@dataclass(slots=True)
class Window:
    """Pages of one batch that are admitted, written and made visible together.

    Args:
        outcomes: of the first pages that were asked for; the others come in a later window.
        granted: by key, the pages to write, in the batch's order; each with its place.
        files: where to write them: those of the folder in which they were admitted.
    """

    generation: int
    files: SegmentFiles
    outcomes: list[Outcome] = field(default_factory=list)
    granted: dict[PageKey, PageEntry] = field(default_factory=dict)


class PageLedger(FolderState):
    """Pages of one folder under a quota; several processes at a time. See ``FolderState`` for arguments."""

    # ---- writing: admit, (the caller writes the slots,) commit -------------------------------------------

    def admit(self, wanted: Sequence[PageEntry], failed: set[PageKey], *, may_refuse: bool = True) -> Window:
        """Make room for the first of the pages, as many as can be had at once.

        A page without room waits for those before it, which may then be evicted for it: the window ends
        before it, and it is refused only as the first of a window.

        Args:
            wanted: in order; their places mean nothing yet.
            failed: keys of this batch that were not taken; what hangs below them is refused. *Changes*.
            may_refuse: False while earlier windows of the batch are open: then a first page without room
                waits for them, and the window has no outcomes.
        """
        with self._exclusive():
            self._make_up_for_others(wanted)
            window = Window(self._generation, self.files)
            victims = self._reserve(wanted, failed, window, may_refuse=may_refuse)
            try:
                self._compact_if_due(len(victims) + len(window.granted))
                spared = self._let_go(victims)
                if not spared:
                    self._assign_places(window)
                    while (excess_bytes := self._shrink()) and window.granted:
                        self._cut(window, excess_bytes, wanted, failed, may_refuse=may_refuse)
                else:
                    self._refuse(window, failed)
                    self._stay(spared)
                self._tell()
            except BaseException as error:  # whatever it was, no page may stay reserved for ever
                self._refuse(window, failed)
                if not isinstance(error, OSError):
                    raise
                self.count_error(error)
            return window

    def commit(self, window: Window, written: Sequence[NewPage], failed: set[PageKey]) -> dict[PageKey, bool]:
        """Make the written pages of a window visible, in order, and take back the others.

        Returns:
            for each granted page whether it is there now.
        """
        if not window.granted:
            return {}
        try:
            if self._durable and written:
                self.files.sync(sorted({split_place(page.entry.place)[0] for page in written}))
            with self._exclusive():
                answers = self._commit(window, written, failed)
                self._compact_if_due()
                return answers
        except OSError as error:
            self.count_error(error)
        with self._lock:
            return self._commit(window, (), failed)

    def resize(self, capacity_bytes: int) -> None:
        """Keep to another limit. Raises ``OSError`` when the folder cannot be changed."""
        with self._exclusive():
            self.index.capacity_bytes = capacity_bytes
            self._shrink()
            self._tell()

    def _commit(
        self, window: Window, written: Sequence[NewPage], failed: set[PageKey]
    ) -> dict[PageKey, bool]:
        answers = dict.fromkeys(window.granted, False)
        if window.generation != self._generation:
            failed.update(window.granted)
            return answers
        good: list[NewPage] = []
        by_key = {page.entry.key: page for page in written}
        for key, entry in window.granted.items():
            page = by_key.get(key)
            if page is None or entry.parent in failed:
                failed.add(key)
            elif (winner := self._overtaken.get(key)) is not None:
                self._take_back(entry)
                self.index.add(winner)
                answers[key] = True
            else:
                good.append(page)
        appended = self._journal.append(page_records(good, self.index_bytes))
        for page in good[: appended.num_records]:
            self.index.commit(page.entry.key, page.entry.place)
            answers[page.entry.key] = True
        if appended.error is not None:
            self.count_error(appended.error)
            if appended.num_records == len(good):  # not durable: what was not acknowledged shall not stay
                self._remove([page.entry.key for page in good])
                answers.update(dict.fromkeys((page.entry.key for page in good), False))
        for key, entry in window.granted.items():
            if not answers[key]:
                failed.add(key)
                if self.index.entry_of(key) is not None:
                    self._take_back(entry)
            self._overtaken.pop(key, None)
        self._writing_bytes -= sum(entry.size_bytes for entry in window.granted.values())
        with contextlib.suppress(OSError):
            self._shrink()
            self._tell()
        return answers

    # ---- removing ----------------------------------------------------------------------------------------

    def remove(self, keys: Iterable[PageKey]) -> int:
        """Remove pages, whoever wrote them, and give their blocks back; how many were there."""
        with self._exclusive():
            num_removed = self._remove(keys)
            self._compact_if_due()
            return num_removed

    def remove_bad(self, entry: PageEntry) -> bool:
        """Remove a page that was read wrong; False if it was not there any more when it was read."""
        with self._exclusive():
            if self.index.entry_of(entry.key) is not entry:
                return False
            if not self._remove([entry.key]):
                self.index.hide(entry.key)
            return True

    def clear(self) -> int:
        """Remove all pages; how many there were."""
        with self._exclusive():
            num_removed = self._remove([entry.key for entry in self.index.entries()])
            self._compact_if_due()
            return num_removed

    def check_integrity(self) -> list[str]:
        """One sentence for each disagreement of index, journal and slots; exact when nothing is running."""
        with self._exclusive():
            findings = self.index.check_integrity()
            entries = sorted(self.index.entries(), key=lambda entry: entry.place)
            if not self._is_private:
                on_disk = entries_of(last_of_each_slot(self._journal.read_all()), self.index_bytes)
                for entry in set(on_disk).symmetric_difference(entries):
                    findings.append(f"page {entry.key.hex()} is in the index or in the journal, not in both")
            extents = [(entry.place, entry.place + entry.size_bytes - self.index_bytes) for entry in entries]
            extents += self.slots.free_extents()
            extents.sort()
            for (_, end), (start, _) in itertools.pairwise(extents):
                if start < end:
                    findings.append(f"two slots, or a slot and free space, overlap at {split_place(start)}")
            if self.index.capacity_bytes is not None:
                self._shrink()  # what others freed of ours counts in full until we look at it
                total = self.index.used_bytes + self.slots.retained_bytes
                total += sum(self.slots.left_bytes().values())
                if total > self.index.capacity_bytes:
                    findings.append(f"{total} bytes are kept, {self.index.capacity_bytes} may be")
            return findings

    # ---- helpers -----------------------------------------------------------------------------------------

    def _reserve(
        self, wanted: Sequence[PageEntry], failed: set[PageKey], window: Window, *, may_refuse: bool
    ) -> list[PageEntry]:
        """Reserve room in the index for the first pages; who leaves for them."""
        if self.slots.orphans(self._others):
            self._adopt(last_of_each_slot(self._journal.read_all()))
        self.index.set_outside(self._outside_bytes())
        free_bytes = self._folder.free_bytes() + self.slots.retained_bytes if self._min_free_bytes else 0
        victims: list[PageEntry] = []
        granted_bytes = 0
        most_bytes = DURABLE_WINDOW_BYTES if self._durable else WINDOW_BYTES
        for entry in wanted:
            outcome = Outcome.REFUSED
            if entry.parent not in failed and self._keep_free(entry, granted_bytes, free_bytes, victims):
                admission = self.index.reserve(entry.key, entry.parent, entry.size_bytes)
                outcome = admission.outcome
                victims += self._leaving(admission.victims)
            if outcome is Outcome.GRANTED:
                window.granted[entry.key] = entry
                granted_bytes += entry.size_bytes
            elif outcome is not Outcome.PRESENT:
                if (window.granted or not may_refuse) and entry.parent not in failed:
                    break
                failed.add(entry.key)
            window.outcomes.append(outcome)
            if granted_bytes >= most_bytes or len(window.granted) >= WINDOW_PAGES:
                break
        return victims

    def _make_up_for_others(self, wanted: Sequence[PageEntry]) -> None:
        """Where others filled the file system, pages of ours leave for those to come, as if by our own limit.

        Their blocks are given back: where a page is of another size, their slots would not do.
        """
        if self._full is None:
            return
        new = {entry.key: entry for entry in wanted if not self.index.knows(entry.key)}
        wanted_bytes, first = 0, None
        for entry in new.values():
            if entry.parent is None or entry.parent in new or self.index.knows(entry.parent):
                first = first or entry
                wanted_bytes += entry.size_bytes
        if first is None:
            return
        wanted_bytes = missing_bytes = min(wanted_bytes, WINDOW_BYTES)
        self.slots.shrink(wanted_bytes)
        if self._full == errno.ENOSPC:  # how much is left of a quota (EDQUOT) is not known
            missing_bytes -= self._folder.free_bytes()
        if self._full == errno.EDQUOT or missing_bytes <= 0:
            self._full = None
        if missing_bytes > 0:
            victims = self.index.evict(missing_bytes, protected=first.parent)
            victims = victims or self.index.evict(first.size_bytes, protected=first.parent)
            self._counters.add(pages_evicted=self._give_up(victims))

    def _keep_free(
        self, entry: PageEntry, granted_bytes: int, free_bytes: int, victims: list[PageEntry]
    ) -> bool:
        """Make room on the file system itself; whether the page may be written to it."""
        if not self._min_free_bytes or self.index.knows(entry.key):
            return True
        free_bytes += sum(victim.size_bytes for victim in victims)
        missing_bytes = self._min_free_bytes + granted_bytes + entry.size_bytes - free_bytes
        if missing_bytes <= 0:
            return True
        if entry.parent is not None and not self.index.knows(entry.parent):
            return False
        leaving = self.index.evict(missing_bytes, protected=entry.parent)
        victims += self._leaving(leaving)
        return bool(leaving)

    def _assign_places(self, window: Window) -> None:
        """Give each granted page a slot; neighbours of one size lie side by side if they can, a run of them."""
        done: dict[PageKey, PageEntry] = {}
        try:
            for size, entries in itertools.groupby(window.granted.values(), lambda entry: entry.size_bytes):
                while some := list(itertools.islice(entries, max(1, RUN_BYTES // size))):
                    places = self._take_slots(size - self.index_bytes, len(some))
                    for (key, parent, _, _), place in zip(some, places, strict=True):
                        done[key] = PageEntry(key, parent, size, place)
        except OSError:
            self._retain(list(done.values()))
            raise
        window.granted = done
        self._writing_bytes += sum(entry.size_bytes for entry in done.values())

    def _take_slots(self, size: int, num_slots: int) -> list[int]:
        places = self.slots.take(size, num_slots)
        while places is None:
            segment = self.slots.next_segment
            self._claim(segment, grain_of(size))
            self.slots.add_new(segment, size)
            places = self.slots.take(size, num_slots)
        return places

    def _cut(
        self,
        window: Window,
        excess_bytes: int,
        wanted: Sequence[PageEntry],
        failed: set[PageKey],
        *,
        may_refuse: bool,
    ) -> None:
        """Let the last pages of a window wait: victims left blocks behind that are not free yet."""
        position_of = {entry.key: position for position, entry in enumerate(wanted)}
        while excess_bytes > 0 and window.granted:
            key, entry = window.granted.popitem()
            del window.outcomes[position_of[key] :]
            self._writing_bytes -= entry.size_bytes
            self._take_back(entry)
            excess_bytes -= entry.size_bytes
        if not window.outcomes and may_refuse:
            window.outcomes.append(Outcome.REFUSED)
            failed.add(wanted[0].key)

    def _refuse(self, window: Window, failed: set[PageKey]) -> None:
        """Nothing of a window can be written after all."""
        window.outcomes = [
            Outcome.REFUSED if outcome is Outcome.GRANTED else outcome for outcome in window.outcomes
        ]
        for key, entry in window.granted.items():
            failed.add(key)
            self.index.drop(key)
            if entry.place:
                self._writing_bytes -= entry.size_bytes
                self._retain([entry])
        window.granted.clear()

    def _take_back(self, entry: PageEntry) -> None:
        """A page that was admitted is not to be."""
        self.index.drop(entry.key)
        self._retain([entry])

    def _remove(self, keys: Iterable[PageKey]) -> int:
        return self._give_up([entry for key in keys if (entry := self.index.take(key)) is not None])

    def _give_up(self, taken: Sequence[PageEntry]) -> int:
        """Pages that are LEAVING go, and their blocks are given back; how many did."""
        appended = self._journal.append(gone_records(taken, self.index_bytes))
        is_full = appended.error is not None and appended.error.errno == errno.ENOSPC
        if is_full:
            appended = self._remove_on_full_disk(taken, appended)
        for entry in taken[appended.num_records :]:
            self.index.restore(entry.key)
            if is_full:
                self.index.hide(entry.key)
        gone = taken[: appended.num_records]
        for entry in gone:
            self.index.drop(entry.key)
        self.slots.release([self._slot(entry) for entry in gone], self._journal.num_records)
        with contextlib.suppress(OSError):
            self._tell()
        if appended.error is not None:
            self.count_error(appended.error)
        return len(gone)

    def _remove_on_full_disk(self, taken: Sequence[PageEntry], appended: Appended) -> Appended:
        """Give back the blocks of pages before the journal says that they are gone: it needs one itself.

        Whoever reads one of them meanwhile, or after a kill, finds zeros: a miss.
        """
        rest = taken[appended.num_records :]
        for entry in rest:
            self.slots.wipe(self._slot(entry))
        again = self._journal.append(gone_records(rest, self.index_bytes))
        return Appended(appended.num_records + again.num_records, again.error)
