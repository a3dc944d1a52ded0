"""Time as a value, so that tests own it."""

from __future__ import annotations

import contextlib
import math
import time
from numbers import Real
from typing import Protocol


class Clock(Protocol):
    """Seconds that never step back. *Thread*: any; never blocks in ``now_s``."""

    def now_s(self) -> float: ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward by ``seconds``. Raises ``ValueError`` if negative."""
        if seconds < 0:
            raise ValueError(f"a clock never steps back, got {seconds} s")
        self._now_s += seconds


def checked_seconds(name: str, seconds: object) -> float:
    """The time that a client gives, as a number.

    Args:
        name: of the call and its argument, for the message.

    Raises:
        ValueError: it is no number, not finite, or not above 0.
    """
    if not isinstance(seconds, bool) and isinstance(seconds, Real):
        with contextlib.suppress(OverflowError):  # of an integer beyond all floats
            number = float(seconds)
            if 0 < number < math.inf:
                return number
    raise ValueError(f"{name} is {seconds!r:.80}, expected seconds above 0")
