"""The files of a temporary folder: one file for all pages, since nobody will ever open it again.

A folder that goes when the store is closed needs no names and no restart. So its pages are extents of a
single file, and an extent that a page left is used again by the next page of the same length::

    pages   | page A | page B | (free) | page D | ...

Nothing outlives the process: the file is unlinked as soon as it is open.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hicache.tiers.framing import HEADER_BYTES
from hicache.tiers.page_files import (
    FileStamp,
    FoundPage,
    PageFiles,
    ReadResult,
    ReadStatus,
    TemporaryFile,
    judge,
)
from hicache.tiers.page_index import PageEntry
from hicache.tiers.store import PageTarget
from hicache.types import PageKey

SCRATCH_NAME = "pages"


@dataclass(frozen=True, slots=True)
class _Extent:
    """Where a page lies. ``serial`` tells it from a later page in the same place."""

    offset: int
    size_bytes: int
    serial: int
    parent: PageKey | None


class ScratchFiles(PageFiles):
    """``PageFiles`` for a folder that is private and temporary.

    *Thread*: any. A read that races with the removal of its page may see the bytes of a later one;
    their header has another key, so it is a miss as any other.
    """

    def __init__(self, root: str) -> None:
        super().__init__(root, durable=False)
        self._descriptor = -1
        self._end = 0
        self._free: dict[int, list[int]] = {}
        self._extents: dict[PageKey, _Extent] = {}
        self._serials = itertools.count(1)
        self._lock = threading.Lock()

    def open(self) -> None:
        path = Path(self.root, SCRATCH_NAME)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o600)
        path.unlink()

    def close(self) -> None:
        """Give the space back. *Caller guarantees*: nothing reads or writes any more."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def folders(self) -> list[str]:
        return [self.root]

    def scan(self, folder: str) -> list[FoundPage]:
        with self._lock:
            return [
                FoundPage(PageEntry(key, extent.parent, extent.size_bytes), extent.serial, is_whole=True)
                for key, extent in self._extents.items()
            ]

    def write_temporary(self, key: PageKey, parts: Sequence[bytes | memoryview]) -> TemporaryFile:
        """Write to an extent of its own. The result's ``descriptor`` is the extent's offset."""
        size_bytes = sum(memoryview(part).nbytes for part in parts)
        with self._lock:
            free = self._free.get(size_bytes)
            offset = free.pop() if free else self._end
            self._end = max(self._end, offset + size_bytes)
        try:
            self._write_at(offset, parts)
        except BaseException:
            self._give_back(offset, size_bytes)
            raise
        return TemporaryFile(str(size_bytes), offset)

    def _write_at(self, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        for part in parts:
            rest = memoryview(part).cast("B")
            while rest:
                num_written = os.pwrite(self._descriptor, rest, offset)
                rest, offset = rest[num_written:], offset + num_written

    def _give_back(self, offset: int, size_bytes: int) -> None:
        with self._lock:
            self._free.setdefault(size_bytes, []).append(offset)

    def publish(self, temporary: TemporaryFile, entry: PageEntry) -> None:
        extent = _Extent(temporary.descriptor, entry.size_bytes, next(self._serials), entry.parent)
        with self._lock:
            before = self._extents.get(entry.key)
            self._extents[entry.key] = extent
        if before is not None:
            self._give_back(before.offset, before.size_bytes)

    def discard(self, temporary: TemporaryFile) -> None:
        self._give_back(temporary.descriptor, int(temporary.path))

    def find(self, key: PageKey) -> PageEntry | None:
        """Nobody else writes here, so what the index lacks is not there."""
        return None

    def measure(self, entry: PageEntry) -> tuple[int, FileStamp] | None:
        extent = self._extents.get(entry.key)
        return None if extent is None else (extent.size_bytes, (0, extent.serial, 0))

    def read(self, entry: PageEntry, target: PageTarget) -> ReadResult:
        extent = self._extents.get(entry.key)
        if extent is None:
            return ReadResult(ReadStatus.MISSING)
        head = bytearray(HEADER_BYTES)
        payload = target.payload.cast("B")
        fits = extent.size_bytes == HEADER_BYTES + len(payload)
        offset = extent.offset
        for part in (memoryview(head), payload) if fits else (memoryview(head),):
            rest = part
            while rest and (num_read := os.preadv(self._descriptor, [rest], offset)):
                rest, offset = rest[num_read:], offset + num_read
        return judge(head, payload, extent.size_bytes, (0, extent.serial, 0), target)

    def remove(self, entry: PageEntry) -> bool:
        with self._lock:
            extent = self._extents.pop(entry.key, None)
        if extent is not None:
            self._give_back(extent.offset, extent.size_bytes)
        return extent is not None

    def remove_link(self, key: PageKey) -> None:
        """There is none."""
