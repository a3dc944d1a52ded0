"""Pages in a folder under a quota: what is there, what goes, what an I/O error means.

The blocking half of ``DiskStore``; it knows no event loop. Everything about one page goes through
``PageIndex`` (decides) and ``PageFiles`` (acts), and an error of one page ends here as a count.
"""

from __future__ import annotations

import errno
import threading

from hicache.tiers.counters import StoreCounters
from hicache.tiers.framing import HEADER_BYTES, encode_header
from hicache.tiers.page_files import FileStamp, PageFiles, ReadStatus, TemporaryFile
from hicache.tiers.page_index import Outcome, PageEntry, PageIndex
from hicache.tiers.store import PageTarget, StoredPage
from hicache.types import PageKey


class DiskPages:
    """All pages of one folder.

    Args:
        files: the folder.
        capacity_bytes: hard limit of what is in it, headers and temporary files included; None for
            none. With several processes in one folder each holds to it over the pages it has seen.
        min_free_bytes: pages leave, or are refused, rather than let the file system fall below this.
        counters: where everything is counted.

    *Thread*: any; calls block on the file system. Errors of the file system are counted by their
    name and answered as *not there* or *not written*.
    """

    def __init__(
        self, files: PageFiles, capacity_bytes: int | None, *, min_free_bytes: int, counters: StoreCounters
    ) -> None:
        self.index = PageIndex(capacity_bytes)
        self._files = files
        self._min_free_bytes = min_free_bytes
        self._counters = counters
        # Room is made by one thread at a time: no one writes into room whose files are still there.
        self._admission_lock = threading.Lock()

    def load(self) -> None:
        """Index what the folder holds, least recently written first, and evict down to the capacity.

        Raises:
            OSError: the folder cannot be used.
        """
        self._files.open()
        found = [page for folder in self._files.folders() for page in self._files.scan(folder)]
        found.sort(key=lambda page: page.modified_ns, reverse=True)
        whole = []
        known: set[PageKey] = set()
        for page in found:
            if page.is_whole and page.entry.key not in known:
                known.add(page.entry.key)
                whole.append(page.entry)
                continue
            self._remove_surplus(page.entry)
        for entry in reversed(whole):
            self.index.add(entry)
        if self.index.capacity_bytes is not None:
            with self._admission_lock:
                self._remove_victims(self.index.evict(self.index.used_bytes - self.index.capacity_bytes))

    def close(self) -> None:
        """Let go of the folder's files. *Caller guarantees*: no call is running."""
        self._files.close()

    # ---- asking and reading ----------------------------------------------------------------------------------

    def exists(self, key: PageKey) -> bool:
        """Whether a page's file is there now, in full length."""
        try:
            return self._find_whole(key) is not None
        except OSError as error:
            self._count_error(error)
            return False

    def read(self, target: PageTarget) -> bool:
        """Fill ``target``; False and counted as a miss if that cannot be done, whatever the reason."""
        try:
            is_hit = self._read(target)
        except OSError as error:
            self._count_error(error)
            is_hit = False
        if is_hit:
            self._counters.add(pages_read=1, bytes_read=target.payload.nbytes)
        else:
            self._counters.add(pages_missed=1)
        return is_hit

    # ---- writing: admit, write, publish (or abandon) ---------------------------------------------------------

    def admit(self, page: StoredPage) -> Outcome:
        """Make room for a page. GRANTED: it is reserved; go on with ``write``. Counts nothing else."""
        size_bytes = HEADER_BYTES + page.payload.nbytes
        with self._admission_lock:
            try:
                self._find_whole(page.key)  # if its file vanished, or another process wrote it, we know now
                if page.parent is not None:
                    self._find(page.parent)
                if not self._keep_free(page, size_bytes):
                    return Outcome.REFUSED
            except OSError as error:
                self._count_error(error)
                return Outcome.REFUSED
            admission = self.index.reserve(page.key, page.parent, size_bytes)
            if admission.victims and not self._remove_victims(admission.victims):
                self.index.drop(page.key)
                return Outcome.REFUSED
            return admission.outcome

    def write(self, page: StoredPage) -> TemporaryFile | None:
        """Write an admitted page where nobody sees it; None if that failed (then it is abandoned)."""
        header = encode_header(page.key, page.component, page.payload, parent=page.parent)
        try:
            return self._files.write_temporary(page.key, (header, page.payload))
        except OSError as error:
            self._count_error(error)
            self.index.drop(page.key)
            return None
        except BaseException:
            self.index.drop(page.key)
            raise

    def publish(self, page: StoredPage, temporary: TemporaryFile) -> bool:
        """Make a written page visible; False if that failed (then it is abandoned)."""
        entry = PageEntry(page.key, page.parent, HEADER_BYTES + page.payload.nbytes)
        try:
            self._files.publish(temporary, entry)
        except OSError as error:
            self._count_error(error)
            self._remove_unsure(entry)
            self.index.drop(page.key)
            return False
        self.index.commit(page.key)
        self._counters.add(pages_written=1, bytes_written=page.payload.nbytes)
        return True

    def abandon(self, page: StoredPage, temporary: TemporaryFile) -> None:
        """Take back a written page that is of no use."""
        try:
            self._files.discard(temporary)
        except OSError as error:
            self._count_error(error)
        self.index.drop(page.key)

    # ---- removing --------------------------------------------------------------------------------------------

    def remove(self, key: PageKey) -> bool:
        """Remove a page, whatever it holds; whether it was there."""
        try:
            self._find(key)
        except OSError as error:
            self._count_error(error)
        entry = self.index.take(key)
        return entry is not None and self._remove_taken(entry)

    def clear(self) -> int:
        """Remove all pages in the folder, whoever wrote them; how many there were."""
        num_removed = 0
        try:
            for folder in self._files.folders():
                for page in self._files.scan(folder):
                    self.index.add(page.entry)
        except OSError as error:
            self._count_error(error)
        for entry in self.index.entries():
            if self.index.take(entry.key, only=entry) is not None:
                num_removed += self._remove_taken(entry)
        return num_removed

    def check_integrity(self) -> list[str]:
        """One sentence for each disagreement between index and folder; exact when nothing is running."""
        findings = self.index.check_integrity()
        on_disk = {page.entry for folder in self._files.folders() for page in self._files.scan(folder)}
        findings.extend(
            f"page {entry.key.hex()} is indexed, its file is not there"
            for entry in self.index.entries()
            if entry not in on_disk
        )
        return findings

    # ---- helpers ---------------------------------------------------------------------------------------------

    def _find(self, key: PageKey) -> PageEntry | None:
        """The page by the index, else by the folder."""
        entry = self.index.find(key)
        if entry is not None or self.index.knows(key):
            return entry
        found = self._files.find(key)
        if found is not None:
            self.index.add(found)
        return self.index.find(key)

    def _find_whole(self, key: PageKey) -> PageEntry | None:
        """The page if its file is there in full length; an index entry without one goes."""
        entry = self._find(key)
        if entry is None:
            return None
        measured = self._files.measure(entry)
        if measured is None:
            self._forget(entry)
            return None
        size_bytes, stamp = measured
        if size_bytes != entry.size_bytes:
            self._remove_corrupt(entry, stamp)
            return None
        return entry

    def _read(self, target: PageTarget) -> bool:
        entry = self._find(target.key)
        if entry is None:
            return False
        result = self._files.read(entry, target)
        match result.status:
            case ReadStatus.HIT:
                if target.on_parent is not None:
                    target.on_parent(entry.parent)
                return True
            case ReadStatus.MISSING:
                self._forget(entry)
            case ReadStatus.CORRUPT:
                assert result.stamp is not None
                self._remove_corrupt(entry, result.stamp)
            case ReadStatus.UNSUPPORTED:
                self.index.hide(target.key)
                self._counters.error("unsupported", result.reason)
            case ReadStatus.MISMATCH:
                self._counters.error("mismatch", result.reason)
        return False

    def _forget(self, entry: PageEntry) -> None:
        """Drop an index entry whose file is gone, unless the page is being put anew."""
        if self.index.take(entry.key, only=entry) is None:
            return
        try:
            self._files.remove_link(entry.key)
        except OSError as error:
            self._count_error(error)
        self.index.drop(entry.key)

    def _remove_corrupt(self, entry: PageEntry, stamp: FileStamp) -> None:
        """Remove a bad file, but not the good one that took its name in the meantime."""
        self._counters.add(pages_corrupt=1)
        if self.index.take(entry.key, only=entry) is None:
            return
        try:
            is_gone = self._files.remove_unchanged(entry, stamp)
        except OSError as error:
            self._count_error(error)
            self.index.restore(entry.key)
            self.index.hide(entry.key)
            return
        if is_gone:
            self.index.drop(entry.key)
        else:
            self.index.restore(entry.key)

    def _remove_taken(self, entry: PageEntry) -> bool:
        try:
            was_there = self._files.remove(entry)
        except OSError as error:
            self._count_error(error)
            self.index.restore(entry.key)
            return False
        self.index.drop(entry.key)
        return was_there

    def _remove_surplus(self, entry: PageEntry) -> None:
        """Remove a file that ``load`` does not take in: short, or an older one of the same key."""
        try:
            measured = self._files.measure(entry)
            if measured is not None:
                self._counters.add(pages_corrupt=int(measured[0] != entry.size_bytes))
                self._files.remove_unchanged(entry, measured[1])
        except OSError as error:
            self._count_error(error)

    def _remove_unsure(self, entry: PageEntry) -> None:
        """Remove a page whose publication failed, perhaps after it became visible."""
        try:
            self._files.remove(entry)
        except OSError as error:
            self._count_error(error)

    def _remove_victims(self, victims: tuple[PageEntry, ...]) -> bool:
        """Remove what was chosen to leave; at the first that cannot be removed the rest stays."""
        for position, entry in enumerate(victims):
            try:
                self._files.remove(entry)
            except OSError as error:
                self._count_error(error)
                for spared in reversed(victims[position:]):
                    self.index.restore(spared.key)
                return False
            self.index.drop(entry.key)
            self._counters.add(pages_evicted=1)
        return True

    def _keep_free(self, page: StoredPage, size_bytes: int) -> bool:
        """Make room on the file system itself; whether ``size_bytes`` may be written to it."""
        if not self._min_free_bytes or self.index.knows(page.key):
            return True
        missing_bytes = self._min_free_bytes + size_bytes - self._files.free_bytes()
        if missing_bytes <= 0:
            return True
        if page.parent is not None and not self.index.knows(page.parent):
            return False
        victims = self.index.evict(missing_bytes, protected=page.parent)
        return bool(victims) and self._remove_victims(victims)

    def _count_error(self, error: OSError) -> None:
        name = errno.errorcode.get(error.errno, "OSError") if error.errno is not None else "OSError"
        self._counters.error(name, error)
