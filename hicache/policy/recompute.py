"""Fetch from L3, or compute again? Whichever is sooner, by measured bandwidth and a stated cost.

A peer decides by a fixed number of tokens; that is right for one model on one network only. Here the time to
fetch is what the bytes, and those queued before them, take at the bandwidth seen lately, and the time to
compute is what the configuration says that 1,024 tokens of prefill take.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_MEASURED_BYTES = 1 << 20
"""Below this the bandwidth is not known, and what is not known is fetched."""
TRY_EVERY = 16
"""Of so many fetches that seem too slow one is made all the same: the store may have become faster."""


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """What one transfer of a direction got lately.

    Args:
        num_bytes, seconds: of the latest batches, older ones counting less.
    """

    num_bytes: float = 0.0
    seconds: float = 0.0

    def time_s(self, num_bytes: int) -> float | None:
        """Seconds for so many bytes; None while too little was measured."""
        if self.num_bytes < MIN_MEASURED_BYTES or self.seconds <= 0:
            return None
        return num_bytes * self.seconds / self.num_bytes


class LoadOrRecompute:
    """Decides for each fetch.

    Args:
        per_1024_tokens_s: what the engine takes to prefill 1,024 tokens; None: always fetch.
    """

    def __init__(self, per_1024_tokens_s: float | None) -> None:
        self._per_token_s = None if per_1024_tokens_s is None else per_1024_tokens_s / 1024
        self._num_skipped = 0

    @property
    def always_fetches(self) -> bool:
        """No cost is stated, so there is nothing to compare."""
        return self._per_token_s is None

    def should_fetch(
        self, *, num_tokens: int, num_bytes: int, ahead_bytes: int, bandwidth: Bandwidth
    ) -> bool:
        """Is fetching sooner?

        Args:
            num_tokens: that would have to be computed otherwise.
            num_bytes: to fetch.
            ahead_bytes: of other fetches that come first.
            bandwidth: of fetches, as measured.
        """
        if self._per_token_s is None:
            return True
        fetch_s = bandwidth.time_s(num_bytes + ahead_bytes)
        if fetch_s is None or fetch_s <= num_tokens * self._per_token_s:
            return True
        self._num_skipped += 1
        return self._num_skipped % TRY_EVERY == 0
