"""A multi-turn load whose hits are known in closed form (cases O-63).

::

    turn 0   | system | user 0 |
    turn 1   | system | user 0 | answer 0 | user 1 |
    turn 2   | system | user 0 | answer 0 | user 1 | answer 1 | user 2 |

All sessions share the system prompt and nothing else. Turn t of every session comes before turn t + 1 of any.
A long history may be sent in strides: then one request brings what several turns would have brought.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hicache.workload.records import Request
from hicache.workload.tokens import MAX_REQUEST_TOKENS, Tokens, stream_tokens

REQUEST_GAP_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiTurn:
    """Sizes of the load, in tokens where not said otherwise.

    Args:
        sessions, turns: how many sessions, and turns of each.
        system: the prompt that all sessions begin with.
        user, output: what each turn brings, and what the model answers.
        shuffled: sessions come in a new random order each turn, instead of always the same.
        stride, every_turn_from: of the turns before this one (counted from 1) only each ``stride``-th is sent.
    """

    sessions: int
    turns: int
    system: int = 0
    user: int
    output: int = 0
    shuffled: bool = False
    stride: int = 1
    every_turn_from: int = 1

    def __post_init__(self) -> None:
        lows = {
            "sessions": 1,
            "turns": 1,
            "system": 0,
            "user": 1,
            "output": 0,
            "stride": 1,
            "every_turn_from": 1,
        }
        for name, low in lows.items():
            value = getattr(self, name)
            if value < low:
                raise ValueError(f"{name} is {value}, expected at least {low}")
        longest = self.prompt_length(self.turns - 1) + self.output
        if longest > MAX_REQUEST_TOKENS:
            raise ValueError(f"the last turn has {longest} tokens, expected at most {MAX_REQUEST_TOKENS}")

    def prompt_length(self, turn: int) -> int:
        """Prompt of turn ``turn``, counted from 0."""
        return self.system + (turn + 1) * self.user + turn * self.output

    @property
    def sent_turns(self) -> tuple[int, ...]:
        """The turns that are requests, counted from 0; the last always is one."""
        sparse = min(self.every_turn_from, self.turns) - 1
        return (*range(self.stride - 1, sparse, self.stride), *range(sparse, self.turns))

    @property
    def num_requests(self) -> int:
        return self.sessions * len(self.sent_turns)


@dataclass(frozen=True, slots=True)
class ExpectedTurn:
    """What one turn of all sessions hits when nothing is ever evicted.

    Args:
        turn: from 0; turns that are not sent have none.
        prompt_length: of one request.
        prompt_tokens, hit_tokens: of all sessions together.
    """

    turn: int
    prompt_length: int
    prompt_tokens: int
    hit_tokens: int

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens


def closed_form(
    load: MultiTurn, page_size: int, *, last_token_written: bool = True
) -> tuple[ExpectedTurn, ...]:
    """Exact hits of each turn in a cache that holds everything.

    A request reuses what was written before it, ends at a page, and computes at least one token. With no system
    prompt and no answers, turn r hits ``floor(r * user / page) * page`` of ``(r + 1) * user`` tokens.

    Args:
        last_token_written: whether the payload of the last token of an answer is stored, too.
    """

    def reusable(written: int, prompt_length: int) -> int:
        return min(written, prompt_length - 1) // page_size * page_size

    unwritten = 0 if last_token_written or not load.output else 1
    expected = []
    before: int | None = None
    for turn in load.sent_turns:
        length = load.prompt_length(turn)
        if before is None:
            hits = (load.sessions - 1) * reusable(load.system, length)
        else:
            written = load.prompt_length(before) + load.output - unwritten
            hits = load.sessions * reusable(written, length)
        before = turn
        expected.append(ExpectedTurn(turn, length, load.sessions * length, hits))
    return tuple(expected)


def check_reuse(load: MultiTurn, page_size: int, first_turn: int) -> None:
    """Raises ``ValueError`` if no turn from ``first_turn`` (from 1) on could hit anything: a test of them cannot fail."""
    expected = closed_form(load, page_size, last_token_written=False)
    if not any(turn.hit_tokens for turn in expected if turn.turn >= first_turn - 1):
        longest = load.prompt_length(load.turns - 1)
        raise ValueError(
            f"turns {first_turn} to {load.turns} could reuse nothing even with room for everything: prompts of up to"
            f" {longest:,} tokens, pages of {page_size:,}; ask for more or longer turns"
        )


def multi_turn(load: MultiTurn, *, seed: int = 0) -> Iterator[Request]:
    """The load's requests, turn by turn, each turn over all sessions, one every ``REQUEST_GAP_S``."""
    orders = _orders(load, seed)
    places = [{session: at for at, session in enumerate(order)} for order in orders]
    for n, (turn, order) in enumerate(zip(load.sent_turns, orders, strict=True)):
        length = load.prompt_length(turn)
        for at, session in enumerate(order):
            index = n * load.sessions + at
            yield Request(
                index=index,
                arrival_s=index * REQUEST_GAP_S,
                prompt=SessionSource(load.system, session, 0, length, seed),
                output=SessionSource(load.system, session, length, length + load.output, seed),
                session=f"session-{session}",
                turn=turn + 1,
                continues=(n - 1) * load.sessions + places[n - 1][session] if n else None,
                continued_by=(n + 1) * load.sessions + places[n + 1][session]
                if n + 1 < len(places)
                else None,
            )


def _orders(load: MultiTurn, seed: int) -> list[list[int]]:
    """For each turn that is sent, the sessions in the order in which they come."""
    rng = random.Random(seed)
    sessions = list(range(load.sessions))
    return [rng.sample(sessions, len(sessions)) if load.shuffled else sessions for _ in load.sent_turns]


@dataclass(frozen=True, slots=True)
class SessionSource:
    """Tokens [begin, end) of a session: first the system prompt that all share, then a stream of its own."""

    system: int
    session: int
    begin: int
    end: int
    seed: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.begin

    def tokens(self) -> Tokens:
        cut = min(max(self.system, self.begin), self.end)
        shared = stream_tokens(0, min(self.begin, cut), cut, seed=self.seed)
        own_begin = max(self.begin - self.system, 0)
        own = stream_tokens(self.session + 1, own_begin, own_begin + self.end - cut, seed=self.seed)
        return np.concatenate([shared, own]) if len(shared) else own
