from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

import pytest

from hicache.radix.actions import Slots
from hicache.testing.scripted_store import FLIPPED, MISS, SHORT, Raise, ScriptedStore, Simple
from hicache.testing.transfer_rig import PATIENCE_S, TransferRig, check_stamp, page_key, page_keys, stamp
from hicache.tiers.store import PageTarget
from hicache.transfer.jobs import Direction
from hicache.transfer.layout import SlotView
from hicache.types import PageKey, TicketId

POISON = b"\xee" * 256


def poison(rig: TransferRig, slots: Sequence[int]) -> None:
    for slot in slots:
        rig.host.write("full", slot, POISON)


def test_pages_arrive_in_their_slots() -> None:
    with TransferRig(on_page=check_stamp) as rig:
        rig.seed("abc")
        rig.engine.submit(rig.fetch(1, "abc", [7, 2, 11]))
        done = rig.ended(1)[1]
        assert (done.is_complete, done.error, done.num_bytes) == (True, None, 768)
        assert [rig.holds_stamp(slot, name) for slot, name in ((7, "a"), (2, "b"), (11, "c"))] == [True] * 3
        assert rig.engine.stats().bytes_moved(Direction.FETCH) == 768


class WatchedStore(ScriptedStore):
    """Calls an observer before and after each get."""

    observe: Callable[[], None] = staticmethod(lambda: None)

    async def get(self, targets: Sequence[PageTarget]) -> list[bool]:
        self.observe()
        answers = await super().get(targets)
        self.observe()
        return answers


@pytest.mark.parametrize("batch_pages", [1, 3, 64])
def test_progress_never_runs_ahead_of_the_data(batch_pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # O-36: four pages, of which the store has the first two.
    store = WatchedStore()
    seen: list[int] = []

    def observe(*_page: object) -> None:
        progress = rig.engine.progress(TicketId(1))
        assert all(rig.holds_stamp(slot, "abcd"[slot]) for slot in range(progress))
        seen.append(progress)

    store.observe = observe
    with TransferRig(store=store, store_batch_pages=batch_pages, on_page=observe) as rig:
        rig.store = store
        rig.seed("abd")
        poison(rig, range(4))
        copy = rig.engine._copier.copy

        def watched_copy(source: SlotView, first: Slots, target: SlotView, second: Slots) -> None:
            observe()
            copy(source, first, target, second)
            observe()

        monkeypatch.setattr(rig.engine._copier, "copy", watched_copy)
        rig.engine.submit(rig.fetch(1, "abcd"))
        done = rig.ended(1)[1]
        assert sorted(seen) == seen
        assert max(seen) <= 2
        assert (done.done_slots, done.error, done.is_complete) == (2, None, False)
        assert [rig.holds_stamp(slot, "abcd"[slot]) for slot in range(4)] == [True, True, False, False]
        assert rig.host.read("full", 2) == rig.host.read("full", 3) == POISON
        assert rig.engine.stats().failures == {"miss": 1}


@pytest.mark.parametrize(
    ("outcome", "done_slots", "error"),
    [
        pytest.param(MISS, 2, None, id="missing"),
        pytest.param(SHORT, 2, None, id="short"),
        pytest.param(FLIPPED, 2, None, id="flipped-bit"),
        pytest.param(Raise(OSError(5, "bad sector")), 0, "raised", id="raises"),
    ],
)
def test_a_bad_page_in_a_batch_never_reaches_its_slot(
    outcome: Simple | Raise, done_slots: int, error: str | None
) -> None:
    # O-48: what was not filled is not delivered, and nothing stays taken.
    with TransferRig(on_page=check_stamp) as rig:
        rig.seed("abcd")
        poison(rig, range(4))
        rig.store.script("get", outcome, key=page_key("c"), times=1)
        rig.engine.submit(rig.fetch(1, "abcd"))
        done = rig.ended(1)[1]
        assert (done.done_slots, done.error) == (done_slots, error)
        expected = [stamp(page_key(name), 256) for name in "abcd"[:done_slots]] + [POISON] * (4 - done_slots)
        assert [rig.host.read("full", slot) for slot in range(4)] == expected
        rig.engine.submit(rig.fetch(2, "abcd"))
        assert rig.ended(2)[2].is_complete
        assert rig.engine.check_integrity() == []


@pytest.mark.parametrize("batch_pages", [1, 64], ids=["single", "batch"])
def test_memory_that_the_store_reuses_under_a_read_is_noticed(batch_pages: int) -> None:
    # O-49: after two pages the third's memory is given to other bytes, and the store notices nothing.
    class ReusingStore(ScriptedStore):
        async def get(self, targets: Sequence[PageTarget]) -> list[bool]:
            answers = await super().get(targets)
            for target in targets:
                if target.key == page_key("c"):
                    target.payload[:] = b"\x55" * 256
            return answers

    store = ReusingStore()
    with TransferRig(store=store, store_batch_pages=batch_pages, on_page=check_stamp) as rig:
        rig.store = store
        rig.seed("abcd")
        poison(rig, range(4))
        rig.engine.submit(rig.fetch(1, "abcd"))
        done = rig.ended(1)[1]
        assert (done.done_slots, done.error) == (2, "stamp")
        assert rig.holds_stamp(1, "b")
        assert rig.host.read("full", 2) == POISON


def test_loads_that_wait_for_one_another_all_end() -> None:
    # O-56: batches of one page, a slow first consumer, more fetches than run at once.
    with TransferRig(store_batch_pages=1) as rig:
        names = [f"{ticket}{page}" for ticket in range(6) for page in range(2)]
        rig.seed(names)
        slow = rig.store.block("get", key=page_key("00"))
        for ticket in range(6):
            rig.engine.submit(
                rig.fetch(ticket, names[2 * ticket : 2 * ticket + 2], [2 * ticket, 2 * ticket + 1])
            )
        done = rig.ended(1, 2, 3, 4, 5)
        assert all(end.is_complete for end in done.values())
        assert rig.engine.outstanding() == (0,)
        slow.release()
        assert rig.ended(0)[0].is_complete
        assert len(rig.store.keys_of("get")) == 12  # nobody asked twice
        assert all(rig.holds_stamp(slot, name) for slot, name in enumerate(names))


def test_a_fetch_completes_when_it_has_ended_whatever_its_place_in_the_queue() -> None:
    # O-34
    with TransferRig() as rig:
        rig.seed("abcd")
        gates = [rig.store.block("get", key=page_key(name)) for name in "abc"]
        for ticket, name in enumerate("abcd"):
            rig.engine.submit(rig.fetch(ticket, [name], [ticket]))
        assert list(rig.ended(3)) == [3]
        assert rig.holds_stamp(3, "d")
        assert rig.engine.stats().fetch_queue.jobs == 3
        for ticket in (2, 0, 1):
            gates[ticket].release()
            assert list(rig.ended(ticket)) == [ticket]


def test_no_more_than_four_fetches_run_at_once() -> None:
    with TransferRig() as rig:
        rig.seed("abcdef")
        gates = [rig.store.block("get", key=page_key(name)) for name in "abcdef"]
        for ticket, name in enumerate("abcdef"):
            rig.engine.submit(rig.fetch(ticket, [name], [ticket]))
        for gate in gates[:4]:
            assert gate.reached.wait(PATIENCE_S)
        assert len(rig.store.keys_of("get")) == 4
        rig.store.release()
        assert len(rig.ended(*range(6))) == 6


def test_a_full_queue_drops_at_once_and_has_room_again_later() -> None:
    with TransferRig(prefetch_queue_bytes=2 * 256) as rig:
        rig.seed("abc")
        gate = rig.store.block("get")
        rig.engine.submit(rig.fetch(1, "ab", [0, 1]))
        rig.engine.submit(rig.fetch(2, "c", [2]))
        (dropped,) = rig.engine.completions()
        assert (dropped.ticket, dropped.done_slots, dropped.error) == (2, 0, "queue full")
        gate.release()
        rig.ended(1)
        rig.engine.submit(rig.fetch(3, "c", [2]))
        assert rig.ended(3)[3].is_complete
        assert rig.engine.stats().queue_drops == {Direction.FETCH: 1}


# ---- cancellation ------------------------------------------------------------------------------------------------


def test_cancelling_in_every_state_leaves_nothing_reserved() -> None:
    # O-30: room for ten; cancelled while running, queued, dropped, done and taken. Then ten fit again.
    with TransferRig(prefetch_queue_bytes=10 * 256, store_batch_pages=1) as rig:
        names = [f"p{number}" for number in range(12)]
        rig.seed(names)
        running = [rig.store.block("get", key=page_key(name)) for name in names[:4]]
        for ticket in range(4):
            rig.engine.submit(rig.fetch(ticket, [names[ticket], names[ticket + 4]], [ticket, ticket + 4]))
        for gate in running:
            assert gate.reached.wait(PATIENCE_S)
        rig.engine.submit(rig.fetch(4, [names[8]], [8]))  # queued
        rig.engine.submit(rig.fetch(5, names[9:12], [9, 10, 11]))  # does not fit
        assert [rig.engine.cancel(TicketId(ticket)) for ticket in range(6)] == [True] * 5 + [False]
        assert [(done.ticket, done.error) for done in rig.engine.completions()] == [
            (5, "queue full"),
            (4, "cancelled"),
        ]
        for gate in running:
            gate.release()
        done = rig.ended(0, 1, 2, 3)
        assert {(end.done_slots, end.error) for end in done.values()} == {(1, "cancelled")}
        assert not rig.engine.cancel(TicketId(0))  # done and taken
        assert rig.engine.stats().fetch_queue.used_bytes == 0
        assert rig.engine.check_integrity() == []
        rig.engine.submit(rig.fetch(6, names[:10]))
        assert rig.ended(6)[6].is_complete


def test_a_running_fetch_that_is_cancelled_keeps_what_has_arrived() -> None:
    with TransferRig(store_batch_pages=2) as rig:
        rig.seed("abcdef")
        poison(rig, range(6))
        gate = rig.store.block("get", key=page_key("d"))
        rig.engine.submit(rig.fetch(1, "abcdef"))
        assert gate.reached.wait(PATIENCE_S)
        assert rig.engine.progress(TicketId(1)) == 2
        assert rig.engine.cancel(TicketId(1))
        assert rig.engine.outstanding() == (1,)  # its batch is still under way
        gate.release()
        done = rig.ended(1)[1]
        assert (done.done_slots, done.error) == (4, "cancelled")
        assert rig.holds_stamp(3, "d")
        assert rig.host.read("full", 4) == POISON


def test_a_fetch_cancelled_during_its_last_batch_is_whole() -> None:
    with TransferRig() as rig:
        rig.seed("ab")
        gate = rig.store.block("get", key=page_key("b"))
        rig.engine.submit(rig.fetch(1, "ab"))
        assert gate.reached.wait(PATIENCE_S)
        rig.engine.cancel(TicketId(1))
        gate.release()
        assert rig.ended(1)[1].is_complete


# ---- time limits -------------------------------------------------------------------------------------------------


def test_a_get_that_hangs_ends_as_timeout_with_what_came_before_it() -> None:
    with TransferRig(store_timeout_s=30.0, store_batch_pages=1) as rig:
        rig.seed("abc")
        gate = rig.store.block("get", key=page_key("b"))
        rig.engine.submit(rig.fetch(1, "abc"))
        assert gate.reached.wait(PATIENCE_S)
        rig.advance(29.0)
        assert not rig.engine.wait([TicketId(1)], 0.0)
        rig.advance(1.0)
        done = rig.ended(1)[1]
        assert (done.done_slots, done.error) == (1, "timeout")
        gate.release()
        rig.engine.submit(rig.fetch(2, "bc", [1, 2]))  # the store comes back by itself
        assert rig.ended(2)[2].is_complete


class StubbornStore(ScriptedStore):
    """A store whose get ignores cancellation and fills its targets late."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Semaphore(0)
        self.ignored = threading.Semaphore(0)
        self.go_on = asyncio.Event()
        self.wrote = threading.Semaphore(0)

    async def get(self, targets: Sequence[PageTarget]) -> list[bool]:
        self.entered.release()
        while not self.go_on.is_set():
            try:
                await self.go_on.wait()
            except asyncio.CancelledError:
                self.ignored.release()
        for target in targets:
            target.payload[:] = b"\x55" * target.payload.nbytes
        self.wrote.release()
        return [True] * len(targets)

    async def let_go(self) -> None:
        self.go_on.set()


def test_a_get_that_outlives_its_ticket_never_writes_to_slots_handed_on() -> None:
    store = StubbornStore()
    with TransferRig(store=store, store_timeout_s=30.0) as rig:
        rig.engine.submit(rig.fetch(1, "ab"))
        assert store.entered.acquire(timeout=PATIENCE_S)
        rig.advance(30.0)
        assert store.ignored.acquire(timeout=PATIENCE_S)
        rig.advance(30.0)
        done = rig.ended(1)[1]
        assert (done.done_slots, done.error) == (0, "timeout")
        for slot in (0, 1):
            rig.host.write("full", slot, b"\x01" * 256)  # the slots' next owner
        rig.engine.run_store(lambda _: store.let_go())
        assert store.wrote.acquire(timeout=PATIENCE_S)
        rig.engine.run_store(lambda inner: inner.exists([]))  # whatever the late end would do is done
        assert [rig.host.read("full", slot) for slot in (0, 1)] == [b"\x01" * 256] * 2
        assert rig.engine.completions() == []


def test_a_store_whose_calls_never_end_gets_no_more_of_them_and_comes_back() -> None:
    store = StubbornStore()
    with TransferRig(store=store, store_timeout_s=30.0) as rig:
        for ticket in range(8):
            rig.engine.submit(rig.fetch(ticket, "a"))
            assert store.entered.acquire(timeout=PATIENCE_S)
            rig.advance(30.0)
            assert store.ignored.acquire(timeout=PATIENCE_S)
            rig.advance(30.0)
            assert rig.ended(ticket)[ticket].error == "timeout"
        rig.engine.submit(rig.fetch(8, "a"))
        assert rig.ended(8)[8].error == "unavailable"
        assert rig.engine.stats().stuck_calls == 8
        assert rig.engine._store_io is not None
        rig.engine._store_io._loop.call_soon(store.go_on.set)
        for _ in range(8):
            assert store.wrote.acquire(timeout=PATIENCE_S)
        rig.engine.submit(rig.fetch(9, "a"))
        assert rig.ended(9)[9].is_complete
        assert rig.engine.stats().stuck_calls == 0


# ---- probes ------------------------------------------------------------------------------------------------------


def keys_of(**names: str) -> dict[str, Sequence[PageKey]]:
    return {component: page_keys(of_component) for component, of_component in names.items()}


def test_a_probe_asks_for_all_components_in_one_call() -> None:
    with TransferRig() as rig:
        rig.seed("abx")
        assert rig.engine.exists(keys_of(full="abc", mamba="xy"), PATIENCE_S) == {
            "full": [True, True, False],
            "mamba": [True, False],
        }
        assert [call.operation for call in rig.store.calls].count("exists") == 1
        assert rig.engine.exists({"full": []}, PATIENCE_S) == {"full": []}
        assert [call.operation for call in rig.store.calls].count("exists") == 1


def test_an_async_probe_answers_the_same() -> None:
    with TransferRig() as rig:
        rig.seed("ab")

        async def probe() -> dict[str, list[bool]] | None:
            return await rig.engine.aexists(keys_of(full="abc"), PATIENCE_S)

        assert asyncio.run(probe()) == {"full": [True, True, False]}


def test_a_probe_of_a_store_that_fails_knows_nothing_and_is_counted() -> None:
    with TransferRig() as rig:
        rig.store.script("exists", Raise(OSError(5, "no")))
        assert rig.engine.exists(keys_of(full="a"), PATIENCE_S) is None
        assert rig.engine.stats().failures == {"raised": 1}


def test_a_probe_that_takes_too_long_knows_nothing() -> None:
    with TransferRig(store_timeout_s=30.0) as rig:
        gate = rig.store.block("exists")
        answers: list[object] = []
        asking = threading.Thread(
            target=lambda: answers.append(rig.engine.exists(keys_of(full="a"), PATIENCE_S))
        )
        asking.start()
        assert gate.reached.wait(PATIENCE_S)
        rig.advance(30.0)
        asking.join(PATIENCE_S)
        assert answers == [None]
        assert rig.engine.stats().failures == {"timeout": 1}


def test_without_a_store_a_probe_knows_nothing() -> None:
    with TransferRig(store=None) as rig:
        assert rig.engine.exists(keys_of(full="a"), PATIENCE_S) is None
