from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from hicache.errors import ProtocolError
from hicache.testing.transfer_rig import PATIENCE_S
from hicache.transfer.jobs import ByteBudget, Completion, Direction, Failure, Job, JobBoard, Waiter
from hicache.types import TicketId


def job(ticket: int, kind: Direction = Direction.TO_HOST, num_slots: int = 4) -> Job:
    return Job(TicketId(ticket), kind, "full", num_slots, 10)


def tickets(*numbers: int) -> list[TicketId]:
    return [TicketId(number) for number in numbers]


@pytest.fixture
def board() -> JobBoard:
    return JobBoard(lambda _job, _done_slots, _error: None)


def test_a_ticket_completes_once_with_the_first_outcome(board: JobBoard) -> None:
    one = job(1)
    board.open(one)
    assert board.finish(one, 3, Failure.COPY)
    assert not board.finish(one, 4, None)
    assert board.take_completions() == [Completion(TicketId(1), 4, 3, "copy", 30, Direction.TO_HOST)]
    assert board.take_completions() == []
    assert board.check_integrity() == []


def test_completions_come_in_the_order_in_which_jobs_end(board: JobBoard) -> None:
    jobs = [job(number) for number in range(3)]
    for one in jobs:
        board.open(one)
    for number in (2, 0, 1):
        board.finish(jobs[number], 4, None)
    assert [completion.ticket for completion in board.take_completions()] == [2, 0, 1]


def test_an_outstanding_ticket_cannot_be_opened_again(board: JobBoard) -> None:
    one = job(1)
    board.open(one)
    with pytest.raises(ProtocolError, match="ticket 1"):
        board.open(job(1))
    board.finish(one, 4, None)
    board.open(job(1))
    assert board.outstanding() == (1,)


def test_the_books_are_closed_before_anybody_sees_the_completion() -> None:
    seen: list[tuple[int, Failure | None]] = []
    board = JobBoard(lambda job, done_slots, error: seen.append((done_slots, error)))
    one = job(1)
    board.open(one)
    board.watch(tickets(1), lambda: seen.append((-1, None)))
    board.finish(one, 2, Failure.CLOSED)
    assert seen == [(2, Failure.CLOSED), (-1, None)]


def test_a_page_that_is_not_there_is_an_answer_and_no_error(board: JobBoard) -> None:
    one = job(1, Direction.FETCH)
    board.open(one)
    board.finish(one, 2, Failure.MISS)
    (completion,) = board.take_completions()
    assert (completion.done_slots, completion.error, completion.is_complete) == (2, None, False)


@pytest.mark.parametrize(
    ("kind", "begun", "stopped", "outcome"),
    [
        pytest.param(Direction.STORE, False, True, "cancelled", id="queued-store"),
        pytest.param(Direction.FETCH, False, True, "cancelled", id="queued-fetch"),
        pytest.param(Direction.FETCH, True, True, None, id="running-fetch"),
        pytest.param(Direction.STORE, True, False, None, id="running-store"),
        pytest.param(Direction.TO_HOST, False, False, None, id="copy"),
    ],
)
def test_what_cancel_can_stop(
    board: JobBoard, kind: Direction, begun: bool, stopped: bool, outcome: str | None
) -> None:
    one = job(1, kind)
    board.open(one)
    if begun:
        assert board.begin(one)
    assert board.cancel(TicketId(1)) is stopped
    completed = board.take_completions()
    assert [completion.error for completion in completed] == ([outcome] if outcome else [])
    assert one.is_cancelled is (kind is Direction.FETCH and begun)
    assert board.begin(one) is (not begun and outcome is None)


def test_cancelling_what_is_done_or_unknown_does_nothing(board: JobBoard) -> None:
    one = job(1, Direction.FETCH)
    board.open(one)
    board.finish(one, 4, None)
    assert not board.cancel(TicketId(1))
    assert not board.cancel(TicketId(99))


def test_tickets_never_seen_and_tickets_done_are_not_waited_for(board: JobBoard) -> None:
    one = job(1)
    board.open(one)
    board.finish(one, 4, None)
    board.take_completions()
    assert board.wait(tickets(1, 77), 0.0)


def test_a_wait_that_gives_up_leaves_nothing_behind(board: JobBoard) -> None:
    one = job(1)
    board.open(one)
    assert not board.wait(tickets(1), 0.0)
    assert not board.wait(tickets(1), -1.0)
    assert board._waiters == {}
    board.finish(one, 4, None)
    assert board.check_integrity() == []


def test_all_who_wait_for_one_ticket_are_released_together(
    board: JobBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    watching = threading.Semaphore(0)
    watch = board.watch

    def noticed(tickets: list[TicketId], fire: Callable[[], None]) -> Waiter | None:
        waiter = watch(tickets, fire)
        watching.release()
        return waiter

    monkeypatch.setattr(board, "watch", noticed)
    shared, own = job(1), job(2)
    board.open(shared)
    board.open(own)
    outcomes: list[bool] = []
    waiters = [
        threading.Thread(target=lambda: outcomes.append(board.wait(tickets(1), PATIENCE_S))) for _ in range(5)
    ]
    for waiter in waiters:
        waiter.start()
    for _ in waiters:
        assert watching.acquire(timeout=PATIENCE_S)
    board.finish(shared, 4, None)
    for waiter in waiters:
        waiter.join(PATIENCE_S)
    assert outcomes == [True] * 5
    assert board.outstanding() == (2,)


def test_a_wait_for_several_ends_with_the_last(board: JobBoard) -> None:
    jobs = [job(number) for number in range(3)]
    for one in jobs:
        board.open(one)
    fired: list[int] = []
    board.watch(tickets(0, 1, 2), lambda: fired.append(1))
    board.finish(jobs[1], 4, None)
    board.finish(jobs[0], 0, Failure.COPY)
    assert fired == []
    board.finish(jobs[2], 4, None)
    assert fired == [1]


def test_a_budget_admits_up_to_its_limit_and_gets_everything_back() -> None:
    budget = ByteBudget(100)
    first, second, third = job(1, num_slots=6), job(2, num_slots=4), job(3, num_slots=1)
    assert budget.admit(first)
    assert budget.admit(second)
    assert not budget.admit(third)
    assert (budget.used_bytes, budget.num_jobs) == (100, 2)
    budget.give_back(first)
    assert budget.admit(third)
    budget.give_back(second)
    budget.give_back(third)
    assert (budget.used_bytes, budget.num_jobs) == (0, 0)


def test_progress_is_known_until_the_completion_is_taken(board: JobBoard) -> None:
    one = job(1, Direction.FETCH)
    board.open(one)
    board.arrived(one, 2)
    assert board.progress(TicketId(1)) == 2
    board.finish(one, 3, Failure.TIMEOUT)
    assert board.progress(TicketId(1)) == 3
    board.take_completions()
    assert board.progress(TicketId(1)) == 0
