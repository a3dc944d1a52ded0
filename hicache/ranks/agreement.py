"""What the ranks of a cache agree on in one step, and how it is written as numbers.

All that a cache decides follows from its tree, and a tree from the calls it is given. What of them depends on
this rank alone is agreed here, in one call of the group a step, before the tree hears of it::

    [ call | -call | length | -length | time | session's time | ends ... | paces ... | -queues ... | extra ... ]
      └──── all the same? else the ranks have made different calls └ one for each ticket under way

Each rank gives its numbers, all get the lowest:

=================  =======================================================  =============================
what               a rank gives                                             so that all get
=================  =======================================================  =============================
time               rank 0 its clock, the others ``ABSENT``                  rank 0's
end of a transfer  ``NOT_YET``, or slots done and why no more, in one       ``NOT_YET`` until all have
                   number that grows with the slots                         ended, then the worst end
presence in L3     1 or 0                                                   1 if all ranks have the page
pace               minus nanoseconds a MiB, of late                         the slowest rank's
queue              minus bytes under way                                    the longest queue
=================  =======================================================  =============================
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from hicache.clock import Clock
from hicache.errors import ProtocolError, RankGroupError
from hicache.policy.recompute import MIN_MEASURED_BYTES, Bandwidth
from hicache.ranks.group import ABSENT, Numbers, RankGroup
from hicache.transfer.jobs import Completion, Failure
from hicache.types import TicketId

FRAME_NUMBERS = 64
"""The first exchange of a step has this length, whatever is in it: ranks that make different calls meet in it."""
NOT_YET = -1
_ENDS: tuple[Failure | None, ...] = (
    # What proves a page missing comes first: of two ranks that got as far, it is the lower.
    Failure.MISS,
    Failure.CORRUPT,
    Failure.STAMP,
    *(failure for failure in Failure if failure not in (Failure.MISS, Failure.CORRUPT, Failure.STAMP)),
    None,
)
_RANK_OF_END = {failure: rank for rank, failure in enumerate(_ENDS)}
_STEPS_A_SLOT = 64
_NS = 1_000_000_000


class AgreedClock:
    """Rank 0's time at the last agreement, on all ranks."""

    def __init__(self) -> None:
        self.now_ns = 0

    def now_s(self) -> float:
        return self.now_ns / _NS


@dataclass(frozen=True, slots=True)
class Facts:
    """What one rank knows when a step begins.

    Args:
        running: tickets under way, the same on all ranks and in one order.
        ended: those of them that have ended here.
        speeds: bandwidths as measured here, as many on all ranks.
        queued_bytes: of transfers under way here, as many on all ranks.
        extra: further numbers, as many on all ranks.
        state: what else must be the same on all ranks, to find out early that it is not.
    """

    running: Sequence[TicketId]
    ended: Mapping[TicketId, Completion]
    speeds: Sequence[Bandwidth] = ()
    queued_bytes: Sequence[int] = ()
    extra: Sequence[int] = ()
    state: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Agreed:
    """The same on all ranks. ``ended``: what has ended on all, in the order of ``Facts.running``."""

    ended: tuple[Completion, ...]
    speeds: tuple[Bandwidth, ...]
    queued_bytes: tuple[int, ...]
    extra: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AgreementStats:
    """What agreeing has cost one rank, and what it has taken from it.

    Args:
        num_ranks: that agree; 1 is one alone, which has nothing to agree on.
        num_steps: agreements; ``num_calls``: of the group for them, in which this rank gave ``num_bytes``.
        seconds: in those calls, waiting for slower ranks included.
        num_shortened: transfers that ended better here than on another rank, so that all have the worse end;
            ``shortened_slots``: what had arrived here for nothing by that.
        absent_pages: L3 had them here and lacked them on another rank, or another got no answer.
    """

    num_ranks: int = 1
    num_steps: int = 0
    num_calls: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    num_shortened: int = 0
    shortened_slots: int = 0
    absent_pages: int = 0


class Agreement:
    """One rank's part in what all agree on.

    Args:
        group: a group of one costs nothing: there is nothing to agree on, and nobody calls ``step``.
        clock, session_clock: of this rank; what it reads in ``clock`` and ``session_clock`` is the agreed time.

    *Thread*: one at a time.
    """

    def __init__(self, group: RankGroup, clock: Clock, session_clock: Clock) -> None:
        self.group = group
        self._own_clocks = (clock, session_clock)
        self._agreed_clocks = (AgreedClock(), AgreedClock())
        self.is_alone = group.size == 1
        self.clock, self.session_clock = self._own_clocks if self.is_alone else self._agreed_clocks
        self._busy = threading.Lock()
        self._failure: str | None = None
        self._num_steps = self._num_calls = self._num_bytes = 0
        self._seconds = 0.0
        self._num_shortened = self._shortened_slots = self._absent_pages = 0

    @property
    def is_broken(self) -> bool:
        """Whether an agreement has failed; none comes about any more then."""
        return self._failure is not None

    def lowest(self, what: str, numbers: Sequence[int]) -> tuple[int, ...]:
        """The lowest of all ranks of some numbers, as many on all; raises what ``step`` does."""
        return self.step(what, Facts((), {}, extra=numbers)).extra

    def step(self, what: str, facts: Facts) -> Agreed:
        """Agree with the other ranks.

        Args:
            what: the call that asks, the same on all ranks.

        Raises:
            RankGroupError: the ranks have made different calls, or one did not come in time or has left.
                Nothing is agreed any more after that.
            ProtocolError: two threads of this rank are at it; nobody was asked.
        """
        if not self._busy.acquire(blocking=False):
            raise ProtocolError(
                f"{what}: another thread is agreeing with the other ranks; in a group one thread makes all calls"
            )
        try:
            if self._failure is not None:
                raise RankGroupError(f"{what}: no longer one of a group: {self._failure}")
            began_s = time.perf_counter()
            try:
                agreed = self._exchange(what, self._written(what, facts))
            except BaseException as error:  # an interrupt, too, leaves the others a step ahead
                self._failure = str(error) or type(error).__name__
                self.group.close()
                raise
            self._seconds += time.perf_counter() - began_s
            return self._read(agreed, facts)
        finally:
            self._busy.release()

    def stats(self) -> AgreementStats:
        return AgreementStats(
            num_ranks=self.group.size,
            num_steps=self._num_steps,
            num_calls=self._num_calls,
            num_bytes=self._num_bytes,
            seconds=self._seconds,
            num_shortened=self._num_shortened,
            shortened_slots=self._shortened_slots,
            absent_pages=self._absent_pages,
        )

    def note_absent(self, num_pages: int) -> None:
        """Pages that L3 has here are of no use: another rank lacks them."""
        self._absent_pages += num_pages

    def close(self) -> None:
        """Leave the group."""
        self.group.close()

    # ---- numbers -----------------------------------------------------------------------------
    def _written(self, what: str, facts: Facts) -> Numbers:
        self._num_steps += 1
        call = zlib.crc32(repr((what, self._num_steps, tuple(facts.running), tuple(facts.state))).encode())
        is_first = self.group.rank == 0
        times = [round(clock.now_s() * _NS) if is_first else ABSENT for clock in self._own_clocks]
        ends = [_end_of(facts.ended.get(ticket)) for ticket in facts.running]
        paces = [-_pace_ns(speed) for speed in facts.speeds]
        queues = [-num_bytes for num_bytes in facts.queued_bytes]
        own = [*times, *ends, *paces, *queues, *facts.extra]
        length = 4 + len(own)
        return np.array([call, -call, length, -length, *own], dtype=np.int64)

    def _exchange(self, what: str, numbers: Numbers) -> Numbers:
        frame = np.zeros(FRAME_NUMBERS, dtype=np.int64)
        first = numbers[:FRAME_NUMBERS]
        frame[: len(first)] = first
        agreed = self._lowest(frame)
        if agreed[0] != -agreed[1] or agreed[2] != -agreed[3]:
            raise RankGroupError(
                f"{what} (step {self._num_steps} of rank {self.group.rank}): the ranks have made different calls,"
                " or their trees differ; each must make the same calls in the same order"
            )
        if len(numbers) <= FRAME_NUMBERS:
            return agreed[: len(numbers)]
        rest = self._lowest(numbers[FRAME_NUMBERS:].copy())
        return np.concatenate([agreed, rest])

    def _lowest(self, numbers: Numbers) -> Numbers:
        self._num_calls += 1
        self._num_bytes += numbers.nbytes
        return self.group.lowest(numbers)

    def _read(self, agreed: Numbers, facts: Facts) -> Agreed:
        numbers = iter(agreed.tolist()[4:])
        for clock in self._agreed_clocks:
            clock.now_ns = max(clock.now_ns, next(numbers))
        ended = tuple(
            _ended(facts.ended[ticket], number)
            for ticket, number in zip(facts.running, islice(numbers, len(facts.running)), strict=True)
            if number != NOT_YET
        )
        for end in ended:
            own = facts.ended[end.ticket]
            self._num_shortened += _end_of(end) < _end_of(own)
            self._shortened_slots += own.done_slots - end.done_slots
        speeds = tuple(_bandwidth(-number) for number in islice(numbers, len(facts.speeds)))
        queued_bytes = tuple(-number for number in islice(numbers, len(facts.queued_bytes)))
        return Agreed(ended, speeds, queued_bytes, tuple(numbers))


def _end_of(completion: Completion | None) -> int:
    if completion is None:
        return NOT_YET
    failure = None if completion.is_complete else Failure(completion.error or Failure.MISS)
    return completion.done_slots * _STEPS_A_SLOT + _RANK_OF_END[failure]


def _ended(own: Completion, number: int) -> Completion:
    """How the transfer ended for all; the worst of them is no better than ours."""
    done_slots, end = divmod(number, _STEPS_A_SLOT)
    failure = _ENDS[end]
    slot_bytes = own.num_bytes // own.done_slots if own.done_slots else 0
    error = None if failure in (None, Failure.MISS) else failure
    return replace(own, done_slots=done_slots, error=error, num_bytes=done_slots * slot_bytes)


def _pace_ns(speed: Bandwidth) -> int:
    """Nanoseconds a MiB; 0 if it is not known."""
    return round(speed.time_s(MIN_MEASURED_BYTES) * _NS)


def _bandwidth(pace_ns: int) -> Bandwidth:
    return Bandwidth(float(MIN_MEASURED_BYTES), pace_ns / _NS) if pace_ns else Bandwidth()
