"""The slots of a folder as one process sees them: whose they are, which of its own are free.

Slots of others' segments are only ever given back to the file system here, under the folder's lock, after
the journal said that they are free; their owner reads that there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hicache.tiers.counters import StoreCounters, error_name
from hicache.tiers.extents import BLOCK_BYTES, SlotSpace, whole_blocks
from hicache.tiers.journal_records import place_of, split_place
from hicache.tiers.segment_files import SEGMENT_BYTES, SMALL_GRAIN, SegmentFiles, grain_of

NUM_FRONTS = 4
"""Segments of large slots that grow in turns."""
Slot = tuple[int, int]
"""A place, and the bytes from there on."""


class SegmentSlots:
    """Free and taken slots.

    Args:
        files: the segments.
        counters: where errors of the file system are counted: blocks that cannot be given back stay.

    *Thread*: the caller's lock is held.
    """

    def __init__(self, files: SegmentFiles, counters: StoreCounters) -> None:
        self.files = files
        self.owners: dict[int, int] = {}
        """Which process writes into a segment."""
        self.owner = 0
        """This process."""
        self._counters = counters
        self._spaces = {
            SMALL_GRAIN: SlotSpace(SEGMENT_BYTES),
            BLOCK_BYTES: SlotSpace(SEGMENT_BYTES, num_fronts=NUM_FRONTS),
        }

    @property
    def retained_bytes(self) -> int:
        """Free bytes of ours that still have blocks."""
        return sum(space.retained.num_bytes for space in self._spaces.values())

    def free_extents(self) -> Iterator[tuple[int, int]]:
        """(start, end) in places of all that is free of ours."""
        for space in self._spaces.values():
            yield from space.retained
            yield from space.holes

    def is_ours(self, place: int) -> bool:
        """Whether this process may write there."""
        return self.owners.get(split_place(place)[0]) == self.owner

    def orphans(self, live_owners: dict[int, int]) -> list[int]:
        """Segments whose owner is gone."""
        return [
            segment
            for segment, owner in self.owners.items()
            if owner != self.owner and owner not in live_owners
        ]

    # ---- taking ----------------------------------------------------------------------------------------------

    def take(self, size: int, num_slots: int) -> list[int] | None:
        """Places for pages of one size, side by side if possible; None: a new segment is needed first."""
        return self._spaces[grain_of(size)].take(size, num_slots)

    def add_new(self, size: int) -> int:
        """Make a segment for slots of ``size``; its number. Raises ``OSError``."""
        segment = max(self.owners, default=0) + 1
        self.files.create(segment)
        self.owners[segment] = self.owner
        self._spaces[grain_of(size)].add_segment(segment, 0, [])
        return segment

    def adopt(self, segment: int, starts: Sequence[int], ends: Sequence[int]) -> int:
        """Take over a segment: what none of its pages holds is free. Raises ``OSError``.

        Args:
            starts, ends: of its pages, in places, sorted.

        Returns:
            the grain of its slots.
        """
        base = place_of(segment, 0)
        grain = grain_of(ends[0] - starts[0]) if starts else BLOCK_BYTES
        end = -(-(ends[-1] if ends else base) // grain) * grain
        gaps = [(a, b) for a, b in zip([base, *ends], [*starts, end], strict=True) if a < b]
        self.files.truncate(segment, end - base)
        self.owners[segment] = self.owner
        self._spaces[grain].add_segment(segment, end - base, gaps)
        return grain

    # ---- giving back -----------------------------------------------------------------------------------------

    def retain(self, slots: Sequence[Slot]) -> None:
        """Slots are free: ours will be used again as they are, blocks of others' are given back."""
        self._punch_others(slots)
        for place, size in slots:
            if self.is_ours(place):
                self._spaces[grain_of(size)].give_back(place, size)

    def release(self, slots: Sequence[Slot]) -> None:
        """Slots are free, and their blocks are given back."""
        self.retain(slots)
        self.shrink(sum(size for _, size in slots))

    def punched(self, place: int, size: int) -> None:
        """Another process removed a page and, if the slot is ours, gave its blocks back."""
        if self.is_ours(place):
            self._spaces[grain_of(size)].give_back(place, size, is_hole=True)

    def shrink(self, num_bytes: int) -> int:
        """Give back the blocks of free slots of ours, about ``num_bytes``; how many bytes that freed."""
        before = self.retained_bytes
        for space in self._spaces.values():
            for segment, end in space.cut_ends().items():
                try:
                    self.files.truncate(segment, end)
                except OSError as error:
                    self._counters.error(error_name(error), error)
        for space in self._spaces.values():
            for start, end in space.punch(num_bytes - (before - self.retained_bytes)):
                self._punch(start, end)
        return before - self.retained_bytes

    def _punch_others(self, slots: Sequence[Slot]) -> None:
        """Punch slots in others' segments; neighbours at once."""
        merged: list[tuple[int, int]] = []
        for place, size in sorted(slot for slot in slots if not self.is_ours(slot[0])):
            if merged and merged[-1][1] == place:
                merged[-1] = (merged[-1][0], place + size)
            else:
                merged.append((place, place + size))
        for extent in merged:
            inner = whole_blocks(*extent)
            if inner is not None:
                self._punch(*inner)

    def _punch(self, start: int, end: int) -> None:
        try:
            self.files.punch(start, end)
        except OSError as error:
            self._counters.error(error_name(error), error)
