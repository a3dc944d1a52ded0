"""The journal of a folder: which page lies where, one file that all processes append to.

::

    ROOT/lock       held (flock) while the journal or a slot changes hands
    ROOT/journal    records (see ``journal_records``), oldest first

Whoever appends holds the lock and has read to the end, so all processes see one order of events. Whoever
only reads takes no lock: it reads whole records, and those it cannot verify it leaves for later. When half
of the records say nothing any more, the journal is written anew and takes the old one's name; readers see
by the inode that this has happened.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from hicache.tiers.journal_records import RECORD, RECORD_BYTES, Records, are_whole

JOURNAL_NAME = "journal"
LOCK_NAME = "lock"
LOCK_TIMEOUT_S = 5.0
"""How long the lock is waited for: a process that was stopped while it held it must not stop the others."""
_FIRST_PAUSE_S = 0.0001
_LONGEST_PAUSE_S = 0.01
_READ_BYTES = 64 << 20


class FolderReplacedError(FileNotFoundError):
    """The folder is gone, or is another one: everything that is known of it is void."""

    def __init__(self, root: str) -> None:
        super().__init__(errno.ENOENT, "the store's folder was removed or replaced", root)


@dataclass(frozen=True, slots=True)
class NewRecords:
    """What a look at the journal found.

    Args:
        records: whole ones, in order.
        is_all: the journal was written anew: ``records`` is all of it, not what came last.
        num_bad: records that were skipped because their check was wrong.
    """

    records: Records
    is_all: bool
    num_bad: int


@dataclass(frozen=True, slots=True)
class Appended:
    """How many records are in the journal now, and why not all of them, or why not durably."""

    num_records: int
    error: OSError | None


class Journal:
    """The journal of one folder.

    Args:
        root: the folder.
        durable: fsync what is appended.
        sleep: how to pass the time while another process holds the lock.

    *Thread*: the caller's lock is held. All calls raise ``OSError``.
    """

    def __init__(self, root: str, *, durable: bool, sleep: Callable[[float], None] = time.sleep) -> None:
        self._root = root
        self._path = f"{root}/{JOURNAL_NAME}"
        self._durable = durable
        self._sleep = sleep
        self._lock_descriptor = -1
        self._descriptor = -1
        self.inode = 0
        self._position = 0
        self.num_records = 0

    # ---- life ------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Open the lock and no more; the journal is opened under it by the first ``read``."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._lock_descriptor = os.open(f"{self._root}/{LOCK_NAME}", flags, 0o600)

    def close(self) -> None:
        for descriptor in (self._descriptor, self._lock_descriptor):
            if descriptor >= 0:
                os.close(descriptor)
        self._descriptor = self._lock_descriptor = -1
        self.inode = self._position = self.num_records = 0

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder's lock.

        Raises:
            OSError: ``ETIMEDOUT``, another process did not let go of it.
            FolderReplacedError: this is not the folder's lock any more.
        """
        if self._lock_descriptor < 0:
            raise FolderReplacedError(self._root)  # it could not be opened again so far
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                fcntl.flock(self._lock_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise OSError(
                        errno.ETIMEDOUT, f"no lock within {LOCK_TIMEOUT_S:g} s", f"{self._root}/{LOCK_NAME}"
                    ) from None
            self._sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        try:
            self._check_folder()
            yield
        finally:
            fcntl.flock(self._lock_descriptor, fcntl.LOCK_UN)

    # ---- reading ---------------------------------------------------------------------------------------------

    def peek(self) -> NewRecords | None:
        """What others appended since the last look, without the lock; one system call if nothing.

        Raises:
            FolderReplacedError: see there.
        """
        try:
            status = os.stat(self._path, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise FolderReplacedError(self._root) from error
        if status.st_ino == self.inode and status.st_size <= self._position:
            return None
        self._check_folder()
        return self._read(skip_bad=False)

    def read(self) -> NewRecords:
        """What others appended since the last look; records that are not whole are skipped for good.

        *Caller guarantees*: holds the lock.
        """
        found = self._read(skip_bad=True)
        rest = os.fstat(self._descriptor).st_size - self._position
        if rest:  # its writer was killed half-way
            os.ftruncate(self._descriptor, self._position)
        return found

    def read_all(self) -> Records:
        """All whole records. *Caller guarantees*: holds the lock and has read to the end."""
        records = self._records_from(0)
        return records[are_whole(records)]

    def _read(self, *, skip_bad: bool) -> NewRecords:
        is_all = self._reopen_if_replaced()
        records = self._records_from(self._position)
        whole = are_whole(records)
        num_bad = len(records) - int(np.count_nonzero(whole))
        if num_bad and not skip_bad:
            records, num_bad = records[: int(np.argmin(whole))], 0
        elif num_bad:
            self._advance(num_bad)
            records = records[whole]
        self._advance(len(records))
        return NewRecords(records, is_all, num_bad)

    def _advance(self, num_records: int) -> None:
        self._position += num_records * RECORD_BYTES
        self.num_records += num_records

    def _records_from(self, position: int) -> Records:
        parts = []
        while part := os.pread(self._descriptor, _READ_BYTES, position):
            parts.append(part)
            position += len(part)
        raw = parts[0] if len(parts) == 1 else b"".join(parts)
        return np.frombuffer(raw, RECORD, count=len(raw) // RECORD_BYTES)

    def _reopen_if_replaced(self) -> bool:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self._path, flags, 0o600)
        inode = os.fstat(descriptor).st_ino
        if inode == self.inode:
            os.close(descriptor)
            return False
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self.inode = descriptor, inode
        self._position = self.num_records = 0
        return True

    def _check_folder(self) -> None:
        if self._lock_descriptor < 0:
            raise FolderReplacedError(self._root)
        try:
            named = os.stat(f"{self._root}/{LOCK_NAME}", follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise FolderReplacedError(self._root) from error
        held = os.fstat(self._lock_descriptor)
        if (named.st_dev, named.st_ino) != (held.st_dev, held.st_ino):
            raise FolderReplacedError(self._root)

    # ---- writing ---------------------------------------------------------------------------------------------

    def append(self, records: Records) -> Appended:
        """Write records at the end. Records that were written stay: others may have read them already.

        *Caller guarantees*: holds the lock and has read to the end.
        """
        error: OSError | None = None
        end = self._position
        try:
            rest = memoryview(records.tobytes())
            while rest:
                num_written = os.pwrite(self._descriptor, rest, end)
                rest, end = rest[num_written:], end + num_written
            if self._durable and len(records):
                os.fdatasync(self._descriptor)
        except OSError as failure:
            error = failure
        num_whole = (end - self._position) // RECORD_BYTES
        self._advance(num_whole)
        if end > self._position:
            with contextlib.suppress(OSError):  # whoever holds the lock next tries again
                os.ftruncate(self._descriptor, self._position)
        return Appended(num_whole, error)

    def replace(self, records: Records) -> None:
        """Write the journal anew. *Caller guarantees*: holds the lock and has read to the end."""
        temporary = f"{self._path}.new"
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(temporary, flags, 0o600)
        try:
            for begin in range(0, len(records), _READ_BYTES // RECORD_BYTES):
                rest = memoryview(records[begin : begin + _READ_BYTES // RECORD_BYTES].tobytes())
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
            if self._durable:
                os.fdatasync(descriptor)
            os.replace(temporary, self._path)
            if self._durable:
                sync_folder(self._root)
        except BaseException:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        os.close(self._descriptor)
        self._descriptor, self.inode = descriptor, os.fstat(descriptor).st_ino
        self._position, self.num_records = len(records) * RECORD_BYTES, len(records)


def sync_folder(path: str) -> None:
    """Fsync a folder: names in it survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class NoJournal:
    """The journal of a private folder: nobody else will ever read it."""

    inode = 0
    num_records = 0

    def open(self) -> None:
        """Nothing to open."""

    def close(self) -> None:
        """Nothing to close."""

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Nobody to wait for."""
        return contextlib.nullcontext()

    def peek(self) -> NewRecords | None:
        """Nobody else writes."""
        return None

    def read(self) -> NewRecords:
        """Nobody else writes."""
        return NewRecords(np.zeros(0, RECORD), is_all=False, num_bad=0)

    def read_all(self) -> Records:
        """Nothing was kept."""
        return np.zeros(0, RECORD)

    def append(self, records: Records) -> Appended:
        """Nobody will read it."""
        return Appended(len(records), None)

    def replace(self, records: Records) -> None:
        """Nothing to replace."""
