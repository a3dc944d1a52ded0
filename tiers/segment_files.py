"""The files that hold pages: descriptors and system calls, no policy.

::

    ROOT/segment-00000001.data     slots; each holds a frame (header, payload) and zero bytes to its end

Frames that lie side by side are read or written by one system call. With ``direct``, frames that fill
whole blocks go past the page cache, by way of an aligned buffer for each thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import logging
import mmap
import os
import threading
from collections.abc import Generator, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hicache.tiers.aio import MAX_READS, AsyncReads
from hicache.tiers.extents import BLOCK_BYTES
from hicache.tiers.framing import HEADER_BYTES
from hicache.tiers.journal_records import split_place

logger = logging.getLogger(__name__)

SMALL_GRAIN = 8
LARGE_FRAME_BYTES = 32 << 10
"""Frames from here on fill whole blocks: a slot that is written again needs nothing read first."""
SEGMENT_BYTES = 16 << 30
RUN_BYTES = 17 << 16
"""One system call moves so many bytes, but always one page."""
RUN_PAGES = 256
BATCH_BYTES = 16 << 20
"""So much is read at once past the page cache, but always one run: the memory that takes, for each thread."""
_MAX_PARTS = 1024  # IOV_MAX of Linux
UNLOCKED_COPY_BYTES = 256 << 10
"""From here on memory is copied without the interpreter's lock. What is shorter takes less time (under 20 us)
than it takes to hand the lock over and to get it back.
"""
_FALLOC_KEEP_SIZE_AND_PUNCH = 0x01 | 0x02
_PADDING = memoryview(bytes(BLOCK_BYTES))
assert 3 * RUN_PAGES <= _MAX_PARTS


class Frame(NamedTuple):
    """One page in memory, to write or to read: its place, its slot, its header and its payload."""

    place: int
    slot_bytes: int
    header: bytes | bytearray
    payload: memoryview


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
        self._aligned = threading.local()
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
        segment, offset = split_place(frames[0].place)
        num_bytes = sum(frame.slot_bytes for frame in frames)
        parts: list[bytes | bytearray | memoryview]
        descriptor = self._direct_descriptor(segment, frames)
        if descriptor is not None:
            parts = [self._gathered(frames, num_bytes)]
        else:
            descriptor = self._descriptor(segment)
            parts = []
            for frame in frames:
                parts += (frame.header, frame.payload)
                padding = frame.slot_bytes - HEADER_BYTES - len(frame.payload)
                if padding:
                    parts.append(_PADDING[:padding])
        num_written = os.pwritev(descriptor, parts, offset)
        while num_written < num_bytes:
            offset, num_bytes = offset + num_written, num_bytes - num_written
            parts = _after(parts, num_written)
            num_written = os.pwritev(descriptor, parts, offset)

    def read(self, frames: Sequence[Frame]) -> int:
        """Fill headers and payloads of frames that lie side by side; bytes read before the file's end."""
        segment, offset = split_place(frames[0].place)
        descriptor = self._direct_descriptor(segment, frames)
        if descriptor is not None:
            num_bytes = sum(frame.slot_bytes for frame in frames)
            aligned = self._buffer(num_bytes)
            num_read = _read_all(descriptor, [aligned], offset)
            if num_read < num_bytes:
                aligned[num_read:] = bytes(num_bytes - num_read)
            _scatter(aligned, frames)
            return num_read
        parts: list[bytes | bytearray | memoryview] = []
        for frame in frames:
            parts += (frame.header, frame.payload)
            padding = frame.slot_bytes - HEADER_BYTES - len(frame.payload)
            if padding and frame is not frames[-1]:
                parts.append(bytearray(padding))
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
        queue = self._queue(runs)
        if queue is None:
            for position, frames in enumerate(runs):
                yield position, self._try_read(frames)
            return
        begin = 0
        while begin < len(runs):
            end, num_bytes = begin, 0
            while end < len(runs) and end - begin < MAX_READS:
                run_bytes = sum(frame.slot_bytes for frame in runs[end])
                if end > begin and num_bytes + run_bytes > BATCH_BYTES:
                    break
                end, num_bytes = end + 1, num_bytes + run_bytes
            yield from (
                (begin + position, error) for position, error in self._read_queued(queue, runs[begin:end])
            )
            begin = end

    def _read_queued(
        self, queue: AsyncReads, runs: Sequence[Sequence[Frame]]
    ) -> Iterator[tuple[int, OSError | None]]:
        sizes = [sum(frame.slot_bytes for frame in frames) for frames in runs]
        starts = [0, *itertools.accumulate(sizes)]
        aligned = self._buffer(starts[-1])
        address = np.frombuffer(aligned, np.uint8).ctypes.data
        places = [split_place(frames[0].place) for frames in runs]
        reads = queue.read(
            [self._direct_descriptors[segment] for segment, _ in places],
            [address + start for start in starts[:-1]],
            sizes,
            [offset for _, offset in places],
        )
        with contextlib.closing(reads):
            short: list[int] = []
            for position, num_read in reads:
                if num_read == sizes[position]:
                    _scatter(aligned[starts[position] : starts[position + 1]], runs[position])
                    yield position, None
                else:
                    short.append(position)
        for position in short:  # an error, or the file's end: the plain read tells which
            yield position, self._try_read(runs[position])

    def _try_read(self, frames: Sequence[Frame]) -> OSError | None:
        try:
            self.read(frames)
        except OSError as error:
            return error
        return None

    def _queue(self, runs: Sequence[Sequence[Frame]]) -> AsyncReads | None:
        """This thread's queue, if these runs are to bypass the page cache and it has, or can have, one."""
        if not self.has_depth:
            return None
        try:
            if any(self._direct_descriptor(split_place(run[0].place)[0], run) is None for run in runs):
                return None
        except OSError:
            return None  # a segment is not there; reading tells which run is concerned
        queue: AsyncReads | None = getattr(self._aligned, "queue", None)
        if queue is None:
            try:
                queue = self._aligned.queue = AsyncReads()
            except OSError as error:
                self._has_queues = False
                logger.info("%s: no asynchronous reads here (%s); threads are used", self._root, error)
                return None
            with self._lock:
                self._queues.append(queue)
        return queue

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

    def _direct_descriptor(self, segment: int, frames: Sequence[Frame]) -> int | None:
        """One that bypasses the page cache, if these frames are to."""
        if not self._direct or frames[0].slot_bytes % BLOCK_BYTES or frames[0].place % BLOCK_BYTES:
            return None
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

    def _buffer(self, num_bytes: int) -> memoryview:
        """This thread's aligned memory."""
        memory: mmap.mmap | None = getattr(self._aligned, "memory", None)
        if memory is None or len(memory) < num_bytes:
            memory = self._aligned.memory = mmap.mmap(-1, max(num_bytes, 2 * RUN_BYTES))
        return memoryview(memory)[:num_bytes]

    def _gathered(self, frames: Sequence[Frame], num_bytes: int) -> memoryview:
        """Frames with their padding in this thread's aligned memory."""
        aligned = self._buffer(num_bytes)
        begin = 0
        for frame in frames:
            payload = begin + HEADER_BYTES
            end = payload + len(frame.payload)
            aligned[begin:payload] = frame.header
            _copy(frame.payload, aligned[payload:end])
            begin += frame.slot_bytes
            aligned[end:begin] = _PADDING[: begin - end]
        return aligned


def _scatter(aligned: memoryview, frames: Sequence[Frame]) -> None:
    """Fill headers and payloads from slots that were read as one."""
    begin = 0
    for frame in frames:
        payload = begin + HEADER_BYTES
        memoryview(frame.header)[:] = aligned[begin:payload]
        _copy(aligned[payload : payload + len(frame.payload)], frame.payload)
        begin += frame.slot_bytes


def _copy(source: memoryview, into: memoryview) -> None:
    """Copy bytes to memory of the same length."""
    if len(source) < UNLOCKED_COPY_BYTES:
        into[:] = source
    else:
        np.frombuffer(into, np.uint8)[:] = np.frombuffer(source, np.uint8)


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
