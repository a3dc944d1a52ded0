"""Reads and writes past the page cache, through a little aligned memory that is used again and again.

::

    a run of slots    | piece | piece | piece |
                          │       │
    memory            [ piece ] [ piece ] [ piece ]
                        under way: copied    plain reads
                        on at the end of      and writes
                        each, then the next

Little memory, since what the device has just brought is then still in the processor's cache when it is
copied on, and the device is faster at what stays there; in huge pages, since a piece is then one segment
for the device, and not one for each 4 KiB.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Generator, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hicache.tiers.aio import MAX_READS, AsyncReads, Read
from hicache.tiers.frames import Frame, gather, scatter

PIECE_BYTES = 17 << 16
"""The most that one system call moves: a page of 1 MiB with its header, or 16 of 64 KiB."""
NUM_SECTIONS = 2
_PIECES_OF_SECTION = MAX_READS // NUM_SECTIONS
_HUGE_PAGE_BYTES = 2 << 20


class DirectRun(NamedTuple):
    """Slots that lie side by side in a file opened with O_DIRECT."""

    descriptor: int
    offset: int
    num_bytes: int
    frames: Sequence[Frame]


class _Piece(NamedTuple):
    """A part of a run: the run's position, where the part starts in it, and where in our memory it comes."""

    run: int
    begin: int
    num_bytes: int
    at: int


class DirectMemory:
    """The aligned memory of one thread.

    *Thread*: one.
    """

    def __init__(self) -> None:
        num_bytes = -(-(NUM_SECTIONS + 1) * PIECE_BYTES // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        area = mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = np.frombuffer(area, np.uint8).ctypes.data
        first = -address % _HUGE_PAGE_BYTES
        with contextlib.suppress(OSError):  # a kernel without them
            area.madvise(mmap.MADV_HUGEPAGE, first, num_bytes)
        self._memory = memoryview(area)[first : first + num_bytes]
        self._plain = self._memory[NUM_SECTIONS * PIECE_BYTES :]
        self._address = address + first

    def read(self, run: DirectRun) -> int:
        """Fill headers and payloads of a run; bytes read before the file's end."""
        for begin in range(0, run.num_bytes, PIECE_BYTES):
            piece = self._plain[: min(PIECE_BYTES, run.num_bytes - begin)]
            num_read = 0
            while num_read < len(piece) and (
                some := os.preadv(run.descriptor, [piece[num_read:]], run.offset + begin + num_read)
            ):
                num_read += some
            if num_read < len(piece):
                piece[num_read:] = bytes(len(piece) - num_read)
            scatter(piece, run.frames, begin)
            if num_read < len(piece):
                return begin + num_read
        return run.num_bytes

    def write(self, run: DirectRun) -> None:
        """Write a run, padding included."""
        for begin in range(0, run.num_bytes, PIECE_BYTES):
            piece = self._plain[: min(PIECE_BYTES, run.num_bytes - begin)]
            gather(run.frames, piece, begin)
            num_written = 0
            while num_written < len(piece):
                num_written += os.pwrite(
                    run.descriptor, piece[num_written:], run.offset + begin + num_written
                )

    def read_many(
        self, queue: AsyncReads, runs: Sequence[DirectRun]
    ) -> Generator[tuple[int, bool], None, None]:
        """Read runs, all sections of pieces under way at once.

        Yields each run's position when its frames are filled, in any order; with False when a piece was short
        or an error: a plain read tells which.

        *Caller guarantees*: exhausts or closes the iterator.
        """
        groups = _groups(runs)
        num_left = [-(-run.num_bytes // PIECE_BYTES) for run in runs]
        whole = [True] * len(runs)
        sections: list[dict[int, _Piece]] = [{} for _ in range(NUM_SECTIONS)]
        try:
            for section in range(NUM_SECTIONS):
                sections[section] = self._begin(queue, runs, next(groups, ()), section)
            while any(sections):
                for tag, num_read in queue.wait():
                    section = tag // _PIECES_OF_SECTION
                    piece = sections[section].pop(tag)
                    if num_read == piece.num_bytes:
                        source = self._memory[piece.at : piece.at + num_read]
                        scatter(source, runs[piece.run].frames, piece.begin)
                    else:
                        whole[piece.run] = False
                    if not sections[section]:
                        sections[section] = self._begin(queue, runs, next(groups, ()), section)
                    num_left[piece.run] -= 1
                    if not num_left[piece.run]:
                        yield piece.run, whole[piece.run]
        finally:
            queue.drain()

    def _begin(
        self, queue: AsyncReads, runs: Sequence[DirectRun], group: Sequence[_Piece], section: int
    ) -> dict[int, _Piece]:
        """Begin to read a group into a section; its pieces by tag."""
        tagged = {
            tag: piece._replace(at=section * PIECE_BYTES + piece.at)
            for tag, piece in enumerate(group, section * _PIECES_OF_SECTION)
        }
        queue.submit(
            [
                Read(
                    tag,
                    runs[piece.run].descriptor,
                    self._address + piece.at,
                    piece.num_bytes,
                    runs[piece.run].offset + piece.begin,
                )
                for tag, piece in tagged.items()
            ]
        )
        return tagged


def _groups(runs: Sequence[DirectRun]) -> Iterator[list[_Piece]]:
    """The pieces of all runs in order, as many together as a section takes."""
    group: list[_Piece] = []
    group_bytes = 0
    for position, run in enumerate(runs):
        for begin in range(0, run.num_bytes, PIECE_BYTES):
            num_bytes = min(PIECE_BYTES, run.num_bytes - begin)
            if group_bytes + num_bytes > PIECE_BYTES or len(group) == _PIECES_OF_SECTION:
                yield group
                group, group_bytes = [], 0
            group.append(_Piece(position, begin, num_bytes, group_bytes))
            group_bytes += num_bytes
    yield group
