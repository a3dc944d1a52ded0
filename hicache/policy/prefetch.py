"""How long a request waits for L3.

The three policies and the time limit's shape are SGLang's (``best_effort``, ``wait_complete``,
``timeout``: base plus a rate per 1,024 tokens); the ceiling is ours, so that no request waits for ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class PrefetchMode(StrEnum):
    """How long a fetch from L3 is waited for."""

    BEST_EFFORT = "best_effort"
    """Take what has arrived; never wait."""
    WAIT_COMPLETE = "wait_complete"
    """Wait for everything (within the bound of every wait)."""
    TIMEOUT = "timeout"
    """Wait as long as the length of the fetch is worth."""


@dataclass(frozen=True, slots=True)
class PrefetchPolicy:
    """Decides whether a fetch is waited for.

    Args:
        min_tokens: shorter tails are not asked of L3 at all.
        base_s, per_1024_tokens_s, max_s: the time limit ``min(max, base + per * tokens / 1024)``.
        wait_limit_s: the bound of every wait.
    """

    mode: PrefetchMode = PrefetchMode.TIMEOUT
    min_tokens: int = 256
    base_s: float = 2.0
    per_1024_tokens_s: float = 0.1
    max_s: float = 30.0
    wait_limit_s: float = 30.0

    def limit_s(self, num_tokens: int) -> float:
        """Seconds that fetching ``num_tokens`` may take, counted from its start."""
        match self.mode:
            case PrefetchMode.BEST_EFFORT:
                return 0.0
            case PrefetchMode.WAIT_COMPLETE:
                return self.wait_limit_s
            case PrefetchMode.TIMEOUT:
                grown = self.base_s + self.per_1024_tokens_s * num_tokens / 1024
                return min(self.max_s, self.wait_limit_s, grown)

    def should_stop(self, *, done: bool, elapsed_s: float, num_tokens: int) -> bool:
        """Go on with what is there? ``done``: every component's transfer has ended."""
        return done or elapsed_s >= self.limit_s(num_tokens)
