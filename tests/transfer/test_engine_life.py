from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.clock import MonotonicClock
from hicache.errors import TierTimeoutError, TierUnavailableError
from hicache.radix.actions import Forget
from hicache.testing.scripted_store import MISS, Raise, ScriptedStore
from hicache.testing.transfer_rig import PATIENCE_S, TransferRig, engine_threads, page_key, page_keys
from hicache.tiers.memory import MemoryStore
from hicache.tiers.store import PageTarget
from hicache.transfer import io_loop, store_calls
from hicache.types import TicketId, Tier


def test_the_store_is_opened_first_and_closed_last() -> None:
    rig = TransferRig()
    rig.engine.submit(rig.put(1, ["a"]))
    rig.ended(1)
    rig.close()
    assert [call.operation for call in rig.store.calls] == ["open", "put", "close"]


def test_a_store_that_does_not_open_is_reported_and_leaves_no_thread() -> None:
    class Unreachable(ScriptedStore):
        async def open(self) -> None:
            raise TierUnavailableError("nobody listens on port 1; start the server")

    before = engine_threads()
    with pytest.raises(TierUnavailableError, match="port 1"):
        TransferRig(store=Unreachable(), streams="cpu")
    assert engine_threads() == before


def test_a_store_that_hangs_while_opening_is_given_up() -> None:
    class Hanging(ScriptedStore):
        async def open(self) -> None:
            await asyncio.Event().wait()

    before = engine_threads()
    with pytest.raises(TierTimeoutError):
        TransferRig(store=Hanging(), open_timeout_s=0.0)
    assert engine_threads() == before


def test_close_completes_every_ticket_once_as_closed() -> None:
    before = engine_threads()
    rig = TransferRig(store_batch_pages=1)
    rig.seed("ab")
    rig.store.block("put")
    running = rig.store.block("get", key=page_key("b"))
    rig.engine.submit(rig.copy(1, "full", Tier.DEVICE, [0], Tier.HOST, [8]))
    rig.engine.submit(rig.fetch(2, "ab", [9, 10]))
    for ticket in (3, 4):
        rig.engine.submit(rig.put(ticket, [ticket], [ticket]))
    assert running.reached.wait(PATIENCE_S)
    rig.engine.close()
    rig.engine.submit(rig.fetch(5, "a"))
    rig.engine.submit(Forget("full", page_keys("a")))
    done = rig.ended(1, 2, 3, 4, 5)
    assert {end.error for end in done.values()} == {"closed"}
    assert {ticket: end.done_slots for ticket, end in done.items()} == {1: 0, 2: 1, 3: 0, 4: 0, 5: 0}
    assert rig.engine.check_integrity() == []
    assert rig.engine.exists({"full": page_keys("a")}, PATIENCE_S) is None
    assert rig.engine.drain(0.0)
    assert engine_threads() == before
    rig.close()


def test_an_engine_can_be_left_with_an_exception() -> None:
    before = engine_threads()

    def fail_inside() -> None:
        with TransferRig(streams="cpu") as rig:
            rig.engine.submit(rig.put(1, ["a"]))
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        fail_inside()
    assert engine_threads() == before


def test_close_is_bounded_when_a_store_ignores_cancellation_and_nothing_is_written_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_calls, "CANCEL_GRACE_S", 0.01)
    monkeypatch.setattr(io_loop, "CLOSE_GRACE_S", 0.01)
    entered = threading.Event()

    class Stubborn(ScriptedStore):
        async def get(self, targets: Sequence[PageTarget]) -> list[bool]:
            entered.set()
            while True:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    continue

    rig = TransferRig(store=Stubborn())
    rig.host.write("full", 0, b"\xee" * 256)
    rig.engine.submit(rig.fetch(1, "a"))
    assert entered.wait(PATIENCE_S)
    rig.engine.close()
    assert rig.ended(1)[1].error == "closed"
    assert rig.host.read("full", 0) == b"\xee" * 256
    rig.close()


def test_drain_waits_for_stores_and_deletions() -> None:
    with TransferRig() as rig:
        rig.seed("a")
        gate = rig.store.block("put")
        rig.engine.submit(rig.put(1, ["b"]))
        rig.engine.submit(Forget("full", page_keys("a")))
        assert not rig.engine.drain(0.0)
        gate.release()
        assert rig.engine.drain(PATIENCE_S)
        assert rig.engine.stats().forgotten_pages == 1
        assert rig.engine.outstanding() == ()


def test_drain_gives_up_on_a_copy_that_does_not_end() -> None:
    with TransferRig() as rig:
        rig.engine.submit(rig.copy(1, "full", Tier.DEVICE, [0], Tier.HOST, [0]))
        assert not rig.engine.drain(0.0)
        rig.to_host.step()
        assert rig.engine.drain(PATIENCE_S)


def test_other_calls_of_the_store_run_on_its_loop() -> None:
    with TransferRig() as rig:
        rig.seed("abc")
        assert rig.engine.run_store(lambda store: store.delete(page_keys("a"))) == 1
        assert rig.engine.run_store(lambda store: store.clear()) == 2


@pytest.mark.parametrize(
    ("error", "kind"),
    [(TierUnavailableError("gone"), "unavailable"), (KeyError("bug"), "raised")],
    ids=["tier-error", "bug"],
)
def test_other_calls_that_fail_raise_a_tier_error_and_are_counted(error: Exception, kind: str) -> None:
    async def fails(_store: object) -> None:
        raise error

    with TransferRig() as rig:
        with pytest.raises(TierUnavailableError):
            rig.engine.run_store(fails)
        assert rig.engine.stats().failures == {kind: 1}


def test_a_failing_store_is_logged_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    with TransferRig() as rig:
        rig.store.script("get", Raise(OSError(5, "bad sector")))
        for ticket in range(5):
            rig.engine.submit(rig.fetch(ticket, "a", [ticket]))
        rig.ended(*range(5))
        assert caplog.text.count("bad sector") == 1
        rig.advance(60.0)
        rig.engine.submit(rig.fetch(5, "a", [5]))
        rig.ended(5)
        assert caplog.text.count("bad sector") == 2


def test_a_fault_of_our_own_ends_the_ticket_and_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    with TransferRig() as rig:
        rig.seed("a")
        copier = rig.engine._copier

        def broken(*_arguments: object) -> None:
            raise RuntimeError("a bug")

        monkeypatch.setattr(copier, "copy", broken)
        rig.engine.submit(rig.fetch(1, "a"))
        rig.engine.submit(rig.put(2, ["b"], [1]))
        done = rig.ended(1, 2)
        assert {end.error for end in done.values()} == {"raised"}
        monkeypatch.undo()
        rig.engine.submit(rig.fetch(3, "a"))
        rig.engine.submit(rig.put(4, ["b"], [1]))
        assert all(end.is_complete for end in rig.ended(3, 4).values())


def test_the_shipped_memory_store_serves_a_round_trip_in_real_time() -> None:
    with TransferRig(store=MemoryStore(), streams="cpu", clock=MonotonicClock(), store_timeout_s=60.0) as rig:
        rig.engine.submit(rig.put(1, range(12), range(12)))
        assert rig.ended(1)[1].is_complete
        for slot in range(12):
            rig.host.write("full", slot, b"\xee" * 256)
        rig.engine.submit(rig.fetch(2, range(12), range(11, -1, -1)))
        assert rig.ended(2)[2].is_complete
        assert all(rig.holds_stamp(11 - name, name) for name in range(12))


@pytest.mark.parametrize(("timeout_s", "batch_pages"), [(0.0, 64), (1.0, 0)], ids=["no-time", "no-pages"])
def test_settings_that_allow_no_call_are_refused(timeout_s: float, batch_pages: int) -> None:
    with pytest.raises(ValueError, match="store call"):
        TransferRig(store_timeout_s=timeout_s, store_batch_pages=batch_pages)


NAMES = "abcdef"
STEPS = st.one_of(
    st.tuples(st.just("put"), st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True)),
    st.tuples(st.just("fetch"), st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True)),
    st.tuples(st.just("cancel"), st.integers(0, 20)),
    st.tuples(st.just("copy"), st.integers(0, 7)),
    st.tuples(st.just("forget"), st.sampled_from(NAMES)),
)
SCRIPTS = st.lists(
    st.tuples(
        st.sampled_from(["put", "get"]),
        st.sampled_from(NAMES),
        st.sampled_from([MISS, Raise(OSError(5, "no")), Raise(TierUnavailableError("gone"))]),
    ),
    max_size=4,
)


@settings(max_examples=30, deadline=None)
@given(steps=st.lists(STEPS, max_size=20), scripts=SCRIPTS, close_early=st.booleans())
def test_every_ticket_completes_exactly_once_whatever_happens(
    steps: list[tuple[str, object]],
    scripts: list[tuple[str, str, object]],
    close_early: bool,
) -> None:
    with TransferRig(store_batch_pages=2, store_queue_bytes=8 * 256, prefetch_queue_bytes=8 * 256) as rig:
        for operation, name, outcome in scripts:
            rig.store.script(operation, outcome, key=page_key(name))  # type: ignore[arg-type]
        submitted = set()
        for ticket, (what, argument) in enumerate(steps):
            actions: dict[str, Callable[[], object]] = {
                "put": lambda t=ticket, a=argument: rig.put(t, a),  # type: ignore[misc]
                "fetch": lambda t=ticket, a=argument: rig.fetch(t, a, range(8, 8 + len(a))),  # type: ignore[misc]
                "copy": lambda t=ticket, a=argument: rig.copy(t, "full", Tier.DEVICE, [a], Tier.HOST, [12]),  # type: ignore[misc]
                "forget": lambda a=argument: Forget("full", page_keys([a])),  # type: ignore[misc]
            }
            if what == "cancel":
                rig.engine.cancel(TicketId(argument))  # type: ignore[arg-type]
                continue
            rig.engine.submit(actions[what]())  # type: ignore[arg-type]
            if what != "forget":
                submitted.add(ticket)
        if not close_early:
            rig.to_host.step_all()
            assert rig.engine.drain(PATIENCE_S)
        rig.engine.close()
        done = rig.engine.completions()
        assert sorted(end.ticket for end in done) == sorted(submitted)
        assert all(0 <= end.done_slots <= end.num_slots for end in done)
        assert all(end.error is not None or end.is_complete or end.kind == "fetch" for end in done)
        assert rig.engine.outstanding() == ()
        assert rig.engine.check_integrity() == []
        stats = rig.engine.stats()
        assert stats.store_queue.used_bytes == stats.fetch_queue.used_bytes == 0
