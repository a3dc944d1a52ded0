from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from hicache.errors import ProtocolError
from hicache.radix.actions import Copy
from hicache.testing.transfer_rig import PATIENCE_S, TransferRig, as_slots, engine_threads
from hicache.transfer.jobs import Completion, Direction
from hicache.types import ComponentSpec, TicketId, Tier

DEVICE, HOST = Tier.DEVICE, Tier.HOST
T1 = TicketId(1)


def test_a_backup_and_a_load_back_bring_the_same_bytes() -> None:
    with TransferRig(streams="cpu", store=None) as rig:
        for component in ("full", "mamba"):
            rig.fill(DEVICE, component, [3, 9, 4])
        rig.engine.submit(rig.copy(1, "full", DEVICE, [3, 9, 4], HOST, [0, 1, 2]))
        rig.engine.submit(rig.copy(2, "mamba", DEVICE, [9], HOST, [15]))
        assert all(done.is_complete for done in rig.ended(1, 2).values())
        rig.engine.submit(rig.copy(3, "full", HOST, [0, 1, 2], DEVICE, [10, 11, 12]))
        rig.engine.submit(rig.copy(4, "mamba", HOST, [15], DEVICE, [0]))
        rig.ended(3, 4)
        assert [rig.read(DEVICE, "full", slot) for slot in (10, 11, 12)] == [
            rig.payload(DEVICE, "full", slot) for slot in (3, 9, 4)
        ]
        assert rig.read(DEVICE, "mamba", 0) == rig.payload(DEVICE, "mamba", 9)


def test_a_completion_comes_when_the_bytes_are_in_place_and_not_before() -> None:
    with TransferRig() as rig:
        rig.fill(DEVICE, "full", [0, 1])
        rig.engine.submit(rig.copy(1, "full", DEVICE, [0, 1], HOST, [5, 6]))
        assert rig.engine.completions() == []
        assert rig.engine.outstanding() == (1,)
        assert not rig.engine.wait([T1], 0.0)
        rig.to_host.step()
        assert rig.read(HOST, "full", 6) == rig.payload(DEVICE, "full", 1)
        assert rig.engine.wait([T1], 0.0)
        assert rig.engine.completions() == [Completion(T1, 2, 2, None, 512, Direction.TO_HOST)]
        assert rig.engine.wait([T1], 0.0)  # drained earlier
        assert rig.engine.outstanding() == ()


def test_a_copy_cut_short_reports_its_leading_slots() -> None:
    with TransferRig() as rig:
        rig.fill(HOST, "full", [0, 1, 2])
        rig.engine.submit(rig.copy(1, "full", HOST, [0, 1, 2], DEVICE, [3, 4, 5]))
        rig.to_device.step_partial(2)
        done = rig.ended(1)[1]
        assert (done.done_slots, done.error, done.num_bytes) == (2, "copy", 512)
        assert rig.read(DEVICE, "full", 4) == rig.payload(HOST, "full", 1)
        assert rig.read(DEVICE, "full", 5) == bytes(256)
        assert rig.engine.stats().failures == {"copy": 1}


def test_a_copy_that_raises_fails_alone() -> None:
    with TransferRig() as rig:
        rig.fill(DEVICE, "full", [0])
        rig.to_host.fail_next(RuntimeError("no"))
        rig.engine.submit(rig.copy(1, "full", DEVICE, [0], HOST, [0]))
        rig.engine.submit(rig.copy(2, "full", DEVICE, [0], HOST, [1]))
        rig.to_host.step_all()
        done = rig.ended(1, 2)
        assert (done[1].done_slots, done[1].error) == (0, "copy")
        assert done[2].is_complete


def test_a_claim_does_not_wait_behind_a_load() -> None:
    with TransferRig() as rig:
        rig.fill(HOST, "full", [0])
        rig.fill(DEVICE, "mamba", [2])
        rig.engine.submit(rig.copy(1, "full", HOST, [0], DEVICE, [0]))
        rig.engine.submit(rig.copy(2, "mamba", DEVICE, [2], DEVICE, [7]))
        rig.local.step()
        assert rig.engine.wait([TicketId(2)], 0.0)
        assert rig.engine.outstanding() == (1,)
        assert rig.read(DEVICE, "mamba", 7) == rig.payload(DEVICE, "mamba", 2)


def test_what_ends_first_completes_first_whatever_was_submitted_before_it() -> None:
    with TransferRig() as rig:
        rig.engine.submit(rig.copy(1, "full", DEVICE, [0], HOST, [0]))
        rig.engine.submit(rig.copy(2, "full", HOST, [8], DEVICE, [8]))
        rig.to_device.step()
        rig.to_host.step()
        assert [done.ticket for done in rig.engine.completions()] == [2, 1]


def test_a_waiting_thread_is_released_by_the_completion() -> None:
    with TransferRig() as rig:
        rig.engine.submit(rig.copy(1, "full", DEVICE, [0], HOST, [0]))
        outcome: list[bool] = []
        waiter = threading.Thread(target=lambda: outcome.append(rig.engine.wait([T1], PATIENCE_S)))
        waiter.start()
        rig.to_host.step()
        waiter.join(PATIENCE_S)
        assert outcome == [True]


def test_an_async_caller_waits_on_its_own_loop() -> None:
    with TransferRig() as rig:
        rig.engine.submit(rig.copy(1, "full", DEVICE, [0], HOST, [0]))

        async def step_while_waiting() -> tuple[bool, bool, bool]:
            too_short = await rig.engine.await_([T1], 0.0)
            waiting = asyncio.create_task(rig.engine.await_([T1], PATIENCE_S))
            await asyncio.sleep(0)
            await asyncio.to_thread(rig.to_host.step)
            return too_short, await waiting, await rig.engine.await_([T1, TicketId(77)], 0.0)

        assert asyncio.run(step_while_waiting()) == (False, True, True)
        assert rig.engine.check_integrity() == []


def test_a_copy_of_nothing_completes_at_once() -> None:
    with TransferRig() as rig:
        rig.engine.submit(rig.copy(1, "full", DEVICE, [], HOST, []))
        assert rig.ended(1)[1].is_complete


@pytest.mark.parametrize(
    "action",
    [
        pytest.param(Copy(T1, "swa", DEVICE, as_slots([0]), HOST, as_slots([0])), id="unknown-component"),
        pytest.param(Copy(T1, "full", DEVICE, as_slots([16]), HOST, as_slots([0])), id="past-the-pool"),
        pytest.param(Copy(T1, "full", DEVICE, as_slots([-1]), HOST, as_slots([0])), id="no-slot"),
        pytest.param(Copy(T1, "full", DEVICE, as_slots([0, 1]), HOST, as_slots([0])), id="unpaired"),
        pytest.param(Copy(T1, "full", HOST, as_slots([0]), HOST, as_slots([1])), id="within-the-host"),
        pytest.param(Copy(T1, "full", DEVICE, as_slots([1]), DEVICE, as_slots([1])), id="onto-itself"),
    ],
)
def test_a_copy_that_makes_no_sense_is_refused_and_leaves_nothing(action: Copy) -> None:
    with TransferRig() as rig:
        with pytest.raises(ProtocolError):
            rig.engine.submit(action)
        assert rig.engine.outstanding() == ()
        assert rig.engine.check_integrity() == []


def test_an_outstanding_ticket_is_refused_and_its_copy_goes_on() -> None:
    with TransferRig() as rig:
        rig.engine.submit(rig.copy(1, "full", DEVICE, [0], HOST, [0]))
        with pytest.raises(ProtocolError, match="ticket 1"):
            rig.engine.submit(rig.copy(1, "full", DEVICE, [1], HOST, [1]))
        assert rig.to_host.step_all() == 1
        assert rig.ended(1)[1].is_complete


def test_cancel_lets_copies_finish() -> None:
    with TransferRig() as rig:
        rig.engine.submit(rig.copy(1, "full", DEVICE, [0], HOST, [0]))
        assert not rig.engine.cancel(T1)
        rig.to_host.step()
        assert rig.ended(1)[1].is_complete


def test_bytes_and_slots_are_counted_by_direction_and_component() -> None:
    with TransferRig() as rig:
        rig.engine.submit(rig.copy(1, "full", DEVICE, [0, 1], HOST, [0, 1]))
        rig.engine.submit(rig.copy(2, "full", DEVICE, [2], HOST, [2]))
        rig.engine.submit(rig.copy(3, "mamba", DEVICE, [0], DEVICE, [1]))
        rig.to_host.step_all()
        rig.local.step_all()
        stats = rig.engine.stats()
        rows = {(row.direction, row.component): row for row in stats.directions()}
        assert set(rows) == {("to_host", "full"), ("local", "mamba")}
        to_host = rows[Direction.TO_HOST, "full"]
        assert (to_host.transfers, to_host.slots, to_host.num_bytes) == (2, 3, 768)
        assert stats.bytes_moved(Direction.TO_HOST) == 768
        assert set(stats.seconds) == {"to_host", "local"}
        assert min(stats.seconds.values()) > 0.0


def test_close_completes_pending_copies_as_closed_and_leaves_no_thread() -> None:
    before = engine_threads()
    rig = TransferRig(streams="cpu")
    rig.engine.submit(rig.copy(1, "full", DEVICE, [0], HOST, [0]))
    rig.ended(1)
    rig.close()
    rig.engine.close()
    assert engine_threads() == before
    stepped = TransferRig()
    stepped.engine.submit(stepped.copy(1, "full", DEVICE, [0], HOST, [0]))
    stepped.engine.close()
    stepped.engine.submit(stepped.copy(2, "full", DEVICE, [0], HOST, [0]))
    assert [(done.ticket, done.error) for done in stepped.engine.completions()] == [
        (1, "closed"),
        (2, "closed"),
    ]
    assert stepped.to_host.step_all() == 0
    stepped.close()
    assert engine_threads() == before


def test_large_pages_copied_by_several_threads_arrive_whole() -> None:
    spec = ComponentSpec("full", num_layers=4, bytes_per_token=64 << 10)
    with TransferRig(streams="cpu", store=None, specs=(spec,), page_size=1, num_slots=128) as rig:
        slots = list(range(128))
        rig.fill(DEVICE, "full", slots)
        order = np.random.default_rng(3).permutation(128).tolist()
        rig.engine.submit(rig.copy(1, "full", DEVICE, slots, HOST, order))
        assert rig.ended(1)[1].is_complete
        assert all(rig.read(HOST, "full", order[slot]) == rig.payload(DEVICE, "full", slot) for slot in slots)
