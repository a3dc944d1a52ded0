"""Which request of a hash trace continues which, and what that says about the tokens.

A trace gives ids, no tokens. Two things follow only from a later turn that shows them::

    request i   | full block | full block | part |  answer ...        |
    request j   | full block | full block | full block | full block | part |
                                          ^ i's part and answer are what j has here

So a partial last block takes the tokens of the block that continues it, and an answer the tokens of the prompt that
continues it, as far as that prompt reaches. What nobody shows is made up, unique to the request.

**Who continues whom.** A request continues an earlier one of its session if it starts with all of its full blocks
(at least one): the one with most such blocks, the latest among equals. Where no session is given, all requests
without one are searched, except that a request whose full blocks end in a *shared prefix* is continued by nobody: a
block that is followed by more than ``SHARED_FAN_OUT`` different blocks ends a system prompt, not somebody's turn.
(In mooncake_conversation the first block is followed by 7,373 different ones, every other by 11 at most.)

**Sessions.** A request joins the session of the one it continues and is its next turn. If another request has
continued that one already (a fork: an edited or repeated turn), it starts a session of its own, at turn 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hicache.workload.records import BlockSource, Request
from hicache.workload.tokens import BLOCK_TOKENS

SHARED_FAN_OUT = 32


@dataclass(frozen=True, slots=True, eq=False)
class BlockRecord:
    """A line of a hash trace. ``block_ids``: int64, one for each started block of the prompt."""

    arrival_s: float
    input_length: int
    output_length: int
    block_ids: NDArray[np.int64]
    session: str | None = None
    turn: int | None = None
    stop: str = ""

    @property
    def num_full(self) -> int:
        return self.input_length // BLOCK_TOKENS

    @property
    def tail_length(self) -> int:
        """Tokens of the partial last block; 0 if there is none."""
        return self.input_length % BLOCK_TOKENS


def link_requests(records: Sequence[BlockRecord]) -> tuple[Request, ...]:
    """Make requests of the records of a hash trace, which are in order of arrival."""
    continues = _continued_requests(records)
    tails = _Tails(records)
    shown_by: list[int | None] = [None] * len(records)
    for later, earlier in enumerate(continues):
        if earlier is not None and shown_by[earlier] is None and tails.join(records[earlier], records[later]):
            shown_by[earlier] = later
    blocks = [tails.resolved(record) for record in records]
    sessions = _sessions(records, continues)
    return tuple(
        Request(
            index=index,
            arrival_s=record.arrival_s,
            prompt=BlockSource(blocks[index], record.input_length, record.input_length),
            output=_answer(index, records, blocks, shown_by[index]),
            session=session,
            turn=turn,
            stop=record.stop,
            block_ids=blocks[index][: record.num_full],
            continues=continues[index],
            continued_by=shown_by[index],
        )
        for index, (record, (session, turn)) in enumerate(zip(records, sessions, strict=True))
    )


def _continued_requests(records: Sequence[BlockRecord]) -> list[int | None]:
    """For each request, the index of the one that it continues."""
    shared = _shared_ends(record.block_ids for record in records if record.session is None)
    latest_by_session: dict[str | None, dict[int, int]] = {}
    continues: list[int | None] = []
    for later, record in enumerate(records):
        latest = latest_by_session.setdefault(record.session, {})  # last full block -> latest such request
        full = record.block_ids[: record.num_full]
        found = None
        for block in reversed(full.tolist()):
            earlier = latest.get(block)
            # One look-up is enough where ids are chained, as the format says; the comparison makes sure of it.
            if earlier is not None and _starts_with(full, records[earlier]):
                found = earlier
                break
        continues.append(found)
        if record.num_full and (record.session is not None or int(full[-1]) not in shared):
            latest[int(full[-1])] = later
    return continues


def _starts_with(full: NDArray[np.int64], earlier: BlockRecord) -> bool:
    count = earlier.num_full
    return np.array_equal(full[:count], earlier.block_ids[:count])


def _shared_ends(prompts: Iterable[NDArray[np.int64]]) -> frozenset[int]:
    """Blocks with more than ``SHARED_FAN_OUT`` different successors."""
    pairs = [np.stack([ids[:-1], ids[1:]], axis=1) for ids in prompts if len(ids) > 1]
    if not pairs:
        return frozenset()
    heads, fan_outs = np.unique(np.unique(np.concatenate(pairs), axis=0)[:, 0], return_counts=True)
    return frozenset(heads[fan_outs > SHARED_FAN_OUT].tolist())


def _sessions(records: Sequence[BlockRecord], continues: Sequence[int | None]) -> list[tuple[str, int]]:
    """Session and turn of each request: as given, else as inferred."""
    placed: list[tuple[str, int]] = []
    num_turns: dict[str, int] = {}  # of given sessions, for lines without a turn
    num_inferred = 0
    continued: set[int] = set()
    for record, earlier in zip(records, continues, strict=True):
        if record.session is not None:
            num_turns[record.session] = record.turn or num_turns.get(record.session, 0) + 1
            placed.append((record.session, num_turns[record.session]))
        elif earlier is not None and earlier not in continued:
            continued.add(earlier)
            session, turn = placed[earlier]
            placed.append((session, turn + 1))
        else:
            placed.append((f"inferred-{num_inferred}", 1))
            num_inferred += 1
    return placed


def _answer(
    index: int,
    records: Sequence[BlockRecord],
    blocks: Sequence[NDArray[np.int64]],
    shown_by: int | None,
) -> BlockSource:
    """The answer's tokens: from the prompt that shows it as far as that reaches, then of its own."""
    record = records[index]
    begin = record.input_length
    end = begin
    source = blocks[index][:0]
    if shown_by is not None:
        end = min(begin + record.output_length, records[shown_by].input_length)
        source = blocks[shown_by][begin // BLOCK_TOKENS : -(-end // BLOCK_TOKENS)]
    return BlockSource(source, record.output_length, end - begin, offset=begin % BLOCK_TOKENS, stream=index)


class _Tails:
    """Whose tokens each partial last block takes.

    A partial block takes the first tokens of the block that continues it, which may be partial and continued itself.
    Two partial blocks of one length never take the same tokens: their ids differ, so their tokens have to.
    """

    def __init__(self, records: Sequence[BlockRecord]) -> None:
        self._next: dict[int, int] = {}
        self._lengths: dict[int, set[int]] = {}  # root -> lengths of the partial blocks that take its tokens
        full_ids: set[int] = set()
        lengths: dict[int, int] = {}
        mixed: set[int] = set()
        for record in records:
            full_ids.update(record.block_ids[: record.num_full].tolist())
            if record.tail_length:
                tail = int(record.block_ids[-1])
                if lengths.setdefault(tail, record.tail_length) != record.tail_length:
                    mixed.add(tail)
        # An id that stands for blocks of several lengths breaks the format; it keeps tokens of its own.
        self._mixed = mixed | (full_ids & lengths.keys())

    def join(self, earlier: BlockRecord, later: BlockRecord) -> bool:
        """Let the later prompt show the earlier one's tail, if it can; True if it does then.

        *Caller guarantees*: ``later`` starts with the full blocks of ``earlier``.
        """
        if later.input_length <= earlier.input_length:
            return False
        if not earlier.tail_length:
            return True
        tail, over = int(earlier.block_ids[-1]), int(later.block_ids[earlier.num_full])
        root, over_root = self._root(tail), self._root(over)
        if root == over_root:
            return True
        if root != tail or tail in self._mixed:
            return False
        mine = self._lengths.get(tail, set()) | {earlier.tail_length}
        others = self._lengths.setdefault(over_root, set())
        if mine & others:
            return False
        self._next[tail] = over_root
        others |= mine
        return True

    def resolved(self, record: BlockRecord) -> NDArray[np.int64]:
        """The prompt's blocks, the last one replaced by the block whose tokens it takes."""
        if not record.tail_length:
            return record.block_ids
        blocks = record.block_ids.copy()
        blocks[-1] = self._root(int(blocks[-1]))
        return blocks

    def _root(self, block: int) -> int:
        while block in self._next:
            block = self._next[block]
        return block
