"""Reading and writing the pages of a folder, and what an I/O error means.

The blocking half of ``DiskStore``; it knows no event loop. ``PageLedger`` says where a page lies; an error
of one page ends here as a count. A batch is worked off by several threads at once: see ``WriteBatch`` and
``ReadBatch``.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from hicache.errors import CorruptPayloadError
from hicache.tiers.counters import StoreCounters
from hicache.tiers.frames import Frame
from hicache.tiers.framing import (
    HEADER_BYTES,
    PageHeader,
    UnsupportedFormatError,
    check_payload,
    decode_header,
    encode_header,
)
from hicache.tiers.journal_records import NewPage
from hicache.tiers.page_index import Outcome, PageEntry
from hicache.tiers.page_ledger import WINDOW_PAGES, PageLedger, Window
from hicache.tiers.segment_files import cut_into_runs, slot_bytes
from hicache.tiers.store import PageTarget, StoredPage
from hicache.types import PageKey

MAX_OPEN_WINDOWS = 2


@dataclass(frozen=True, slots=True)
class StoredFrame:
    """A verified page as it lies on the disk."""

    header: PageHeader
    raw_header: bytes
    payload: memoryview


class DiskPages:
    """All pages of one folder.

    Args:
        ledger: what is where.
        counters: where everything is counted.

    *Thread*: any; calls block on the file system.
    """

    def __init__(self, ledger: PageLedger, counters: StoreCounters) -> None:
        self.ledger = ledger
        self.counters = counters

    def exists(self, keys: Sequence[PageKey]) -> list[bool]:
        """One answer per key, in order."""
        self.refresh()
        return [self.ledger.index.find(key) is not None for key in keys]

    def remove(self, keys: Sequence[PageKey]) -> int:
        """Remove pages, whatever they hold; how many were there."""
        return self._or_zero(lambda: self.ledger.remove(keys))

    def clear(self) -> int:
        """Remove all pages; how many there were."""
        return self._or_zero(self.ledger.clear)

    def refresh(self) -> None:
        """Learn what other processes did."""
        try:
            self.ledger.refresh()
        except OSError as error:
            self.ledger.count_error(error)

    def settle(self, entry: PageEntry, error: Exception) -> None:
        """A page was read wrong: it is removed, unless it had left its slot when it was read."""
        if isinstance(error, UnsupportedFormatError):
            self.ledger.index.hide(entry.key)
            self.counters.error("unsupported", error)
            return
        try:
            if self.ledger.remove_bad(entry):
                self.counters.add(pages_corrupt=1)
        except OSError as failure:
            self.ledger.count_error(failure)
            self.ledger.index.hide(entry.key)
            self.counters.add(pages_corrupt=1)

    def frames(self, entries: Sequence[PageEntry]) -> Iterator[StoredFrame | None]:
        """Read pages whole and verify them, in order; None for one that is not (any more) right."""
        for entry in entries:
            yield self._frame(entry)

    def _frame(self, entry: PageEntry) -> StoredFrame | None:
        head = bytearray(HEADER_BYTES)
        body = memoryview(bytearray(entry.size_bytes - self.ledger.index_bytes - HEADER_BYTES))
        try:
            self.ledger.files.read([Frame(entry.place, HEADER_BYTES + len(body), head, body)])
            header = decode_header(head)
            header.check_identity(entry.key)
            if slot_bytes(header.payload_bytes) != HEADER_BYTES + len(body):
                raise CorruptPayloadError(f"payload of {header.payload_bytes} bytes in another page's slot")
            check_payload(header, body[: header.payload_bytes])
        except (CorruptPayloadError, UnsupportedFormatError) as error:
            self.settle(entry, error)
            return None
        except OSError as error:
            self.ledger.count_error(error)
            return None
        return StoredFrame(header, bytes(head), body[: header.payload_bytes])

    def _or_zero(self, call: Callable[[], int]) -> int:
        try:
            return call()
        except OSError as error:
            self.ledger.count_error(error)
            return 0


_Run = list[tuple[int, PageEntry]]
"""Neighbours on the disk: the position of each in its batch, and where it lies."""


class ReadBatch:
    """One ``get``: pages are sorted by place, neighbours read together, every page verified.

    Args:
        num_threads: how many will call ``run``.

    *Thread*: several call ``run`` at once. Through the page cache each takes the next run of neighbours until
    none is left; past it each takes its part and has all of that under way at once.
    """

    def __init__(self, pages: DiskPages, targets: Sequence[PageTarget], *, num_threads: int = 1) -> None:
        self.answers = [False] * len(targets)
        self.stop = threading.Event()
        self._pages = pages
        self._targets = targets
        self._num_threads = num_threads
        self._lock = threading.Lock()
        self._files = pages.ledger.files
        self._parts: Iterator[list[_Run]] | None = None

    def run(self) -> None:
        """One thread's share."""
        while not self.stop.is_set() and (runs := self._take()) is not None:
            self._read(runs)

    def _take(self) -> list[_Run] | None:
        with self._lock:
            if self._parts is None:
                runs = self._plan()
                is_parted = self._files.has_depth or self._num_threads == 1
                step = -(-len(runs) // self._num_threads) if is_parted else 1
                self._parts = iter([runs[at : at + step] for at in range(0, len(runs), max(1, step))])
            return next(self._parts, None)

    def _plan(self) -> list[_Run]:
        self._pages.refresh()
        ledger = self._pages.ledger
        self._files = ledger.files
        found = [
            (position, entry)
            for position, target in enumerate(self._targets)
            if (entry := ledger.index.find(target.key)) is not None
        ]
        self._pages.counters.add(pages_missed=len(self._targets) - len(found))
        found.sort(key=lambda item: item[1].place)
        places = [(entry.place, entry.size_bytes - ledger.index_bytes) for _, entry in found]
        runs = cut_into_runs(places)
        if len(runs) > 1:
            for run in runs:
                self._files.will_read(places[run[0]][0], sum(places[i][1] for i in run))
        return [[found[i] for i in run] for run in runs]

    def _read(self, runs: list[_Run]) -> None:
        frames = [[self._frame(position, entry) for position, entry in run] for run in runs]
        num_hits = num_missed = num_bytes = 0
        with contextlib.closing(self._files.read_many(frames)) as results:
            for number, error in results:
                if error is None:
                    for (position, entry), frame in zip(runs[number], frames[number], strict=True):
                        if self._is_right(position, entry, frame):
                            self.answers[position] = True
                            num_hits += 1
                            num_bytes += self._targets[position].payload.nbytes
                        else:
                            num_missed += 1
                elif len(runs[number]) > 1:  # one bad block must not cost its neighbours
                    self._read([[item] for item in runs[number]])
                else:
                    self._pages.ledger.count_error(error)
                    num_missed += 1
                if self.stop.is_set():
                    break
        self._pages.counters.add(pages_read=num_hits, bytes_read=num_bytes, pages_missed=num_missed)

    def _frame(self, position: int, entry: PageEntry) -> Frame:
        size = entry.size_bytes - self._pages.ledger.index_bytes
        target = self._targets[position]
        payload = target.payload.cast("B")
        if slot_bytes(len(payload)) != size:
            payload = memoryview(bytearray(size - HEADER_BYTES))
        rest = None if target.receive is None else bytearray(size - HEADER_BYTES - len(payload))
        return Frame(entry.place, size, bytearray(HEADER_BYTES), payload, rest)

    def _is_right(self, position: int, entry: PageEntry, frame: Frame) -> bool:
        target = self._targets[position]
        try:
            header = decode_header(frame.header)
            header.check_identity(entry.key)
            if slot_bytes(header.payload_bytes) != frame.slot_bytes:
                raise CorruptPayloadError(f"{header.payload_bytes} bytes in a slot of {frame.slot_bytes}")
            if not target.check(header):
                self._pages.counters.error(
                    "mismatch",
                    f"{header.payload_bytes} bytes of {header.component!r} are stored, "
                    f"{target.payload.nbytes} of {target.component!r} were asked for",
                )
                return False
            stored = frame.payload
            if frame.rest and header.payload_bytes > len(stored):  # encoding made it longer than its target
                stored = memoryview(b"".join((stored, frame.rest)))
            stored = stored[: header.payload_bytes]
            check_payload(header, stored)
        except (CorruptPayloadError, UnsupportedFormatError) as error:
            self._pages.settle(entry, error)
            return False
        target.hand_over(header, stored)
        return True


@dataclass(slots=True, eq=False)
class _OpenWindow:
    """A window of a batch: what is still to be written of it, and what was."""

    window: Window
    runs: list[list[tuple[StoredPage, PageEntry]]]
    num_running: int = 0
    written: set[PageKey] = field(default_factory=set)

    @property
    def is_over(self) -> bool:
        return not self.runs and not self.num_running


class WriteBatch:
    """One ``put``: pages are admitted by the window, written by several threads, made visible in order.

    ::

        visible ▏ window: being written ▏ window: to be written ▏ not admitted yet

    The disk has work while a window is admitted and while the one before is made visible: there are two.

    *Thread*: several call ``run`` at once. One of them at a time admits or commits, the others write.
    """

    def __init__(self, pages: DiskPages, batch: Sequence[StoredPage]) -> None:
        self.answers: dict[PageKey, bool] = {}
        self.stop = threading.Event()
        self._pages = pages
        self._batch = batch
        self._turn = threading.Condition()
        self._failed: set[PageKey] = set()
        self._num_asked = 0  # pages that the ledger has answered for, in the batch's order
        self._open: deque[_OpenWindow] = deque()
        self._is_deciding = False  # a thread admits or commits
        self._waits = False  # the next page has room only once something was made visible

    def run(self) -> None:
        """One thread's share: take the next run, write it, until nothing is left."""
        try:
            while (taken := self._take()) is not None:
                run, part = taken
                written: list[PageKey] = []
                try:
                    written = self._write(run, part.window)
                finally:
                    with self._turn:
                        part.written.update(written)
                        part.num_running -= 1
                        self._turn.notify_all()
        except BaseException:
            self.stop.set()
            self._take()  # what was admitted is made visible or given back
            raise

    # ---- windows -----------------------------------------------------------------------------------------------

    def _take(self) -> tuple[list[tuple[StoredPage, PageEntry]], _OpenWindow] | None:
        with self._turn:
            while True:
                if self.stop.is_set():
                    for part in self._open:
                        part.runs.clear()
                if not self._is_deciding:
                    if self._open and self._open[0].is_over:
                        self._decide(self._commit)
                        continue
                    if self._may_admit():
                        self._decide(self._admit)
                        continue
                    if not self._open:
                        return None
                for part in self._open:
                    if part.runs:
                        part.num_running += 1
                        return part.runs.pop(0), part
                self._turn.wait()

    def _may_admit(self) -> bool:
        is_left = self._num_asked < len(self._batch) and not self.stop.is_set()
        return is_left and not self._waits and len(self._open) < MAX_OPEN_WINDOWS

    def _decide(self, decision: Callable[[], None]) -> None:
        """Run what no other thread may do meanwhile, while the others go on writing. ``_turn`` is held."""
        self._is_deciding = True
        self._turn.release()
        try:
            decision()
        finally:
            self._turn.acquire()
            self._is_deciding = False
            self._turn.notify_all()

    def _admit(self) -> None:
        ledger = self._pages.ledger
        rest = self._batch[self._num_asked : self._num_asked + WINDOW_PAGES]
        wanted = [
            PageEntry(page.key, page.parent, slot_bytes(page.payload.nbytes) + ledger.index_bytes)
            for page in rest
        ]
        try:
            window = ledger.admit(wanted, self._failed, may_refuse=not self._open)
        except OSError as error:
            ledger.count_error(error)
            failed = [page.key for page in self._batch[self._num_asked :]]
            self._failed.update(failed)
            self.answers.update(dict.fromkeys(failed, False))
            self._num_asked = len(self._batch)
            return
        num_refused = 0
        admitted: list[tuple[StoredPage, PageEntry]] = []
        for page, outcome in zip(rest, window.outcomes, strict=False):
            self.answers[page.key] = outcome is Outcome.PRESENT
            num_refused += outcome is Outcome.REFUSED
            if (entry := window.granted.get(page.key)) is not None:
                admitted.append((page, entry))
        self._pages.counters.add(pages_refused=num_refused)
        places = [(entry.place, entry.size_bytes - ledger.index_bytes) for _, entry in admitted]
        runs = [[admitted[i] for i in run] for run in cut_into_runs(places)]
        with self._turn:
            self._num_asked += len(window.outcomes)
            self._waits = not window.outcomes
            if admitted:
                self._open.append(_OpenWindow(window, runs))

    def _commit(self) -> None:
        """Make visible what was written of the first window."""
        with self._turn:
            part = self._open.popleft()
            self._waits = False
        written = [
            (page, NewPage(part.window.granted[page.key], page.component))
            for page in self._batch
            if page.key in part.written and page.key in part.window.granted
        ]
        answers = self._pages.ledger.commit(part.window, [new for _, new in written], self._failed)
        self.answers.update(answers)
        good = [page for page, _ in written if answers.get(page.key)]
        self._pages.counters.add(
            pages_written=len(good), bytes_written=sum(page.payload.nbytes for page in good)
        )

    # ---- one run -----------------------------------------------------------------------------------------------

    def _write(self, run: list[tuple[StoredPage, PageEntry]], window: Window) -> list[PageKey]:
        index_bytes = self._pages.ledger.index_bytes
        frames = [
            Frame(
                entry.place,
                entry.size_bytes - index_bytes,
                encode_header(page.key, page.component, page.payload, parent=page.parent, codec=page.codec),
                page.payload.cast("B"),
            )
            for page, entry in run
        ]
        try:
            window.files.write(frames)
        except OSError as error:
            if len(run) > 1:  # one page that cannot be written must not cost its neighbours
                return [key for item in run for key in self._write([item], window)]
            self._pages.ledger.count_error(error)
            return []
        return [page.key for page, _ in run]
