import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.workload import Request, Trace, read_trace
from hicache.workload.continuation import SHARED_FAN_OUT, BlockRecord, link_requests
from hicache.workload.lines import read_lines
from hicache.workload.tokens import BLOCK_TOKENS, block_tokens, stream_tokens

TRACES = Path(__file__).parents[2] / "traces"
MOONCAKE = TRACES / "mooncake_conversation.jsonl.zst"
AGENTIC = TRACES / "cc_agentic_small.jsonl.zst"


def record(
    length: int, ids: Sequence[int], output: int = 100, *, session: str | None = None, turn: int | None = None
) -> BlockRecord:
    assert len(ids) == -(-length // BLOCK_TOKENS)
    return BlockRecord(0.0, length, output, np.array(ids, dtype=np.int64), session, turn)


def places(requests: Sequence[Request]) -> list[tuple[str | None, int]]:
    return [(request.session, request.turn) for request in requests]


def with_answer(request: Request) -> list[int]:
    return [*request.prompt_tokens().tolist(), *request.answer_tokens().tolist()]


def assert_shown(request: Request, later: Request) -> None:
    """The answer, and the part of a block before it, are what the later prompt has at their places."""
    kept = np.concatenate([request.prompt_tokens(), request.answer_tokens()])
    common = min(len(kept), later.prompt_length)
    assert common > request.prompt_length or request.output_length == 0
    assert np.array_equal(kept[:common], later.prompt_tokens()[:common])


# ---- tokens ------------------------------------------------------------------------------------------------------


def test_full_blocks_have_the_tokens_of_their_ids() -> None:
    (request,) = link_requests([record(1024, [4, 9])])
    assert request.prompt_tokens().tolist() == block_tokens(np.array([4, 9])).tolist()
    assert request.block_ids is not None
    assert request.block_ids.tolist() == [4, 9]


def test_only_full_blocks_count_among_the_block_ids() -> None:
    (request,) = link_requests([record(1023, [4, 9])])
    assert request.block_ids is not None
    assert request.block_ids.tolist() == [4]


def test_a_partial_block_that_nobody_continues_has_the_first_tokens_of_its_id() -> None:
    (request,) = link_requests([record(600, [4, 9])])
    assert request.prompt_tokens()[512:].tolist() == block_tokens(np.array([9]), 88).tolist()


def test_an_answer_that_nobody_shows_has_tokens_of_its_own() -> None:
    first, second = link_requests([record(600, [4, 9], 50), record(600, [4, 9], 50)])
    assert first.answer_tokens().tolist() == stream_tokens(0, 0, 50).tolist()
    assert second.answer_tokens().tolist() == stream_tokens(1, 0, 50).tolist()
    assert first.continued_by is None


def test_an_answer_and_the_part_before_it_are_what_the_next_prompt_shows() -> None:
    first, second = link_requests([record(600, [4, 9], 300), record(1500, [4, 10, 11])])
    assert with_answer(first) == second.prompt_tokens().tolist()[:900]
    assert (first.continued_by, second.continues) == (1, 0)


def test_an_answer_longer_than_the_next_prompt_goes_on_with_tokens_of_its_own() -> None:
    first, second = link_requests([record(600, [4, 9], 1000), record(700, [4, 10])])
    assert with_answer(first)[:700] == second.prompt_tokens().tolist()
    assert first.answer_tokens()[100:].tolist() == stream_tokens(0, 0, 900).tolist()


def test_an_answer_behind_a_full_block_is_shown_too() -> None:
    first, second = link_requests([record(512, [4], 20), record(540, [4, 7])])
    assert with_answer(first) == second.prompt_tokens().tolist()[:532]


def test_short_turns_inside_one_block_resolve_to_the_block_that_fills_it() -> None:
    turns = link_requests(
        [
            record(520, [1, 2], 10),
            record(540, [1, 3], 10),
            record(600, [1, 4], 10),
            record(1100, [1, 5, 6], 10),
        ]
    )
    last = turns[-1].prompt_tokens().tolist()
    assert all(with_answer(turn) == last[: turn.prompt_length + 10] for turn in turns[:3])
    assert [turn.turn for turn in turns] == [1, 2, 3, 4]


def test_equal_partial_blocks_keep_equal_tokens_though_only_one_request_is_continued() -> None:
    first, again, _, other = link_requests(
        [
            record(600, [1, 2], 10),
            record(600, [1, 2], 10),
            record(1100, [1, 5, 6], 10),
            record(1100, [1, 7, 8], 10),
        ]
    )
    assert first.prompt_tokens().tolist() == again.prompt_tokens().tolist()
    assert other.prompt_tokens()[512:600].tolist() != first.prompt_tokens()[512:600].tolist()


def test_a_partial_block_continued_in_two_ways_goes_with_the_first() -> None:
    first, one, two = link_requests(
        [record(600, [1, 2], 10), record(1100, [1, 5, 6], 10), record(1100, [1, 7, 8], 10)]
    )
    assert (one.continues, two.continues, first.continued_by) == (0, 0, 1)
    assert_shown(first, one)
    assert two.prompt_tokens()[512] != one.prompt_tokens()[512]


def test_two_different_partial_blocks_of_one_length_never_take_the_same_tokens() -> None:
    # Both end at 600 and the third continues the second; the first is continued by a repeat of the third.
    first, second, third, again = link_requests(
        [
            record(600, [1, 2], 10, session="a"),
            record(600, [1, 3], 10, session="b"),
            record(1100, [1, 5, 6], 10, session="b"),
            record(1100, [1, 5, 6], 10, session="a"),
        ]
    )
    assert_shown(second, third)
    assert (second.continued_by, first.continued_by) == (2, None)
    assert first.prompt_tokens()[512:].tolist() != second.prompt_tokens()[512:].tolist()
    assert third.prompt_tokens().tolist() == again.prompt_tokens().tolist()


def test_a_chain_of_partial_blocks_joins_another_only_if_no_length_is_there_twice() -> None:
    # In session a 520 tokens go on to 540, in b 520 others to 1100. Then a arrives at b's block.
    requests = link_requests(
        [
            record(520, [1, 2], 10, session="a"),
            record(540, [1, 3], 10, session="a"),
            record(520, [1, 4], 10, session="b"),
            record(1100, [1, 5, 6], 10, session="b"),
            record(1100, [1, 5, 6], 10, session="a"),
        ]
    )
    assert [request.continued_by for request in requests] == [1, None, 3, None, None]
    assert requests[0].prompt_tokens()[512] != requests[2].prompt_tokens()[512]


def test_a_shorter_repeat_does_not_show_the_answer() -> None:
    first, second = link_requests([record(700, [1, 2], 10), record(600, [1, 3], 10)])
    assert second.continues == 0
    assert first.continued_by is None
    assert second.prompt_tokens()[512] != first.prompt_tokens()[512]


def test_an_id_that_stands_for_two_lengths_keeps_tokens_of_its_own() -> None:
    turns = link_requests([record(600, [1, 2], 10), record(700, [1, 2], 10), record(1100, [1, 5, 6], 10)])
    assert turns[0].prompt_tokens().tolist() == turns[1].prompt_tokens().tolist()[:600]
    assert turns[2].prompt_tokens().tolist()[512:600] != turns[0].prompt_tokens().tolist()[512:]


def test_ids_that_are_not_prefix_chained_do_no_harm() -> None:
    turns = link_requests([record(1100, [1, 5, 9], 10), record(1700, [2, 5, 7, 8], 10)])
    assert turns[1].continues is None
    assert turns[0].prompt_tokens()[512:1024].tolist() == turns[1].prompt_tokens()[512:1024].tolist()


# ---- sessions ----------------------------------------------------------------------------------------------------


def test_a_request_continues_the_one_with_most_of_its_blocks_and_the_latest_of_equals() -> None:
    requests = link_requests(
        [
            record(1100, [1, 2, 3]),
            record(1700, [1, 2, 4, 5]),
            record(1700, [1, 2, 4, 6]),
            record(2100, [1, 2, 4, 7, 8]),
            record(1030, [1, 2, 9]),
        ]
    )
    assert [request.continues for request in requests] == [None, 0, 1, 2, 0]


def test_a_prompt_of_less_than_one_block_is_continued_by_nobody() -> None:
    requests = link_requests([record(100, [1]), record(600, [2, 3])])
    assert [request.continues for request in requests] == [None, None]


def test_a_fork_starts_a_session_of_its_own() -> None:
    requests = link_requests(
        [record(600, [1, 2]), record(1100, [1, 5, 6]), record(1100, [1, 7, 8]), record(1700, [1, 7, 9, 10])]
    )
    assert places(requests) == [("inferred-0", 1), ("inferred-0", 2), ("inferred-1", 1), ("inferred-1", 2)]


def test_a_shared_system_prompt_makes_no_session() -> None:
    num_users = SHARED_FAN_OUT + 1
    requests = link_requests([record(600, [0, 100 + user]) for user in range(num_users)])
    assert {request.continues for request in requests} == {None}
    assert len({request.session for request in requests}) == num_users


def test_given_sessions_and_turns_are_kept() -> None:
    requests = link_requests(
        [record(600, [1, 2], session="x", turn=3), record(1100, [1, 3, 4], session="x", turn=7)]
    )
    assert places(requests) == [("x", 3), ("x", 7)]
    assert requests[0].continued_by == 1


def test_missing_turns_of_given_sessions_are_counted() -> None:
    requests = link_requests(
        [record(100, [1], session="x"), record(100, [2], session="y"), record(100, [3], session="x")]
    )
    assert places(requests) == [("x", 1), ("y", 1), ("x", 2)]


def test_a_request_continues_nothing_of_another_given_session() -> None:
    requests = link_requests([record(600, [1, 2], session="x"), record(1100, [1, 3, 4], session="y")])
    assert requests[1].continues is None


# ---- random conversations ----------------------------------------------------------------------------------------

lengths = st.sampled_from([1, 2, 60, 200, 511, 512, 513, 700])
# (what it builds on: -1 nothing, else an earlier event; whether it keeps the answer; new tokens; answer's length)
events = st.lists(st.tuples(st.integers(-1, 5), st.booleans(), lengths, lengths), min_size=1, max_size=7)


def conversations(plan: list[tuple[int, bool, int, int]], system: int) -> list[BlockRecord]:
    """Records as a serving system would write them, from true tokens with one id for each different block."""
    ids: dict[tuple[int, bytes], int] = {}
    prompts: list[list[int]] = []
    answers: list[list[int]] = []
    records = []
    fresh = iter(range(10**6))
    for base, keep, user, output in plan:
        prompt = [-1] * system
        if 0 <= base < len(prompts):
            prompt = prompts[base] + (answers[base] if keep else [])
        prompt = prompt + [next(fresh) for _ in range(user)]
        parent, chain = -1, []
        for begin in range(0, len(prompt), BLOCK_TOKENS):
            content = np.array(prompt[begin : begin + BLOCK_TOKENS]).tobytes()
            parent = ids.setdefault((parent, content), len(ids))
            chain.append(parent)
        prompts.append(prompt)
        answers.append([next(fresh) for _ in range(output)])
        records.append(record(len(prompt), chain, output))
    return records


@given(events, st.sampled_from([0, 100, 512, 600]))
def test_blocks_are_equal_exactly_where_their_ids_are(
    plan: list[tuple[int, bool, int, int]], system: int
) -> None:
    records = conversations(plan, system)
    seen: dict[tuple[int, bytes], set[int]] = {}
    tokens_of: dict[int, set[bytes]] = {}
    for line, request in zip(records, link_requests(records), strict=True):
        tokens = request.prompt_tokens()
        assert len(tokens) == line.input_length
        assert len(request.answer_tokens()) == line.output_length
        for place, block in enumerate(line.block_ids.tolist()):
            content = tokens[place * BLOCK_TOKENS : (place + 1) * BLOCK_TOKENS].tobytes()
            seen.setdefault((place, content), set()).add(block)
            tokens_of.setdefault(block, set()).add(content)
    assert all(len(same) == 1 for same in seen.values())
    assert all(len(same) == 1 for same in tokens_of.values())


@given(events, st.sampled_from([0, 100, 512, 600]))
def test_what_a_request_says_is_shown_is_shown(plan: list[tuple[int, bool, int, int]], system: int) -> None:
    requests = link_requests(conversations(plan, system))
    for request in requests:
        if request.continued_by is not None:
            assert_shown(request, requests[request.continued_by])


@given(st.lists(st.tuples(lengths, lengths), min_size=2, max_size=5))
def test_a_plain_conversation_shows_every_answer_but_the_last(turns: list[tuple[int, int]]) -> None:
    plan = [(turn - 1, True, user, output) for turn, (user, output) in enumerate(turns)]
    requests = link_requests(conversations(plan, 600))
    assert [request.continued_by for request in requests] == [*range(1, len(turns)), None]
    assert [request.turn for request in requests] == list(range(1, len(turns) + 1))
    for request, later in itertools.pairwise(requests):
        kept = with_answer(request)
        assert kept == later.prompt_tokens().tolist()[: len(kept)]


# ---- the bundled traces ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mooncake() -> Trace:
    return read_trace(MOONCAKE)


def test_sessions_inferred_in_the_mooncake_trace_are_about_as_many_as_its_readme_says(
    mooncake: Trace,
) -> None:
    assert mooncake.num_sessions == 8_099
    assert sum(request.continues is not None for request in mooncake) == 3_975
    assert max(request.turn for request in mooncake) == 43


def test_every_continued_request_of_the_mooncake_trace_has_the_tokens_that_its_successor_shows(
    mooncake: Trace,
) -> None:
    shown = 0
    for request in mooncake:
        if request.continued_by is None:
            continue
        later = mooncake.requests[request.continued_by]
        assert_shown(request, later)
        shown += min(request.output_length, later.prompt_length - request.prompt_length)
    assert shown == 1_344_502
    assert shown / mooncake.output_tokens == pytest.approx(0.3262, abs=5e-5)


def test_blocks_of_the_mooncake_trace_are_equal_exactly_where_their_ids_are(mooncake: Trace) -> None:
    id_of: dict[tuple[int, bytes], int] = {}
    content_of: dict[int, bytes] = {}
    for request, (_, raw) in zip(mooncake, read_lines(MOONCAKE), strict=True):
        ids = json.loads(raw)["hash_ids"]
        first = max(len(ids) - 2, 0)  # the last two are enough: those before are full, and shared ones repeat
        tokens = request.prompt_tokens()
        for place in range(first, len(ids)):
            content = tokens[place * BLOCK_TOKENS : (place + 1) * BLOCK_TOKENS].tobytes()
            assert id_of.setdefault((place, content), ids[place]) == ids[place]
            assert content_of.setdefault(ids[place], content) == content


def test_every_continued_request_of_the_agent_trace_has_the_tokens_that_its_successor_shows() -> None:
    trace = read_trace(AGENTIC, limit=200)
    continued = [request for request in trace if request.continued_by is not None]
    assert len(continued) > 150
    for request in continued:
        assert_shown(request, trace.requests[request.continued_by or 0])
