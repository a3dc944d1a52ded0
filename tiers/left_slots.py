"""Slots that we freed in another process's segments, until that process has heard of it."""

from __future__ import annotations

from hicache.tiers.extents import BLOCK_BYTES, ExtentMap, whole_blocks


class LeftSlots:
    """Free slots of one segment whose owner has not read yet that they are free.

    ::

        blocks   |        |        |        |        |
        slots       xxxxxxxxxxxxxxxxxxxxxx      xx           x: freed by us
        counted     xxxxxx          xxxxxx      xx           the block between has been given back

    Their owner cannot have used them again, so blocks that they fill together can be given back. The rest of
    their bytes lies in blocks that stay, and nobody counts it but us, until the owner has read the journal.

    *Thread*: the caller's lock is held.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        """What lies in blocks that stay."""
        self._slots: list[tuple[int, int, int]] = []  # record that tells of it, start, end
        self._extents = ExtentMap()

    def add(self, record: int, start: int, end: int) -> tuple[int, int] | None:
        """Take in a slot, or neighbours.

        Args:
            record: how many records the journal has with the one that tells of it.
            start, end: in places.

        Returns:
            (start, end) of the blocks that can be given back now, if any.
        """
        self._slots.append((record, start, end))
        first, last = self._extents.start_of(start), self._extents.end_of(end)
        joined = (start if first is None else first, end if last is None else last)
        self.num_bytes += _edge_bytes(*joined) - _edge_bytes(joined[0], start) - _edge_bytes(end, joined[1])
        self._extents.add(start, end)
        return whole_blocks(
            max(joined[0], start // BLOCK_BYTES * BLOCK_BYTES),
            min(joined[1], -(-end // BLOCK_BYTES) * BLOCK_BYTES),
        )

    def heard(self, num_records: int) -> None:
        """The owner has read so many records: what they tell of is for the owner to count."""
        rest = [slot for slot in self._slots if slot[0] > num_records]
        if len(rest) == len(self._slots):
            return
        self.num_bytes, self._slots, self._extents = 0, [], ExtentMap()
        for slot in rest:
            self.add(*slot)

    def restart(self) -> None:
        """The journal was written anew: whoever has read any of the new one has heard of all."""
        self._slots = [(0, start, end) for _, start, end in self._slots]


def _edge_bytes(start: int, end: int) -> int:
    """Bytes of an extent outside its whole blocks."""
    inner = whole_blocks(start, end)
    return end - start if inner is None else end - start - (inner[1] - inner[0])
