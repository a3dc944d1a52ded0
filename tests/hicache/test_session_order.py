"""What sessions are worth: hints, learnt returns, branches that were abandoned; and its limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import hicache
from hicache.policy.return_hazard import EDGES_S, ENDS_S, NUM_BINS, ReturnHazard, open_class, worth_of
from hicache.policy.session_order import MAX_BRANCHES, MAX_TURNS, SessionOrder, make_session_order
from hicache.radix.core import core_kind
from hicache.replay.capacity import parse_capacity
from hicache.replay.reference import block_sequences, reference_replay, told_ends
from hicache.types import LeaseId, Regard, SessionId
from hicache.workload import read_trace

TOOL_CALL, END_TURN = 1, 2
CORES = ["python", "rust"] if core_kind()[0] == "rust" else ["python"]
TRACES = Path(hicache.__file__).resolve().parents[1] / "traces"


class Clients:
    """Sessions that take turns; what the tree would know of their leases."""

    def __init__(self, core: str) -> None:
        self.is_native = core == "rust"
        self.order = make_session_order(core)
        self.worth: dict[LeaseId, int] = {}
        self.regard: dict[LeaseId, Regard] = {}
        self.now_s = 0.0
        self._next = 0
        self._names: dict[str, SessionId] = {}
        self.last: dict[str, LeaseId] = {}

    def number(self, name: str) -> SessionId:
        return self._names.setdefault(name, SessionId(len(self._names)))

    def turn(
        self,
        name: str,
        *,
        stop: int = 0,
        reused: LeaseId | None = None,
        priority: int = 50,
        hint: Callable[[SessionId], None] | None = None,
    ) -> LeaseId:
        """It comes back for the session's last turn if nothing else is said."""
        lease, number = LeaseId(self._next), self.number(name)
        self._next += 1
        self.order.begin(number, self.last.get(name) if reused is None else reused, self.now_s, priority)
        if hint is not None:
            hint(number)
        self.order.end(number, lease, stop, self.now_s)
        self.last[name] = lease
        self.tell()
        return lease

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.tell()

    def tell(self) -> None:
        for lease, worth, regard in zip(*self.order.take_ratings(self.now_s), strict=True):
            self.worth[lease], self.regard[lease] = worth, regard

    def teach(self, *, num: int = 60) -> None:
        """Turns that end in a tool call come back after 10 s; those that end otherwise never do."""
        for i in range(num):
            self.turn(f"tool {i}", stop=TOOL_CALL)
            self.turn(f"person {i}", stop=END_TURN)
            self.wait(10)
            self.turn(f"tool {i}", stop=END_TURN)


@pytest.fixture(params=CORES)
def clients(request: pytest.FixtureRequest) -> Clients:
    return Clients(request.param)


# ---- learnt ----------------------------------------------------------------------------------
def test_what_comes_back_is_worth_more_than_what_does_not(clients: Clients) -> None:
    clients.teach()
    tool, person = clients.turn("a", stop=TOOL_CALL), clients.turn("b", stop=END_TURN)
    assert clients.worth[tool] > clients.worth[person] > 0


def test_the_usual_gap_of_a_session_tells_how_soon_it_comes_back(clients: Clients) -> None:
    for i in range(60):
        for name, gap_s in (("quick", 10), ("slow", 1000)):
            for _ in range(4):
                clients.turn(f"{name} {i}")
                clients.wait(gap_s)
            clients.turn(f"{name} {i}")
    worths = []
    for name, gap_s in (("quick", 10), ("slow", 1000)):
        clients.turn(name)
        clients.wait(gap_s)
        worths.append(clients.worth[clients.turn(name)])
    assert worths[0] > worths[1] > 1


def test_the_number_of_turns_tells_whether_a_session_comes_back(clients: Clients) -> None:
    """Half of them stop after their second turn; those that get beyond it go on."""
    for i in range(100):
        for _ in range(2 if i % 2 else 9):
            clients.turn(f"s{i}")
            clients.wait(10)
    clients.wait(ENDS_S[-1])
    worths = []
    for _ in range(6):
        worths.append(clients.worth[clients.turn("new")])
        clients.wait(10)
    assert worths[5] > worths[1] > 0


def test_a_return_that_is_overdue_loses_its_worth(clients: Clients) -> None:
    clients.teach()
    tool = clients.turn("a", stop=TOOL_CALL)
    fresh = clients.worth[tool]
    clients.wait(8)
    assert clients.worth[tool] > fresh, "it comes any moment now"
    clients.wait(600)
    assert clients.worth[tool] < fresh


@pytest.mark.parametrize("in_s", [1.0, 3700.0, 7200.0, 10_000.0])
def test_a_return_that_was_announced_is_believed_for_four_hours_at_most(
    clients: Clients, in_s: float
) -> None:
    """A session that never comes back is not to be kept for ever."""
    lease = clients.turn("a", hint=lambda name: clients.order.expects_return(name, in_s, clients.now_s))
    for _ in range(6):
        clients.wait(ENDS_S[-1] / 5)
        clients.turn("b")
    assert clients.order.session_of(lease) == clients.number("a"), "it is remembered all the same"
    assert clients.worth[lease] == 1


@pytest.mark.parametrize(("priority", "then"), [(100, "as others"), (0, "lower")])
def test_a_priority_raises_an_old_turn_no_more_but_still_lowers_it(
    clients: Clients, priority: int, then: str
) -> None:
    for i in range(200):  # all return after three hours: old turns are worth something, too
        clients.turn(f"s{i}")
    clients.wait(3 * 3600)
    for i in range(200):
        clients.turn(f"s{i}")
    usual, other = clients.turn("usual"), clients.turn("other", priority=priority)
    fresh = clients.worth[other] - clients.worth[usual]
    assert fresh == (80 if priority == 100 else -80)
    clients.wait(ENDS_S[-1])
    old = clients.worth[other] - clients.worth[usual]
    assert old == (0 if then == "as others" else -80)


def test_what_is_old_is_closed_and_reopened_as_before(clients: Clients) -> None:
    lease = clients.turn("a")
    clients.wait(2 * ENDS_S[-1])
    clients.order.close(clients.number("a"))
    clients.tell()
    assert clients.worth[lease] == 0
    clients.order.reopen(clients.number("a"))
    clients.tell()
    assert clients.worth[lease] == 1


def test_a_session_that_returns_after_a_day_is_known_again(clients: Clients) -> None:
    """Also where that is longer than any age that is told apart, as long as the tree has something of it."""
    first = clients.turn("a")
    clients.wait(10 * ENDS_S[-1])
    second = clients.turn("a")
    clients.order.bury([first])
    assert [clients.order.session_of(lease) for lease in (first, second)] == [None, clients.number("a")]
    assert len(clients.order) == 1


def test_before_anything_is_learnt_all_are_worth_the_same(clients: Clients) -> None:
    worths = {clients.worth[clients.turn(f"s{i}", stop=stop)] for i, stop in enumerate((0, TOOL_CALL))}
    assert worths == {1}


def test_the_index_is_the_best_ratio_of_chance_to_time_waited() -> None:
    hazard = ReturnHazard()
    kind, far = open_class(None, 1, 0), 10
    for _ in range(4000):
        for age_bin in range(far + 1):
            hazard.reach(kind, age_bin)
        hazard.come_back(kind, far)  # all return, and all in one bin
        hazard.end_turn()
    hazard.refresh(kind)
    for age_bin in (0, 5, far):
        waited_s = (EDGES_S[far] + ENDS_S[far]) / 2 - EDGES_S[age_bin]
        expected = round((math.log2(1 / waited_s) + 30) * 8)
        assert abs(hazard.worth(kind, age_bin) - expected) <= 1


def test_worths_are_eighths_of_an_octave() -> None:
    for exponent in range(-35, 4):
        for eighths in range(8):
            index = 2.0 ** (exponent + eighths / 8)
            assert worth_of(index) == max(1, (exponent + 30) * 8 + eighths)
    assert worth_of(0.0) == 1


# ---- branches --------------------------------------------------------------------------------
def test_what_a_session_comes_back_without_is_worth_less_than_what_it_comes_back_for(
    clients: Clients,
) -> None:
    """Edited turns are never met again: whatever is left is soon worth almost nothing."""
    for i in range(400):
        for reused in (None, None, LeaseId(10**9)):
            clients.turn(f"s{i}", reused=reused)
            clients.wait(1)
        clients.wait(5)
    left = clients.turn("a")
    clients.wait(1)
    clients.turn("a", reused=LeaseId(10**9))
    clients.wait(1)
    never_left = clients.turn("b")
    assert 1 <= clients.worth[left] < clients.worth[never_left] - 16


def alternate(clients: Clients, name: str, *, rounds: int) -> dict[int, LeaseId]:
    """One session takes turns in two roles, each of which goes on from its own last turn."""
    roles: dict[int, LeaseId] = {}
    for i in range(rounds):
        roles[i % 2] = clients.turn(name, reused=roles.get(i % 2, LeaseId(10**9)))
        clients.wait(10)
    return roles


def test_a_branch_that_sessions_return_to_keeps_its_worth(clients: Clients) -> None:
    """Two roles in one session: what the last turn did not use is what the next one will."""
    alternate(clients, "agent", rounds=300)
    roles = alternate(clients, "another", rounds=7)
    left = roles[1]  # the last turn was the other role's
    fresh = clients.worth[left]
    assert fresh > clients.worth[clients.turn("somebody")]
    clients.wait(3600)
    assert 1 <= clients.worth[left] < fresh


def test_turns_beside_each_other_all_stay_open(clients: Clients) -> None:
    order, name = clients.order, clients.number("a")
    first, second = LeaseId(0), LeaseId(1)
    order.begin(name, None, 0)
    order.begin(name, None, 0)
    order.end(name, first, 0, 1)
    order.end(name, second, 0, 2)
    clients.wait(3)
    assert clients.worth == {first: 1, second: 1}


def test_an_abandoned_branch_goes_first_until_it_is_met_again(clients: Clients) -> None:
    lease = clients.turn("a")
    clients.order.abandon_branch(clients.number("a"))
    clients.tell()
    assert clients.worth[lease] == 0
    assert clients.worth[clients.turn("a")] == 1, "the session itself goes on"


def test_only_the_last_turn_of_a_session_is_abandoned(clients: Clients) -> None:
    """Its other branches, like the prompts of other roles, are what they were."""
    roles = alternate(clients, "agent", rounds=2)
    clients.worth.clear()
    clients.order.abandon_branch(clients.number("agent"))
    clients.tell()
    assert clients.worth == {roles[1]: 0}


@pytest.mark.parametrize("when", ["before the edited request", "while it runs"])
def test_an_abandoned_branch_stays_over_though_an_edited_turn_shares_its_beginning(
    clients: Clients, when: str
) -> None:
    """What the edited turn uses is that one's; what is left of the other one is what was abandoned."""
    before, abandon = clients.turn("a"), clients.order.abandon_branch
    if when == "before the edited request":
        abandon(clients.number("a"))
    edited = clients.turn("a", reused=before, hint=abandon if when == "while it runs" else None)
    clients.wait(1000)
    assert (clients.worth[before], clients.worth[edited]) == (0, 1)
    clients.turn("a", reused=edited)
    assert clients.worth[before] == 0
    clients.order.reopen(clients.number("a"))
    clients.tell()
    assert clients.worth[before] == 1


def test_a_session_keeps_so_many_branches_and_no_more(clients: Clients) -> None:
    leases = [clients.turn("a", reused=LeaseId(10**9)) for _ in range(MAX_BRANCHES + 2)]
    assert [clients.worth[lease] for lease in leases] == [0, 0, *[1] * MAX_BRANCHES]


# ---- hints -----------------------------------------------------------------------------------
def test_what_is_closed_is_worth_nothing_until_it_comes_back(clients: Clients) -> None:
    lease = clients.turn("a")
    clients.order.close(clients.number("a"))
    clients.tell()
    assert clients.worth[lease] == 0
    clients.wait(1000)
    assert clients.worth[lease] == 0, "time changes nothing of it"
    assert clients.worth[clients.turn("a")] == 1


@pytest.mark.parametrize("hint", ["close", "one_shot", "abandon_branch"])
def test_a_hint_is_taken_back_by_reopen(clients: Clients, hint: str) -> None:
    lease = clients.turn("a")
    getattr(clients.order, hint)(clients.number("a"))
    clients.tell()
    assert clients.worth[lease] == 0
    clients.order.reopen(clients.number("a"))
    clients.tell()
    assert clients.worth[lease] == 1


@pytest.mark.parametrize("hint", ["close", "one_shot"])
def test_a_hint_given_while_the_turn_is_at_work_holds_when_it_ends(clients: Clients, hint: str) -> None:
    lease = clients.turn("a", hint=getattr(clients.order, hint))
    assert clients.worth[lease] == 0
    assert clients.worth[clients.turn("a")] == 1, "it came back all the same"


def test_a_return_that_was_announced_counts_until_it_is_long_overdue(clients: Clients) -> None:
    soon, late = clients.turn("soon"), clients.turn("late")
    clients.order.close(clients.number("soon"))
    clients.order.expects_return(clients.number("soon"), 60, clients.now_s)
    clients.order.expects_return(clients.number("late"), 3600, clients.now_s)
    clients.tell()
    assert clients.worth[soon] > clients.worth[late] > 1
    clients.wait(200)
    assert clients.worth[soon] == 1
    assert clients.worth[late] > 1


def test_priority_moves_the_worth_by_octaves_and_never_to_nothing(clients: Clients) -> None:
    clients.teach()
    low, usual, high = (
        clients.turn(name, stop=TOOL_CALL, priority=p) for name, p in (("l", 0), ("u", 50), ("h", 100))
    )
    assert clients.worth[high] == clients.worth[usual] + 80
    assert clients.worth[low] == max(1, clients.worth[usual] - 80)


def test_hints_for_a_session_that_is_unknown_do_nothing(clients: Clients) -> None:
    lease, nobody = clients.turn("a"), clients.number("nobody")
    before = dict(clients.worth)
    order = clients.order
    for hint in (order.close, order.reopen, order.one_shot, order.abandon_branch):
        hint(nobody)
    order.expects_return(nobody, 5, clients.now_s)
    clients.tell()
    assert (clients.worth, len(order)) == (before, 1)
    assert lease in before


# ---- limits ----------------------------------------------------------------------------------
def test_a_clock_that_steps_back_counts_as_no_time_passed(clients: Clients) -> None:
    clients.now_s = 1000.0
    clients.turn("a")
    clients.now_s = 10.0
    clients.turn("b")
    clients.turn("a")
    clients.wait(5)
    assert len(clients.order) == 2
    clients.order.bury([LeaseId(i) for i in range(3)])
    clients.wait(1e6)
    assert len(clients.order) == 0, "time goes on"


def test_turns_of_which_the_tree_has_nothing_any_more_are_not_rated(clients: Clients) -> None:
    gone, other = clients.turn("a"), clients.turn("b")
    clients.order.bury([gone, LeaseId(10**9)])
    clients.worth.clear()
    clients.order.close(clients.number("a"))
    clients.order.close(clients.number("b"))
    clients.tell()
    assert clients.worth == {other: 0}
    assert clients.order.session_of(gone) == clients.number("a"), "the session may still come back"


def test_a_session_of_which_only_a_branch_was_left_is_forgotten_with_it(clients: Clients) -> None:
    first = clients.turn("a")
    second = clients.turn("a")
    clients.order.bury([first])
    assert (clients.order.session_of(first), len(clients.order)) == (None, 1)
    assert clients.order.session_of(second) == clients.number("a")


@pytest.mark.parametrize("is_old", [False, True], ids=["gone first", "old first"])
def test_sessions_of_one_request_cost_bounded_memory_and_are_forgotten_once_gone_and_old(
    clients: Clients, monkeypatch: pytest.MonkeyPatch, is_old: bool
) -> None:
    most = MAX_TURNS if clients.is_native else 100
    monkeypatch.setattr("hicache.policy.session_order.MAX_TURNS", most)
    for i in range(3 * most):
        clients.order.begin(SessionId(i), None, clients.now_s)
        clients.order.end(SessionId(i), LeaseId(i), 0, clients.now_s)
        if i % 1000 == 0:
            clients.wait(1)
    assert len(clients.order) == most
    clients.wait(1e5 * is_old)
    assert len(clients.order) == most, "the tree has something of them"
    clients.order.bury([LeaseId(i) for i in range(3 * most)])
    clients.wait(1e5)
    assert len(clients.order) == 0


@pytest.mark.parametrize("waited_s", [0.0, 10.0 * ENDS_S[-1]], ids=["fresh", "old"])
def test_beyond_the_most_turns_the_oldest_is_forgotten_and_its_hints_with_it(
    clients: Clients, monkeypatch: pytest.MonkeyPatch, waited_s: float
) -> None:
    """Nobody rates it again, so what it was worth last would stand for ever."""
    most = MAX_TURNS if clients.is_native else 100
    monkeypatch.setattr("hicache.policy.session_order.MAX_TURNS", most)
    oldest, next_oldest = clients.turn("a", priority=100), clients.turn("b")
    clients.wait(waited_s)
    clients.order.expects_return(clients.number("a"), 3600, clients.now_s)
    for i in range(2, most + 1):
        clients.order.begin(SessionId(i), None, clients.now_s)
        clients.order.end(SessionId(i), LeaseId(i), 0, clients.now_s)
    clients.tell()
    assert [clients.order.session_of(lease) for lease in (oldest, next_oldest)] == [None, SessionId(1)]
    assert clients.worth[oldest] == 1


def test_turns_that_leave_the_tree_at_once_leave_nothing_behind(
    clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where time stands still: what was timed for them goes, too."""
    monkeypatch.setattr("hicache.policy.session_order.MAX_TURNS", 100)
    for i in range(1000):
        clients.turn(f"s{i}")
        clients.turn(f"s{i}", reused=LeaseId(10**9))
        clients.order.bury([LeaseId(2 * i), LeaseId(2 * i + 1)])
    assert len(clients.order) <= MAX_TURNS
    if isinstance(clients.order, SessionOrder):
        assert sum(map(len, clients.order._timers)) <= 2 * 100


def test_a_turn_costs_a_bounded_number_of_ratings(clients: Clients) -> None:
    clients.turn("a")
    told = 0
    for _ in range(10_000):
        clients.now_s += 1.0
        told += len(clients.order.take_ratings(clients.now_s)[0])
    assert told <= NUM_BINS


class ToldTree:
    """What a tree was told, call by call, each lease with its worth."""

    def __init__(self) -> None:
        self.told: list[dict[LeaseId, int]] = []

    def rate(
        self, leases: Sequence[LeaseId], worths: Sequence[int], regards: Sequence[Regard] | None = None
    ) -> tuple[LeaseId, ...]:
        self.told.append(dict(zip(leases, worths, strict=True)))
        return ()


@pytest.mark.parametrize("core", CORES)
def test_the_tree_is_told_before_a_turn_begins_and_after_it_ends(core: str) -> None:
    tree, order, one = ToldTree(), make_session_order(core), SessionId(1)
    order.begin(one, None, 0.0, 50, tree)
    assert tree.told == [{}]
    order.end(one, LeaseId(7), 0, 0.0, tree)
    assert tree.told[1:] == [{7: 1}]
    order.close(one)
    order.begin(SessionId(2), None, 1.0, 50, tree)
    assert tree.told[2:] == [{7: 0}]
    assert order.take_ratings(1.0)[0] == [], "nothing is told twice"


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


@pytest.mark.parametrize("policy", ["session", "adaptive"])
def test_ends_that_are_told_are_worth_more_than_any_guess(policy: str) -> None:
    trace = read_trace(TRACES / "mooncake_conversation.jsonl.zst")
    sequences = block_sequences(trace)
    blocks = parse_capacity("5%").in_blocks(trace)
    ends = told_ends(trace)
    told = reference_replay(trace, blocks, policy=policy, sequences=sequences, ends=ends)
    assert told.token_hit_rate >= 0.26
