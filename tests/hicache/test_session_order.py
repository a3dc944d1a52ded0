"""What sessions are worth: hints, learnt returns, branches that were abandoned; and its limits."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

import hicache
from hicache.policy.return_hazard import MAX_CLASSES, NUM_BINS, POOLED, ReturnHazard
from hicache.policy.session_order import MAX_SESSIONS, SessionOrder
from hicache.replay.capacity import parse_capacity
from hicache.replay.reference import block_sequences, reference_replay, told_ends
from hicache.types import LeaseId
from hicache.workload import read_trace

TRACES = Path(hicache.__file__).resolve().parents[1] / "traces"


class Clients:
    """Sessions that take turns; what the tree would know of their leases."""

    def __init__(self) -> None:
        self.order = SessionOrder()
        self.worth: dict[LeaseId, int] = {}
        self.now_s = 0.0
        self._next = 0

    def turn(self, name: str, *, stop: str = "", hint: Callable[[str], None] | None = None) -> LeaseId:
        lease = LeaseId(self._next)
        self._next += 1
        self.order.begin(name, self.now_s)
        if hint is not None:
            hint(name)
        self.order.end(name, lease, stop, self.now_s)
        self.tell()
        return lease

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.tell()

    def tell(self) -> None:
        self.worth.update(zip(*self.order.take_ratings(self.now_s), strict=True))

    def teach(self, *, num: int = 60) -> None:
        """Turns that end in a tool call come back after 10 s; those that end otherwise never do."""
        for i in range(num):
            self.turn(f"tool {i}", stop="tool_use")
            self.turn(f"person {i}", stop="end_turn")
            self.wait(10)
            self.turn(f"tool {i}", stop="end_turn")
        self.order.hazard.rebuild()


@pytest.fixture
def clients() -> Clients:
    return Clients()


# ---- learnt ----------------------------------------------------------------------------------
def test_what_comes_back_is_worth_more_than_what_does_not(clients: Clients) -> None:
    clients.teach()
    tool, person = clients.turn("a", stop="tool_use"), clients.turn("b", stop="end_turn")
    assert clients.worth[tool] > clients.worth[person] > 0


def test_a_return_that_is_overdue_loses_its_worth(clients: Clients) -> None:
    clients.teach()
    tool = clients.turn("a", stop="tool_use")
    fresh = clients.worth[tool]
    clients.wait(8)
    assert clients.worth[tool] > fresh, "it comes any moment now"
    clients.wait(600)
    assert clients.worth[tool] < fresh


def test_before_anything_is_learnt_all_are_worth_the_same(clients: Clients) -> None:
    worths = {clients.worth[clients.turn(f"s{i}", stop=stop)] for i, stop in enumerate(("", "tool_use"))}
    assert worths == {1}


def test_what_a_session_used_before_its_last_turn_is_over(clients: Clients) -> None:
    first = clients.turn("a")
    assert clients.order.last_lease("a") == first
    second = clients.turn("a")
    assert (clients.worth[first], clients.worth[second]) == (0, 1)


def test_turns_beside_each_other_keep_each_other_alive_until_a_later_one_ends(clients: Clients) -> None:
    order = clients.order
    first, second, third = LeaseId(0), LeaseId(1), LeaseId(2)
    order.begin("a", 0)
    order.begin("a", 0)
    order.end("a", first, "", 1)
    order.end("a", second, "", 2)
    clients.wait(3)
    assert clients.worth == {first: 1, second: 1}
    order.begin("a", 4)
    order.end("a", third, "", 5)
    clients.wait(3)
    assert clients.worth == {first: 0, second: 0, third: 1}


def test_the_index_is_the_best_ratio_of_chance_to_time_waited() -> None:
    hazard = ReturnHazard()
    kind, far = hazard.class_of("x"), 10
    for _ in range(4000):
        for age_bin in range(far + 1):
            hazard.reach(kind, age_bin)
        hazard.come_back(kind, far)  # all return, and all in one bin
    hazard.rebuild()
    begin_s, end_s = hazard.edges_s[far], hazard.edges_s[far + 1]
    for age_bin in (0, 5, far):
        waited_s = (begin_s + end_s) / 2 - hazard.edges_s[age_bin]
        expected = round((math.log2(1 / waited_s) + 30) * 8)
        assert abs(hazard.worth(kind, age_bin) - expected) <= 1


def test_classes_without_end_share_the_pooled_one() -> None:
    hazard = ReturnHazard()
    classes = [hazard.class_of(i) for i in range(2 * MAX_CLASSES)]
    assert len(set(classes)) == MAX_CLASSES
    assert classes[-1] == POOLED
    assert hazard.class_of(0) == classes[0]


# ---- hints -----------------------------------------------------------------------------------
def test_what_is_closed_is_worth_nothing_until_it_comes_back(clients: Clients) -> None:
    lease = clients.turn("a")
    clients.order.close("a")
    clients.tell()
    assert clients.worth[lease] == 0
    clients.wait(1000)
    assert clients.worth[lease] == 0, "time changes nothing of it"
    assert clients.worth[clients.turn("a")] == 1


@pytest.mark.parametrize("hint", ["close", "one_shot"])
def test_a_hint_is_taken_back_by_reopen(clients: Clients, hint: str) -> None:
    lease = clients.turn("a")
    getattr(clients.order, hint)("a")
    clients.tell()
    assert clients.worth[lease] == 0
    clients.order.reopen("a")
    clients.tell()
    assert clients.worth[lease] == 1


@pytest.mark.parametrize("hint", ["close", "one_shot"])
def test_a_hint_given_while_the_turn_is_at_work_holds_when_it_ends(clients: Clients, hint: str) -> None:
    lease = clients.turn("a", hint=getattr(clients.order, hint))
    assert clients.worth[lease] == 0
    assert clients.worth[clients.turn("a")] == 1, "it came back all the same"


def test_a_return_that_was_announced_counts_until_it_is_long_overdue(clients: Clients) -> None:
    soon, late = clients.turn("soon"), clients.turn("late")
    clients.order.close("soon")
    clients.order.expects_return("soon", 60, clients.now_s)
    clients.order.expects_return("late", 3600, clients.now_s)
    clients.tell()
    assert clients.worth[soon] > clients.worth[late] > 1
    clients.wait(200)
    assert clients.worth[soon] == 1
    assert clients.worth[late] > 1


def test_hints_for_a_session_that_is_unknown_do_nothing(clients: Clients) -> None:
    lease = clients.turn("a")
    before = dict(clients.worth)
    for hint in (clients.order.close, clients.order.reopen, clients.order.one_shot):
        hint("nobody")
    clients.order.expects_return("nobody", 5, clients.now_s)
    clients.tell()
    assert (clients.worth, len(clients.order)) == (before, 1)
    assert lease in before


# ---- limits ----------------------------------------------------------------------------------
def test_a_clock_that_steps_back_counts_as_no_time_passed(clients: Clients) -> None:
    clients.now_s = 1000.0
    lease = clients.turn("a")
    clients.now_s = 10.0
    clients.turn("b")
    clients.turn("a")
    clients.wait(5)
    assert clients.worth[lease] == 0
    assert len(clients.order) == 2


def test_sessions_that_never_come_back_are_forgotten(clients: Clients) -> None:
    for i in range(50):
        clients.order.end_unnamed(LeaseId(1000 + i), "", clients.now_s)
        clients.turn(f"s{i}")
    assert len(clients.order) == 100
    clients.wait(1e5)
    assert len(clients.order) == 0


def test_more_sessions_than_are_remembered_cost_no_more_memory(
    clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hicache.policy.session_order.MAX_SESSIONS", 100)
    for i in range(2000):
        clients.turn(f"s{i}")
    assert len(clients.order) == 100
    assert len(clients.order._timers) <= 401
    assert MAX_SESSIONS > 100


def test_a_turn_costs_a_bounded_number_of_ratings(clients: Clients) -> None:
    clients.turn("a")
    told = 0
    for _ in range(10_000):
        clients.now_s += 1.0
        told += len(clients.order.take_ratings(clients.now_s).leases)
    assert told <= NUM_BINS


# ---- against the published figures -----------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "share", "least"),
    [
        ("cc_agentic_small", "2%", 0.355),
        ("cc_agentic_small", "5%", 0.645),
        ("cc_agentic_small", "10%", 0.8297 - 0.002),
        ("cc_agentic_small", "20%", 0.9229 - 0.002),
        ("cc_agentic_small", "50%", 0.9431 - 0.002),
        ("mooncake_conversation", "2%", 0.140),
        pytest.param("mooncake_conversation", "10%", 0.2818 - 0.002, marks=pytest.mark.slow),
        pytest.param("mooncake_conversation", "20%", 0.3505 - 0.002, marks=pytest.mark.slow),
    ],
)
def test_sessions_reach_the_stated_hit_rates(name: str, share: str, least: float) -> None:
    trace = read_trace(TRACES / f"{name}.jsonl.zst")
    result = reference_replay(trace, parse_capacity(share).in_blocks(trace), policy="session")
    assert result.token_hit_rate >= least
    assert result.audit_errors == ()


def test_ends_that_are_told_are_worth_more_than_any_guess() -> None:
    trace = read_trace(TRACES / "mooncake_conversation.jsonl.zst")
    sequences = block_sequences(trace)
    blocks = parse_capacity("5%").in_blocks(trace)
    ends = told_ends(trace)
    told = reference_replay(trace, blocks, policy="session", sequences=sequences, ends=ends)
    assert told.token_hit_rate >= 0.26
