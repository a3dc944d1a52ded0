"""Load, or compute again? Whichever is ready first, by measured bandwidth and what prefill costs.

A peer decides by a fixed number of tokens; that is right for one model on one network only. Here each legal
boundary has a time: what it needs from L3 and L2 takes as long as these bytes, and those queued before them,
take at the bandwidth that their component got lately; and what lies behind it has to be computed::

    boundary   0 ──────── 512 ──────── 1024 ──────── 2048 ── prompt
    load       -           L1           L2            L3, and a state of 19 MiB
    compute    all         ...          ...           the rest
                                         └─ the least sum is taken

Prefill costs what the configuration says, or what it was seen to take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MIN_MEASURED_BYTES = 1 << 20
"""Below this the bandwidth is not known, and what is not known is moved."""
MIN_MEASURED_TOKENS = 2048
"""Below this it is not known what prefill costs, and everything is moved."""
MIN_PREFILL_TOKENS = 64
"""A prefill of fewer tokens says more of the engine than of its prefill."""
RECENT = 0.9
"""How much a prefill that was seen counts after the next one."""
TRY_EVERY = 16
"""Of so many loads that seem too slow one is made all the same: the tier may have become faster."""


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """What one kind of transfer got lately.

    Args:
        num_bytes, seconds: of the latest batches, older ones counting less.
    """

    num_bytes: float = 0.0
    seconds: float = 0.0

    @property
    def is_known(self) -> bool:
        return self.num_bytes >= MIN_MEASURED_BYTES and self.seconds > 0

    def time_s(self, num_bytes: int) -> float:
        """Seconds for so many bytes; 0 while too little was measured."""
        return num_bytes * self.seconds / self.num_bytes if self.is_known else 0.0


@dataclass(frozen=True, slots=True)
class Move:
    """Bytes of one component that have to come up from one tier to the next.

    Args:
        num_bytes: of this request.
        ahead_bytes: of others that come first.
        bandwidth: as measured.
    """

    num_bytes: int
    ahead_bytes: int
    bandwidth: Bandwidth

    @property
    def time_s(self) -> float:
        return self.bandwidth.time_s(self.num_bytes + self.ahead_bytes)


@dataclass(frozen=True, slots=True)
class Option:
    """A boundary, and the seconds until its payload is in L1."""

    boundary: int
    load_s: float


def soonest(options: Sequence[Option], num_tokens: int, per_token_s: float) -> int:
    """Which option has a prompt of ``num_tokens`` prefilled first; of equal ones the first.

    *Caller guarantees*: there is one.
    """
    times = [option.load_s + (num_tokens - option.boundary) * per_token_s for option in options]
    return times.index(min(times))


class LoadOrRecompute:
    """Decides for each match.

    Args:
        per_1024_tokens_s: what the engine takes to prefill 1,024 tokens; ``auto``: what it was seen to take;
            None: all that is found is loaded.

    *Thread*: the caller holds the cache's lock.
    """

    def __init__(self, per_1024_tokens_s: float | str | None) -> None:
        self._learns = isinstance(per_1024_tokens_s, str)
        self._given_s = per_1024_tokens_s / 1024 if isinstance(per_1024_tokens_s, int | float) else None
        self._seen_tokens = self._seen_s = 0.0
        self._num_passed = 0

    @property
    def per_token_s(self) -> float | None:
        """What prefill costs; None while that is not known, or not asked for."""
        if self._learns and self._seen_tokens >= MIN_MEASURED_TOKENS:
            return self._seen_s / self._seen_tokens
        return self._given_s

    def saw_prefill(self, num_tokens: int, seconds: float) -> None:
        """The engine has computed so many tokens of a prompt in this time."""
        if self._learns and num_tokens >= MIN_PREFILL_TOKENS and seconds > 0:
            self._seen_tokens = RECENT * self._seen_tokens + num_tokens
            self._seen_s = RECENT * self._seen_s + seconds

    def choose(self, options: Sequence[Option], num_tokens: int) -> int:
        """The option to take; the first one if nothing speaks against it.

        Args:
            options: deepest first.
            num_tokens: of the prompt.
        """
        if self.per_token_s is None:
            return 0
        chosen = soonest(options, num_tokens, self.per_token_s)
        if chosen:
            self._num_passed += 1
            if self._num_passed % TRY_EVERY == 0:
                return 0
        return chosen
