"""A disk store's folder: its format, who is at work in it, and what older versions left there.

::

    ROOT/format.json             {"format": 2}
    ROOT/lock, journal           see ``journal``
    ROOT/segment-*.data          see ``segment_files``
    ROOT/owner-*                 one for each process that has it open; held (flock) until it ends
    ROOT/old-format-1/           pages of the one-file-per-page format, set aside

An owner file holds an ``OwnerState``. When the process is gone, so is its lock, and with it whatever it
was at.
Whatever else lies in the folder is foreign: never counted, read or removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import secrets
import struct
from collections.abc import Mapping
from typing import NamedTuple

from hicache.errors import TierUnavailableError
from hicache.tiers.journal import JOURNAL_NAME

logger = logging.getLogger(__name__)

FORMAT = 2
FORMAT_NAME = "format.json"
OLD_FORMAT_FOLDER = "old-format-1"
_OWNER_NAME = re.compile(r"owner-([0-9a-f]{15})")
_FAN_OUT_NAME = re.compile(r"[0-9a-f]{2}")
_OLD_PAGE_SUFFIXES = (".page", ".key", ".tmp")
_STATE = struct.Struct("<QQQ")
_LEFT = struct.Struct("<QQ")
_MOST_STATE_BYTES = 4096


class OwnerState(NamedTuple):
    """What a process tells the others, who count these bytes against the capacity.

    Args:
        reserved_bytes: what it is writing, and its free slots that still have blocks.
        journal: inode of the journal that it has read.
        num_records: how much of that.
        left_bytes: by process, what it freed of that one's slots, in blocks that stay, until that one
            has heard of it and counts it itself.
    """

    reserved_bytes: int = 0
    journal: int = 0
    num_records: int = 0
    left_bytes: Mapping[int, int] = {}

    def pack(self) -> bytes:
        """As an owner file has it: three integers, and two for each process of ``left_bytes``."""
        head = _STATE.pack(self.reserved_bytes, self.journal, self.num_records)
        return head + b"".join(_LEFT.pack(*item) for item in self.left_bytes.items())

    @classmethod
    def unpack(cls, raw: bytes) -> OwnerState:
        """The reverse; older versions tell the first integer only."""
        raw = raw.ljust(_STATE.size, b"\0")
        left = raw[_STATE.size : len(raw) - (len(raw) - _STATE.size) % _LEFT.size]
        reserved_bytes, journal, num_records = _STATE.unpack_from(raw)
        return cls(reserved_bytes, journal, num_records, dict(_LEFT.iter_unpack(left)))


def _open_private(path: str, flags: int) -> int:
    """For this user alone, whatever the umask."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


class DiskFolder:
    """One process's place in a folder.

    Args:
        root: the folder; made by ``open`` if missing.

    *Thread*: the caller's lock is held. All calls raise ``OSError``.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self.owner = 0
        self._owner_descriptor = -1

    # ---- life ------------------------------------------------------------------------------------------------

    def make(self) -> None:
        """Make the folder (0700) unless it is there.

        Raises:
            OSError: it cannot be used.
            TierUnavailableError: it is somebody else's.
        """
        os.makedirs(self.root, mode=0o700, exist_ok=True)
        found, wanted = os.stat(self.root).st_uid, os.geteuid()
        if found != wanted:
            raise TierUnavailableError(
                f"disk store: {self.root} belongs to user {found}, this process runs as user {wanted}; "
                "change its owner or name a folder of this user"
            )
        if os.statvfs(self.root).f_flag & os.ST_RDONLY:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), self.root)
        if not os.access(self.root, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), self.root)

    def check_format(self) -> None:
        """Refuse a newer format, set an older one aside, mark a new folder. Under the folder's lock.

        Raises:
            TierUnavailableError: a format that this version does not read, with what to do.
        """
        path = f"{self.root}/{FORMAT_NAME}"
        try:
            with open(path, "rb") as file:
                found = json.loads(file.read())["format"]
        except FileNotFoundError:
            self._set_old_format_aside()
            temporary = f"{path}.new"
            with open(temporary, "w", encoding="utf-8", opener=_open_private) as file:
                file.write(json.dumps({"format": FORMAT}) + "\n")
            os.replace(temporary, path)
            return
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise TierUnavailableError(
                f"disk store: {path} is not readable ({error}); if the folder is a store of this version, "
                f'write {{"format": {FORMAT}}} into it, else name another folder'
            ) from error
        if found != FORMAT:
            raise TierUnavailableError(
                f"disk store: {self.root} has format {found!r}, this version reads and writes {FORMAT}; "
                "update hicache or name another folder"
            )

    def enter(self) -> None:
        """Become an owner. Under the folder's lock."""
        self.owner = secrets.randbits(59) | 1
        path = self._owner_path(self.owner)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._owner_descriptor = os.open(path, flags, 0o600)
        fcntl.flock(self._owner_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nothing told yet: as all zeros

    def leave(self) -> None:
        """Stop being an owner."""
        if self._owner_descriptor < 0:
            return
        with contextlib.suppress(OSError):  # with the lock gone, the file says nothing
            os.unlink(self._owner_path(self.owner))
        os.close(self._owner_descriptor)
        self._owner_descriptor = -1

    # ---- owners ----------------------------------------------------------------------------------------------

    def tell(self, state: OwnerState) -> None:
        """Let the others know."""
        packed = state.pack()[:_MOST_STATE_BYTES]
        os.pwrite(self._owner_descriptor, packed, 0)
        os.ftruncate(self._owner_descriptor, len(packed))

    def other_owners(self) -> dict[int, OwnerState]:
        """Those at work here and what they tell; files of those that are gone are removed."""
        owners = {}
        with os.scandir(self.root) as entries:
            names = [match for entry in entries if (match := _OWNER_NAME.fullmatch(entry.name))]
        for match in names:
            owner = int(match[1], 16)
            if owner != self.owner and (state := self._state_of(owner)) is not None:
                owners[owner] = state
        return owners

    def _state_of(self, owner: int) -> OwnerState | None:
        """What a live owner tells; None if it is gone."""
        path = self._owner_path(owner)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            raw = os.pread(descriptor, _MOST_STATE_BYTES, 0)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return OwnerState.unpack(raw)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            return None
        finally:
            os.close(descriptor)

    def _owner_path(self, owner: int) -> str:
        return f"{self.root}/owner-{owner:015x}"

    # ---- the file system -------------------------------------------------------------------------------------

    def free_bytes(self) -> int:
        """What the file system still gives to unprivileged writers."""
        status = os.statvfs(self.root)
        return status.f_bavail * status.f_frsize

    def _set_old_format_aside(self) -> None:
        """Move the folders of the one-file-per-page format below one of their own."""
        with os.scandir(self.root) as entries:
            folders = [
                entry.name
                for entry in entries
                if _FAN_OUT_NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            ]
        old = [folder for folder in sorted(folders) if _holds_old_pages(f"{self.root}/{folder}")]
        if not old:
            return
        aside = f"{self.root}/{OLD_FORMAT_FOLDER}"
        os.makedirs(aside, mode=0o700, exist_ok=True)
        for folder in old:
            os.rename(f"{self.root}/{folder}", f"{aside}/{folder}")
        logger.warning(
            "%s holds pages of an older format (one file a page). They were moved to %s and do not count "
            "against the capacity. To take them over: hicache store import %s --path %s; then remove the folder",
            self.root,
            aside,
            aside,
            self.root,
        )


def _holds_old_pages(folder: str) -> bool:
    with os.scandir(folder) as entries:
        return any(entry.name.endswith(_OLD_PAGE_SUFFIXES) for entry in entries)


def is_in_use(root: str) -> bool:
    """Whether a folder is a store of this format."""
    return os.path.exists(f"{root}/{FORMAT_NAME}") and os.path.exists(f"{root}/{JOURNAL_NAME}")


class PrivateFolder(DiskFolder):
    """A temporary folder that nobody else knows of."""

    def make(self) -> None:
        """It is there already."""

    def check_format(self) -> None:
        """It was made just now."""

    def enter(self) -> None:
        self.owner = 1

    def leave(self) -> None:
        """Nobody asks."""

    def tell(self, state: OwnerState) -> None:
        """Nobody asks."""

    def other_owners(self) -> dict[int, OwnerState]:
        return {}
