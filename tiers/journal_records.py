"""Records of a disk store's journal: fixed size, so that a million of them are one NumPy array.

::

    offset  bytes  field (little-endian)
         0      8  check       of the 120 bytes after it
         8      1  kind        1 PAGE   a page lies at (segment, offset)
                               2 GONE   it does not lie there any more
                               3 OWNER  the segment belongs to the process ``offset``
         9      3  zero
        12      4  segment     number of a segment file
        16      8  offset      of the page's slot in it
        24      8  slot bytes  of the slot; for OWNER the grain of the segment's slots
        32     32  key
        64     32  parent      zero bytes: a first page
        96     32  component   the first 32 bytes of its name, to list pages by

What the last record of a slot says holds. The check is linear in the words of a record, which NumPy
computes for all at once; it finds every flipped bit and every record that was written in part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hicache.tiers.framing import KEY_BYTES
from hicache.tiers.page_index import PageEntry
from hicache.types import PageKey

RECORD_BYTES = 128
KIND_PAGE = 1
KIND_GONE = 2
KIND_OWNER = 3
COMPONENT_BYTES = 32

OFFSET_BITS = 40
"""A *place* is ``segment << OFFSET_BITS | offset``: one integer, and its order is that of the disk."""

RECORD = np.dtype(
    [
        ("check", "<u8"),
        ("kind", "u1"),
        ("zero", "V3"),
        ("segment", "<u4"),
        ("offset", "<u8"),
        ("slot_bytes", "<u8"),
        ("key", f"V{KEY_BYTES}"),
        ("parent", f"V{KEY_BYTES}"),
        ("component", f"S{COMPONENT_BYTES}"),
    ]
)
assert RECORD.itemsize == RECORD_BYTES

Records = NDArray[np.void]
"""Structured array of ``RECORD``, shape [num_records]."""

_NO_PARENT = bytes(KEY_BYTES)
_CHUNK = 1 << 14
"""Records that are checked at a time: bounds the memory and how long one NumPy call takes."""
_FACTORS = np.random.default_rng(0x48694361).integers(1 << 63, size=15, dtype=np.uint64) * np.uint64(
    2
) + np.uint64(1)
_SEED = np.uint64(0x9E3779B97F4A7C15)


class NewPage(NamedTuple):
    """A page as the journal names it."""

    entry: PageEntry
    component: str


def place_of(segment: int, offset: int) -> int:
    """One integer for both."""
    return segment << OFFSET_BITS | offset


def split_place(place: int) -> tuple[int, int]:
    """The segment and the offset of a place."""
    return place >> OFFSET_BITS, place & ((1 << OFFSET_BITS) - 1)


def page_records(pages: Sequence[NewPage], index_bytes: int) -> Records:
    """PAGE records, in order. ``index_bytes``: of an entry's cost, what is not its slot."""
    records = _records_at(KIND_PAGE, [page.entry for page in pages], index_bytes)
    records["component"] = [page.component.encode()[:COMPONENT_BYTES] for page in pages]
    return seal(records)


def gone_records(entries: Sequence[PageEntry], index_bytes: int) -> Records:
    """GONE records, in order."""
    return seal(_records_at(KIND_GONE, entries, index_bytes))


def owner_record(segment: int, owner: int, grain: int) -> Records:
    """One OWNER record."""
    records = np.zeros(1, RECORD)
    records["kind"], records["segment"] = KIND_OWNER, segment
    records["offset"], records["slot_bytes"] = owner, grain
    return seal(records)


def _records_at(kind: int, entries: Sequence[PageEntry], index_bytes: int) -> Records:
    records = np.zeros(len(entries), RECORD)
    if not entries:
        return records
    places = np.array([entry.place for entry in entries], dtype=np.int64)
    records["kind"] = kind
    records["segment"] = places >> OFFSET_BITS
    records["offset"] = places & ((1 << OFFSET_BITS) - 1)
    records["slot_bytes"] = [entry.size_bytes - index_bytes for entry in entries]
    records["key"] = np.frombuffer(b"".join(entry.key for entry in entries), f"V{KEY_BYTES}")
    records["parent"] = np.frombuffer(
        b"".join(entry.parent or _NO_PARENT for entry in entries), f"V{KEY_BYTES}"
    )
    return records


def seal(records: Records) -> Records:
    """Fill in the checks, in place."""
    for begin in range(0, len(records), _CHUNK):
        part = records[begin : begin + _CHUNK]
        part["check"] = _checks(part)
    return records


def are_whole(records: Records) -> NDArray[np.bool_]:
    """Which records have the right check and a kind that is known; bool [num_records]."""
    whole = np.empty(len(records), dtype=np.bool_)
    for begin in range(0, len(records), _CHUNK):
        part = records[begin : begin + _CHUNK]
        kinds = part["kind"]
        is_known = (kinds >= KIND_PAGE) & (kinds <= KIND_OWNER)
        whole[begin : begin + _CHUNK] = (part["check"] == _checks(part)) & is_known
    return whole


def _checks(records: Records) -> NDArray[np.uint64]:
    words = np.ascontiguousarray(records).view(np.uint64).reshape(len(records), RECORD_BYTES // 8)
    sums: NDArray[np.uint64] = (words[:, 1:] * _FACTORS).sum(axis=1, dtype=np.uint64)
    return sums ^ _SEED


def places_of(records: Records) -> NDArray[np.int64]:
    """The place of each record; int64 [num_records]."""
    return (records["segment"].astype(np.int64) << OFFSET_BITS) | records["offset"].astype(np.int64)


def last_of_each_slot(records: Records) -> Records:
    """The PAGE records that hold: those after which nothing was said of their slot; in order.

    Of two whose slots overlap the later holds: the record that took the earlier away was lost.
    """
    records = records[records["kind"] != KIND_OWNER]
    places = places_of(records)
    _, from_end = np.unique(places[::-1], return_index=True)
    positions = np.sort(len(records) - 1 - from_end)
    live = records[positions]
    is_page = live["kind"] == KIND_PAGE
    live, positions = live[is_page], positions[is_page]
    while len(live) > 1:
        places = places_of(live)
        order = np.argsort(places, kind="stable")
        ends = places[order] + live["slot_bytes"][order].astype(np.int64)
        clashes = np.flatnonzero(ends[:-1] > places[order][1:])
        if not len(clashes):
            break
        earlier = np.minimum(order[clashes], order[clashes + 1])
        live = np.delete(live, np.unique(earlier))
    return live


def entries_of(records: Records, index_bytes: int) -> list[PageEntry]:
    """PAGE or GONE records as entries, in order."""
    keys = np.ascontiguousarray(records["key"]).tobytes()
    parents = np.ascontiguousarray(records["parent"]).tobytes()
    cuts = range(0, len(keys), KEY_BYTES)
    none_or_parent = [
        None if (parent := parents[at : at + KEY_BYTES]) == _NO_PARENT else parent for at in cuts
    ]
    fields = zip(
        (keys[at : at + KEY_BYTES] for at in cuts),
        none_or_parent,
        (records["slot_bytes"] + np.uint64(index_bytes)).tolist(),
        places_of(records).tolist(),
        strict=True,
    )
    return [
        PageEntry(PageKey(key), None if parent is None else PageKey(parent), size, place)
        for key, parent, size, place in fields
    ]
