"""The allocator of slots: nothing is handed out twice, nothing is lost, neighbours are joined."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hicache.tiers.extents import BLOCK_BYTES, ExtentMap, SlotSpace, whole_blocks
from hicache.tiers.journal_records import place_of

BASE = place_of(1, 0)


def new_space(num_segments: int = 1, segment_bytes: int = 1 << 20) -> SlotSpace:
    space = SlotSpace(segment_bytes, num_fronts=num_segments)
    for segment in range(1, num_segments + 1):
        space.add_segment(segment, 0, [])
    return space


def test_neighbours_become_one_extent() -> None:
    extents = ExtentMap()
    for start in (0, 20, 10):
        extents.add(start, start + 10)
    assert list(extents) == [(0, 30)]
    assert (extents.take(30), extents.take(1), extents.num_bytes) == (0, None, 0)


def test_the_smallest_extent_that_fits_is_cut() -> None:
    extents = ExtentMap()
    extents.add(0, 100)
    extents.add(200, 230)
    assert extents.take(25) == 200
    assert sorted(extents) == [(0, 100), (225, 230)]


def test_slots_of_one_call_lie_side_by_side() -> None:
    assert new_space().take(100, 4) == [BASE, BASE + 100, BASE + 200, BASE + 300]


def test_a_slot_that_was_given_back_is_taken_before_the_segment_grows() -> None:
    space = new_space()
    first, second, _ = space.take(100, 3) or []
    space.give_back(second, 100)
    assert space.take(100, 2) == [second, BASE + 300]
    space.give_back(first, 100, is_hole=True)
    assert space.take(100, 1) == [first]


def test_a_full_segment_takes_no_more_and_loses_nothing() -> None:
    space = new_space(segment_bytes=1000)
    places = space.take(300, 3) or []
    space.give_back(places[1], 300)
    assert space.take(300, 2) is None
    assert space.take(300, 1) == [places[1]]


def test_a_page_larger_than_a_segment_gets_one_of_its_own() -> None:
    assert new_space(segment_bytes=1000).take(5000, 1) == [BASE]


def test_segments_grow_in_turns() -> None:
    space = new_space(num_segments=3)
    taken = {place >> 40 for _ in range(3) for place in space.take(100, 2) or []}
    assert taken == {1, 2, 3}
    lonely = SlotSpace(1 << 20, num_fronts=3)
    lonely.add_segment(1, 0, [])
    assert lonely.take(100, 1) is None, "another segment is wanted first"


def test_only_whole_blocks_are_punched_and_count_as_freed() -> None:
    space = new_space()
    space.take(10_000, 2)
    space.give_back(BASE, 10_000)
    assert space.punch(5000) == [(BASE, BASE + 8192)]
    assert space.retained.num_bytes == 10_000 - 8192
    assert space.punch(5000) == []
    assert whole_blocks(BASE + 1, BASE + BLOCK_BYTES) is None


def test_what_a_page_leaves_of_a_block_of_a_hole_is_retained() -> None:
    space = new_space()
    space.take(BLOCK_BYTES, 4)
    space.give_back(BASE, 3 * BLOCK_BYTES, is_hole=True)
    assert space.take(1000, 1) == [BASE]
    assert (space.retained.num_bytes, space.holes.num_bytes) == (BLOCK_BYTES - 1000, 2 * BLOCK_BYTES)
    assert space.take(3000, 3) == [BASE + 1000, BASE + 4096, BASE + 7096]
    assert (space.retained.num_bytes, space.holes.num_bytes) == (96 + 2192, 0)


def test_what_is_free_at_the_end_is_cut_off_whole() -> None:
    space = new_space()
    places = space.take(3000, 4) or []
    space.give_back(places[2], 3000)
    space.give_back(places[3], 3000, is_hole=True)
    assert space.cut_ends() == {1: 6000}
    assert space.retained.num_bytes == space.holes.num_bytes == 0
    assert space.take(3000, 1) == [places[2]]


class SpaceAgainstModel(RuleBasedStateMachine):
    """The allocator against a plain map of who has which byte range."""

    def __init__(self) -> None:
        super().__init__()
        self.space = new_space(num_segments=2, segment_bytes=200_000)
        self.taken: dict[int, int] = {}

    @rule(size=st.sampled_from([8, 1160, 4096, 5000, 20_480]), num_slots=st.integers(1, 5))
    def take(self, size: int, num_slots: int) -> None:
        places = self.space.take(size, num_slots)
        for place in places or []:
            self.taken[place] = size

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), is_hole=st.booleans())
    def give_back(self, data: st.DataObject, is_hole: bool) -> None:
        place = data.draw(st.sampled_from(sorted(self.taken)))
        self.space.give_back(place, self.taken.pop(place), is_hole=is_hole)

    @rule(num_bytes=st.integers(1, 50_000))
    def punch(self, num_bytes: int) -> None:
        before = self.space.retained.num_bytes
        punched = self.space.punch(num_bytes)
        assert before - self.space.retained.num_bytes == sum(end - start for start, end in punched)

    @rule()
    def cut_ends(self) -> None:
        self.space.cut_ends()

    @invariant()
    def holes_are_whole_blocks(self) -> None:
        assert all(whole_blocks(*hole) == hole for hole in self.space.holes)

    @invariant()
    def every_byte_of_the_segments_is_taken_or_free_once(self) -> None:
        extents = [(place, place + size) for place, size in self.taken.items()]
        extents += [*self.space.retained, *self.space.holes]
        extents.sort()
        position = {1: place_of(1, 0), 2: place_of(2, 0)}
        for start, end in extents:
            assert start == position[start >> 40]
            position[start >> 40] = end
        assert {segment: end - place_of(segment, 0) for segment, end in position.items()} == self.space._ends


TestSpaceAgainstModel = SpaceAgainstModel.TestCase
