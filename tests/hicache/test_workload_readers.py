import contextlib
import gzip
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hicache.errors import TraceError
from hicache.workload import Request, Trace, read_trace
from hicache.workload.formats import TURN_GAP_S

TRACES = Path(__file__).parents[2] / "traces"

FIRST = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
SECOND = {"timestamp": 10, "input_length": 1100, "output_length": 7, "hash_ids": [1, 3, 4]}
CHAT = {
    "id": "chat-1",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Which flights go to Seattle?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "search", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "content": "HAT136", "name": "search", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "HAT136 does."},
        {"role": "user", "content": "Thanks."},
    ],
}
CALL = {
    "timestamp_us": 5_000_000,
    "session_id": "s",
    "input": "user: what is a page?",
    "output": "A run of tokens.",
}


def without(record: Mapping[str, object], name: str) -> dict[str, object]:
    return {key: value for key, value in record.items() if key != name}


def as_bytes(*records: object) -> bytes:
    return b"".join(
        (record if isinstance(record, bytes) else json.dumps(record).encode()) + b"\n" for record in records
    )


def written(folder: Path, data: bytes, name: str = "trace.jsonl") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def read(folder: Path, *records: object, skip_bad: bool = False, limit: int | None = None) -> Trace:
    return read_trace(written(folder, as_bytes(*records)), skip_bad=skip_bad, limit=limit)


def tokens_of(request: Request) -> list[int]:
    return [*request.prompt_tokens().tolist(), *request.answer_tokens().tolist()]


# ---- block hashes ------------------------------------------------------------------------------------------------


def test_a_line_of_block_hashes_is_a_request(tmp_path: Path) -> None:
    trace = read(tmp_path, FIRST, SECOND)
    assert trace.format == "blocks"
    assert (trace.num_requests, trace.prompt_tokens, trace.output_tokens) == (2, 1700, 12)
    request = trace.requests[1]
    assert (request.index, request.arrival_s, request.prompt_length, request.output_length) == (
        1,
        0.01,
        1100,
        7,
    )
    assert trace.duration_s == 0.01


def test_sessions_turns_and_stop_reasons_are_taken_over_where_given(tmp_path: Path) -> None:
    trace = read(tmp_path, FIRST | {"session_id": 7, "turn": 2, "stop": "tool_use", "think_ms": 4})
    request = trace.requests[0]
    assert (request.session, request.turn, request.stop) == ("7", 2, "tool_use")


def test_a_null_session_is_as_good_as_none(tmp_path: Path) -> None:
    trace = read(tmp_path, FIRST | {"session_id": None, "turn": None, "stop": None})
    assert (trace.requests[0].session, trace.requests[0].turn, trace.requests[0].stop) == (
        "inferred-0",
        1,
        "",
    )


@pytest.mark.parametrize(
    ("name", "requests", "sessions", "prompt_tokens"),
    [
        ("mooncake_conversation.jsonl.zst", 12_031, 8_099, 144_793_823),
        ("cc_agentic_small.jsonl.zst", 1_903, 60, 278_159_658),
    ],
)
def test_a_bundled_trace_has_what_its_readme_says(
    name: str, requests: int, sessions: int, prompt_tokens: int
) -> None:
    trace = read_trace(TRACES / name)
    assert (trace.num_requests, trace.num_sessions, trace.prompt_tokens) == (
        requests,
        sessions,
        prompt_tokens,
    )
    assert trace.skipped == ()
    assert len(trace) == len(list(trace)) == requests


# ---- chat messages -----------------------------------------------------------------------------------------------


def test_each_assistant_message_is_a_request(tmp_path: Path) -> None:
    trace = read(tmp_path, CHAT)
    assert trace.format == "messages"
    assert [(request.session, request.turn) for request in trace] == [("chat-1", 1), ("chat-1", 2)]
    assert [request.block_ids for request in trace] == [None, None]


def test_a_chat_turns_prompt_and_answer_begin_the_next_prompt(tmp_path: Path) -> None:
    first, second = read(tmp_path, CHAT).requests
    assert tokens_of(first) == second.prompt_tokens().tolist()[: first.prompt_length + first.output_length]
    assert (first.continued_by, second.continues, second.continued_by) == (1, 0, None)


def test_chats_with_one_system_prompt_share_its_tokens(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    other = {"id": "chat-2", "messages": [*messages, {"role": "assistant", "content": "Hello."}]}
    trace = read(tmp_path, CHAT, other)
    one, two = (next(r for r in trace if r.session == name).prompt_tokens() for name in ("chat-1", "chat-2"))
    common = min(len(one), len(two))
    num_shared = (one[:common] == two[:common]).tolist().index(False)
    assert (
        num_shared == 6
    )  # the role's marker, "Be", " brief", ".", the end marker, and the next role's marker


def test_call_ids_do_not_reach_the_model(tmp_path: Path) -> None:
    text = json.dumps(CHAT).replace("call_1", "call_2")
    assert tokens_of(read(tmp_path, CHAT).requests[1]) == tokens_of(read(tmp_path, text.encode()).requests[1])


def test_chat_turns_follow_each_other_at_a_fixed_gap_and_arrivals_are_the_same_each_time(
    tmp_path: Path,
) -> None:
    chats = [CHAT | {"id": number} for number in range(20)]
    trace = read(tmp_path, *chats)
    arrivals = [request.arrival_s for request in trace]
    assert arrivals == sorted(arrivals)
    assert arrivals == [request.arrival_s for request in read(tmp_path, *chats)]
    assert [request.index for request in trace] == list(range(40))
    for request in trace:
        if request.continued_by is not None:
            assert trace.requests[request.continued_by].arrival_s == pytest.approx(
                request.arrival_s + TURN_GAP_S
            )


# ---- recorded calls ----------------------------------------------------------------------------------------------


def test_each_recorded_call_is_a_request_in_order_of_time(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        CALL | {"timestamp_us": 9_000_000, "session_id": "late"},
        CALL,
        CALL | {"timestamp_us": 6_500_000, "input": "user: what is a page? user: and a slot?"},
    )
    assert trace.format == "calls"
    assert [(r.session, r.turn, r.arrival_s) for r in trace] == [
        ("s", 1, 0.0),
        ("s", 2, 1.5),
        ("late", 1, 4.0),
    ]
    assert [request.continues for request in trace] == [None, 0, None]


def test_a_prompt_that_extends_another_has_its_tokens(tmp_path: Path) -> None:
    first, second = read(tmp_path, CALL, CALL | {"input": "user: what is a page? user: and a slot?"}).requests
    kept = first.prompt_tokens().tolist()[:-1]
    assert second.prompt_tokens().tolist()[: len(kept)] == kept


def test_an_empty_recorded_prompt_still_has_a_token(tmp_path: Path) -> None:
    (request,) = read(tmp_path, CALL | {"input": "", "output": ""}).requests
    assert (request.prompt_length, request.output_length) == (1, 0)
    assert request.answer_tokens().dtype == np.int32


# ---- bad lines ---------------------------------------------------------------------------------------------------

BAD_BLOCKS = {
    "no timestamp": (without(SECOND, "timestamp"), "timestamp is missing"),
    "no input_length": (without(SECOND, "input_length"), "input_length is missing"),
    "no output_length": (without(SECOND, "output_length"), "output_length is missing"),
    "no hash_ids": (without(SECOND, "hash_ids"), "hash_ids is missing"),
    "timestamp of text": (SECOND | {"timestamp": "0"}, "timestamp is '0', expected a number"),
    "timestamp true": (SECOND | {"timestamp": True}, "timestamp is True, expected a number"),
    "negative timestamp": (SECOND | {"timestamp": -1}, "timestamp is -1, expected a number from 0"),
    "infinite timestamp": (
        b'{"timestamp": 1e999, "input_length": 1, "output_length": 1, "hash_ids": [1]}',
        "is inf",
    ),
    "timestamp NaN": (
        b'{"timestamp": NaN, "input_length": 1, "output_length": 1, "hash_ids": [1]}',
        "NaN is no number",
    ),
    "decreasing timestamp": (SECOND | {"timestamp": 4}, "timestamp is 4, before the 5 of an earlier line"),
    "length of text": (SECOND | {"input_length": "1100"}, "input_length is '1100', expected an integer"),
    "length with fraction": (SECOND | {"output_length": 7.0}, "output_length is 7.0, expected an integer"),
    "negative input_length": (SECOND | {"input_length": -1, "hash_ids": []}, "input_length is -1"),
    "empty prompt": (
        SECOND | {"input_length": 0, "hash_ids": []},
        "input_length is 0, expected an integer from 1",
    ),
    "negative output_length": (
        SECOND | {"output_length": -1},
        "output_length is -1, expected an integer from 0",
    ),
    "enormous length": (SECOND | {"output_length": 10**12}, "output_length is 1000000000000"),
    "too few ids": (SECOND | {"hash_ids": [1, 3]}, "hash_ids has 2 ids, expected 3 for input_length 1100"),
    "too many ids": (SECOND | {"hash_ids": [1, 3, 4, 5]}, "hash_ids has 4 ids, expected 3"),
    "ids not a list": (SECOND | {"hash_ids": {"1": 3}}, "hash_ids is {'1': 3}, expected a list"),
    "id of text": (SECOND | {"hash_ids": [1, "3", 4]}, "hash_ids[1] is '3', expected an integer"),
    "id with fraction": (SECOND | {"hash_ids": [1, 3, 4.5]}, "hash_ids[2] is 4.5"),
    "id true": (SECOND | {"hash_ids": [True, 3, 4]}, "hash_ids[0] is True"),
    "negative id": (SECOND | {"hash_ids": [1, 3, -4]}, "hash_ids[2] is -4"),
    "enormous id": (SECOND | {"hash_ids": [1, 3, 10**50]}, "hash_ids[2] is a huge number"),
    "session of a list": (SECOND | {"session_id": [1]}, "session_id is [1], expected a name or a number"),
    "turn zero": (SECOND | {"turn": 0}, "turn is 0, expected an integer from 1"),
    "stop a number": (SECOND | {"stop": 3}, "stop is 3, expected text"),
    "not JSON": (b"{timestamp: 10}", "not JSON: Expecting property name"),
    "half a line": (b'{"timestamp": 10, "input_le', "not JSON: Unterminated string"),
    "endless digits": (b'{"timestamp": ' + b"1" * 5000 + b"}", "not JSON that can be read"),
    "endless nesting": (b"[" * 200_000, "not JSON that can be read: nested too deeply"),
    "not an object": (b"[1, 2]", "expected a JSON object, found list"),
    "not UTF-8": (b'{"timestamp": 10, "x": "\xff"}', "not UTF-8: byte 24 of the line is 0xff"),
}


@pytest.mark.parametrize(("bad", "reason"), BAD_BLOCKS.values(), ids=BAD_BLOCKS.keys())
def test_a_bad_line_is_refused_with_path_line_and_reason(tmp_path: Path, bad: object, reason: str) -> None:
    path = written(tmp_path, as_bytes(FIRST, b"", FIRST | {"timestamp": 5}, bad, SECOND))
    with pytest.raises(TraceError) as raised:
        read_trace(path)
    assert (raised.value.path, raised.value.line) == (str(path), 4)
    assert reason in raised.value.reason
    assert str(raised.value).startswith(f"{path}:4: ")
    assert len(str(raised.value)) < len(str(path)) + 300


@pytest.mark.parametrize(("bad", "reason"), BAD_BLOCKS.values(), ids=BAD_BLOCKS.keys())
def test_a_bad_line_can_be_left_out_and_is_listed(tmp_path: Path, bad: object, reason: str) -> None:
    trace = read(tmp_path, FIRST, b"", FIRST | {"timestamp": 5}, bad, SECOND, skip_bad=True)
    assert trace.num_requests == 3
    ((line, why),) = trace.skipped
    assert line == 4
    assert reason in why


BAD_CHATS = {
    "no id": (without(CHAT, "id"), "id is missing"),
    "no messages": ({"id": 2}, "messages is missing"),
    "empty id": (CHAT | {"id": ""}, "id is '', expected a name"),
    "id of before": (CHAT, "id is 'chat-1', which an earlier line has"),
    "messages not a list": (CHAT | {"id": 2, "messages": "hello"}, "messages is 'hello', expected a list"),
    "message not an object": (
        CHAT | {"id": 2, "messages": ["hello"]},
        "messages[0] is 'hello', expected an object",
    ),
    "no role": (CHAT | {"id": 2, "messages": [{"content": "x"}]}, "messages[0].role is None"),
    "content a number": (
        CHAT | {"id": 2, "messages": [{"role": "user", "content": 3}]},
        "messages[0].content is 3",
    ),
    "neither content nor calls": (
        CHAT | {"id": 2, "messages": [{"role": "user"}]},
        "neither content nor tool_calls",
    ),
    "calls not objects": (
        CHAT | {"id": 2, "messages": [{"role": "assistant", "content": "x", "tool_calls": ["f"]}]},
        "messages[0].tool_calls is ['f'], expected a list of objects",
    ),
    "no assistant": (
        CHAT | {"id": 2, "messages": [{"role": "user", "content": "x"}]},
        "holds no assistant message",
    ),
    "empty": (CHAT | {"id": 2, "messages": []}, "holds no assistant message"),
}


@pytest.mark.parametrize(("bad", "reason"), BAD_CHATS.values(), ids=BAD_CHATS.keys())
def test_a_bad_conversation_is_left_out_whole(tmp_path: Path, bad: object, reason: str) -> None:
    trace = read(tmp_path, CHAT, bad, CHAT | {"id": 3}, skip_bad=True)
    assert {request.session for request in trace} == {"chat-1", "3"}
    ((line, why),) = trace.skipped
    assert line == 2
    assert reason in why


BAD_CALLS = {
    "no time": (without(CALL, "timestamp_us"), "timestamp_us is missing"),
    "no session": (without(CALL, "session_id"), "session_id is missing"),
    "no input": (without(CALL, "input"), "input is missing"),
    "output null": (CALL | {"output": None}, "output is None, expected text"),
    "negative time": (CALL | {"timestamp_us": -1}, "timestamp_us is -1"),
    "time with fraction": (CALL | {"timestamp_us": 5e6}, "timestamp_us is 5000000.0, expected an integer"),
    "going back in its session": (
        CALL | {"timestamp_us": 4},
        "before the 5000000 of this session's earlier line",
    ),
}


@pytest.mark.parametrize(("bad", "reason"), BAD_CALLS.values(), ids=BAD_CALLS.keys())
def test_a_bad_call_is_left_out(tmp_path: Path, bad: object, reason: str) -> None:
    trace = read(tmp_path, CALL, bad, CALL | {"timestamp_us": 4, "session_id": "t"}, skip_bad=True)
    assert {request.session for request in trace} == {"s", "t"}
    ((line, why),) = trace.skipped
    assert line == 2
    assert reason in why


# ---- whole files -------------------------------------------------------------------------------------------------


def refused(path: Path, *, skip_bad: bool = False) -> TraceError:
    with pytest.raises(TraceError) as raised:
        read_trace(path, skip_bad=skip_bad)
    return raised.value


@pytest.mark.parametrize("skip_bad", [False, True], ids=["strict", "skip_bad"])
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "the file is empty"),
        (b"\n \n", "the file holds no request"),
        (gzip.compress(b""), "the file is empty"),
        (b"hello\nworld\n", "not JSON"),
        (b'{"a": 1}\n', "not a known trace: has 'a', expected the fields of one of: hash_ids, input_length"),
        (
            b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n",
            "lengths only",
        ),
    ],
    ids=["empty", "blank", "packed empty", "prose", "other objects", "lengths only"],
)
def test_a_file_without_requests_is_refused(tmp_path: Path, data: bytes, reason: str, skip_bad: bool) -> None:
    error = refused(written(tmp_path, data), skip_bad=skip_bad)
    assert error.line >= 1
    assert reason in str(error)


@pytest.mark.parametrize("skip_bad", [False, True], ids=["strict", "skip_bad"])
def test_a_missing_file_and_a_directory_are_refused(tmp_path: Path, skip_bad: bool) -> None:
    missing = refused(tmp_path / "none.jsonl", skip_bad=skip_bad)
    assert (missing.line, missing.reason) == (0, "cannot be read: No such file or directory")
    assert refused(tmp_path, skip_bad=skip_bad).reason == "cannot be read: Is a directory"


def test_the_format_is_settled_by_the_first_good_line(tmp_path: Path) -> None:
    trace = read(tmp_path, b"# a comment", {"id": 3}, FIRST, CHAT, SECOND, skip_bad=True)
    assert (trace.format, trace.num_requests) == ("blocks", 2)
    assert [line for line, _ in trace.skipped] == [1, 2, 4]


# ---- limit -------------------------------------------------------------------------------------------------------


def test_a_limit_stops_reading_after_so_many_requests(tmp_path: Path) -> None:
    trace = read(tmp_path, FIRST, SECOND, b"bad line that is never read", limit=2)
    assert trace.num_requests == 2


def test_a_limit_may_cut_a_conversation(tmp_path: Path) -> None:
    trace = read(tmp_path, CHAT, CHAT | {"id": 2}, limit=3)
    assert trace.num_requests == 3
    assert {request.continued_by for request in trace if request.session == "2"} == {None}


def test_a_limit_of_less_than_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="limit is 0"):
        read(tmp_path, FIRST, limit=0)


# ---- anything ----------------------------------------------------------------------------------------------------


@given(st.binary(max_size=300), st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_a_trace_or_a_trace_error(tmp_path: Path, data: bytes, skip_bad: bool) -> None:
    path = written(tmp_path, as_bytes(FIRST) + data)
    with contextlib.nullcontext() if skip_bad else contextlib.suppress(TraceError):
        assert read_trace(path, skip_bad=skip_bad).requests[0].prompt_length == 600


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(
    st.sampled_from([FIRST, CHAT, CALL]),
    st.sampled_from(
        [
            "timestamp",
            "input_length",
            "hash_ids",
            "session_id",
            "id",
            "messages",
            "turn",
            "stop",
            "timestamp_us",
            "input",
        ]
    ),
    json_values,
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_value_in_any_field_is_read_or_skipped(
    tmp_path: Path, record: dict[str, object], name: str, value: object
) -> None:
    trace = read(tmp_path, record, record | {name: value}, skip_bad=True)
    assert trace.num_requests >= 1
    assert len(trace.skipped) <= 1
    assert all(len(tokens_of(request)) == request.prompt_length + request.output_length for request in trace)
