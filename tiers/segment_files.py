"""The files that hold pages: descriptors and system calls, no policy.

::

    ROOT/segment-00000001.data     slots; each holds a frame (header, payload) and zero bytes to its end

Frames that lie side by side are read or written by one system call. With ``direct``, frames that fill
whole blocks go past the page cache (``direct_io``).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import threading
from collections.abc import Generator, Sequence

from hicache.tiers.aio import AsyncReads
from hicache.tiers.direct_io import PIECE_BYTES, DirectMemory, DirectRun
from hicache.tiers.extents import BLOCK_BYTES
from hicache.tiers.frames import PADDING, Frame
from hicache.tiers.framing import HEADER_BYTES
from hicache.tiers.journal_records import split_place

logger = logging.getLogger(__name__)

SMALL_GRAIN = 8
LARGE_FRAME_BYTES = 32 << 10
"""Frames from here on fill whole blocks: a slot that is written again needs nothing read first."""
SEGMENT_BYTES = 16 << 30
RUN_BYTES = PIECE_BYTES
"""One system call moves so many bytes, but always one page."""
RUN_PAGES = 256
_MAX_PARTS = 1024  # IOV_MAX of Linux
_FALLOC_KEEP_SIZE_AND_PUNCH = 0x01 | 0x02
assert 3 * RUN_PAGES <= _MAX_PARTS


def grain_of(frame_bytes: int) -> int:
    """What the slot of such a frame is a multiple of."""
    return BLOCK_BYTES if frame_bytes >= LARGE_FRAME_BYTES else SMALL_GRAIN


def slot_bytes(payload_bytes: int) -> int:
    """What a page of so many bytes takes on the disk, header and padding included."""
    frame_bytes = HEADER_BYTES + payload_bytes
    grain = grain_of(frame_bytes)
    return -(-frame_bytes // grain) * grain


def segment_name(segment: int) -> str:
    """The file of a segment."""
    return f"segment-{segment:08x}.data"


def cut_into_runs(places: Sequence[tuple[int, int]]) -> list[range]:
    """Positions of neighbours that one system call may take.

    Args:
        places: (place, slot bytes) of each frame, sorted.
    """
    runs: list[range] = []
    begin, run_bytes, expected = 0, 0, -1
    for position, (place, size) in enumerate(places):
        is_full = run_bytes + size > RUN_BYTES or position - begin >= RUN_PAGES
        if position > begin and (place != expected or is_full):
            runs.append(range(begin, position))
            begin, run_bytes = position, 0
        run_bytes += size
        expected = place + size
    if begin < len(places):
        runs.append(range(begin, len(places)))
    return runs


class SegmentFiles:
    """The segment files of one folder.

    Args:
        root: the folder.
        unlinked: a new file loses its name at once, so that nothing outlives the process.
        direct: large frames bypass the page cache, if the file system can do that.

    *Thread*: any. All calls block on the file system and raise ``OSError``.
    """

    def __init__(self, root: str, *, unlinked: bool = False, direct: bool = False) -> None:
        self._root = root
        self._unlinked = unlinked
        self._direct = direct
        self._descriptors: dict[int, int] = {}
        self._direct_descriptors: dict[int, int] = {}
        self._own = threading.local()  # by thread: aligned memory, and a queue of reads
        self._queues: list[AsyncReads] = []
        self._has_queues = True
        self._lock = threading.Lock()
        self._is_closed = False

    def create(self, segment: int) -> None:
        """Make an empty segment; over one that is there but in no journal."""
        path = f"{self._root}/{segment_name(segment)}"
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path, flags, 0o600)
        if self._unlinked:
            os.unlink(path)
        with self._lock:
            self._descriptors[segment] = descriptor

    def size(self, segment: int) -> int:
        """Length of a segment's file in bytes; 0 if there is none."""
        try:
            return os.fstat(self._descriptor(segment)).st_size
        except FileNotFoundError:
            return 0

    def write(self, frames: Sequence[Frame]) -> None:
        """Write frames that lie side by side."""
        if (run := self._direct_run(frames)) is not None:
            self._memory().write(run)
            return
        segment, offset = split_place(frames[0].place)
        num_bytes = sum(frame.slot_bytes for frame in frames)
        descriptor = self._descriptor(segment)
        parts: list[bytes | bytearray | memoryview] = []
        for frame in frames:
            parts += (frame.header, frame.payload)
            if frame.rest_bytes:
                parts.append(PADDING[: frame.rest_bytes])
        num_written = os.pwritev(descriptor, parts, offset)
        while num_written < num_bytes:
            offset, num_bytes = offset + num_written, num_bytes - num_written
            parts = _after(parts, num_written)
            num_written = os.pwritev(descriptor, parts, offset)

    def read(self, frames: Sequence[Frame]) -> int:
        """Fill headers, payloads and rests of frames that lie side by side; bytes read before the file's end."""
        if (run := self._direct_run(frames)) is not None:
            return self._memory().read(run)
        segment, offset = split_place(frames[0].place)
        parts: list[bytes | bytearray | memoryview] = []
        for frame in frames:
            parts += (frame.header, frame.payload)
            if frame.rest is not None:
                parts.append(frame.rest)
            elif frame.rest_bytes and frame is not frames[-1]:
                parts.append(bytearray(frame.rest_bytes))
        return _read_all(self._descriptor(segment), parts, offset)

    @property
    def has_depth(self) -> bool:
        """Whether one thread has many reads under way at once."""
        return self._direct and self._has_queues

    def read_many(self, runs: Sequence[Sequence[Frame]]) -> Generator[tuple[int, OSError | None], None, None]:
        """Read several runs, all of them under way at once if the page cache is bypassed.

        Yields each run's position when its frames are filled, in any order, or with what went wrong.

        *Caller guarantees*: exhausts or closes the iterator.
        """
        queued = self._queued(runs)
        if queued is None:
            for position, frames in enumerate(runs):
                yield position, self._try_read(frames)
            return
        whole: set[int] = set()
        with contextlib.suppress(OSError), contextlib.closing(self._memory().read_many(*queued)) as ended:
            for position, is_whole in ended:
                if is_whole:
                    whole.add(position)
                    yield position, None
        for position in set(range(len(runs))) - whole:  # an error, or the file's end: the plain read tells
            yield position, self._try_read(runs[position])

    def _try_read(self, frames: Sequence[Frame]) -> OSError | None:
        try:
            self.read(frames)
        except OSError as error:
            return error
        return None

    def _queued(self, runs: Sequence[Sequence[Frame]]) -> tuple[AsyncReads, list[DirectRun]] | None:
        """This thread's queue and what to read by it, if these runs are to bypass the page cache and it can."""
        if not self.has_depth:
            return None
        try:
            direct = [run for frames in runs if (run := self._direct_run(frames)) is not None]
        except OSError:
            return None  # a segment is not there; reading tells which run is concerned
        if len(direct) < len(runs):
            return None
        queue: AsyncReads | None = getattr(self._own, "queue", None)
        if queue is None:
            try:
                queue = self._own.queue = AsyncReads()
            except OSError as error:
                self._has_queues = False
                logger.info("%s: no asynchronous reads here (%s); threads are used", self._root, error)
                return None
            with self._lock:
                self._queues.append(queue)
        return queue, direct

    def will_read(self, place: int, num_bytes: int) -> None:
        """Let the kernel begin to read what lies there; does not wait, and is no more than a hint."""
        if self._direct:
            return
        segment, offset = split_place(place)
        with contextlib.suppress(OSError):  # the read itself will tell
            os.posix_fadvise(self._descriptor(segment), offset, num_bytes, os.POSIX_FADV_WILLNEED)

    def sync(self, segments: Sequence[int]) -> None:
        """fdatasync: what was written survives a power cut."""
        for segment in segments:
            os.fdatasync(self._descriptor(segment))

    def punch(self, start: int, end: int) -> None:
        """Give the blocks between two places back to the file system; they read as zeros."""
        segment, offset = split_place(start)
        _punch_hole(self._descriptor(segment), offset, end - start)

    def truncate(self, segment: int, size: int) -> None:
        """Cut what is behind the last slot."""
        os.ftruncate(self._descriptor(segment), size)

    def close(self) -> None:
        """*Caller guarantees*: nothing reads or writes any more."""
        with self._lock:
            descriptors = [*self._descriptors.values(), *self._direct_descriptors.values()]
            self._descriptors, self._direct_descriptors = {}, {}
            queues, self._queues = self._queues, []
            self._is_closed = True
        for queue in queues:
            queue.close()
        for descriptor in descriptors:
            os.close(descriptor)

    def _descriptor(self, segment: int) -> int:
        descriptor = self._descriptors.get(segment)
        if descriptor is not None:
            return descriptor
        with self._lock:
            if self._is_closed:
                raise OSError(errno.EBADF, "the store is closed", self._root)
            if segment not in self._descriptors:
                path = f"{self._root}/{segment_name(segment)}"
                self._descriptors[segment] = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            return self._descriptors[segment]

    # ---- past the page cache -----------------------------------------------------------------------------------

    def _direct_run(self, frames: Sequence[Frame]) -> DirectRun | None:
        """How to move these frames past the page cache, if they are to go there."""
        if not self._direct or frames[0].slot_bytes % BLOCK_BYTES or frames[0].place % BLOCK_BYTES:
            return None
        segment, offset = split_place(frames[0].place)
        descriptor = self._direct_descriptor(segment)
        if descriptor is None:
            return None
        return DirectRun(descriptor, offset, sum(frame.slot_bytes for frame in frames), frames)

    def _direct_descriptor(self, segment: int) -> int | None:
        """One that bypasses the page cache, if the file system can."""
        descriptor = self._direct_descriptors.get(segment)
        if descriptor is not None:
            return descriptor
        path = f"/proc/self/fd/{self._descriptor(segment)}"  # it may have no name any more
        with self._lock:
            if segment not in self._direct_descriptors:
                try:
                    opened = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
                except OSError as error:
                    self._direct = False
                    logger.info("%s: no direct I/O here (%s); the page cache is used", self._root, error)
                    return None
                self._direct_descriptors[segment] = opened
            return self._direct_descriptors[segment]

    def _memory(self) -> DirectMemory:
        """This thread's aligned memory."""
        memory: DirectMemory | None = getattr(self._own, "memory", None)
        if memory is None:
            memory = self._own.memory = DirectMemory()
        return memory


def _read_all(descriptor: int, parts: Sequence[bytes | bytearray | memoryview], offset: int) -> int:
    """Fill buffers one after another, or as far as the file goes; how many bytes."""
    total = 0
    while parts and (num_read := os.preadv(descriptor, parts, offset + total)):
        total += num_read
        parts = _after(parts, num_read)
    return total


def _after(
    parts: Sequence[bytes | bytearray | memoryview], num_bytes: int
) -> list[bytes | bytearray | memoryview]:
    """What is left of buffers whose first bytes are done."""
    rest: list[bytes | bytearray | memoryview] = []
    for part in parts:
        if num_bytes >= len(part):
            num_bytes -= len(part)
        elif num_bytes:
            rest.append(memoryview(part)[num_bytes:])
            num_bytes = 0
        else:
            rest.append(part)
    return rest


_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def _punch_hole(descriptor: int, offset: int, num_bytes: int) -> None:
    """fallocate(2) with FALLOC_FL_PUNCH_HOLE, which ``os`` does not have."""
    if _libc.fallocate(descriptor, _FALLOC_KEEP_SIZE_AND_PUNCH, offset, num_bytes):
        number = ctypes.get_errno()
        raise OSError(number, f"fallocate: {os.strerror(number)} ({errno.errorcode.get(number, number)})")
