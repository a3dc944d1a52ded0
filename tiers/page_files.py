"""One file per page: names and system calls, no policy.

::

    ROOT/ab/                          the first two hex digits of the key
        KEY-PARENT-SIZE.page          a page: header and payload; SIZE bytes in all, PARENT or "root"
        KEY.key                       a second name (hard link) of the same file
        KEY-RANDOM.tmp                being written: its writer holds flock() on it

A page file's name says all that an index wants to know, so a restart reads folders and opens no
page. The ``.key`` name answers *is this key here?* with one system call where only the key is known:
so one process finds what another wrote. It comes after the page's own name and goes after it; without
it (a file system without hard links, a kill in between) other processes find the page at their next
open and not before.

Whatever else lies in the folders is foreign: never counted, read or removed.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from hicache.errors import CorruptPayloadError
from hicache.tiers.framing import (
    HEADER_BYTES,
    UnsupportedFormatError,
    check_payload,
    decode_header,
)
from hicache.tiers.page_index import PageEntry
from hicache.tiers.store import PageTarget
from hicache.types import PageKey

logger = logging.getLogger(__name__)

_ROOT = "root"
_PAGE_NAME = re.compile(r"([0-9a-f]{64})-([0-9a-f]{64}|root)-([1-9][0-9]{0,18})\.page")
_LINK_NAME = re.compile(r"([0-9a-f]{64})\.key")
_TEMPORARY_NAME = re.compile(r"([0-9a-f]{64})-[0-9a-f]{16}\.tmp")
_FOLDER_NAME = re.compile(r"[0-9a-f]{2}")
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP)
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW

FileStamp = tuple[int, int, int]
"""Device, inode and mtime in ns: whether a name still means the same file."""


class ReadStatus(Enum):
    """What a read of a page file found."""

    HIT = "hit"
    MISSING = "missing"
    CORRUPT = "corrupt"
    """Not the page its name says: truncated, spoilt, or another key's."""
    UNSUPPORTED = "unsupported"
    """A whole page of a newer format."""
    MISMATCH = "mismatch"
    """A whole page, but not of the length or component that was asked for."""


@dataclass(frozen=True, slots=True)
class ReadResult:
    """Outcome of one read; ``stamp`` of the file that was read, ``reason`` for people."""

    status: ReadStatus
    stamp: FileStamp | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TemporaryFile:
    """A page written in full that nobody can see yet; the open file holds its lock."""

    path: str
    descriptor: int


@dataclass(frozen=True, slots=True)
class FoundPage:
    """A page file met by ``scan``. ``is_whole``: its length is the one in its name."""

    entry: PageEntry
    modified_ns: int
    is_whole: bool


class PageFiles:
    """The files of one folder.

    Args:
        root: the folder; made by ``open`` if missing.
        durable: fsync each page before it is published, and its folder after. Without it the data
            is written and renamed: safe against a kill of the process; after a power cut a page may
            be lost or short, which the next open or read finds out.

    *Thread*: any; all calls block on the file system and raise ``OSError``.
    """

    def __init__(self, root: str, *, durable: bool) -> None:
        self.root = root
        self._durable = durable
        self._has_links = True

    def open(self) -> None:
        """Make the folder (0700) unless it is there. Raises ``OSError`` if it cannot be used."""
        os.makedirs(self.root, mode=0o700, exist_ok=True)
        if not os.access(self.root, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), self.root)

    def folders(self) -> list[str]:
        """The fan-out folders there are, sorted."""
        with os.scandir(self.root) as entries:
            return sorted(
                entry.name
                for entry in entries
                if _FOLDER_NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            )

    def scan(self, folder: str) -> list[FoundPage]:
        """List the pages of one fan-out folder without opening them; sweep what a kill left there."""
        found: list[FoundPage] = []
        links: list[str] = []
        temporaries: list[str] = []
        with os.scandir(f"{self.root}/{folder}") as entries:
            for entry in entries:
                if match := _PAGE_NAME.fullmatch(entry.name):
                    page = _found_page(entry, match)
                    if page is not None:
                        found.append(page)
                elif match := _LINK_NAME.fullmatch(entry.name):
                    links.append(match[1])
                elif _TEMPORARY_NAME.fullmatch(entry.name):
                    temporaries.append(entry.path)
        for path in temporaries:
            _sweep_temporary(path)
        pages = {page.entry.key: page.entry for page in found}
        linked = {PageKey(bytes.fromhex(link)) for link in links}
        for key in linked - pages.keys():
            if self.find(key) is None:
                _unlink(self._link_path(key))
        for key in pages.keys() - linked:
            self._link(pages[key])
        return found

    # ---- writing ---------------------------------------------------------------------------------------------

    def write_temporary(self, key: PageKey, parts: Sequence[bytes | memoryview]) -> TemporaryFile:
        """Write all parts to a new file that ``publish`` makes a page, or ``discard`` removes."""
        folder = self._folder(key)
        path = f"{folder}/{key.hex()}-{secrets.token_hex(8)}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags, 0o600)
        except FileNotFoundError:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            if self._durable:
                _sync_folder(self.root)
            descriptor = os.open(path, flags, 0o600)
        temporary = TemporaryFile(path, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write_all(descriptor, parts)
            if self._durable:
                os.fsync(descriptor)
        except BaseException:
            self.discard(temporary)
            raise
        return temporary

    def publish(self, temporary: TemporaryFile, entry: PageEntry) -> None:
        """Make a written page visible under its name, all at once; consumes the temporary file."""
        try:
            os.replace(temporary.path, self.path(entry))
        except BaseException:
            self.discard(temporary)
            raise
        os.close(temporary.descriptor)
        self._link(entry)
        if self._durable:
            _sync_folder(self._folder(entry.key))

    def discard(self, temporary: TemporaryFile) -> None:
        """Remove a temporary file."""
        try:
            _unlink(temporary.path)
        finally:
            os.close(temporary.descriptor)

    # ---- reading ---------------------------------------------------------------------------------------------

    def find(self, key: PageKey) -> PageEntry | None:
        """What another process stored under ``key``: one system call if nothing."""
        try:
            descriptor = os.open(self._link_path(key), _READ_FLAGS)
        except FileNotFoundError:
            return None
        head = bytearray(HEADER_BYTES)
        try:
            size_bytes = os.fstat(descriptor).st_size
            _read_all(descriptor, (memoryview(head),))
            header = decode_header(head)
            header.check_identity(key)
        except (CorruptPayloadError, UnsupportedFormatError) as error:
            logger.debug("%s: %s", self._link_path(key), error)
            return None
        finally:
            os.close(descriptor)
        entry = PageEntry(key, header.parent, size_bytes)
        return entry if self.measure(entry) is not None else None

    def measure(self, entry: PageEntry) -> tuple[int, FileStamp] | None:
        """Length in bytes and stamp of a page's file; None if there is none."""
        try:
            status = os.stat(self.path(entry), follow_symlinks=False)
        except FileNotFoundError:
            return None
        return status.st_size, _stamp(status)

    def read(self, entry: PageEntry, target: PageTarget) -> ReadResult:
        """Read a page into ``target`` and check it: open, one vectored read, close."""
        try:
            descriptor = os.open(self.path(entry), _READ_FLAGS)
        except FileNotFoundError:
            return ReadResult(ReadStatus.MISSING)
        try:
            return _read_page(descriptor, target)
        finally:
            os.close(descriptor)

    # ---- removing --------------------------------------------------------------------------------------------

    def remove(self, entry: PageEntry) -> bool:
        """Remove a page; whether it was there."""
        was_there = _unlink(self.path(entry))
        self.remove_link(entry.key)
        return was_there

    def remove_link(self, key: PageKey) -> None:
        """Remove the second name of a page whose own name is gone; it would keep the bytes."""
        _unlink(self._link_path(key))

    def remove_unchanged(self, entry: PageEntry, stamp: FileStamp) -> bool:
        """Remove a page unless its name means another file by now; whether the name is free."""
        measured = self.measure(entry)
        if measured is not None and measured[1] != stamp:
            return False
        self.remove(entry)
        return True

    def close(self) -> None:
        """Let go of what is held open between calls: nothing here."""

    def free_bytes(self) -> int:
        """What the file system still gives to unprivileged writers."""
        status = os.statvfs(self.root)
        return status.f_bavail * status.f_frsize

    # ---- names -----------------------------------------------------------------------------------------------

    def path(self, entry: PageEntry) -> str:
        """The file of a page."""
        parent = _ROOT if entry.parent is None else entry.parent.hex()
        return f"{self._folder(entry.key)}/{entry.key.hex()}-{parent}-{entry.size_bytes}.page"

    def _folder(self, key: PageKey) -> str:
        return f"{self.root}/{key[:1].hex()}"

    def _link_path(self, key: PageKey) -> str:
        return f"{self._folder(key)}/{key.hex()}.key"

    def _link(self, entry: PageEntry) -> None:
        if not self._has_links:
            return
        page, link = self.path(entry), self._link_path(entry.key)
        try:
            try:
                os.link(page, link)
            except FileExistsError:
                if not os.path.samefile(page, link):
                    _unlink(link)
                    os.link(page, link)
        except OSError as error:
            # The page itself is safe: only other processes have to wait for their next open.
            if error.errno in _NO_LINKS:
                self._has_links = False
                logger.info(
                    "%s keeps no hard links: other processes see new pages at their next open", self.root
                )
            else:
                logger.debug("no link to page %s: %s", entry.key.hex(), error)


def _found_page(entry: os.DirEntry[str], match: re.Match[str]) -> FoundPage | None:
    key, parent, size_bytes = match[1], match[2], int(match[3])
    if parent == key or Path(entry.path).parent.name != key[:2]:
        return None
    try:
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    page = PageEntry(
        PageKey(bytes.fromhex(key)), None if parent == _ROOT else PageKey(bytes.fromhex(parent)), size_bytes
    )
    return FoundPage(page, status.st_mtime_ns, status.st_size == size_bytes)


def _read_page(descriptor: int, target: PageTarget) -> ReadResult:
    status = os.fstat(descriptor)
    head = bytearray(HEADER_BYTES)
    payload = target.payload.cast("B")
    fits = status.st_size == HEADER_BYTES + len(payload)
    _read_all(descriptor, (memoryview(head), payload) if fits else (memoryview(head),))
    return judge(head, payload, status.st_size, _stamp(status), target)


def judge(
    head: bytearray, payload: memoryview, size_bytes: int, stamp: FileStamp, target: PageTarget
) -> ReadResult:
    """Whether header and payload that were read are the page that was asked for.

    Args:
        size_bytes: of the stored page, header included; ``payload`` was read only if it fits this.
    """
    try:
        header = decode_header(head)
        header.check_identity(target.key)
        whole = HEADER_BYTES + header.payload_bytes
        if size_bytes != whole:
            reason = f"file of {size_bytes} bytes, header and payload are {whole}"
            return ReadResult(ReadStatus.CORRUPT, stamp, reason)
        if header.component != target.component or size_bytes != HEADER_BYTES + len(payload):
            reason = (
                f"{header.payload_bytes} bytes of {header.component!r} are stored, "
                f"{len(payload)} of {target.component!r} were asked for"
            )
            return ReadResult(ReadStatus.MISMATCH, stamp, reason)
        check_payload(header, payload)
    except CorruptPayloadError as error:
        return ReadResult(ReadStatus.CORRUPT, stamp, str(error))
    except UnsupportedFormatError as error:
        return ReadResult(ReadStatus.UNSUPPORTED, stamp, str(error))
    return ReadResult(ReadStatus.HIT, stamp)


def _read_all(descriptor: int, parts: Sequence[memoryview]) -> None:
    """Fill the buffers one after another, or as far as the file goes."""
    rest = [part for part in parts if len(part)]
    while rest and (num_read := os.readv(descriptor, rest)):
        _advance(rest, num_read)


def _write_all(descriptor: int, parts: Sequence[bytes | memoryview]) -> None:
    rest = [memoryview(part).cast("B") for part in parts if len(part)]
    while rest:
        _advance(rest, os.writev(descriptor, rest))


def _advance(rest: list[memoryview], num_bytes: int) -> None:
    """Take ``num_bytes`` off the front of what is left to do."""
    while rest and num_bytes >= len(rest[0]):
        num_bytes -= len(rest.pop(0))
    if rest:
        rest[0] = rest[0][num_bytes:]


def _stamp(status: os.stat_result) -> FileStamp:
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _unlink(path: str) -> bool:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True


def _sync_folder(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sweep_temporary(path: str) -> None:
    """Remove a temporary file unless its writer is alive."""
    try:
        descriptor = os.open(path, _READ_FLAGS)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _unlink(path)
    except BlockingIOError:
        logger.debug("%s is being written by another process", path)
    finally:
        os.close(descriptor)
