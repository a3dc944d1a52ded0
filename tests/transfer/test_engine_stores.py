from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from hicache.errors import ProtocolError, TierUnavailableError
from hicache.radix.actions import Forget, Hint, Store
from hicache.testing.scripted_store import MISS, Raise, ScriptedStore
from hicache.testing.transfer_rig import (
    PATIENCE_S,
    TransferRig,
    as_slots,
    check_stamp,
    page_key,
    page_keys,
    stamp,
)
from hicache.tiers.store import StoredPage
from hicache.transfer.jobs import Direction
from hicache.types import PageKey, Regard, TicketId

HINTS = ("put", "over", "plain")


def put_batches(rig: TransferRig) -> list[int]:
    """How many pages each put call had."""
    return [len(call.keys) for call in rig.store.calls if call.operation == "put"]


def test_pages_reach_the_store_with_their_bytes_and_parents() -> None:
    with TransferRig(on_page=check_stamp) as rig:
        rig.engine.submit(rig.put(1, ["a", "b", "c"], [5, 0, 9]))
        done = rig.ended(1)[1]
        assert (done.is_complete, done.done_slots, done.num_bytes) == (True, 3, 768)
        assert rig.stored(["a", "b", "c"]) == [True] * 3
        assert rig.engine.stats().bytes_moved(Direction.STORE) == 768


def test_one_page_that_raises_and_one_that_is_refused_cost_no_other() -> None:
    # O-40: the store raises on the third write and refuses the seventh.
    with TransferRig() as rig:
        gate = rig.store.block("put", key=page_key("first"))
        rig.engine.submit(rig.put(100, ["first"], [15]))
        assert gate.reached.wait(PATIENCE_S)
        rig.store.script("put", Raise(OSError(5, "bad sector")), key=page_key(3))
        rig.store.script("put", MISS, key=page_key(7))
        for number in range(1, 11):
            rig.engine.submit(rig.put(number, [number], [number]))
        gate.release()
        done = rig.ended(100, *range(1, 11))
        assert len(done) == 11
        assert {ticket: end.error for ticket, end in done.items() if end.error} == {3: "raised", 7: "refused"}
        assert rig.stored(range(1, 11)) == [number not in (3, 7) for number in range(1, 11)]
        assert rig.engine.stats().failures == {"raised": 1, "refused": 1}
        rig.store.unscript()
        rig.engine.submit(rig.put(11, [3]))  # the worker lives
        assert rig.ended(11)[11].is_complete
        assert rig.engine.check_integrity() == []


def test_a_ticket_stops_at_its_first_page_that_was_not_put() -> None:
    with TransferRig() as rig:
        rig.store.script("put", MISS, key=page_key("c"))
        rig.engine.submit(rig.put(1, ["a", "b", "c", "d"]))
        done = rig.ended(1)[1]
        assert (done.done_slots, done.error, done.num_bytes) == (2, "refused", 512)


def test_batches_join_tickets_and_are_no_larger_than_asked() -> None:
    with TransferRig(store_batch_pages=5) as rig:
        gate = rig.store.block("put", key=page_key("first"))
        rig.engine.submit(rig.put(1, ["first"], [15]))
        assert gate.reached.wait(PATIENCE_S)
        rig.engine.submit(rig.put(2, ["a", "b"], [0, 1]))
        rig.engine.submit(rig.put(3, [1, 2, 3, 4, 5, 6, 7], range(2, 9)))
        rig.engine.submit(rig.put(4, ["z"], [9]))
        gate.release()
        assert all(end.is_complete for end in rig.ended(1, 2, 3, 4).values())
        assert put_batches(rig) == [1, 5, 5]
        assert rig.store.keys_of("put") == list(page_keys(["first", "a", "b", 1, 2, 3, 4, 5, 6, 7, "z"]))


def test_a_ticket_split_over_batches_reports_pages_of_the_earlier_ones() -> None:
    with TransferRig(store_batch_pages=2) as rig:
        rig.store.script("put", Raise(OSError(28, "full")), key=page_key("d"))
        rig.engine.submit(rig.put(1, ["a", "b", "c", "d", "e", "f"]))
        rig.engine.submit(rig.put(2, ["next"], [9]))
        done = rig.ended(1, 2)
        assert (done[1].done_slots, done[1].error) == (2, "raised")
        assert done[2].is_complete
        assert page_key("e") not in rig.store.keys_of("put")


def test_a_store_that_is_down_is_not_asked_for_every_ticket() -> None:
    with TransferRig() as rig:
        gate = rig.store.block("put", key=page_key("first"))
        rig.engine.submit(rig.put(100, ["first"], [15]))
        assert gate.reached.wait(PATIENCE_S)
        for number in range(10):
            rig.store.script("put", Raise(TierUnavailableError("gone")), key=page_key(number))
            rig.engine.submit(rig.put(number, [number], [number]))
        gate.release()
        done = rig.ended(100, *range(10))
        assert {done[number].error for number in range(10)} == {"unavailable"}
        assert put_batches(rig) == [1, 10, 1, 1]


def test_a_put_that_hangs_ends_as_timeout_and_the_next_one_is_served() -> None:
    with TransferRig(store_timeout_s=30.0) as rig:
        gate = rig.store.block("put", key=page_key("a"))
        rig.engine.submit(rig.put(1, ["a"]))
        assert gate.reached.wait(PATIENCE_S)
        rig.engine.submit(rig.put(2, ["b"], [1]))
        rig.advance(30.0)
        done = rig.ended(1, 2)
        assert (done[1].error, done[1].done_slots) == ("timeout", 0)
        assert done[2].is_complete
        assert rig.engine.stats().failures == {"timeout": 1}


class LateStore(ScriptedStore):
    """A store whose put ignores cancellation and reads its pages late."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.ignored = threading.Event()
        self.go_on = asyncio.Event()
        self.read = threading.Event()
        self.seen: list[bytes] = []

    async def put(self, pages: Sequence[StoredPage]) -> list[bool]:
        self.entered.set()
        while not self.go_on.is_set():
            try:
                await self.go_on.wait()
            except asyncio.CancelledError:
                self.ignored.set()
        self.seen = [bytes(page.payload) for page in pages]
        self.read.set()
        return [True] * len(pages)


def test_a_put_that_outlives_its_ticket_never_reads_what_the_slot_holds_next() -> None:
    store = LateStore()
    with TransferRig(store=store, store_timeout_s=30.0) as rig:
        rig.engine.submit(rig.put(1, ["a"], [0]))
        assert store.entered.wait(PATIENCE_S)
        rig.advance(30.0)
        assert store.ignored.wait(PATIENCE_S)
        rig.advance(30.0)
        assert rig.ended(1)[1].error == "timeout"
        assert rig.engine.stats().stuck_calls == 1
        rig.host.write("full", 0, b"\xee" * 256)  # the slot's next owner
        rig.engine.run_store(lambda _: go_on(store))
        assert store.read.wait(PATIENCE_S)
        assert store.seen == [stamp(page_key("a"), 256)]
        assert rig.engine.completions() == []  # the late end changes nothing


async def go_on(store: LateStore) -> None:
    store.go_on.set()


def test_a_full_queue_drops_at_once_and_counts() -> None:
    with TransferRig(store_queue_bytes=3 * 256) as rig:
        gate = rig.store.block("put")
        rig.engine.submit(rig.put(1, ["a", "b"], [0, 1]))
        rig.engine.submit(rig.put(2, ["c", "d"], [2, 3]))
        rig.engine.submit(rig.put(3, ["e"], [4]))
        (dropped,) = rig.engine.completions()
        assert (dropped.ticket, dropped.done_slots, dropped.error) == (2, 0, "queue full")
        stats = rig.engine.stats()
        assert stats.queue_drops == {Direction.STORE: 1}
        assert (stats.store_queue.jobs, stats.store_queue.used_bytes) == (2, 768)
        gate.release()
        rig.ended(1, 3)
        rig.engine.submit(rig.put(4, ["c", "d", "f"]))  # there is room again
        assert rig.ended(4)[4].is_complete
        assert rig.engine.stats().store_queue.used_bytes == 0


def test_a_queued_store_is_dropped_by_cancel_and_a_running_one_ends_by_itself() -> None:
    with TransferRig() as rig:
        gate = rig.store.block("put", key=page_key("a"))
        rig.engine.submit(rig.put(1, ["a"], [0]))
        assert gate.reached.wait(PATIENCE_S)
        rig.engine.submit(rig.put(2, ["b"], [1]))
        assert rig.engine.cancel(TicketId(2))
        assert not rig.engine.cancel(TicketId(1))
        (cancelled,) = rig.engine.completions()
        assert (cancelled.ticket, cancelled.error, cancelled.done_slots) == (2, "cancelled", 0)
        gate.release()
        assert rig.ended(1)[1].is_complete
        assert rig.stored(["a", "b"]) == [True, False]


def test_a_page_that_is_not_what_its_key_says_is_not_put() -> None:
    with TransferRig(on_page=check_stamp) as rig:
        action = rig.put(1, ["a", "b", "c"])
        rig.host.write("full", 1, b"\xee" * 256)
        rig.engine.submit(action)
        done = rig.ended(1)[1]
        assert (done.done_slots, done.error) == (1, "stamp")
        assert rig.stored(["a", "b", "c"]) == [True, False, False]


def test_deletions_keep_their_place_among_stores() -> None:
    with TransferRig() as rig:
        gate = rig.store.block("put", call=1)
        rig.engine.submit(rig.put(1, ["a", "b"]))
        rig.engine.submit(Forget("full", page_keys(["a", "b", "never there"])))
        rig.engine.submit(rig.put(2, ["b"], [1]))
        gate.release()
        rig.ended(1, 2)
        assert rig.stored(["a", "b"]) == [False, True]
        assert rig.engine.stats().forgotten_pages == 2


class NoDeletions(ScriptedStore):
    async def delete(self, keys: Sequence[PageKey]) -> int:
        raise TierUnavailableError("read only")


def test_a_deletion_that_fails_is_counted_and_nothing_more() -> None:
    store = NoDeletions()
    with TransferRig(store=store) as rig:
        rig.engine.submit(Forget("full", page_keys(["a"])))
        rig.engine.submit(rig.put(1, ["b"]))
        assert rig.ended(1)[1].is_complete
        assert rig.engine.stats().failures == {"unavailable": 1}


def test_hints_keep_their_place_among_stores() -> None:
    with TransferRig() as rig:
        gate = rig.store.block("put", call=1)
        keys = page_keys(["a", "b"])
        rig.engine.submit(rig.put(1, ["a", "b"]))
        rig.engine.submit(Hint("full", keys, Regard.OVER))
        rig.engine.submit(Hint("full", keys[:1], Regard.OVER))
        rig.engine.submit(Hint("full", keys, Regard.PLAIN))
        rig.engine.submit(rig.put(2, ["c"], [1]))
        gate.release()
        rig.ended(1, 2)
        calls = [(call.operation, call.keys) for call in rig.store.calls if call.operation in HINTS]
        hints = [("over", (*keys, keys[0])), ("plain", keys)]
        assert calls == [("put", keys), *hints, ("put", page_keys(["c"]))]
        assert rig.engine.stats().hinted_pages == 5


def test_hints_beyond_the_limit_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache.transfer.store_writer.MAX_HINT_PAGES", 3)
    with TransferRig() as rig:
        gate = rig.store.block("put", call=1)
        rig.engine.submit(rig.put(1, ["a"]))
        assert gate.reached.wait(PATIENCE_S)
        rig.engine.submit(Hint("full", page_keys(["a", "b"]), Regard.KEPT))
        rig.engine.submit(Hint("full", page_keys(["c", "d"]), Regard.KEPT))
        rig.engine.submit(Hint("full", page_keys(["e"]), Regard.OVER))
        gate.release()
        assert rig.engine.drain(PATIENCE_S)
        stats = rig.engine.stats()
        assert (stats.hinted_pages, stats.hint_drops) == (3, 2)


def test_what_takes_a_hint_back_has_room_where_others_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache.transfer.store_writer.MAX_HINT_PAGES", 2)
    with TransferRig() as rig:
        gate = rig.store.block("put", call=1)
        keys = page_keys(["a", "b"])
        rig.engine.submit(rig.put(1, ["a"]))
        assert gate.reached.wait(PATIENCE_S)
        for regard in (Regard.KEPT, Regard.HIGH, Regard.PLAIN, Regard.PLAIN):
            rig.engine.submit(Hint("full", keys, regard))
        gate.release()
        assert rig.engine.drain(PATIENCE_S)
        told = [call.operation for call in rig.store.calls if call.operation in ("kept", "high", "plain")]
        stats = rig.engine.stats()
        assert (told, stats.hinted_pages, stats.hint_drops) == (["kept", "plain"], 4, 4)


def test_a_hint_about_a_store_that_has_gone_is_passed_over() -> None:
    with TransferRig() as rig:
        rig.engine.close_store()
        rig.engine.submit(Hint("full", page_keys(["a"]), Regard.PLAIN))
        with pytest.raises(ProtocolError, match="there is no store"):
            rig.engine.submit(Forget("full", page_keys(["a"])))


class NoHints(ScriptedStore):
    async def hint(self, keys: Sequence[PageKey], regard: Regard) -> None:
        raise TierUnavailableError("away")


def test_a_hint_that_fails_is_counted_and_nothing_more() -> None:
    with TransferRig(store=NoHints()) as rig:
        rig.engine.submit(Hint("full", page_keys(["a"]), Regard.OVER))
        rig.engine.submit(rig.put(1, ["b"]))
        assert rig.ended(1)[1].is_complete
        stats = rig.engine.stats()
        assert (stats.failures, stats.hinted_pages) == ({"unavailable": 1}, 0)


class ShortAnswers(ScriptedStore):
    async def put(self, pages: Sequence[StoredPage]) -> list[bool]:
        return (await super().put(pages))[:-1]


def test_a_store_that_answers_for_fewer_pages_is_not_believed() -> None:
    with TransferRig(store=ShortAnswers()) as rig:
        rig.engine.submit(rig.put(1, ["a", "b"]))
        done = rig.ended(1)[1]
        assert (done.done_slots, done.error) == (0, "unavailable")


def test_a_page_larger_than_the_rest_of_a_batch_goes_into_the_next() -> None:
    with TransferRig(store_batch_pages=2) as rig:
        state_keys = page_keys(["s", "t"])
        rig.fill_states(state_keys, [3, 4])
        gate = rig.store.block("put", key=page_key("first"))
        rig.engine.submit(rig.put(1, ["first"], [15]))
        assert gate.reached.wait(PATIENCE_S)
        rig.engine.submit(rig.put(2, ["a"], [0]))
        rig.engine.submit(Store(TicketId(3), "mamba", state_keys, (None, None), as_slots([3, 4])))
        gate.release()
        assert all(end.is_complete for end in rig.ended(1, 2, 3).values())
        assert put_batches(rig) == [1, 2, 1]


@pytest.mark.parametrize(
    "action",
    [
        pytest.param(Store(TicketId(1), "swa", page_keys("a"), (None,), as_slots([0])), id="component"),
        pytest.param(Store(TicketId(1), "full", page_keys("a"), (None,), as_slots([99])), id="slot"),
        pytest.param(Store(TicketId(1), "full", page_keys("ab"), (None,), as_slots([0])), id="keys"),
        pytest.param(Store(TicketId(1), "full", page_keys("a"), (), as_slots([0])), id="parents"),
    ],
)
def test_a_store_that_makes_no_sense_is_refused_and_leaves_nothing(action: Store) -> None:
    with TransferRig() as rig:
        with pytest.raises(ProtocolError):
            rig.engine.submit(action)
        assert rig.engine.outstanding() == ()
        assert rig.engine.check_integrity() == []


def test_without_a_store_nothing_can_be_stored() -> None:
    with TransferRig(store=None) as rig:
        with pytest.raises(ProtocolError, match="no store"):
            rig.engine.submit(rig.put(1, ["a"]))
        with pytest.raises(ProtocolError, match="no store"):
            rig.engine.submit(Forget("full", page_keys("a")))
