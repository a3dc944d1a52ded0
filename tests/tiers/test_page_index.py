"""The rules of a store's index: quota, order of eviction, states."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hicache.errors import ProtocolError
from hicache.testing.store_pages import make_key
from hicache.tiers.page_index import Outcome, PageEntry, PageIndex
from hicache.types import PageKey, Regard


def put(
    index: PageIndex, name: object, parent: object | None = None, size_bytes: int = 1
) -> list[PageKey] | None:
    """Put a page as a store does; keys of the victims in order, None if refused."""
    above = None if parent is None else make_key(parent)
    admission = index.reserve(make_key(name), above, size_bytes)
    for victim in admission.victims:
        index.drop(victim.key)
    if admission.outcome is Outcome.GRANTED:
        index.commit(make_key(name))
    return None if admission.outcome is Outcome.REFUSED else [victim.key for victim in admission.victims]


def keys(*names: object) -> list[PageKey]:
    return [make_key(name) for name in names]


def test_the_least_recent_leaf_goes_first() -> None:
    index = PageIndex(3)
    for name in "abc":
        put(index, name)
    index.touch(make_key("a"))
    assert put(index, "d") == keys("b")
    assert put(index, "e") == keys("c")
    assert put(index, "f") == keys("a")


def test_one_page_may_displace_several_suffix_first() -> None:
    index = PageIndex(4)
    for name, parent in (("a", None), ("b", "a"), ("c", "b"), ("x", None)):
        put(index, name, parent)
    index.touch(make_key("x"))
    assert put(index, "large", size_bytes=3) == keys("c", "b", "a")


def test_a_parent_inherits_the_recency_of_its_child() -> None:
    index = PageIndex(4)
    put(index, "head")
    put(index, "tail", "head")
    put(index, "old")
    put(index, "older")
    index.touch(make_key("tail"))  # the head was not asked for itself
    assert put(index, "n1") == keys("old")
    assert put(index, "n2") == keys("older")
    assert put(index, "n3") == keys("tail")
    # The head is as recent as its tail was: older than what came after.
    assert put(index, "n4") == keys("head")


def test_pages_that_are_over_go_first_suffix_before_prefix() -> None:
    index = PageIndex(4)
    for name, parent in (("old", None), ("a", None), ("b", "a"), ("c", "b")):
        put(index, name, parent)
    index.hint(keys("a", "b", "c"), Regard.OVER)
    assert put(index, "large", size_bytes=3) == keys("c", "b", "a")


def test_what_is_regarded_more_highly_goes_later_whatever_its_use_and_does_go() -> None:
    index = PageIndex(10)
    for regard in sorted(Regard, reverse=True):  # the most highly regarded is the least recent
        for name in ("one", "two"):
            put(index, regard.name + name)
            index.hint(keys(regard.name + name), regard)
    index.touch(make_key("KEPTone"))
    order = [regard.name + name for regard in sorted(Regard) for name in ("one", "two")]
    order[-2:] = ["KEPTtwo", "KEPTone"]
    assert put(index, "large", size_bytes=10) == keys(*order)


def test_a_suffix_goes_before_its_prefix_however_highly_it_is_regarded() -> None:
    index = PageIndex(3)
    put(index, "head")
    put(index, "tail", "head")
    put(index, "other")
    index.hint(keys("tail"), Regard.KEPT)
    assert put(index, "n1") == keys("other")
    assert put(index, "large", size_bytes=3) == [*keys("n1"), *keys("tail", "head")]


@pytest.mark.parametrize("regard", [Regard.HIGH, Regard.KEPT])
def test_a_prefix_is_plain_still_when_what_was_regarded_highly_below_it_has_gone(regard: Regard) -> None:
    """Nobody would take back what it was never told to be."""
    index = PageIndex(3)
    put(index, "head")
    put(index, "tail", "head")
    put(index, "other")
    index.hint(keys("tail"), regard)
    index.drop(make_key("tail"))
    index.touch(make_key("other"))
    put(index, "new")
    assert put(index, "n1") == keys("head")


def test_a_prefix_that_is_over_stays_while_something_that_is_not_hangs_below() -> None:
    index = PageIndex(3)
    put(index, "old")
    put(index, "head")
    put(index, "tail", "head")
    index.hint(keys("head"), Regard.OVER)
    assert put(index, "n1") == keys("old")
    assert put(index, "n2") == keys("tail")


@pytest.mark.parametrize("regard", [Regard.OVER, Regard.LOW])
@pytest.mark.parametrize("how", ["touch", "hint", "put"])
def test_what_makes_a_page_plain_again(how: str, regard: Regard) -> None:
    index = PageIndex(2)
    put(index, "a")
    put(index, "b")
    index.hint(keys("b"), regard)
    match how:
        case "touch":
            index.touch(make_key("b"))
        case "hint":
            index.hint(keys("b", "b", "not here"), Regard.PLAIN)
        case "put":
            put(index, "b")
    assert put(index, "c") == keys("a")
    assert index.check_integrity() == []


@pytest.mark.parametrize("how", ["touch", "put"])
def test_a_use_takes_nothing_from_what_is_regarded_highly_but_a_hint_does(how: str) -> None:
    index = PageIndex(2)
    put(index, "a")
    index.hint(keys("a"), Regard.HIGH)
    if how == "touch":
        index.touch(make_key("a"))
    else:
        put(index, "a")
    put(index, "b")
    assert put(index, "c") == keys("b")
    index.hint(keys("a"), Regard.PLAIN)
    assert put(index, "d") == keys("a")


def test_pages_of_which_is_said_this_and_that_leave_no_garbage() -> None:
    index = PageIndex(10)
    put(index, "a")
    for _ in range(1000):
        index.hint(keys("a"), Regard.OVER)
        index.hint(keys("a"), Regard.KEPT)
    assert len(index._heap) < 100


def test_pages_that_are_over_are_the_least_recent_when_the_order_is_written_down() -> None:
    index = PageIndex(3)
    for name in "abc":
        put(index, name)
    index.hint(keys("c", "b"), Regard.OVER)
    assert [entry.key for entry in index.by_recency()] == keys("b", "c", "a")


def test_a_page_never_displaces_its_own_ancestors() -> None:
    index = PageIndex(3)
    for n in (1, 2, 3):
        put(index, n, None if n == 1 else n - 1)
    assert put(index, 4, 3) is None
    put_away = index.take(make_key(3))
    assert put_away is not None
    index.drop(put_away.key)
    assert put(index, "x") == []
    assert put(index, 3, 2) == keys("x")


def test_an_orphan_takes_free_room_and_displaces_nobody() -> None:
    index = PageIndex(2)
    put(index, "a")
    assert put(index, "orphan", "not here") == []
    assert put(index, "other orphan", "not here either") is None
    assert len(index) == 2


def test_nobody_leaves_for_a_page_that_cannot_be_had() -> None:
    index = PageIndex(10)
    put(index, "a", size_bytes=5)
    put(index, "b", "a", size_bytes=4)
    put(index, "x", size_bytes=1)
    assert put(index, "c", "b", size_bytes=3) is None  # x alone does not suffice
    assert put(index, "large", size_bytes=11) is None
    assert len(index) == 3
    assert index.check_integrity() == []
    assert put(index, "d", size_bytes=1) == keys("b")


def test_reserved_pages_count_and_cannot_be_seen_or_evicted() -> None:
    index = PageIndex(2)
    assert index.reserve(make_key("a"), None, 2).outcome is Outcome.GRANTED
    assert (index.used_bytes, len(index), index.find(make_key("a"))) == (2, 0, None)
    assert index.reserve(make_key("a"), None, 2).outcome is Outcome.BUSY
    assert index.reserve(make_key("b"), None, 1).outcome is Outcome.REFUSED
    index.drop(make_key("a"))
    assert (index.used_bytes, len(index)) == (0, 0)
    assert put(index, "b") == []


def test_a_page_that_is_leaving_is_not_found_until_it_is_restored() -> None:
    index = PageIndex(None)
    put(index, "a")
    put(index, "b", "a")
    entry = index.take(make_key("b"))
    assert entry == PageEntry(make_key("b"), make_key("a"), 1)
    assert index.find(make_key("b")) is None
    assert index.take(make_key("b")) is None
    assert index.reserve(make_key("b"), None, 1).outcome is Outcome.BUSY
    assert index.used_bytes == 2
    index.restore(make_key("b"))
    assert index.find(make_key("b")) == entry
    assert index.check_integrity() == []


def test_take_with_an_old_entry_spares_the_page_that_came_after() -> None:
    index = PageIndex(None)
    put(index, "a")
    old = index.find(make_key("a"))
    index.drop(make_key("a"))
    put(index, "a")
    assert index.take(make_key("a"), only=old) is None
    assert index.find(make_key("a")) is not None


def test_a_hidden_page_is_not_found_but_counts_and_can_be_evicted() -> None:
    index = PageIndex(1)
    put(index, "a")
    index.hide(make_key("a"))
    assert index.find(make_key("a")) is None
    assert index.used_bytes == 1
    assert index.reserve(make_key("a"), None, 1).outcome is Outcome.BUSY
    assert put(index, "b") == keys("a")


def test_pages_found_over_the_capacity_leave_with_the_next_reservation() -> None:
    index = PageIndex(2)
    for name in "abcd":
        assert index.add(PageEntry(make_key(name), None, 1))
    assert not index.add(PageEntry(make_key("a"), None, 1))
    assert index.used_bytes == 4
    assert put(index, "e") == keys("a", "b", "c")


def test_a_parent_that_comes_after_its_child_is_kept_for_it() -> None:
    index = PageIndex(2)
    put(index, "child", "parent")
    put(index, "parent")
    index.touch(make_key("child"))
    assert put(index, "x") == keys("child")


def test_steps_out_of_order_are_the_callers_fault() -> None:
    index = PageIndex(None)
    with pytest.raises(ProtocolError, match="absent, RESERVED expected"):
        index.commit(make_key("a"))
    put(index, "a")
    with pytest.raises(ProtocolError, match="PRESENT, LEAVING expected"):
        index.restore(make_key("a"))
    with pytest.raises(ValueError, match="-1"):
        PageIndex(-1)


def test_the_queue_of_candidates_stays_as_small_as_the_index() -> None:
    index = PageIndex(8)
    for n in range(2000):
        put(index, n % 11)
        index.touch(make_key((n * 7) % 11))
        entry = index.take(make_key((n * 5) % 11))
        if entry is not None:
            index.drop(entry.key)
    assert len(index._heap) <= 2 * 8 + 65
    assert index.check_integrity() == []


class IndexAgainstModel(RuleBasedStateMachine):
    """The index against a plain list of pages that is searched from scratch each time."""

    CAPACITY = 12

    def __init__(self) -> None:
        super().__init__()
        self.index = PageIndex(self.CAPACITY)
        self.sizes: dict[int, int] = {}
        self.used_at: dict[int, tuple[Regard, int]] = {}
        self.now = 0

    @staticmethod
    def parent_of(page: int) -> int | None:
        """Pages form a binary tree: 1 is the root, 2 and 3 hang under it, and so on."""
        return None if page == 1 else page // 2

    def tick(self, page: int) -> None:
        self.now += 1
        regard, _ = self.used_at.get(page, (Regard.PLAIN, 0))
        self.used_at[page] = max(regard, Regard.PLAIN), self.now

    @staticmethod
    def inherit(used_at: dict[int, tuple[Regard, int]], parent: int, page: int) -> None:
        """A parent is used when its child is, and by it never regarded more highly than plain or than it was."""
        (own, _), (regard, use) = used_at[parent], used_at[page]
        used_at[parent] = max(used_at[parent], (min(regard, max(own, Regard.PLAIN)), use))

    def forget(self, page: int) -> None:
        parent = self.parent_of(page)
        if parent in self.sizes and parent is not None:
            self.inherit(self.used_at, parent, page)
        del self.sizes[page], self.used_at[page]

    def choose(self, missing: int, protected: int | None) -> list[int] | None:
        left = dict(self.sizes)
        used_at = dict(self.used_at)
        victims: list[int] = []
        while missing > 0:
            parents = {self.parent_of(page) for page in left} | {protected}
            leaves = [page for page in left if page not in parents]
            if not leaves:
                return None
            victim = min(leaves, key=used_at.__getitem__)
            parent = self.parent_of(victim)
            if parent is not None and parent in left:
                self.inherit(used_at, parent, victim)
            missing -= left.pop(victim)
            victims.append(victim)
        return victims

    @rule(page=st.integers(1, 15), size=st.integers(1, 5))
    def put(self, page: int, size: int) -> None:
        parent = self.parent_of(page)
        got = put(self.index, page, parent, size)
        if page in self.sizes:
            assert got == []
            self.tick(page)
            return
        missing = sum(self.sizes.values()) + size - self.CAPACITY
        victims = self.choose(missing, parent)
        if missing > 0 and parent is not None and parent not in self.sizes:
            victims = None
        assert got == (None if victims is None else keys(*victims))
        if victims is not None:
            for victim in victims:
                self.forget(victim)
            self.sizes[page] = size
            self.tick(page)

    @precondition(lambda self: self.sizes)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.sizes)))
        self.index.touch(make_key(page))
        self.tick(page)

    @rule(pages=st.lists(st.integers(1, 15), max_size=6), regard=st.sampled_from(Regard))
    def hint(self, pages: list[int], regard: Regard) -> None:
        self.index.hint(keys(*pages), regard)
        for page in set(pages) & set(self.sizes):
            self.used_at[page] = regard, self.used_at[page][1]

    @precondition(lambda self: self.sizes)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.sizes)))
        assert self.index.take(make_key(page)) is not None
        self.index.drop(make_key(page))
        self.forget(page)

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        assert {entry.key for entry in self.index.entries()} == set(keys(*self.sizes))
        assert self.index.used_bytes == sum(self.sizes.values()) <= self.CAPACITY
        assert self.index.check_integrity() == []


TestIndexAgainstModel = IndexAgainstModel.TestCase
