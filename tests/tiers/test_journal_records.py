"""Records of the journal: what holds, and what a flipped bit or a lost record does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.testing.store_pages import make_key
from hicache.tiers.journal_records import (
    RECORD,
    RECORD_BYTES,
    NewPage,
    are_whole,
    entries_of,
    gone_records,
    last_of_each_slot,
    owner_record,
    page_records,
    place_of,
    split_place,
)
from hicache.tiers.page_index import PageEntry

OVERHEAD = 512


def entry(name: object, segment: int, offset: int, size: int = 100, parent: object = None) -> PageEntry:
    above = None if parent is None else make_key(parent)
    return PageEntry(make_key(name), above, size + OVERHEAD, place_of(segment, offset))


def pages(*entries: PageEntry) -> np.ndarray:
    return page_records([NewPage(each, "full") for each in entries], OVERHEAD)


@given(st.integers(1, 2**20), st.integers(0, 2**39))
def test_a_place_is_its_segment_and_offset(segment: int, offset: int) -> None:
    assert split_place(place_of(segment, offset)) == (segment, offset)


def test_entries_survive_the_round_trip() -> None:
    there = [entry("a", 1, 0), entry("b", 70_000, 2**33, parent="a")]
    assert entries_of(pages(*there), OVERHEAD) == there
    assert pages(*there)["component"].tolist() == [b"full"] * 2


@pytest.mark.parametrize("bit", range(0, 8 * RECORD_BYTES, 37))
def test_every_flipped_bit_is_found(bit: int) -> None:
    raw = bytearray(pages(entry("a", 3, 4096, parent="b")).tobytes())
    assert are_whole(np.frombuffer(bytes(raw), RECORD)).all()
    raw[bit // 8] ^= 1 << bit % 8
    assert not are_whole(np.frombuffer(bytes(raw), RECORD)).any()


@pytest.mark.parametrize("num_bytes", range(0, RECORD_BYTES, 9))
def test_a_record_written_in_part_is_found(num_bytes: int) -> None:
    old = pages(entry("old", 1, 0)).tobytes()
    new = gone_records([entry("new", 2, 8, parent="old")], OVERHEAD).tobytes()
    for before in (bytes(RECORD_BYTES), old):
        torn = new[:num_bytes] + before[num_bytes:]
        assert torn in (before, new) or not are_whole(np.frombuffer(torn, RECORD)).any()


def test_the_last_record_of_a_slot_holds() -> None:
    first, second = entry("first", 1, 0), entry("second", 1, 0)
    other = entry("other", 1, 100)
    records = np.concatenate(
        [
            owner_record(1, 7, 8),
            pages(first, other),
            gone_records([first], OVERHEAD),
            pages(second),
            gone_records([other], OVERHEAD),
        ]
    )
    assert entries_of(last_of_each_slot(records), OVERHEAD) == [second]


def test_of_slots_that_overlap_the_later_holds() -> None:
    """The record that took the earlier away has rotted."""
    records = pages(entry("a", 1, 0), entry("b", 1, 100), entry("large", 1, 50, 200), entry("c", 1, 250))
    assert entries_of(last_of_each_slot(records), OVERHEAD) == [
        entry("large", 1, 50, 200),
        entry("c", 1, 250),
    ]


def test_no_records_hold_no_pages() -> None:
    assert len(last_of_each_slot(np.zeros(0, RECORD))) == 0
    assert entries_of(gone_records([], OVERHEAD), OVERHEAD) == []
