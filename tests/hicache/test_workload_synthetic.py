from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.workload import MultiTurn, closed_form, multi_turn
from hicache.workload.ceiling import token_hits

SMALL = MultiTurn(sessions=3, turns=4, system=10, user=7, output=5)


def measured_by_turn(load: MultiTurn, page: int, *, last_token_written: bool) -> list[int]:
    """Hits of each turn in an infinite cache, from the requests' own tokens."""
    requests = list(multi_turn(load))
    totals = [
        token_hits(
            requests[: (turn + 1) * load.sessions],
            page,
            keep_one=True,
            store_answers=True,
            last_token_written=last_token_written,
        ).hit_tokens
        for turn in range(len(load.sent_turns))
    ]
    return [after - before for before, after in zip([0, *totals], totals, strict=False)]


loads = st.builds(
    MultiTurn,
    sessions=st.integers(1, 4),
    turns=st.integers(1, 4),
    system=st.integers(0, 20),
    user=st.integers(1, 12),
    output=st.integers(0, 12),
    shuffled=st.booleans(),
    stride=st.integers(1, 3),
    every_turn_from=st.integers(1, 5),
)


@given(loads, st.integers(1, 9), st.booleans())
def test_the_closed_form_is_what_an_infinite_cache_hits(
    load: MultiTurn, page: int, last_token_written: bool
) -> None:
    expected = closed_form(load, page, last_token_written=last_token_written)
    assert [turn.hit_tokens for turn in expected] == measured_by_turn(
        load, page, last_token_written=last_token_written
    )


@given(loads)
def test_the_requests_have_the_lengths_of_the_closed_form(load: MultiTurn) -> None:
    for place, request in enumerate(multi_turn(load)):
        turn = closed_form(load, 1)[place // load.sessions]
        assert len(request.prompt_tokens()) == request.prompt_length == turn.prompt_length
        assert len(request.answer_tokens()) == request.output_length == load.output
        assert turn.prompt_tokens == load.sessions * turn.prompt_length


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("round_", range(9))
def test_equal_growth_hits_r_of_r_plus_one_rounded_to_pages(page: int, round_: int) -> None:
    growth = 1000
    turn = closed_form(MultiTurn(sessions=20, turns=9, user=growth), page)[round_]
    assert turn.hit_tokens == 20 * (round_ * growth // page * page)
    assert turn.prompt_tokens == 20 * (round_ + 1) * growth


def test_equal_growth_at_page_one_has_the_reported_hit_rates() -> None:
    rates = [turn.hit_rate for turn in closed_form(MultiTurn(sessions=20, turns=9, user=512), 1)]
    assert [round(rate, 4) for rate in rates] == [0, 0.5, 0.6667, 0.75, 0.8, 0.8333, 0.8571, 0.875, 0.8889]


def test_an_unwritten_last_token_costs_a_page_only_where_it_ends_one() -> None:
    load = MultiTurn(sessions=1, turns=2, user=8, output=8)
    assert [turn.hit_tokens for turn in closed_form(load, 16)] == [0, 16]
    assert [turn.hit_tokens for turn in closed_form(load, 16, last_token_written=False)] == [0, 0]
    assert [turn.hit_tokens for turn in closed_form(load, 5, last_token_written=False)] == [0, 15]


def test_a_turns_prompt_is_the_one_before_with_its_answer_and_new_tokens() -> None:
    requests = list(multi_turn(SMALL))
    for request in requests:
        if request.continued_by is None:
            continue
        later = requests[request.continued_by]
        kept = request.prompt_tokens().tolist() + request.answer_tokens().tolist()
        assert later.prompt_tokens().tolist()[:-7] == kept
        assert (later.session, later.turn, later.continues) == (
            request.session,
            request.turn + 1,
            request.index,
        )


def test_a_stride_sends_some_turns_of_the_history_and_all_of_the_rest() -> None:
    load = MultiTurn(sessions=2, turns=12, user=3, output=2, stride=4, every_turn_from=10)
    requests = list(multi_turn(load))
    assert [request.turn for request in requests[::2]] == [4, 8, 10, 11, 12]
    assert load.num_requests == len(requests) == 10
    every = list(multi_turn(MultiTurn(sessions=2, turns=12, user=3, output=2)))
    assert requests[-1].prompt_tokens().tolist() == every[-1].prompt_tokens().tolist()


def test_shuffled_sessions_come_once_a_turn_in_an_order_of_its_own() -> None:
    load = MultiTurn(sessions=9, turns=4, user=3, output=2, shuffled=True)
    requests = list(multi_turn(load, seed=1))
    orders = [[request.session for request in requests[n : n + 9]] for n in range(0, 36, 9)]
    assert all(len(set(order)) == 9 for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    for request in requests[9:]:
        assert request.continues is not None
        before = requests[request.continues]
        assert (before.session, before.turn) == (request.session, request.turn - 1)
        assert before.continued_by == request.index


def test_sessions_take_turns() -> None:
    requests = list(multi_turn(SMALL))
    assert [request.index for request in requests] == list(range(12))
    assert [request.session for request in requests[:4]] == [
        "session-0",
        "session-1",
        "session-2",
        "session-0",
    ]
    assert [request.arrival_s for request in requests[:3]] == [0.0, 1.0, 2.0]


def test_sessions_share_the_system_prompt_and_nothing_else() -> None:
    prompts = [request.prompt_tokens().tolist() for request in multi_turn(SMALL)][-3:]
    assert len({tuple(prompt[:10]) for prompt in prompts}) == 1
    own = [token for prompt in prompts for token in prompt[10:]]
    assert len(set(own)) == len(own)


def test_the_seed_decides_all_tokens() -> None:
    one, same, other = (
        [request.prompt_tokens().tolist() for request in multi_turn(SMALL, seed=seed)] for seed in (1, 1, 2)
    )
    assert one == same
    assert not set(one[-1]) & set(other[-1])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"sessions": 0, "turns": 1, "user": 1}, "sessions is 0, expected at least 1"),
        ({"sessions": 1, "turns": 0, "user": 1}, "turns is 0, expected at least 1"),
        ({"sessions": 1, "turns": 1, "user": 0}, "user is 0, expected at least 1"),
        ({"sessions": 1, "turns": 1, "user": 1, "system": -1}, "system is -1, expected at least 0"),
        ({"sessions": 1, "turns": 1, "user": 1, "output": -1}, "output is -1, expected at least 0"),
        ({"sessions": 1, "turns": 1, "user": 1, "stride": 0}, "stride is 0, expected at least 1"),
        ({"sessions": 1, "turns": 100, "user": 10**6}, "the last turn has 100000000 tokens"),
    ],
)
def test_sizes_that_make_no_load_are_refused(sizes: dict[str, Any], message: str) -> None:  # Any: passed on
    with pytest.raises(ValueError, match=message):
        MultiTurn(**sizes)
