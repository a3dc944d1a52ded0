"""Requests as a replay needs them: who asks when, and the tokens on demand.

A long trace has thousands of millions of prompt tokens. So a request holds where its tokens come from, a few bytes a
block, and makes them each time they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from hicache.workload.ceiling import Hits, id_hits, token_hits
from hicache.workload.tokens import BLOCK_TOKENS, Tokens, block_tokens, stream_tokens


class TokenSource(Protocol):
    """A sequence of tokens that is made when asked for."""

    @property
    def num_tokens(self) -> int: ...

    def tokens(self) -> Tokens:
        """int32 [num_tokens], the same at each call; the caller must not write to it."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ArraySource:
    """Tokens [begin, end) of an array that is kept, for text traces."""

    array: Tokens
    begin: int
    end: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.begin

    def tokens(self) -> Tokens:
        return self.array[self.begin : self.end]


@dataclass(frozen=True, slots=True, eq=False)
class BlockSource:
    """Tokens of a run of blocks, then tokens of a stream of its own.

    Args:
        block_ids: int64 [n], the blocks that the first ``num_shown`` tokens lie in.
        offset: where in the first block they begin.
        num_shown: tokens taken from the blocks.
        stream: whose tokens follow, from the stream's start.
        num_tokens: of both together.
    """

    block_ids: NDArray[np.int64]
    num_tokens: int
    num_shown: int
    offset: int = 0
    stream: int = 0

    def tokens(self) -> Tokens:
        shown = block_tokens(self.block_ids, self.offset + self.num_shown)[self.offset :]
        if self.num_shown == self.num_tokens:
            return shown
        return np.concatenate([shown, stream_tokens(self.stream, 0, self.num_tokens - self.num_shown)])


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One call of the model.

    Args:
        index: place in the trace, from 0.
        arrival_s: seconds from the trace's start.
        prompt, output: where the tokens come from.
        session: given or inferred; None where a trace says nothing and nothing can be inferred.
        turn: place in its session from 1, given or inferred.
        stop: how the answer ended, as the trace says it (``tool_use``, ``end_turn``); empty if it does not.
        block_ids: for a hash trace the ids of the prompt's full 512-token blocks; else None.
        continues: index of the earlier request whose prompt this one extends, where known.
        continued_by: index of the later request whose prompt shows this answer, where there is one.
    """

    index: int
    arrival_s: float
    prompt: TokenSource
    output: TokenSource
    session: str | None = None
    turn: int = 1
    stop: str = ""
    block_ids: NDArray[np.int64] | None = None
    continues: int | None = None
    continued_by: int | None = None

    @property
    def prompt_length(self) -> int:
        return self.prompt.num_tokens

    @property
    def output_length(self) -> int:
        return self.output.num_tokens

    def prompt_tokens(self) -> Tokens:
        """int32 [prompt_length]; not to be written to."""
        return self.prompt.tokens()

    def answer_tokens(self) -> Tokens:
        """int32 [output_length]; not to be written to."""
        return self.output.tokens()


class SkippedLine(NamedTuple):
    """A line that ``skip_bad`` left out, and why."""

    line: int
    reason: str


@dataclass(frozen=True, eq=False)  # no slots: facts about all requests are worked out once and kept
class Trace:
    """Requests in order of arrival, and what holds for all of them together.

    Args:
        path: the file it was read from.
        format: ``blocks``, ``messages`` or ``calls``; see ``read_trace``.
        skipped: bad lines that were left out; empty unless that was asked for.
    """

    path: str
    format: str
    requests: tuple[Request, ...] = field(repr=False)
    skipped: tuple[SkippedLine, ...] = ()

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    @property
    def num_requests(self) -> int:
        return len(self.requests)

    @cached_property
    def num_sessions(self) -> int:
        return len({request.session for request in self.requests})

    @cached_property
    def prompt_tokens(self) -> int:
        return sum(request.prompt_length for request in self.requests)

    @cached_property
    def output_tokens(self) -> int:
        return sum(request.output_length for request in self.requests)

    @property
    def duration_s(self) -> float:
        """From the trace's start to the last arrival."""
        return self.requests[-1].arrival_s

    @property
    def distinct_blocks(self) -> int:
        """How many different full 512-token prompt blocks there are, each with all that stands before it."""
        return self._reference.distinct_pages

    @property
    def infinite_hit_rate(self) -> float:
        """Token hit rate of an infinite cache in the reference model: full 512-token blocks of prompts only."""
        return self._reference.hit_tokens / self.prompt_tokens

    @cached_property
    def _reference(self) -> Hits:
        if self.format == "blocks":
            return id_hits(request.block_ids for request in self.requests if request.block_ids is not None)
        return token_hits(
            self.requests, BLOCK_TOKENS, keep_one=False, store_answers=False, last_token_written=True
        )

    def infinite_hit_tokens(
        self, page_size: int, *, store_answers: bool = True, last_token_written: bool = True
    ) -> int:
        """Prompt tokens that an infinite cache would serve in the verified replay's model.

        A request's reuse ends at a page and leaves it one token to compute; when it is done, its prompt and answer
        are stored as far as they fill pages, before the next request is looked up. Uses no tree.

        Args:
            page_size: tokens a page.
            store_answers: store the answer too, not only the prompt.
            last_token_written: whether the last sampled token's payload exists; an engine that never feeds it back
                does not write it.
        """
        if page_size < 1:
            raise ValueError(f"page_size is {page_size}, expected at least 1")
        hits = token_hits(
            self.requests,
            page_size,
            keep_one=True,
            store_answers=store_answers,
            last_token_written=last_token_written,
        )
        return hits.hit_tokens
