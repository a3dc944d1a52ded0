"""A stated cost model for the time to first token. It estimates; nothing of it is measured here."""

from __future__ import annotations

from dataclasses import dataclass

from hicache.types import TierTokens


@dataclass(frozen=True, slots=True)
class CostModel:
    """Microseconds per token, for a request that is alone on the machine.

    The defaults stand for a model that prefills 10,000 tokens a second and keeps 100 KB a token, with
    25 GB/s between host and device and 3 GB/s from a store; give your own for your model.
    """

    prefill_us: float = 100.0
    host_us: float = 4.0
    store_us: float = 33.0

    def first_token_s(self, source: TierTokens, prompt_tokens: int) -> float:
        """Seconds to the first token: what is loaded, then what is computed."""
        computed = prompt_tokens - source.total
        loaded_us = self.host_us * source.host + (self.store_us + self.host_us) * source.store
        return (loaded_us + self.prefill_us * computed) / 1e6
