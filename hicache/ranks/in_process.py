"""A group whose ranks are threads of one process: for tests, and for replays of several ranks."""

from __future__ import annotations

import threading

import numpy as np

from hicache.errors import RankGroupError
from hicache.ranks.group import Numbers


class _Meeting:
    """Where the ranks meet, call by call. All but ``size`` and ``timeout_s`` under ``changed``."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self.changed = threading.Condition()
        self.given: dict[int, Numbers] = {}
        self.agreed: Numbers | None = None
        self.num_met = 0
        self.broken: str | None = None

    def break_up(self, why: str) -> None:
        """The first reason stands."""
        self.broken = self.broken or why
        self.changed.notify_all()


class InProcessGroup:
    """One rank's place; made by ``threads``, one for each thread."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self._meeting = meeting
        self.rank = rank
        self.size = meeting.size

    def lowest(self, numbers: Numbers) -> Numbers:
        meeting = self._meeting
        with meeting.changed:
            if meeting.broken is None and self.rank in meeting.given:
                meeting.break_up(f"rank {self.rank} was called from two threads at once")
            number = meeting.num_met
            meeting.given[self.rank] = numbers
            if meeting.broken is None and len(meeting.given) == meeting.size:
                self._meet()
            met = meeting.changed.wait_for(
                lambda: meeting.num_met > number or meeting.broken is not None, meeting.timeout_s
            )
            if not met:
                missing = sorted(set(range(meeting.size)) - set(meeting.given))
                meeting.break_up(f"ranks {missing} did not come within {meeting.timeout_s:g} s")
            if meeting.num_met == number:
                raise RankGroupError(f"the rank group broke up: {meeting.broken}")
            assert meeting.agreed is not None
            return meeting.agreed.copy()

    def _meet(self) -> None:
        meeting = self._meeting
        lengths = {rank: len(numbers) for rank, numbers in meeting.given.items()}
        if len(set(lengths.values())) > 1:
            meeting.break_up(f"the ranks gave different numbers of values: {lengths}")
            return
        meeting.agreed = np.min([meeting.given[rank] for rank in range(meeting.size)], axis=0)
        meeting.given = {}
        meeting.num_met += 1
        meeting.changed.notify_all()

    def close(self) -> None:
        with self._meeting.changed:
            self._meeting.break_up(f"rank {self.rank} has left")


def threads(size: int, *, timeout_s: float = 30.0) -> tuple[InProcessGroup, ...]:
    """A group of so many threads; each takes one place. Raises ``ValueError`` for less than one."""
    if size < 1 or timeout_s <= 0:
        raise ValueError(f"a group has ranks and a time limit, got {size} ranks and {timeout_s} s")
    meeting = _Meeting(size, timeout_s)
    return tuple(InProcessGroup(meeting, rank) for rank in range(size))
