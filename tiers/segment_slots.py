"""The slots of a folder as one process sees them: whose they are, which of its own are free.

Slots of others' segments are only ever given back to the file system here, under the folder's lock, after
the journal said that they are free; their owner reads that there. Until it has, blocks that they fill only in
part are counted by whoever freed them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from hicache.tiers.counters import StoreCounters, error_name
from hicache.tiers.extents import BLOCK_BYTES, SlotSpace
from hicache.tiers.journal_records import place_of, split_place
from hicache.tiers.left_slots import LeftSlots
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
        self._left: dict[int, LeftSlots] = {}  # by segment
        self._spaces = {
            SMALL_GRAIN: SlotSpace(SEGMENT_BYTES),
            BLOCK_BYTES: SlotSpace(SEGMENT_BYTES, num_fronts=NUM_FRONTS),
        }

    @property
    def retained_bytes(self) -> int:
        """Free bytes of ours that still have blocks."""
        return sum(space.retained.num_bytes for space in self._spaces.values())

    def left_bytes(self) -> dict[int, int]:
        """By process: bytes of its slots that we freed, in blocks that stay, and that it does not know of yet."""
        bytes_of: dict[int, int] = {}
        for segment, left in self._left.items():
            owner = self.owners[segment]
            bytes_of[owner] = bytes_of.get(owner, 0) + left.num_bytes
        return bytes_of

    def free_extents(self) -> Iterator[tuple[int, int]]:
        """(start, end) in places of all that is free of ours."""
        for space in self._spaces.values():
            yield from space.retained
            yield from space.holes

    def is_ours(self, place: int) -> bool:
        """Whether this process may write there."""
        return self.owners.get(split_place(place)[0]) == self.owner

    def orphans(self, live_owners: Collection[int]) -> list[int]:
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

    @property
    def next_segment(self) -> int:
        """The number of a segment that nobody has."""
        return max(self.owners, default=0) + 1

    def add_new(self, segment: int, size: int) -> None:
        """Make a segment for slots of ``size``. Raises ``OSError``.

        *Caller guarantees*: the journal says it is ours.
        """
        self.files.create(segment)
        self.set_owner(segment, self.owner)
        self._spaces[grain_of(size)].add_segment(segment, 0, [])

    def adopt(self, segment: int, grain: int, starts: Sequence[int], ends: Sequence[int]) -> None:
        """Take over a segment: what none of its pages holds is free. Raises ``OSError``.

        Args:
            grain: of its slots.
            starts, ends: of its pages, in places, sorted.

        *Caller guarantees*: the journal says it is ours.
        """
        base = place_of(segment, 0)
        end = -(-(ends[-1] if ends else base) // grain) * grain
        gaps = [(a, b) for a, b in zip([base, *ends], [*starts, end], strict=True) if a < b]
        self.files.truncate(segment, end - base)
        self.set_owner(segment, self.owner)
        self._spaces[grain].add_segment(segment, end - base, gaps)

    # ---- giving back -----------------------------------------------------------------------------------------

    def retain(self, slots: Sequence[Slot], num_records: int) -> None:
        """Slots are free: ours will be used again as they are, blocks of others' are given back.

        Args:
            num_records: of the journal, which tells so by now.
        """
        self._punch_others(slots, num_records)
        for place, size in slots:
            if self.is_ours(place):
                self._spaces[grain_of(size)].give_back(place, size)

    def release(self, slots: Sequence[Slot], num_records: int) -> None:
        """Slots are free, and their blocks are given back. Args as for ``retain``."""
        self.retain(slots, num_records)
        self.shrink(sum(size for _, size in slots))

    def wipe(self, slot: Slot) -> None:
        """Zero the slot of a page that is about to be removed, and give back its whole blocks."""
        place, size = slot
        self._punch(place, place + size)

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

    def heard(self, num_records: Mapping[int, int]) -> None:
        """Other processes have read so many records of the journal: what they know of they count themselves.

        Args:
            num_records: by process; one that is not named has read none.
        """
        for segment, left in list(self._left.items()):
            left.heard(num_records.get(self.owners[segment], -1))
            if not left.num_bytes:
                del self._left[segment]

    def restart(self) -> None:
        """The journal was written anew."""
        for left in self._left.values():
            left.restart()

    def set_owner(self, segment: int, owner: int) -> None:
        """A process has a segment; if it has just made or adopted it, it counts all that is free there."""
        if self.owners.get(segment) != owner:
            self.owners[segment] = owner
            self._left.pop(segment, None)

    def forget(self, segment: int) -> None:
        """A segment is gone."""
        del self.owners[segment]
        self._left.pop(segment, None)

    def _punch_others(self, slots: Sequence[Slot], num_records: int) -> None:
        """Punch slots in others' segments; neighbours at once."""
        merged: list[tuple[int, int]] = []
        for place, size in sorted(slot for slot in slots if not self.is_ours(slot[0])):
            if merged and merged[-1][1] == place:
                merged[-1] = (merged[-1][0], place + size)
            else:
                merged.append((place, place + size))
        for extent in merged:
            left = self._left.setdefault(split_place(extent[0])[0], LeftSlots())
            inner = left.add(num_records, *extent)
            if inner is not None:
                self._punch(*inner)

    def _punch(self, start: int, end: int) -> None:
        try:
            self.files.punch(start, end)
        except OSError as error:
            self._counters.error(error_name(error), error)
