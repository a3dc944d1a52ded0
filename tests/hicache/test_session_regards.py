"""How L3 is to regard a turn: by what its session said, and only as long as that holds."""

from __future__ import annotations

import pytest

from hicache.policy.return_hazard import ENDS_S
from hicache.types import LeaseId, Regard
from tests.hicache.test_session_order import CORES, Clients


@pytest.fixture(params=CORES)
def clients(request: pytest.FixtureRequest) -> Clients:
    return Clients(request.param)


@pytest.mark.parametrize(
    ("priority", "regard", "then"),
    [
        (0, Regard.LOW, Regard.LOW),
        (49, Regard.LOW, Regard.LOW),
        (50, Regard.PLAIN, Regard.PLAIN),
        (51, Regard.HIGH, Regard.PLAIN),
        (100, Regard.HIGH, Regard.PLAIN),
    ],
)
def test_a_turn_is_regarded_by_its_sessions_priority_and_highly_until_it_is_old(
    clients: Clients, priority: int, regard: Regard, then: Regard
) -> None:
    lease = clients.turn("a", priority=priority)
    assert clients.regard[lease] == regard
    clients.wait(ENDS_S[-1])
    assert clients.regard[lease] == then


def test_an_announced_return_is_regarded_highly_while_it_is_believed(clients: Clients) -> None:
    lease = clients.turn("a")
    clients.order.expects_return(clients.number("a"), 600.0, clients.now_s)
    clients.tell()
    assert clients.regard[lease] == Regard.HIGH
    clients.wait(ENDS_S[-1])
    assert clients.regard[lease] == Regard.PLAIN


def test_what_is_over_is_regarded_so_until_it_is_not(clients: Clients) -> None:
    lease = clients.turn("a", priority=100)
    clients.order.close(clients.number("a"))
    clients.tell()
    assert (clients.worth[lease], clients.regard[lease]) == (0, Regard.OVER)
    clients.order.reopen(clients.number("a"))
    clients.tell()
    assert clients.regard[lease] == Regard.HIGH


def test_a_branch_that_a_session_of_high_priority_left_is_plain(clients: Clients) -> None:
    left = clients.turn("a", priority=100)
    clients.turn("a", reused=LeaseId(10**9), priority=100)
    assert clients.regard[left] == Regard.PLAIN


def test_a_change_of_priority_is_told_though_the_worth_stays(clients: Clients) -> None:
    """By the time of the next bin, whatever the worth is by then."""
    lease = clients.turn("a", priority=100)
    clients.turn("a", reused=LeaseId(10**9), priority=50)
    clients.wait(ENDS_S[-1])
    assert clients.regard[lease] == Regard.PLAIN
