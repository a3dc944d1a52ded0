"""A page in memory on its way to or from its slot, and the bytes of slots that lie side by side.

::

    slot:    | header | payload ............ | zero bytes |
    slots:   | slot | slot | slot |              what one read or write moves, or a piece of it
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hicache.tiers.extents import BLOCK_BYTES
from hicache.tiers.framing import HEADER_BYTES

PADDING = memoryview(bytes(BLOCK_BYTES))
UNLOCKED_COPY_BYTES = 256 << 10
"""From here on memory is copied without the interpreter's lock. What is shorter takes less time (under 20 us)
than it takes to hand the lock over and to get it back.
"""


class Frame(NamedTuple):
    """One page in memory, to write or to read: its place, its slot, its header and its payload.

    Args:
        rest: when reading, what lies behind the payload's memory in the slot is wanted, too: the end of a page that
            is longer than who reads it can know.
    """

    place: int
    slot_bytes: int
    header: bytes | bytearray
    payload: memoryview
    rest: bytearray | None = None

    @property
    def rest_bytes(self) -> int:
        """From the payload to the slot's end; zeros when written."""
        return self.slot_bytes - HEADER_BYTES - len(self.payload)


def scatter(source: memoryview, frames: Sequence[Frame], begin: int = 0) -> None:
    """Fill the part of headers and payloads that lies in ``source``.

    Args:
        source: bytes of the frames' slots, which lie side by side.
        begin: where in them it starts.
    """
    for at, part in _parts_between(frames, begin, begin + len(source)):
        _copy(source[at : at + len(part)], part)


def gather(frames: Sequence[Frame], into: memoryview, begin: int = 0) -> None:
    """Fill ``into`` with the bytes of the frames' slots from ``begin`` on, padding included."""
    for at, part in _parts_between(frames, begin, begin + len(into), padded=True):
        _copy(part, into[at : at + len(part)])


def _parts_between(
    frames: Sequence[Frame], begin: int, end: int, *, padded: bool = False
) -> Iterator[tuple[int, memoryview]]:
    """Memory of the frames between two positions of their slots; each with its distance from ``begin``."""
    at = 0
    for frame in frames:
        if at >= end:
            return
        parts = [memoryview(frame.header), frame.payload]
        if frame.rest is not None:
            parts.append(memoryview(frame.rest))
        elif padded:
            parts.append(PADDING[: frame.rest_bytes])
        start = at
        for part in parts:
            low, high = max(begin, start), min(end, start + len(part))
            if low < high:
                yield low - begin, part[low - start : high - start]
            start += len(part)
        at += frame.slot_bytes


def _copy(source: memoryview, into: memoryview) -> None:
    """Copy bytes to memory of the same length."""
    if len(source) < UNLOCKED_COPY_BYTES:
        into[:] = source
    else:
        np.frombuffer(into, np.uint8)[:] = np.frombuffer(source, np.uint8)
