"""What is agreed in a step, and how a step fails."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from hicache.clock import ManualClock
from hicache.errors import ProtocolError, RankGroupError
from hicache.policy.recompute import Bandwidth
from hicache.ranks.agreement import FRAME_NUMBERS, Agreed, Agreement, Facts
from hicache.ranks.group import SingleGroup
from hicache.ranks.in_process import threads
from hicache.testing.ranks import RecordingGroup
from hicache.transfer.jobs import Completion, Direction, Failure
from hicache.types import TicketId

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache.ranks.group import Numbers

PATIENCE_S = 60.0
T1, T2 = TicketId(1), TicketId(2)


def ended(ticket: TicketId, done: int, error: Failure | None = None, *, of: int = 8) -> Completion:
    return Completion(ticket, of, done, error, done * 10, Direction.FETCH)


def facts(*completions: Completion, running: Sequence[TicketId] = (T1,), **keywords: object) -> Facts:
    return Facts(running, {each.ticket: each for each in completions}, **keywords)  # type: ignore[arg-type]  # as the test has them


def agree(*of_ranks: Facts, what: str = "test", clocks: Sequence[float] = ()) -> list[Agreed]:
    """One step of a new group."""
    groups = threads(len(of_ranks))
    times = clocks or [0.0] * len(of_ranks)
    parts = [
        Agreement(group, ManualClock(at), ManualClock(2 * at))
        for group, at in zip(groups, times, strict=True)
    ]
    with ThreadPoolExecutor(len(of_ranks)) as pool:
        steps = [pool.submit(part.step, what, each) for part, each in zip(parts, of_ranks, strict=True)]
        return [step.result(PATIENCE_S) for step in steps]


def test_what_has_not_ended_everywhere_has_ended_nowhere() -> None:
    for agreed in agree(facts(ended(T1, 8)), facts(), facts(ended(T1, 8))):
        assert agreed.ended == ()


def test_what_has_ended_everywhere_comes_in_the_order_of_its_start() -> None:
    both = facts(ended(T2, 8), ended(T1, 8), running=(T1, T2))
    for agreed in agree(both, both):
        assert [each.ticket for each in agreed.ended] == [T1, T2]
        assert all(each.is_complete and each.error is None for each in agreed.ended)


@pytest.mark.parametrize(
    ("first", "second", "done", "error"),
    [
        pytest.param((8, None), (5, Failure.MISS), 5, None, id="one lacks a page"),
        pytest.param((8, None), (5, Failure.TIMEOUT), 5, Failure.TIMEOUT, id="one is slow"),
        pytest.param(
            (3, Failure.TIMEOUT), (5, Failure.MISS), 3, Failure.TIMEOUT, id="what is lacking lies further"
        ),
        pytest.param(
            (5, Failure.TIMEOUT), (5, Failure.CORRUPT), 5, Failure.CORRUPT, id="proof that it is not there"
        ),
        pytest.param(
            (0, Failure.QUEUE_FULL), (8, None), 0, Failure.QUEUE_FULL, id="one had no room in its queue"
        ),
        pytest.param((7, Failure.COPY), (0, Failure.CANCELLED), 0, Failure.CANCELLED, id="one was cancelled"),
    ],
)
def test_a_transfer_ends_for_all_as_it_ended_for_the_worst(
    first: tuple[int, Failure | None],
    second: tuple[int, Failure | None],
    done: int,
    error: Failure | None,
) -> None:
    own = [None if why is Failure.MISS else why for _, why in (first, second)]
    for agreed in agree(facts(ended(T1, first[0], own[0])), facts(ended(T1, second[0], own[1]))):
        (end,) = agreed.ended
        assert (end.done_slots, end.error) == (done, error)
        assert end.num_bytes == done * 10


@pytest.mark.parametrize("failure", list(Failure))
def test_every_failure_survives_the_agreement(failure: Failure) -> None:
    own = None if failure is Failure.MISS else failure
    for agreed in agree(*[facts(ended(T1, 2, own))] * 2):
        assert (agreed.ended[0].error, agreed.ended[0].done_slots) == (own, 2)


def test_the_time_is_the_first_rank_s_and_never_steps_back() -> None:
    groups = threads(2)
    leader, other = ManualClock(100.25), ManualClock(7.0)
    parts = [Agreement(groups[0], leader, leader), Agreement(groups[1], other, other)]
    with ThreadPoolExecutor(2) as pool:
        for wanted, moves in ((100.25, 1.5), (101.75, 0.0)):
            for step in [pool.submit(part.step, "time", facts(running=())) for part in parts]:
                step.result(PATIENCE_S)
            assert [part.clock.now_s() for part in parts] == [wanted, wanted]
            assert [part.session_clock.now_s() for part in parts] == [wanted, wanted]
            leader.advance(moves)
            other.advance(1000.0)
            assert parts[1].clock.now_s() == wanted, "between agreements time stands still"


def test_loading_is_as_slow_as_on_the_slowest_rank() -> None:
    fast, slow, unknown = Bandwidth(2.0 * 2**20, 0.5), Bandwidth(2.0 * 2**20, 4.0), Bandwidth(10.0, 1.0)
    others = (
        facts(speeds=[fast, unknown], queued_bytes=[5]),
        facts(speeds=[slow, unknown], queued_bytes=[70]),
        facts(speeds=[unknown, unknown], queued_bytes=[6]),
    )
    for agreed in agree(*others):
        assert agreed.speeds[0].time_s(2**20) == pytest.approx(2.0)
        assert not agreed.speeds[1].is_known
        assert agreed.queued_bytes == (70,)


def test_numbers_beyond_the_first_frame_take_a_second_exchange() -> None:
    groups = [RecordingGroup(group) for group in threads(2)]
    parts = [Agreement(group, ManualClock(), ManualClock()) for group in groups]
    many = [list(range(rank, 500 + rank)) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        steps = [pool.submit(part.lowest, "many", own) for part, own in zip(parts, many, strict=True)]
        assert [step.result(PATIENCE_S) for step in steps] == [tuple(range(500))] * 2
    assert [length for length, _ in groups[0].calls] == [FRAME_NUMBERS, 506 - FRAME_NUMBERS]
    assert groups[0].calls[0] == groups[1].calls[0]
    stats = parts[0].stats()
    assert (stats.num_steps, stats.num_calls, stats.num_bytes) == (1, 2, 506 * 8)


@pytest.mark.parametrize(
    ("second", "what"),
    [
        pytest.param(facts(), "release", id="another call"),
        pytest.param(facts(running=(T1, T2)), "match", id="other transfers"),
        pytest.param(facts(extra=(1,)), "match", id="more numbers"),
        pytest.param(facts(extra=range(200)), "match", id="more frames"),
        pytest.param(facts(state=(3,)), "match", id="another tree"),
    ],
)
def test_ranks_that_made_different_calls_are_told_and_agree_on_nothing_more(second: Facts, what: str) -> None:
    groups = threads(2)
    parts = [Agreement(group, ManualClock(), ManualClock()) for group in groups]
    with ThreadPoolExecutor(2) as pool:
        steps = [pool.submit(parts[0].step, "match", facts()), pool.submit(parts[1].step, what, second)]
        for step in steps:
            with pytest.raises(
                RankGroupError, match="the ranks have made different calls, or their trees differ"
            ):
                step.result(PATIENCE_S)
    for part in parts:
        with pytest.raises(RankGroupError, match="no longer one of a group"):
            part.step("match", facts())


def test_an_interrupt_ends_the_group_for_all() -> None:
    class Interrupted(RecordingGroup):
        def lowest(self, numbers: Numbers) -> Numbers:
            raise KeyboardInterrupt

    groups = threads(2)
    first = Agreement(Interrupted(groups[0]), ManualClock(), ManualClock())
    second = Agreement(groups[1], ManualClock(), ManualClock())
    with pytest.raises(KeyboardInterrupt):
        first.step("match", facts())
    with pytest.raises(RankGroupError, match="no longer one of a group: KeyboardInterrupt"):
        first.step("match", facts())
    with pytest.raises(RankGroupError, match="rank 0 has left"):
        second.step("match", facts())


def test_two_threads_of_a_rank_may_not_agree_at_once() -> None:
    groups = threads(2)
    part, other = (Agreement(group, ManualClock(), ManualClock()) for group in groups)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(part.step, "load", facts())
        while not part._busy.locked():
            pass
        with pytest.raises(ProtocolError, match="match: another thread is agreeing"):
            part.step("match", facts())
        other.step("load", facts())  # nobody was disturbed
        waiting.result(PATIENCE_S)


def test_one_rank_alone_goes_by_its_own_clocks() -> None:
    clock, session_clock = ManualClock(), ManualClock()
    alone = Agreement(SingleGroup(), clock, session_clock)
    assert alone.is_alone
    assert (alone.clock, alone.session_clock) == (clock, session_clock)
