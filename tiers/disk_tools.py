"""What an operator does with a disk store: look, verify, copy out, copy in.

An *archive* is one file, parents before children, so that it can be read in one pass::

    b"HICPAGES" and format version 1, 2 bytes
    frames     header (see ``framing``) and payload, as in the store
    b"HICTOTAL" and the number of frames, 8 bytes, little-endian
"""

from __future__ import annotations

import struct
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO

from hicache.errors import CorruptPayloadError, TierError
from hicache.tiers.disk import DiskStore
from hicache.tiers.disk_pages import DiskPages, StoredFrame
from hicache.tiers.framing import (
    HEADER_BYTES,
    PageHeader,
    UnsupportedFormatError,
    check_payload,
    decode_header,
)
from hicache.tiers.journal import JOURNAL_NAME
from hicache.tiers.page_index import PageEntry
from hicache.tiers.store import StoredPage
from hicache.types import PageKey

ARCHIVE_MAGIC = b"HICPAGES"
ARCHIVE_VERSION = 1
_TRAILER_MAGIC = b"HICTOTAL"
_VERSION = struct.Struct("<H")
_TOTAL = struct.Struct("<Q")
_BATCH_BYTES = 16 << 20

Progress = Callable[[int], None]
"""Told the number of pages done so far; what it raises ends the work."""


class ArchiveError(TierError):
    """A file is no archive, is of a newer format, or is damaged; says where."""


@dataclass(frozen=True, slots=True)
class ScrubResult:
    """What reading every page found. ``num_bad``: pages that were not right; they are removed."""

    num_pages: int
    num_bytes: int
    num_bad: int


@dataclass(frozen=True, slots=True)
class ExportResult:
    """``num_pages`` are in the archive; ``num_left_out`` are not: read wrong, or gone meanwhile."""

    num_pages: int
    num_left_out: int


@dataclass(frozen=True, slots=True)
class ImportResult:
    """What became of the pages of an archive or an old folder.

    Args:
        num_stored: in the store at the end, whether they were there before or not.
        num_evicted: were taken, and had to leave again for those that came after them.
        num_refused: whole, but not taken.
        num_bad: damaged, not readable, or encoded in a way that this version does not read.
        num_displaced: pages that only the store had, and that left it meanwhile.
    """

    num_stored: int
    num_evicted: int
    num_refused: int
    num_bad: int
    num_displaced: int

    @property
    def is_complete(self) -> bool:
        """Everything is in the store now."""
        return not (self.num_evicted or self.num_refused or self.num_bad)


def scrub(pages: DiskPages, progress: Progress = lambda _: None) -> ScrubResult:
    """Read and verify every page, in the order of the disk; bad ones are removed."""
    pages.refresh()
    entries = sorted(pages.ledger.index.entries(), key=lambda entry: entry.place)
    num_pages = num_bytes = 0
    num_corrupt_before = pages.counters.snapshot(pages.ledger.index).pages_corrupt
    for num_done, frame in enumerate(pages.frames(entries), 1):
        if frame is not None:
            num_pages, num_bytes = num_pages + 1, num_bytes + frame.header.payload_bytes
        progress(num_done)
    num_bad = pages.counters.snapshot(pages.ledger.index).pages_corrupt - num_corrupt_before
    return ScrubResult(num_pages, num_bytes, num_bad)


def find_keys(
    pages: DiskPages, *, prefixes: Iterable[str] = (), component: str | None = None
) -> list[PageKey]:
    """Keys of the pages whose key starts with one of the hexadecimal prefixes, or of one component.

    Children come before their parents, so that deleting them in this order leaves no suffix alone.
    """
    starts = tuple(prefix.lower() for prefix in prefixes)
    found = [
        page.entry
        for page in pages.ledger.listing()
        if (not starts or page.entry.key.hex().startswith(starts))
        and (component is None or page.component == component[:32])
    ]
    return [entry.key for entry in reversed(parents_first(found))]


def count_components(pages: DiskPages) -> dict[str, tuple[int, int]]:
    """By the component's name: number of pages, and what they cost of the capacity in bytes."""
    num_pages: Counter[str] = Counter()
    num_bytes: Counter[str] = Counter()
    for page in pages.ledger.listing():
        num_pages[page.component] += 1
        num_bytes[page.component] += page.entry.size_bytes
    return {name: (num_pages[name], num_bytes[name]) for name in sorted(num_pages)}


def parents_first(entries: Iterable[PageEntry]) -> list[PageEntry]:
    """The same pages, each after the page it hangs under; otherwise in the order given."""
    waiting = {entry.key: entry for entry in entries}
    ordered: list[PageEntry] = []
    while waiting:
        chain = [next(iter(waiting.values()))]
        while (parent := chain[-1].parent) is not None and parent in waiting and len(chain) <= len(waiting):
            chain.append(waiting[parent])
        ordered.extend(entry for entry in reversed(chain) if waiting.pop(entry.key, None) is not None)
    return ordered


# ---- copying out ---------------------------------------------------------------------------------------------------


def export_pages(pages: DiskPages, target: Path, progress: Progress = lambda _: None) -> ExportResult:
    """Write all pages that are right to an archive (0600). It takes its name when it is complete.

    *Caller guarantees*: ``check_target`` passed.

    Raises:
        ArchiveError: it cannot be written.
    """
    pages.refresh()
    entries = parents_first(pages.ledger.index.by_recency())
    try:
        with tempfile.NamedTemporaryFile(
            dir=target.parent, prefix=f"{target.name}.", suffix=".partial", delete=False
        ) as file:
            partial = Path(file.name)
            try:
                num_pages = _write_archive(file, pages.frames(entries), progress)
                file.flush()
                partial.replace(target)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise ArchiveError(
            f"{target} cannot be written: {error.strerror}; what was there before is left as it was"
        ) from error
    return ExportResult(num_pages, len(entries) - num_pages)


def _write_archive(file: IO[bytes], frames: Iterable[StoredFrame | None], progress: Progress) -> int:
    """How many pages there were."""
    num_pages = 0
    file.write(ARCHIVE_MAGIC + _VERSION.pack(ARCHIVE_VERSION))
    for num_done, frame in enumerate(frames, 1):
        if frame is not None:
            file.write(frame.raw_header)
            file.write(frame.payload)
            num_pages += 1
        progress(num_done)
    file.write(_TRAILER_MAGIC + _TOTAL.pack(num_pages))
    return num_pages


def check_target(target: Path, folder: Path) -> None:
    """Refuse what a file that is put in the target's place would break.

    Raises ``ArchiveError``: the target is something other than a file, or lies in the store's own folder.
    """
    if target.is_symlink() or (target.exists() and not target.is_file()):
        raise ArchiveError(f"{target} is no plain file; name a file, new or to be replaced")
    if not target.resolve().parent.is_dir():
        raise ArchiveError(f"{target.parent} is no folder; make it, or name a file elsewhere")
    if target.resolve().is_relative_to(folder.resolve()):
        raise ArchiveError(f"{target} lies in the store's own folder {folder}; name a file elsewhere")


# ---- copying in ----------------------------------------------------------------------------------------------------


def check_source(source: Path) -> None:
    """Refuse what is neither an archive nor a folder of the older format, before a store is made for it.

    Raises ``ArchiveError``, also if it cannot be read.
    """
    if (source / JOURNAL_NAME).exists():
        raise ArchiveError(
            f"{source} is a store of the present format; `hicache store export` makes an archive of it"
        )
    try:
        if source.is_dir():
            next(source.iterdir(), None)
            return
        with source.open("rb") as file:
            _check_head(file, source)
    except OSError as error:
        raise ArchiveError(
            f"{source} cannot be read: {error.strerror}; name a file that this user may read"
        ) from error


async def import_pages(store: DiskStore, source: Path, progress: Progress = lambda _: None) -> ImportResult:
    """Put the pages of an archive, or of a folder of the one-file-per-page format, into a store.

    Raises:
        ArchiveError: not an archive, not readable, or damaged; what came before the damage is in the store.
    """
    frames = _old_frames(source) if source.is_dir() else _archive_frames(source)  # noqa: ASYNC240  # a tool may block
    had = await store.run(lambda pages: [entry.key for entry in pages.ledger.index.entries()])
    taken: list[PageKey] = []
    num_refused = num_bad = 0
    batch: list[StoredPage] = []

    async def put_batch() -> None:
        nonlocal num_refused
        pages, batch[:] = list(batch), []
        answers = await store.put(pages)
        taken.extend(page.key for page, is_taken in zip(pages, answers, strict=True) if is_taken)
        num_refused += answers.count(False)
        progress(len(taken))

    try:
        for frame in frames:
            if frame is None:
                num_bad += 1
                continue
            header, payload = frame
            batch.append(
                StoredPage(
                    header.key, header.parent, header.component, memoryview(payload), codec=header.codec
                )
            )
            if sum(page.payload.nbytes for page in batch) >= _BATCH_BYTES:
                await put_batch()
    except OSError as error:
        raise ArchiveError(
            f"{source} cannot be read on: {error.strerror}; what came before is imported"
        ) from error
    finally:
        await put_batch()
    num_stored = sum(await store.exists(taken))
    others = list(set(had).difference(taken))
    num_displaced = len(others) - sum(await store.exists(others))
    return ImportResult(num_stored, len(taken) - num_stored, num_refused, num_bad, num_displaced)


def _archive_frames(source: Path) -> Iterator[tuple[PageHeader, bytes] | None]:
    """Pages of an archive; None for one that is not right by itself."""
    with source.open("rb") as file:
        _check_head(file, source)
        num_frames = 0
        while True:
            start = file.tell()
            raw = file.read(len(_TRAILER_MAGIC) + _TOTAL.size)
            if raw.startswith(_TRAILER_MAGIC) and len(raw) == len(_TRAILER_MAGIC) + _TOTAL.size:
                if _TOTAL.unpack_from(raw, len(_TRAILER_MAGIC))[0] != num_frames:
                    raise ArchiveError(f"{source}: pages are missing in it")
                return
            num_frames += 1
            yield _next_frame(file, raw, source, start)


def _check_head(file: BinaryIO, source: Path) -> None:
    head = file.read(len(ARCHIVE_MAGIC) + _VERSION.size)
    if not head.startswith(ARCHIVE_MAGIC) or len(head) < len(ARCHIVE_MAGIC) + _VERSION.size:
        raise ArchiveError(f"{source} is no archive of pages; name a file that `hicache store export` wrote")
    (version,) = _VERSION.unpack_from(head, len(ARCHIVE_MAGIC))
    if version != ARCHIVE_VERSION:
        raise ArchiveError(
            f"{source} has format {version}, this version reads {ARCHIVE_VERSION}; update hicache"
        )


def _next_frame(file: BinaryIO, begun: bytes, source: Path, start: int) -> tuple[PageHeader, bytes] | None:
    try:
        header = decode_header(begun + file.read(HEADER_BYTES - len(begun)))
    except (CorruptPayloadError, UnsupportedFormatError) as error:
        raise ArchiveError(
            f"{source} is damaged at byte {start} ({error}); what came before is imported, export it again"
        ) from error
    payload = file.read(header.payload_bytes)
    return (header, payload) if _is_right(header, payload) else None


def _old_frames(folder: Path) -> Iterator[tuple[PageHeader, bytes] | None]:
    """Pages of a folder of the older format; parents before children where their files tell."""
    entries: dict[PageKey, tuple[PageEntry, Path]] = {}
    for path in sorted(folder.glob("[0-9a-f][0-9a-f]/*.page")):
        key, _, rest = path.stem.partition("-")
        parent = rest.partition("-")[0]
        try:
            above = None if parent == "root" else PageKey(bytes.fromhex(parent))
            entry = PageEntry(PageKey(bytes.fromhex(key)), above, 0)
        except ValueError:
            continue  # foreign
        entries[entry.key] = (entry, path)
    for entry in parents_first(entry for entry, _ in entries.values()):
        try:
            raw = entries[entry.key][1].read_bytes()
            header = decode_header(raw)
        except (OSError, CorruptPayloadError, UnsupportedFormatError):
            yield None
            continue
        payload = raw[HEADER_BYTES:]
        yield (header, payload) if header.key == entry.key and _is_right(header, payload) else None


def _is_right(header: PageHeader, payload: bytes) -> bool:
    try:
        check_payload(header, payload)
    except CorruptPayloadError:
        return False
    return True
