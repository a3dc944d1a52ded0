"""Which bytes of a store's segment files are free: an allocator of extents, in memory only.

::

    segment   | page | page | (retained) | page | (hole) | page | ...... |
                              blocks kept          no blocks      end

A *retained* extent still has its blocks on the disk, so a page that takes it needs no allocation by the
file system and no discard: the steady state of a full store. A *hole* has none, and is whole blocks: what
a page leaves of the last block that it takes is retained. ``punch`` turns the first into the second when their
blocks are needed elsewhere.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from hicache.tiers.journal_records import OFFSET_BITS, place_of

BLOCK_BYTES = 4096
"""A hole starts and ends at a multiple of this: the file system frees no less."""


class ExtentMap:
    """Free extents by place and by size; neighbours are joined."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._ends: dict[int, int] = {}  # start -> end
        self._starts: dict[int, int] = {}  # end -> start
        self._of_size: dict[int, dict[int, None]] = {}  # size -> starts, last in first out
        self._sizes: list[int] = []  # the keys of _of_size, sorted

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """(start, end) of every extent, in no order."""
        return iter(list(self._ends.items()))

    def add(self, start: int, end: int) -> None:
        """Take in an extent that is not there yet."""
        if start >= end:
            return
        before = self._starts.get(start)
        if before is not None:
            self._remove(before, start)
            start = before
        after = self._ends.get(end)
        if after is not None:
            self._remove(end, after)
            end = after
        self._insert(start, end)

    def take(self, size: int) -> int | None:
        """Cut ``size`` bytes from the smallest extent that has them; its start, None if there is none."""
        position = bisect.bisect_left(self._sizes, size)
        if position == len(self._sizes):
            return None
        start = next(reversed(self._of_size[self._sizes[position]]))
        end = self._ends[start]
        self._remove(start, end)
        if start + size < end:
            self._insert(start + size, end)
        return start

    def largest(self) -> tuple[int, int] | None:
        """(start, end) of a largest extent."""
        if not self._sizes:
            return None
        start = next(reversed(self._of_size[self._sizes[-1]]))
        return start, self._ends[start]

    def start_of(self, end: int) -> int | None:
        """Where the extent starts that ends there."""
        return self._starts.get(end)

    def end_of(self, start: int) -> int | None:
        """Where the extent ends that starts there."""
        return self._ends.get(start)

    def remove(self, start: int, end: int) -> None:
        """Take out an extent that is there as a whole."""
        self._remove(start, end)

    def _insert(self, start: int, end: int) -> None:
        self._ends[start], self._starts[end] = end, start
        size = end - start
        self.num_bytes += size
        starts = self._of_size.get(size)
        if starts is None:
            starts = self._of_size[size] = {}
            bisect.insort(self._sizes, size)
        starts[start] = None

    def _remove(self, start: int, end: int) -> None:
        del self._ends[start], self._starts[end]
        size = end - start
        self.num_bytes -= size
        starts = self._of_size[size]
        del starts[start]
        if not starts:
            del self._of_size[size]
            del self._sizes[bisect.bisect_left(self._sizes, size)]


class SlotSpace:
    """The slots of this process's segments of one grain.

    Args:
        segment_bytes: a segment grows to this and no further.
        num_fronts: how many segments grow in turns: file systems let one writer at a time into a file.

    *Thread*: the caller's lock is held.
    """

    def __init__(self, segment_bytes: int, num_fronts: int = 1) -> None:
        self.retained = ExtentMap()
        self.holes = ExtentMap()
        self._segment_bytes = segment_bytes
        self._num_fronts = num_fronts
        self._turn = 0
        self._ends: dict[int, int] = {}  # segment -> where it ends

    def add_segment(self, segment: int, end: int, free: list[tuple[int, int]]) -> None:
        """Take over a segment. ``free``: (start, end) in places, all retained."""
        self._ends[segment] = end
        for start, stop in free:
            self.retained.add(start, stop)

    def take(self, size: int, num_slots: int) -> list[int] | None:
        """Places of ``num_slots`` slots, side by side where possible; None: another segment is needed.

        *Caller guarantees*: ``size`` is a multiple of the grain. None takes nothing.
        """
        start = self.retained.take(size * num_slots)
        if start is not None:
            return _row(start, size, num_slots)
        places: list[int] = []
        while len(places) < num_slots and (place := self.retained.take(size)) is not None:
            places.append(place)
        num_retained = len(places)
        used: list[tuple[int, int, int]] = []  # of holes: start, end of slots, end of the blocks they use
        while (num_missing := num_slots - len(places)) and (hole := self.holes.largest()) is not None:
            num_fitting = min(num_missing, (hole[1] - hole[0]) // size)
            if not num_fitting:
                break
            num_bytes = -(-num_fitting * size // BLOCK_BYTES) * BLOCK_BYTES
            start = self.holes.take(num_bytes)
            assert start is not None  # holes are whole blocks
            used.append((start, start + num_fitting * size, start + num_bytes))
            places += _row(start, size, num_fitting)
        if num_missing:
            start = self._grow(size * num_missing)
            if start is None:
                for place in places[:num_retained]:
                    self.retained.add(place, place + size)
                for start, _, end in used:
                    self.holes.add(start, end)
                return None
            places += _row(start, size, num_missing)
        for _, start, end in used:
            self.retained.add(start, end)
        return sorted(places)

    def give_back(self, place: int, size: int, *, is_hole: bool = False) -> None:
        """A slot is free again."""
        if is_hole:
            self._add_hole(place, place + size)
        else:
            self.retained.add(place, place + size)

    def cut_ends(self) -> dict[int, int]:
        """Free what no page holds at the ends of segments.

        Returns:
            segment -> its new end, for the caller to truncate the file to.
        """
        cut: dict[int, int] = {}
        for segment, end in self._ends.items():
            place = place_of(segment, end)
            while True:
                extents = self.retained if self.retained.start_of(place) is not None else self.holes
                start = extents.start_of(place)
                if start is None:
                    break
                extents.remove(start, place)
                place = start
                cut[segment] = place - place_of(segment, 0)
        self._ends.update(cut)
        return cut

    def punch(self, num_bytes: int) -> list[tuple[int, int]]:
        """Turn retained extents, largest first, into holes until ``num_bytes`` of blocks are freed.

        Returns:
            (start, end) in places, for the caller to punch; whole blocks. Less than what was asked
            for if no extent has a whole block any more.
        """
        punched: list[tuple[int, int]] = []
        edges: list[tuple[int, int]] = []
        while num_bytes > 0 and (extent := self.retained.largest()) is not None:
            self.retained.remove(*extent)
            inner = whole_blocks(*extent)
            if inner is None:
                edges.append(extent)
                if extent[1] - extent[0] < BLOCK_BYTES:
                    break  # none of the others is larger
                continue
            start, end = inner
            edges += [(extent[0], start), (end, extent[1])]
            self.holes.add(start, end)
            punched.append(inner)
            num_bytes -= end - start
        for edge in edges:
            self.retained.add(*edge)
        return punched

    def _add_hole(self, start: int, end: int) -> None:
        inner = whole_blocks(start, end)
        if inner is None:
            self.retained.add(start, end)
            return
        self.retained.add(start, inner[0])
        self.holes.add(*inner)
        self.retained.add(inner[1], end)

    def _grow(self, size: int) -> int | None:
        fronts = [
            segment for segment, end in self._ends.items() if not end or end + size <= self._segment_bytes
        ]
        if len(fronts) < self._num_fronts:
            return None
        self._turn += 1
        segment = fronts[self._turn % len(fronts)]
        end = self._ends[segment]
        self._ends[segment] = end + size
        return place_of(segment, end)


def _row(start: int, size: int, num_slots: int) -> list[int]:
    return [start + size * i for i in range(num_slots)]


def whole_blocks(start: int, end: int) -> tuple[int, int] | None:
    """The whole blocks of an extent; None if it has none."""
    start = -(-start // BLOCK_BYTES) * BLOCK_BYTES
    end = end // BLOCK_BYTES * BLOCK_BYTES
    return (start, end) if start < end else None


assert (1 << OFFSET_BITS) % BLOCK_BYTES == 0  # places are aligned as offsets are
