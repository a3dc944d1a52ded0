"""The three formats of traces that can be replayed, one class each: parsed lines to requests.

============  =======================================================================  ===================
format        a line                                                                   traces/README names
============  =======================================================================  ===================
``blocks``    one request: ``timestamp`` (ms), ``input_length``, ``output_length``,    mooncake_*, cc_*
              ``hash_ids``; perhaps ``session_id``, ``turn``, ``stop``
``messages``  one conversation: ``id``, ``messages``                                   taubench_*
``calls``     one request: ``timestamp_us``, ``session_id``, ``input``, ``output``     lmcache_*
============  =======================================================================  ===================

What the text formats leave open is settled here:

* ``messages``: each assistant message is a request. Its prompt is all messages before it and the marker that opens
  its own, its answer is its text, tool calls and end marker; so both stand at the head of the next prompt.
  Conversations start as a Poisson process (``START_GAP_S`` apart in the mean, a fixed seed), and their turns follow
  each other every ``TURN_GAP_S``.
* ``calls``: the prompt, after a marker that begins it, and the answer are tokenised each for itself. Recorded prompts
  mostly leave earlier answers out or put a role's name before them, so an answer is seldom found in the next prompt;
  nor was it by the engine that served it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from hicache.types import MAX_SESSION_NAME
from hicache.workload.continuation import BlockRecord, link_requests
from hicache.workload.records import ArraySource, Request
from hicache.workload.tokens import BLOCK_TOKENS, MAX_BLOCK_ID, MAX_REQUEST_TOKENS, TextTokenizer

START_GAP_S = 10.0
TURN_GAP_S = 10.0
START_SEED = 0

MAX_TIME = 2**53

Record = Mapping[str, object]


class BadLineError(Exception):
    """Why a line cannot be used. Stays in this package: it ends as a ``TraceError`` or a skipped line."""


class Format(Protocol):
    """Collects a file's lines and makes requests of them in the end."""

    name: ClassVar[str]
    fields: ClassVar[frozenset[str]]

    @property
    def num_requests(self) -> int: ...

    def add(self, record: Record) -> None:
        """Take a line, or raise ``BadLineError`` and change nothing."""
        ...

    def requests(self, limit: int | None) -> tuple[Request, ...]:
        """The first ``limit`` requests of the file, in order of arrival."""
        ...


class BlocksFormat:
    """Block hashes instead of text; sorted by time."""

    name: ClassVar[str] = "blocks"
    fields: ClassVar[frozenset[str]] = frozenset({"timestamp", "input_length", "output_length", "hash_ids"})

    def __init__(self) -> None:
        self._records: list[BlockRecord] = []

    @property
    def num_requests(self) -> int:
        return len(self._records)

    def add(self, record: Record) -> None:
        arrival_s = _number(record, "timestamp") / 1e3
        if self._records and arrival_s < self._records[-1].arrival_s:
            before_ms = self._records[-1].arrival_s * 1e3
            raise BadLineError(
                f"timestamp is {record['timestamp']}, before the {before_ms:.15g} of an earlier line"
            )
        input_length = _integer(record, "input_length", 1, MAX_REQUEST_TOKENS)
        self._records.append(
            BlockRecord(
                arrival_s=arrival_s,
                input_length=input_length,
                output_length=_integer(record, "output_length", 0, MAX_REQUEST_TOKENS),
                block_ids=_block_ids(record, input_length),
                session=_session(record) if record.get("session_id") is not None else None,
                turn=_integer(record, "turn", 1, 2**31) if record.get("turn") is not None else None,
                stop=_text(record, "stop") if record.get("stop") is not None else "",
            )
        )

    def requests(self, limit: int | None) -> tuple[Request, ...]:
        return link_requests(self._records[:limit])


class MessagesFormat:
    """Conversations as lists of chat messages, without times."""

    name: ClassVar[str] = "messages"
    fields: ClassVar[frozenset[str]] = frozenset({"id", "messages"})

    def __init__(self) -> None:
        self._tokenizer = TextTokenizer()
        self._random = random.Random(START_SEED)
        self._start_s = 0.0
        self._sessions: set[str] = set()
        self._requests: list[Request] = []

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def add(self, record: Record) -> None:
        session = _session(record, "id")
        if session in self._sessions:
            raise BadLineError(f"id is {session!r}, which an earlier line has")
        messages = [_message(item, place) for place, item in enumerate(_list(record, "messages"))]
        spans, tokens = self._spans(messages)
        if not spans:
            raise BadLineError("messages holds no assistant message, so nothing was asked of the model")
        self._sessions.add(session)
        for turn, (prompt_end, answer_end) in enumerate(spans, start=1):
            index = len(self._requests)
            self._requests.append(
                Request(
                    index=index,
                    arrival_s=self._start_s + (turn - 1) * TURN_GAP_S,
                    prompt=ArraySource(tokens, 0, prompt_end),
                    output=ArraySource(tokens, prompt_end, answer_end),
                    session=session,
                    turn=turn,
                    continues=index - 1 if turn > 1 else None,
                    continued_by=index + 1 if turn < len(spans) else None,
                )
            )
        self._start_s += self._random.expovariate(1 / START_GAP_S)

    def requests(self, limit: int | None) -> tuple[Request, ...]:
        return _by_arrival(self._requests[:limit])

    def _spans(self, messages: Sequence[_Message]) -> tuple[list[tuple[int, int]], NDArray[np.int32]]:
        """Ends of prompt and answer for each assistant message, and the whole conversation's tokens."""
        parts: list[NDArray[np.int32]] = []
        spans: list[tuple[int, int]] = []
        length = 0
        for message in messages:
            marker = self._tokenizer.marker(message.role)
            body = self._tokenizer.message_body(message.content, message.tool_calls)
            prompt_end = length + len(marker)
            length = prompt_end + len(body)
            parts += [marker, body]
            if message.role == "assistant":
                spans.append((prompt_end, length))
        if length > MAX_REQUEST_TOKENS:
            raise BadLineError(f"messages has {length} tokens, expected at most {MAX_REQUEST_TOKENS}")
        return spans, np.concatenate(parts) if parts else np.empty(0, np.int32)


class CallsFormat:
    """Whole prompts and answers as text, with real times; sorted by session, then by time."""

    name: ClassVar[str] = "calls"
    fields: ClassVar[frozenset[str]] = frozenset({"timestamp_us", "session_id", "input", "output"})

    def __init__(self) -> None:
        self._tokenizer = TextTokenizer()
        self._requests: list[Request] = []
        self._times_us: list[int] = []
        self._by_session: dict[str, list[int]] = {}
        self._prompts: list[str] = []

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def add(self, record: Record) -> None:
        session = _session(record)
        time_us = _integer(record, "timestamp_us", 0, MAX_TIME)
        earlier = self._by_session.get(session, [])
        if earlier and time_us < self._times_us[earlier[-1]]:
            before_us = self._times_us[earlier[-1]]
            raise BadLineError(
                f"timestamp_us is {time_us}, before the {before_us} of this session's earlier line"
            )
        prompt, answer = _text(record, "input"), _text(record, "output")
        # The marker that begins a sequence; some recorded prompts are empty, and an engine needs one token.
        prompt_tokens = np.concatenate([self._tokenizer.marker("begin"), self._tokenizer.tokens(prompt)])
        answer_tokens = self._tokenizer.tokens(answer)
        if max(len(prompt_tokens), len(answer_tokens)) > MAX_REQUEST_TOKENS:
            raise BadLineError(f"input or output has more than {MAX_REQUEST_TOKENS} tokens")
        index = len(self._requests)
        self._requests.append(
            Request(
                index=index,
                arrival_s=0.0,
                prompt=ArraySource(prompt_tokens, 0, len(prompt_tokens)),
                output=ArraySource(answer_tokens, 0, len(answer_tokens)),
                session=session,
                turn=len(earlier) + 1,
                continues=self._extended(prompt, earlier),
            )
        )
        self._times_us.append(time_us)
        self._prompts.append(prompt)
        self._by_session.setdefault(session, []).append(index)

    def requests(self, limit: int | None) -> tuple[Request, ...]:
        start_us = min(self._times_us[:limit])
        timed = zip(self._requests[:limit], self._times_us[:limit], strict=True)
        return _by_arrival([replace(request, arrival_s=(us - start_us) / 1e6) for request, us in timed])

    def _extended(self, prompt: str, earlier: Sequence[int]) -> int | None:
        """The request of the same session with the longest prompt that this one starts with, the latest of equals."""
        matches = [index for index in earlier if prompt.startswith(self._prompts[index])]
        return max(matches, key=lambda index: (len(self._prompts[index]), index), default=None)


def _by_arrival(requests: Sequence[Request]) -> tuple[Request, ...]:
    """Sort by time and number anew; what pointed at a request that is not there points nowhere."""
    order = sorted(range(len(requests)), key=lambda index: (requests[index].arrival_s, index))
    places = {old: new for new, old in enumerate(order)}
    return tuple(
        replace(
            requests[old],
            index=new,
            continues=_moved(requests[old].continues, places),
            continued_by=_moved(requests[old].continued_by, places),
        )
        for new, old in enumerate(order)
    )


def _moved(index: int | None, places: Mapping[int, int]) -> int | None:
    return None if index is None else places.get(index)


# ---- fields: each gives a checked value or raises BadLineError ---------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Message:
    role: str
    content: str | None
    tool_calls: Sequence[Mapping[str, object]]


def _message(item: object, place: int) -> _Message:
    where = f"messages[{place}]"
    if not isinstance(item, dict):
        raise BadLineError(f"{where} is {_shown(item)}, expected an object")
    role, content, calls = item.get("role"), item.get("content"), item.get("tool_calls") or []
    if not isinstance(role, str) or not role:
        raise BadLineError(f"{where}.role is {_shown(role)}, expected a name")
    if content is not None and not isinstance(content, str):
        raise BadLineError(f"{where}.content is {_shown(content)}, expected text or null")
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise BadLineError(f"{where}.tool_calls is {_shown(calls)}, expected a list of objects")
    if content is None and not calls:
        raise BadLineError(f"{where} has neither content nor tool_calls")
    return _Message(role, content, calls)


def _block_ids(record: Record, input_length: int) -> NDArray[np.int64]:
    ids = _list(record, "hash_ids")
    expected = -(-input_length // BLOCK_TOKENS)
    if len(ids) != expected:
        raise BadLineError(
            f"hash_ids has {len(ids)} ids, expected {expected} for input_length {input_length}"
            f" (one for each started block of {BLOCK_TOKENS})"
        )
    for place, block in enumerate(ids):
        if type(block) is not int or not 0 <= block <= MAX_BLOCK_ID:  # bool is an int to isinstance
            raise BadLineError(
                f"hash_ids[{place}] is {_shown(block)}, expected an integer from 0 to {MAX_BLOCK_ID}"
            )
    return np.array(ids, dtype=np.int64)


def _integer(record: Record, name: str, low: int, high: int) -> int:
    value = _field(record, name)
    if type(value) is not int or not low <= value <= high:
        raise BadLineError(f"{name} is {_shown(value)}, expected an integer from {low} to {high}")
    return value


def _number(record: Record, name: str) -> float:
    value = _field(record, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_TIME:
        raise BadLineError(f"{name} is {_shown(value)}, expected a number from 0 to {MAX_TIME}")
    return float(value)


def _text(record: Record, name: str) -> str:
    value = _field(record, name)
    if not isinstance(value, str):
        raise BadLineError(f"{name} is {_shown(value)}, expected text")
    return value


def _session(record: Record, name: str = "session_id") -> str:
    value = _field(record, name)
    if type(value) is not int and not (isinstance(value, str) and value):
        raise BadLineError(f"{name} is {_shown(value)}, expected a name or a number")
    session = str(value)
    if len(session) > MAX_SESSION_NAME:
        raise BadLineError(f"{name} has {len(session)} characters, expected at most {MAX_SESSION_NAME}")
    return session


def _list(record: Record, name: str) -> list[object]:
    value = _field(record, name)
    if not isinstance(value, list):
        raise BadLineError(f"{name} is {_shown(value)}, expected a list")
    return value


def _field(record: Record, name: str) -> object:
    if name not in record:
        raise BadLineError(f"{name} is missing")
    return record[name]


def _shown(value: object) -> str:
    """A value as an error message shows it: short whatever it is."""
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**40 else "a huge number"
    return text if len(text) <= 60 else f"{text[:57]}..."
